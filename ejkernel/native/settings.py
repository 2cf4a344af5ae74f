"""What users have set. The layers above know where it is written, and hand it in.

Nothing of `ejkernel.ops` is imported here: what is native is below it.
"""

from __future__ import annotations

import pathlib
from typing import Protocol


class Variable(Protocol):
    """One environment variable."""

    def read(self) -> str: ...


class Environment(Protocol):
    """The part of `ejkernel.ops.utils.environment` that is needed here."""

    @property
    def NATIVE(self) -> Variable: ...
    @property
    def CXX(self) -> Variable: ...
    @property
    def CACHE_DIR(self) -> Variable: ...
    @property
    def NoHomeFolder(self) -> type[OSError]: ...
    @property
    def VariableError(self) -> type[ValueError]: ...
    def cache_folder(self, *inside: str) -> pathlib.Path: ...


_provided: list[Environment] = []


def provide_environment(environment: Environment) -> None:
    """Say where the settings are; `ejkernel.ops` does."""
    _provided[:] = [environment]


def environment() -> Environment:
    """The settings of this process."""
    if not _provided:
        raise RuntimeError(
            "ejkernel.native does not know its settings and libraries yet; import ejkernel.modules "
            "first"
        )
    return _provided[0]
