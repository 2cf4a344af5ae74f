"""Is a stored config still worth what it was when it was measured?

A kernel whose source changed makes its entries *stale*: they stay and are not used, and their
timings are not used again. Another compiler makes them *suspect*: they are used, marked, and
measured again where tuning is allowed. An entry that does not say what made it, such as one put by
hand, is taken as it is.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from ...markup import one_line
from ...store.rows import COMPILERS, origin
from ..core.invocation import Invocation
from ..core.kernel import Kernel
from ..core.types import ConfigKey
from ..utils.fingerprint import device_fingerprint
from ..utils.provenance import source_hash, versions
from .explain import call_fields


class EntryState(enum.Enum):
    """What became of an entry since it was made."""

    FRESH = "fresh"
    STALE = "stale"
    SUSPECT = "suspect"


@dataclasses.dataclass(frozen=True)
class Freshness:
    """A state and, unless it is fresh, the reason in words: `suspect: measured with jaxlib …`."""

    state: EntryState
    reason: str = ""


def made_by(inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> dict[str, Any]:
    """What a new entry says about its origin."""
    return {
        "signature": inv.signature,
        "call": call_fields(inv),
        "source": source_hash(kernel),
        "versions": versions(),
    }


def judge(about: Mapping[str, Any], kernel: Kernel[Any, Any], key: ConfigKey) -> Freshness:
    """Compare what made an entry with what would make it now."""
    source = about.get("source")
    if source is not None and source != source_hash(kernel):
        when = f" on {one_line(about['when'])}" if "when" in about else ""
        return Freshness(
            EntryState.STALE, f"stale: the kernel's source changed since it was tuned{when}"
        )
    if key.device != device_fingerprint():
        # What compiles for a device that is not here, nobody knows.
        return Freshness(EntryState.FRESH)
    then, now = about.get("versions"), versions()
    changed = [
        f"{name} {one_line(then[name])}, this is {now[name]}"
        for name in COMPILERS
        if isinstance(then, dict) and name in then and then[name] != now[name]
    ]
    if changed:
        return Freshness(EntryState.SUSPECT, f"suspect: measured with {'; '.join(changed)}")
    return Freshness(EntryState.FRESH)


def can_be_continued(about: Mapping[str, Any], kernel: Kernel[Any, Any], measured: str) -> bool:
    """True if a tuning run of today may use an entry's trials: the same origin throughout."""
    now = {"source": source_hash(kernel), "versions": versions(), "measured": measured}
    return origin(about) == origin(now)
