"""A chosen config with its reasons: a value that can be printed, compared and sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Generic

from ...formatting import lasting
from ...markup import one_line, printable
from ..core.types import Cfg, ConfigKey
from ..utils.display import Displayed, Explanation, Shown


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
      passed: the tiers that were asked before, each with why it had nothing.
      signature: the call, readable.
      about: what the store or the tuner knows: when measured, how fast, against what.
    """

    cfg: Cfg
    tier: str
    key: ConfigKey
    reason: str
    passed: tuple[TierMiss, ...] = ()
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
        lines += [f"  before   {passed.tier}: {passed.explain()}" for passed in self.passed]
        return Explanation(printable("\n".join(lines), keep="\n"), self._shown())

    def _shown(self) -> Shown:
        rows = [
            ("config", lasting(str(self.cfg))),
            ("chosen by", f"{self.tier}: {self.reason}"),
            *((f"not by {passed.tier}", passed.explain()) for passed in self.passed),
            ("device", self.key.device),
            ("key", self.key.call_key),
        ]
        return Shown(f"{self.key.op_id}({self.signature})", ("", ""), rows)

    def __str__(self) -> str:
        return str(self.explain())
