"""Imports go one way: what a lower layer calls of a higher one is handed in. Calls are short."""

from __future__ import annotations

import ast
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]

# From the bottom to the top: a file imports from its own layer and from those before it.
LAYERS = [
    (
        *("markup", "formatting", "text_table", "speedup"),
        *("installation", "store", "native"),
    ),
    ("ops.utils",),
    ("ops.core", "ops.registry"),
    ("ops.config",),
    ("ops.tuner",),
    ("ops.execution",),
    ("ops",),  # ops/__init__.py puts the layers together
    ("kernels",),
    ("modules",),
    ("fleet", "targets", "report", "tuning", "decorator", "dashboard", "cli", "__main__"),
]
ASSEMBLED = LAYERS.index(("ops",))

# What puts the layers together names what lies above it, inside a function: loaded when needed.
ASSEMBLY = {("ejkernel.ops", "ejkernel.fleet.agreement.job_agreement")}


def layer_of(module: str) -> int | None:
    """The number of a module's layer; None for the package itself, which holds its version."""
    name = module.removeprefix("ejkernel").lstrip(".")
    for number, prefixes in enumerate(LAYERS):
        for prefix in prefixes:
            if name == prefix or (number != ASSEMBLED and name.startswith(f"{prefix}.")):
                return number
    return ASSEMBLED if name.startswith("ops.") else None  # a name that `ejkernel.ops` exports


def imports(file: pathlib.Path, module: str) -> Iterator[str]:
    """What a file imports, inside functions too.

    Not under `TYPE_CHECKING`: that names the type of what is handed in, and loads nothing.
    """
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    waiting: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            waiting += node.orelse
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            yield from (".".join([*base, alias.name]) for alias in node.names)


def all_imports() -> Iterator[tuple[str, str]]:
    for file in sorted((ROOT / "ejkernel").rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts[:-1] if file.name == "__init__.py" else parts)
        for target in imports(file, module):
            if target.split(".")[0] == "ejkernel":
                yield module, target


def upwards() -> set[tuple[str, str]]:
    found = set()
    for module, target in all_imports():
        here, there = layer_of(module), layer_of(target)
        if here is not None and there is not None and there > here:
            found.add((module, target))
    return found


def test_every_folder_has_a_layer():
    modules = {module for module, _ in all_imports()}
    assert len(modules) > 100
    assert {module for module in modules if layer_of(module) is None} == set()


def test_no_import_goes_upwards():
    assert upwards() - ASSEMBLY == set()


def test_no_exception_outlives_its_reason():
    assert ASSEMBLY - upwards() == set()


def test_an_import_upwards_is_seen_wherever_it_stands(tmp_path):
    file = tmp_path / "selection.py"
    file.write_text(
        "from typing import TYPE_CHECKING\n"
        "from ..utils import stable\n"
        "if TYPE_CHECKING:\n    from ..tuner.tuner import Tuner\n"
        "def choose():\n    if True:\n        from ..tuner import session\n"
        "    import ejkernel.cli.tune\n",
        encoding="utf-8",
    )
    above = {"ejkernel.ops.tuner.session", "ejkernel.cli.tune"}
    found = {name for name in imports(file, "ejkernel.ops.config.selection") if "ejk" in name}
    assert found == {"ejkernel.ops.utils.stable", *above}
    here = layer_of("ejkernel.ops.config.selection")
    assert {name for name in found if layer_of(name) > here} == above


def test_who_follows_a_first_call_opens_at_most_20_files():
    script = ROOT / "benchmarks" / "first_call.py"
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    counts = [int(count) for count in re.findall(r": (\d+) files$", run.stdout, re.MULTILINE)]
    assert len(counts) == 2
    assert max(counts) <= 20, run.stdout
