"""The example that trains a transformer runs, learns, and tuning does not change what it learns."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import sys

import pytest

pytest.importorskip("flax", reason="pip install '.[examples]'")

PATH = pathlib.Path(__file__).parent.parent / "examples" / "train_transformer.py"
SMALL = {
    "batch": 2,
    "length": 16,
    "layers": 1,
    "heads": 2,
    "head-dim": 8,
    "vocabulary": 16,
    "steps": 8,
    "learning-rate": 0.02,
}


def test_it_learns_the_same_untuned_and_tuned(tmp_path, capsys, monkeypatch):
    specification = importlib.util.spec_from_file_location("train_transformer", PATH)
    example = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "train_transformer", example)  # dataclasses look there
    specification.loader.exec_module(example)
    settings = [f"--{name}={value}" for name, value in SMALL.items()]
    example.main([*settings, f"--store={tmp_path}"])

    printed = capsys.readouterr().out
    losses = re.findall(r"loss ([\d.]+) -> ([\d.]+)", printed)
    assert len(losses) == 2
    assert all(float(last) < float(first) - 0.1 for first, last in losses)
    assert "tuned 3 operations" in printed
    assert "the same loss in every step" in printed
