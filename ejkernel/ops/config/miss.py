"""A call that has no config: the answer with its reasons, and the error that says what to do."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ..core.types import ConfigKey
from .persistent import default_path
from .statistics import count_miss

if TYPE_CHECKING:
    from .decision import TierMiss
    from .persistent import PersistentCache
    from .tiers.request import Request


class ConfigMiss(RuntimeError):
    """No config for a call; the message lists every tier with its reason.

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


class StrictMiss(ConfigMiss):
    """Strict mode, and no config is stored for a call."""


@dataclasses.dataclass(frozen=True)
class Miss:
    """The answer that there is no config for a call, with the reasons."""

    request: Request
    passed: tuple[TierMiss, ...]
    store: PersistentCache | None

    @property
    def reason(self) -> str:
        """Why the last tier that was asked had nothing."""
        return self.passed[-1].reason if self.passed else "nothing was found"

    def error(self) -> ConfigMiss:
        """The error for whoever cannot do without; the miss is counted and told to listeners."""
        request = self.request
        count_miss(request.key.op_id)
        kind, text = (
            (StrictMiss, self._strict()) if request.policy.strict else (ConfigMiss, self._plain())
        )
        error = kind(text, request.key, request.inv.signature)
        request.emit("error", error=error)
        return error

    def _tiers(self) -> str:
        return "\n".join(f"  {p.tier}: {p.explain()}" for p in self.passed)

    def _plain(self) -> str:
        key = self.request.key
        return (
            f"no config for {key.op_id}({self.request.inv.signature}), key {key.call_key} on "
            f"{key.device}:\n{self._tiers()}\n"
            "Tune it (policy_override(autotune=True)), allow heuristics, or give cfg= with the "
            "call."
        )

    def _strict(self) -> str:
        """Which call, where was looked, what to run."""
        key = self.request.key
        return (
            f"strict mode: no config is stored for {key.op_id}({self.request.inv.signature}), key "
            f"{key.call_key} on {key.device}:\n{self._tiers()}\n"
            "Tune it on such a device, once:\n"
            f"  ejkernel tune MODULE:FUNCTION{_store_option(self.store)}\n"
            "where FUNCTION() returns the function that makes this call and its example arguments, "
            "(function, arguments).\n"
            "To ship what was tuned elsewhere, name its bundle in EJKERNEL_CONFIG_PATH. To go on "
            "with the kernel's default config: EJKERNEL_STRICT=0, or "
            "policy_override(strict=False)."
        )


def _store_option(store: PersistentCache | None) -> str:
    """How the command line is told to write where this selector reads."""
    try:
        usual = store is None or store.path == default_path()
    except OSError:
        usual = False
    return "" if usual or store is None else f" --store {store.path}"
