"""`ejkernel native`: kernels in C++, built on this machine for its processor."""

from __future__ import annotations

import importlib
from typing import Any

import click

from . import options
from .exits import Exit, Failure
from .output import State, table


@click.group(cls=options.Group)
@options.common
def native() -> None:
    """Kernels in C++, built on this machine for its processor."""


@native.command()
@options.with_state
def status(state: State) -> int:
    """Say whether they are built and used. Ends with 1 if they cannot be used."""
    found = native_module().status()
    _answer(state, found)
    return Exit.OK if found.available else Exit.NOT_WELL


@native.command()
@click.option("--force", is_flag=True, help="Build them anew.")
@options.with_state
def build(state: State, force: bool) -> int:
    """Build them now, with the C++ compiler of this machine."""
    module = native_module()
    try:
        built = module.build(force=force)
    except module.BuildFailed as error:
        raise Failure(str(error), Exit.MISSING) from error
    _answer(state, built)
    return Exit.OK


def native_module() -> Any:
    """`ejkernel.native`, with every operation loaded: they say which libraries there are."""
    importlib.import_module("ejkernel.modules")
    return importlib.import_module("ejkernel.native")


def _answer(state: State, found: Any) -> None:
    rows = [(name, str(file)) for name, file in found.files.items()]
    compiler = f"compiler: {found.compiler}"
    state.result(found, found.reason, compiler, table(("library", "file"), rows))
