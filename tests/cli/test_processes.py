"""What only a process of its own can show: start-up, pipes, colours, Ctrl-C. They cost imports."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
EJ = [sys.executable, "-m", "ejkernel"]


@pytest.fixture
def settings(tmp_path):
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(HERE))),
        "EJKERNEL_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PLATFORMS": "cpu",
        "NO_COLOR": "",
    }


def test_help_imports_neither_jax_nor_what_is_heavy(settings):
    code = (
        "import sys; from ejkernel.cli import run; code = run(['--help']); "
        "run(['tune', '--help']); run(['--version']); run(['nonsense']); "
        "heavy = {'jax', 'jaxlib', 'numpy', 'sqlalchemy', 'rich'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=settings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "tune" in done.stdout


def test_a_pipe_that_is_closed_ends_it_quietly(settings):
    process = subprocess.Popen(
        [*EJ, "doctor", "--json"],
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    error = process.stderr.read()
    assert process.wait(120) == 141
    assert error == ""


def test_ctrl_c_keeps_what_was_learned_and_the_same_command_goes_on(settings, tmp_path):
    mark = tmp_path / "mark"
    settings |= {"SMALL_MODEL_MARK": str(mark)}
    command = [*EJ, "tune", "small_model:with_slow", "--effort", "quick", "--no-bench", "--json"]
    # What a shell starts in the background ignores SIGINT, and so would everything that it starts.
    first = subprocess.Popen(
        ["env", "--default-signal=INT", *command],
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not mark.exists():
        assert first.poll() is None, first.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    out, error = first.communicate(timeout=60)
    assert first.returncode == 130, error
    assert "Traceback" not in error
    told = json.loads(out)
    assert told["interrupted"] is True
    assert len(told["operations"]) + len(told["not_tuned"]) == 2
    assert json.loads(pathlib.Path(told["record"]).read_text())["notes"] == [
        "interrupted by Ctrl-C"
    ]
    second = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stderr
    assert len(json.loads(second.stdout)["operations"]) == 2
    for operation in told["operations"]:  # what was finished is not measured again
        assert f"{operation['op_id']}: known already" in second.stderr


def test_a_word_of_help_into_a_closed_pipe(settings):
    process = subprocess.Popen(
        [*EJ, "--help"], env=settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(60) == 141


def test_completion_completes(settings):
    settings |= {"COMP_WORDS": "ejkernel con", "COMP_CWORD": "1"}
    settings |= {"_EJKERNEL_COMPLETE": "bash_complete"}
    done = subprocess.run(EJ, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "plain,configs\n"


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a terminal")
@pytest.mark.parametrize("no_colour", ["", "1"])
def test_a_terminal_gets_colours_unless_it_wants_none(settings, no_colour):
    settings |= {"NO_COLOR": no_colour, "TERM": "xterm-256color", "COLUMNS": "120"}
    ours, theirs = os.openpty()
    process = subprocess.Popen([*EJ, "check"], env=settings, stdout=theirs, stderr=theirs)
    os.close(theirs)
    text = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        text += part
    os.close(ours)
    assert process.wait(120) == 0, text
    assert b"tpu-v5e" in text
    assert (b"\x1b[" in text) == (no_colour == "")
