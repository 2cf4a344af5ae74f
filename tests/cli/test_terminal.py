"""What a person sees in a terminal of 80 columns."""

from __future__ import annotations

import os
import pathlib
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from ejkernel.cli import run
from ejkernel.cli.app import app

HERE = pathlib.Path(__file__).parent
EJ = [sys.executable, "-m", "ejkernel"]

pytestmark = pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a terminal")


class Terminal:
    """A command in a terminal, and all that it wrote."""

    def __init__(self, tmp_path, *arguments, **settings):
        self.end, theirs = os.openpty()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE)]),
            "EJKERNEL_CACHE_DIR": str(tmp_path / "cache"),
            "TERM": "xterm-256color",
            "COLUMNS": "80",
            **settings,
        }
        environment.pop("NO_COLOR", None) if "NO_COLOR" not in settings else None
        self.process = subprocess.Popen(
            [*EJ, *arguments],
            env=environment,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self.text = ""

    def read(self, until=None, seconds=120):
        limit = time.monotonic() + seconds
        while time.monotonic() < limit and (until is None or until not in self.text):
            if not select.select([self.end], [], [], 1)[0]:
                continue
            try:
                part = os.read(self.end, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            self.text += part.decode()
        return self.text

    def done(self):
        self.read()
        code = self.process.wait(timeout=60)
        os.close(self.end)
        # What stays on the screen: no colours, no lines that were written over.
        lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in self.text.split("\n")]
        return code, [line.rstrip("\r").rpartition("\r")[2] for line in lines]


def test_tuning_at_80_columns(tmp_path):
    code, lines = Terminal(tmp_path, "tune", "small_model:tuned", "--effort", "quick").done()
    assert code == 0, lines
    assert not [line for line in lines if len(line) > 80 and "/" not in line]
    shown = "\n".join(lines)
    assert "loading small_model:tuned" in shown
    assert re.search(r"^small_row_sum@v1 .* [\d.]+ [µm]s .* \d\.\d\d×", shown, re.MULTILINE)
    assert "rows=" in shown
    assert "float32[32,4]" in shown


def test_something_is_shown_before_jax_is_imported_and_ctrl_c_ends_it(tmp_path):
    mark = tmp_path / "mark"
    settings = {"SMALL_MODEL_MARK": str(mark)}  # it waits there, for a minute
    terminal = Terminal(tmp_path, "tune", "small_model:with_slow", **settings)
    assert "loading small_model:with_slow" in terminal.read(until="loading")
    assert not mark.exists()
    while not mark.exists():
        assert terminal.process.poll() is None, terminal.read()
        terminal.read(until="what is never written", seconds=0.2)
    terminal.process.send_signal(signal.SIGINT)
    code, lines = terminal.done()
    text = " ".join(lines)
    assert code == 130, text
    assert "Traceback" not in text
    assert "the same command goes on where it stopped" in text


@pytest.mark.parametrize(("settings", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_errors_are_red(tmp_path, settings, coloured):
    terminal = Terminal(tmp_path, "check", "a:b", "--target", "h101", **settings)
    code, lines = terminal.done()
    assert code == 2
    assert ("\x1b[1;31merror:\x1b[0m" in terminal.text) == coloured
    assert any(line.startswith("error: ") for line in lines)
    assert all(len(line) <= 80 for line in lines)


def test_no_command_is_a_request_for_help(ej):
    for arguments in ((), ("configs",), ("native",)):
        done = ej(*arguments)
        assert (done.code, done.err) == (0, "")
        assert "Commands:" in done.out


def test_commands_are_in_the_order_of_use(ej):
    shown = re.findall(
        r"^  (\w+)  +[A-Z].*$", ej("--help").out.partition("Commands:")[2], re.MULTILINE
    )
    assert shown == list(app.commands)
    assert shown[:3] == ["doctor", "tune", "bench"]
    assert "..." not in ej("--help").out.partition("Commands:")[2]  # none is cut off


def test_a_pipe_has_one_line_per_entry(ej, store, capsys):
    lines = ej("configs", "list").out.splitlines()
    assert len(lines) == 2 + 3 + 1
    assert run(["--version"]) == 0


# --- doctor --------------------------------------------------------------------------------------


def findings(ej, area):
    listed = ej("doctor", "--json").data["findings"]
    return [finding for finding in listed if finding["area"] == area]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("EJKERNEL_STRIKT", "EJKERNEL_STRICT"),
        ("EJKERNEL_CACHEDIR", "EJKERNEL_CACHE_DIR"),
        ("ejkernel_autotune", "EJKERNEL_AUTOTUNE"),
        ("EJKERNAL_NATIVE", "EJKERNEL_NATIVE"),
    ],
)
def test_a_misspelt_variable_is_noticed(ej, monkeypatch, written, meant):
    monkeypatch.setenv(written, "1")
    (found,) = (f for f in findings(ej, "settings") if f["name"] == written)
    assert found["status"] == "warning"
    assert found["advice"] == f"did you mean {meant}?"


def test_an_unheard_variable_is_noticed_too(ej, monkeypatch):
    monkeypatch.setenv("EJKERNEL_COFFEE", "1")
    monkeypatch.setenv("EJECT", "1")
    names = [finding["name"] for finding in findings(ej, "settings")]
    assert "EJKERNEL_COFFEE" in names
    assert "EJECT" not in names


def test_another_project_of_our_name_is_noticed(ej, monkeypatch):

    module = sys.modules["ejkernel.cli.doctor"]
    monkeypatch.setattr(module, "foreign_distributions", lambda: iter(["0.0.80 (else), in /x"]))
    found = [f for f in findings(ej, "versions") if f["status"] == "warning"]
    assert "0.0.80 (else)" in found[0]["text"]
    assert "pip uninstall ejkernel" in found[0]["advice"]


# --- targets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["h100", "H100", "sm90", "cuda_sm90", "CUDA-SM90"])
def test_a_target_by_the_name_that_people_use(ej, name):
    done = ej("check", "small_model:tuned", "--target", name, "--lower-only")
    assert done.code == 0, done.err
    assert "for cuda-sm90" in done.out
