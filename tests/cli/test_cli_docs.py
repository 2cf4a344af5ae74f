"""Every `$ ejkernel …` line of docs/cli.md runs, in order, and says what the page says it does."""

from __future__ import annotations

import pathlib
import re
import shlex

import pytest

from ejkernel.cli import run

PAGE = pathlib.Path(__file__).parent.parent.parent / "docs" / "cli.md"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    text = PAGE.read_text(encoding="utf-8")
    code = re.search(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[1]
    (tmp_path / "model.py").write_text(code)
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import jax
    import model

    function, arguments = model.example()
    program = jax.jit(function).lower(*arguments).as_text()
    (tmp_path / "program.mlir").write_text(program)
    return tmp_path


def commands():
    """Each command of the page with the lines that it shows."""
    text = PAGE.read_text(encoding="utf-8")
    for block in re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ejkernel ", block, flags=re.MULTILINE)[1:]:
            line, *shown = part.splitlines()
            yield shlex.split(line), shown


def words(line):
    """What of a line does not depend on the machine or on the clock."""
    return [word for word in line.split() if re.fullmatch(r"[A-Za-z@_:,;()=*]+", word)]


def test_the_page_says_what_happens(folder, capsys):
    listed = list(commands())
    assert len(listed) >= 17
    for arguments, shown in listed:
        capsys.readouterr()
        code = run(arguments)
        captured = capsys.readouterr()
        if arguments == ["native", "status"]:  # what it says depends on the compiler
            continue
        assert code == 0, (arguments, captured.err)
        first = next(line for line in shown if not line.startswith("["))
        assert words(first) == words(captured.out.splitlines()[0]), (arguments, captured.out)


def test_every_command_is_on_the_page():
    from ejkernel.cli.app import app

    text = PAGE.read_text(encoding="utf-8")
    for name in app.commands:
        assert f"ejkernel {name}" in text
    for name in app.commands["configs"].commands:
        assert f"ejkernel configs {name}" in text


def test_every_exit_code_is_on_the_page():
    from ejkernel.cli.exits import Exit

    rows = re.findall(r"^\| (\d+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [int(row) for row in rows] == [code.value for code in Exit]
