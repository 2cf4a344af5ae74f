"""The tutorial, word for word: its file is saved, its commands are run, one after the other."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
FILE = re.compile(r'^```python title="([\w.]+)"\n(.*?)^```', re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def shell(tmp_path):
    """Runs commands in an empty folder, with this Python's `ejkernel` first on the path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, call in (("ejkernel", "-m ejkernel"), ("python", "")):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {call} "$@"\n')
        script.chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    env = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "EJKERNEL_CACHE_DIR": str(tmp_path / "cache"),
        "NO_COLOR": "1",
    }

    def run(commands):
        return subprocess.run(
            ["sh", "-ec", commands], cwd=work, env=env, capture_output=True, text=True, timeout=300
        )

    run.folder = work
    return run


def _follow(shell, text):
    """Save the files of a page and run its commands; what each of them printed."""
    for name, content in FILE.findall(text):
        (shell.folder / name).write_text(content)
    said = []
    for commands in COMMANDS.findall(text):
        done = shell(commands)
        assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
        said.append(done.stdout)
    return said


@pytest.mark.long
def test_the_tutorial_word_for_word(shell):
    doctor, before, tune, seen, explained, shipped, used = _follow(shell, TEXT)
    assert "cpu" in doctor
    assert "× faster" in before
    assert "linear_attention@v1" in tune
    assert "linear_attention@v1" in seen
    assert (shell.folder / "report.html").stat().st_size > 10_000
    assert "chunk=" in explained
    assert "tuned.json" in shipped
    assert "(4096, 64)" in used


def test_from_nothing_to_strict_mode_in_the_readme(shell):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (part,) = re.findall(r"(?ms)^## From nothing.*?(?=^## )", readme)
    (said,) = _follow(shell, part)
    assert "chosen   by persistent" in said
    assert said.rstrip().endswith("65536.0")
    written = [*FILE.findall(part)[0][1].splitlines(), *COMMANDS.findall(part)[0].splitlines()]
    assert len([line for line in written if line.strip()]) < 15
