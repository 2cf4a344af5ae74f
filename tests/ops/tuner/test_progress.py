"""The bar in a terminal."""

from __future__ import annotations

import re

import pytest

from ejkernel.ops.tuner.progress import Progress, time_left


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
    assert "12/16 compiling and checking" in said


def test_the_best_so_far_fits_into_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with Progress("flash_attention@v1(float32[8], float32[8])", True) as shown:
        shown.racing(12, 40)
        shown.round(12, 12, 1.03e-4, 1.58)
    said = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
    assert "flash_attention@v1(2" in said
    assert "12/40 racing 12, best 103 µs (1.58×)" in said


def test_the_time_left():
    assert [time_left(seconds) for seconds in (None, 0.2, 12, 75)] == [
        *("", "0 s left", "12 s left", "1 min 15 s left")
    ]
