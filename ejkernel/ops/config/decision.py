"""What selection answers: a `Decision`, which can be printed, compared and sent; or a `Miss`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic

from ...formatting import lasting
from ...markup import one_line, printable
from ..core.types import Cfg, ConfigKey
from ..registry import count_miss
from ..utils.display import Displayed, Explanation, Shown
from .persistent import default_path

if TYPE_CHECKING:
    from .persistent import PersistentCache
    from .tiers.request import Request


@dataclasses.dataclass(frozen=True)
class TierMiss:
    """A source of configs that had none, and why.

    `more` finds out the rest, such as which entries are near: it costs a search, and is asked only
    when a person wants to know.
    """

    tier: str
    reason: str
    more: Callable[[], str] | None = dataclasses.field(default=None, compare=False, repr=False)

    def explain(self) -> str:
        """The reason, and what more there is to say."""
        more = "" if self.more is None else self.more()
        return f"{self.reason}; {more}" if more else self.reason

    def __reduce__(self) -> tuple[Any, ...]:
        """Sent elsewhere, it is its text: the store is not there."""
        return type(self), (self.tier, self.explain())


@dataclasses.dataclass(frozen=True)
class Decision(Displayed, Generic[Cfg]):
    """Which config a call runs with, which tier gave it, and why those before it did not.

    Attributes:
      cfg: the config.
      tier: `override`, `overlay`, `memory`, `persistent`, `autotune` or `heuristics`.
      key: the call it was decided for.
      reason: where the config comes from, in words.
      misses: the tiers that were asked before, each with why it had nothing.
      signature: the call, readable.
      about: what the store or the tuner knows: when measured, how fast, against what.
    """

    cfg: Cfg
    tier: str
    key: ConfigKey
    reason: str
    misses: tuple[TierMiss, ...] = ()
    signature: str = ""
    about: Any = None

    def explain(self) -> Explanation:
        """The whole story, for a person: text, and a table in a notebook."""
        lines = [
            one_line(f"{self.key.op_id}({self.signature})"),
            f"  device   {self.key.device}",
            f"  key      {self.key.call_key}",
            f"  config   {one_line(lasting(str(self.cfg)))}",
            f"  chosen   by {self.tier}: {self.reason}",
        ]
        lines += [f"  before   {miss.tier}: {miss.explain()}" for miss in self.misses]
        return Explanation(printable("\n".join(lines), keep="\n"), self._shown())

    def _shown(self) -> Shown:
        rows = [
            ("config", lasting(str(self.cfg))),
            ("chosen by", f"{self.tier}: {self.reason}"),
            *((f"not by {miss.tier}", miss.explain()) for miss in self.misses),
            ("device", self.key.device),
            ("key", self.key.call_key),
        ]
        return Shown(f"{self.key.op_id}({self.signature})", ("", ""), rows)

    def __str__(self) -> str:
        return str(self.explain())


Answer = Decision[Any] | tuple[TierMiss, ...]
"""A decision; or, if no tier has a config, each tier with its reason."""


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
    misses: tuple[TierMiss, ...]
    store: PersistentCache | None

    @property
    def reason(self) -> str:
        """Why the last tier that was asked had nothing."""
        return self.misses[-1].reason if self.misses else "nothing was found"

    def error(self) -> ConfigMiss:
        """The error for whoever cannot do without; the miss is counted and told to listeners."""
        request, key = self.request, self.request.key
        count_miss(key.op_id)
        strict = bool(request.policy.strict)
        tiers = "\n".join(f"  {miss.tier}: {miss.explain()}" for miss in self.misses)
        text = (
            f"{'strict mode: no config is stored' if strict else 'no config'} for "
            f"{key.op_id}({request.inv.signature}), key {key.call_key} on {key.device}:\n{tiers}\n"
            f"{_STRICT_ADVICE.format(_store_option(self.store)) if strict else _ADVICE}"
        )
        error = (StrictMiss if strict else ConfigMiss)(text, key, request.inv.signature)
        request.emit("error", error=error)
        return error


_ADVICE = "Tune it (policy_override(autotune=True)), allow heuristics, or give cfg= with the call."
_STRICT_ADVICE = """\
Tune it on such a device, once:
  ejkernel tune MODULE:FUNCTION{}
where FUNCTION() returns the function that makes this call and its example arguments, \
(function, arguments).
To ship what was tuned elsewhere, name its bundle in EJKERNEL_CONFIG_PATH. To go on with the \
kernel's default config: EJKERNEL_STRICT=0, or policy_override(strict=False)."""


def _store_option(store: PersistentCache | None) -> str:
    """How the command line is told to write where this selector reads."""
    try:
        usual = store is None or store.path == default_path()
    except OSError:
        usual = False
    return "" if usual or store is None else f" --store {store.path}"
