"""The bar in a terminal."""

from __future__ import annotations

import re

import pytest

from ejkernel.ops.tuner.progress import Progress


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_a_narrow_terminal_shortens_the_name_and_nothing_else(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with Progress("flash_attention@v1(float32[1,1024,4,64], float32[1,1024,4,64])", True) as shown:
        shown.building(16)
        shown.update(completed=12)
    said = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
    assert "flash_att" in said
    assert re.search(r"12/16 compiling and checking \d:\d\d:\d\d", said)
