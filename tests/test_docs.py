"""Every code block of the README and the docs runs, and what the docs list is what there is."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pathlib
import pkgutil
import re

import pytest

import ejkernel
from ejkernel.ops.utils import environment

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _can_run(block):
    """A block that begins with `# needs NAME` runs where that library is installed."""
    needed = re.match(r"# needs (\w+)\n", block)
    return needed is None or importlib.util.find_spec(needed[1]) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_run(page):
    text = page.read_text(encoding="utf-8")
    namespace: dict = {"__name__": "__main__"}
    for match in BLOCK.finditer(text):
        if not _can_run(match[1]):
            continue
        line = text[: match.start()].count("\n") + 1
        code = compile("\n" * line + match[1], str(page), "exec", dont_inherit=True)
        exec(code, namespace)


def test_pages_with_code_were_found():
    assert sum(len(BLOCK.findall(page.read_text(encoding="utf-8"))) for page in PAGES) >= 15


def _modules():
    for info in pkgutil.walk_packages(ejkernel.__path__, "ejkernel."):
        yield info.name


@pytest.mark.parametrize("name", list(_modules()))
def test_docstring_examples_run(name):
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0


def test_every_environment_variable_is_documented():
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    for variable in environment.VARIABLES:
        default = f"`{variable.default}`" if variable.default else "–"
        row = f"| `{variable.name}` | {default} | {variable.meaning} |"
        assert row in page
    assert set(re.findall(r"EJKERNEL_\w+", page)) == {
        v.name for v in environment.VARIABLES if v.name.startswith("EJKERNEL_")
    }


def test_no_other_module_reads_the_environment():
    for path in (ROOT / "ejkernel").rglob("*.py"):
        if path.name != "environment.py":
            assert not re.search(r"os\.(environ|getenv)", path.read_text(encoding="utf-8")), path


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_reference_has_every_public_name_once():
    import ejkernel.ops

    pages = (ROOT / "docs" / "reference").glob("*.md")
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    listed = re.findall(r"^::: ejkernel\.ops\.(\w+)$", text, re.MULTILINE)
    assert sorted(listed) == sorted(ejkernel.ops.__all__)
