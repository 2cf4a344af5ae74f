"""`ejkernel native`: kernels in C++ for this machine's processor."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from typing import Any

import click

from . import options
from .exits import Exit, Failure
from .output import State, plain


@click.group()
@options.common
def native() -> None:
    """Kernels in C++ for this machine's processor."""


@native.command()
@options.common
@options.with_state
def status(state: State) -> int:
    """Say whether the native kernels are built and used. Ends with 1 if they are not."""
    found = _module().status()
    state.result(_data(found), str(found))
    return Exit.OK if _is_ready(found) else Exit.NOT_WELL


@native.command()
@options.common
@options.with_state
def build(state: State) -> int:
    """Build the native kernels with this machine's C++ compiler."""
    built = _module().build()
    found = _module().status()
    state.result({"built": str(built), "status": _data(found)}, str(found))
    return Exit.OK if _is_ready(found) else Exit.NOT_WELL


def native_status() -> tuple[bool, str]:
    """Whether they are ready, and what there is to say about it, in one line."""
    found = _module().status()
    return _is_ready(found), " ".join(str(found).split())


def _module() -> Any:
    if importlib.util.find_spec("ejkernel.native") is None:
        raise Failure("this build of ejkernel has no native kernels", Exit.MISSING)
    return importlib.import_module("ejkernel.native")


def _is_ready(found: Any) -> bool:
    return bool(getattr(found, "ready", found))


def _data(found: Any) -> Any:
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        return plain(dataclasses.asdict(found))
    return plain(found)
