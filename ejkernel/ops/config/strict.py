"""Strict mode: a call that has no stored config is an error that says what to run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core.types import ConfigKey
from .persistent import default_path

if TYPE_CHECKING:
    from .decision import Passed
    from .persistent import PersistentCache
    from .tiers import Request


class StrictMiss(RuntimeError):
    """Strict mode, and no config is stored for a call.

    Attributes:
      key: the call that has none.
      signature: the call, readable.
    """

    def __init__(self, message: str, key: ConfigKey, signature: str) -> None:
        super().__init__(message)
        self.key = key
        self.signature = signature

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.key, self.signature)


def strict_message(
    request: Request, passed: tuple[Passed, ...], store: PersistentCache | None
) -> str:
    """What a person reads whose call has no config: which call, where was looked, what to run."""
    tiers = "\n".join(f"  {p.tier}: {p.explain()}" for p in passed)
    option = _store_option(store)
    return (
        f"strict mode: no config is stored for {request.key.op_id}({request.inv.signature}), key "
        f"{request.key.call_key} on {request.key.device}:\n{tiers}\n"
        "Tune it on such a device, once:\n"
        f"  ejkernel tune MODULE:FUNCTION{option}\n"
        "where FUNCTION() returns the function that makes this call and its example arguments, "
        "(function, arguments).\n"
        "To ship what was tuned elsewhere, name its bundle in EJKERNEL_CONFIG_PATH. To go on with "
        "the kernel's default config: EJKERNEL_STRICT=0, or policy_override(strict=False)."
    )


def _store_option(store: PersistentCache | None) -> str:
    """How the command line is told to write where this selector reads."""
    try:
        usual = store is None or store.path == default_path()
    except OSError:
        usual = False
    return "" if usual or store is None else f" --store {store.path}"
