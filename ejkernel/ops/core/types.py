"""The two things a kernel is generic in."""

from typing import Any, NamedTuple, TypeVar

from ...markup import one_line

Cfg = TypeVar("Cfg")
"""A kernel's config: a frozen dataclass (nested dataclasses, tuples, enums, dtypes, None)."""

Out = TypeVar("Out")
"""A kernel's output: an array or a pytree of arrays."""


class ConfigKey(NamedTuple):
    """Where a config is stored: the device, the operation with its version, and the call."""

    device: str
    op_id: str
    call_key: str

    def __str__(self) -> str:
        return one_line(f"{self.op_id}:{self.call_key} on {self.device}")


PyTree = Any
