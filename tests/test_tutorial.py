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


@pytest.mark.long
def test_the_tutorial_word_for_word(shell):
    for name, content in FILE.findall(TEXT):
        (shell.folder / name).write_text(content)
    said = []
    for commands in COMMANDS.findall(TEXT):
        done = shell(commands)
        assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
        said.append(done.stdout)
    doctor, tune, seen, explained, shipped, used = said
    assert "cpu" in doctor
    assert "flash_attention@v1" in tune
    assert "flash_attention@v1" in seen
    assert (shell.folder / "report.html").stat().st_size > 10_000
    assert "flash_attention" in explained
    assert "tuned.json" in shipped
    assert "['out', 'qkv']" in used
