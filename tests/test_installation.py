"""Nobody who follows our words installs another project of the same name."""

from __future__ import annotations

import importlib.metadata
import pathlib
import re

import pytest

import ejkernel
from ejkernel.installation import foreign_distributions, how_to_install

ROOT = pathlib.Path(__file__).parents[1]

# `pip install ejkernel`, `pip install -U "ejkernel[search]"`, `uv add ejkernel`, `ejkernel[search]`
BY_NAME = re.compile(
    r"\b(?:install|add)\s+(?:-\S+\s+)*[\"'`]?ejkernel(?![\w./-])|\bejkernel\[[a-z]", re.IGNORECASE
)


def texts():
    yield from ROOT.glob("*.md")
    for folder, pattern in (("docs", "*.md"), ("ejkernel", "*.py"), ("examples", "*.py")):
        yield from (ROOT / folder).rglob(pattern)
    yield ROOT / "mkdocs.yml"


def test_no_text_installs_by_name():
    found = [
        f"{file.relative_to(ROOT)}: {match[0]}"
        for file in texts()
        for match in BY_NAME.finditer(file.read_text(encoding="utf-8"))
    ]
    assert not found, f"write how_to_install(), or name the folder: {found}"


@pytest.mark.parametrize(
    "text",
    [
        "pip install ejkernel",
        "pip install -U 'ejkernel[ray]'",
        "uv add ejkernel",
        "`ejkernel[ray]`",
    ],
)
def test_the_pattern_finds_them(text):
    assert BY_NAME.search(text)


def test_what_to_type():
    assert how_to_install("search") == "pip install '.[search]' in the project's folder"
    assert how_to_install() == "pip install '.' in the project's folder"


def test_what_to_type_where_it_was_installed_from_a_wheel(monkeypatch, tmp_path):
    from ejkernel import installation

    monkeypatch.setattr(installation, "__file__", str(tmp_path / "ejkernel" / "installation.py"))
    assert "'FILE.whl[ray]'" in how_to_install("ray")
    assert "'.[ray]' in the project's folder" in how_to_install("ray")


def installed(monkeypatch, folder, version, files=True):
    """A distribution called ejkernel in a folder."""
    info = folder / f"ejkernel-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: ejkernel\nVersion: {version}\nSummary: Something else\n"
    )
    if files:
        (folder / "ejkernel").mkdir()
        (folder / "ejkernel" / "__init__.py").write_text("")
    found = importlib.metadata.PathDistribution(info)
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **_: [found])


def test_another_project_is_noticed(monkeypatch, tmp_path):
    installed(monkeypatch, tmp_path, "0.0.80")
    (other,) = foreign_distributions()
    assert other == f"0.0.80 (Something else), in {tmp_path}"


def test_other_files_of_the_same_version_are_noticed(monkeypatch, tmp_path):
    installed(monkeypatch, tmp_path, ejkernel.__version__)
    assert len(list(foreign_distributions())) == 1


def test_an_editable_installation_is_ours(monkeypatch, tmp_path):
    installed(monkeypatch, tmp_path, ejkernel.__version__, files=False)
    assert not list(foreign_distributions())
