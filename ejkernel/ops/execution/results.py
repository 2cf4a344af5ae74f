"""What tuning gives back: configs by operation and call, usable as an overlay."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...formatting import described, duration, lasting, shortened, speedup
from ...speedup import Gain, PlainJax
from ...store.reading import parse_json, shown
from ...store.rows import wrong_about
from ..config import context
from ..config.cache import OverlayLayer
from ..core.kernel import kernel_named
from ..core.types import ConfigKey
from ..utils.display import Displayed, Explanation, Shown, as_text
from ..utils.fingerprint import device_fingerprint
from ..utils.serialize import config_type_named, from_plain, qualified_name, to_plain

if TYPE_CHECKING:
    from ..config.outcome import Outcome
    from ..config.selection import ConfigSelectorChain

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Entry:
    """The config of one operation's call.

    The rest says for which shapes and how it was measured; it is not part of the entry's identity.

    Attributes:
      op_id: the operation with its version.
      call_key: the call.
      cfg: its config.
      signature: the call, readable.
      seconds: the measured time per call.
      heuristic_seconds: that of the heuristic config.
      origin: where the config comes from, in words.
      outcome: every candidate, if it was measured in this process.
      gain: how many times faster it is than the heuristic config, with the confidence interval.
      plain: the same call in plain JAX, if that was timed.
    """

    op_id: str
    call_key: str
    cfg: Any
    signature: str = dataclasses.field(default="", compare=False)
    seconds: float | None = dataclasses.field(default=None, compare=False)
    heuristic_seconds: float | None = dataclasses.field(default=None, compare=False)
    origin: str = dataclasses.field(default="", compare=False, repr=False)
    outcome: Outcome[Any] | None = dataclasses.field(default=None, compare=False, repr=False)
    gain: Gain | None = dataclasses.field(default=None, compare=False, repr=False)
    plain: PlainJax | None = dataclasses.field(default=None, compare=False, repr=False)

    @classmethod
    def of(
        cls, key: ConfigKey, cfg: Any, signature: str, about: Mapping[str, Any], origin: str
    ) -> Entry:
        """The entry of a config and what is stored with it."""
        return cls(
            key.op_id,
            key.call_key,
            cfg,
            signature,
            about.get("seconds"),
            about.get("heuristic_seconds"),
            origin,
            gain=Gain.from_plain(about.get("speedup")),
            plain=PlainJax.from_plain(about.get("plain")),
        )


@dataclasses.dataclass(frozen=True)
class Skipped:
    """An operation that was not tuned, and why."""

    label: str
    reason: str


class AutotuningResult(Displayed):
    """Tuned configs of one device. As a context manager it activates them.

    ::

        with result:
            out = jax.jit(my_function)(x)     # runs with the tuned configs

    It may be entered again while active, and from several threads or asyncio tasks, each on its
    own. `a | b` merges, `b` winning; `dumps` and `loads` write and read it as text.
    """

    def __init__(
        self,
        device: str | None = None,
        entries: Iterable[Entry] = (),
        skipped: Iterable[Skipped] = (),
    ) -> None:
        self.device = device or device_fingerprint()
        self.entries = tuple(entries)
        self.skipped = tuple(skipped)
        for entry in self.entries:
            if not isinstance(entry, Entry):
                raise TypeError(
                    f"AutotuningResult: entries must be Entry objects, got {entry!r} "
                    f"({type(entry).__name__})"
                )

    # --- active ----------------------------------------------------------------------------------

    def as_mapping(self) -> dict[ConfigKey, Any]:
        """The configs by cache key."""
        return {
            ConfigKey(self.device, entry.op_id, entry.call_key): entry.cfg for entry in self.entries
        }

    def __enter__(self) -> AutotuningResult:
        context.enter(self, OverlayLayer.of(self.as_mapping()))
        return self

    def __exit__(self, *_: object) -> None:
        context.leave(self)

    def install(self, selector: ConfigSelectorChain | None = None) -> None:
        """Install the configs for good: into a selector's memory (default: the default one).

        Functions jitted before select again. In a job of several processes, do so in each of them.
        """
        if selector is None:
            from .executor import default_executor

            selector = default_executor().selector
        selector.cache.install(self.as_mapping())

    def explain(self, entry: Entry | int | str) -> Explanation:
        """How an entry came about: every candidate with its time or why it has none.

        Takes an entry, its position, or an operation's id.
        """
        chosen = entry
        if isinstance(entry, int):
            chosen = self.entries[entry]
        elif isinstance(entry, str):
            named = [e for e in self.entries if entry in (e.op_id, e.op_id.partition("@v")[0])]
            if not named:
                known = ", ".join(dict.fromkeys(e.op_id for e in self.entries)) or "none"
                raise KeyError(f"no entry of {entry!r}; this result has {known}")
            chosen = named[0]
        assert isinstance(chosen, Entry)
        title, cfg = f"{chosen.op_id}({chosen.signature})", lasting(str(chosen.cfg))
        head = f"{title}\n  {cfg}\n  {chosen.origin}"
        rows = [("config", cfg), ("origin", chosen.origin)]
        if chosen.outcome is None and chosen.plain is not None:
            rows.append(("plain JAX", chosen.plain.sentence(chosen.seconds, duration)))
            head += f"\n  {rows[-1][1]}"
        table = Shown(title, ("", ""), rows)
        if chosen.outcome is None:
            return Explanation(head, table)
        return Explanation(f"{head}\n{chosen.outcome.explain()}", table, chosen.outcome._shown())

    # --- as a collection -------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __or__(self, other: AutotuningResult) -> AutotuningResult:
        if not isinstance(other, AutotuningResult):
            return NotImplemented
        if other.device != self.device:
            raise ValueError(
                f"results of different devices cannot be merged: {self.device} and {other.device}"
            )
        merged = {(entry.op_id, entry.call_key): entry for entry in self.entries}
        merged.update({(entry.op_id, entry.call_key): entry for entry in other.entries})
        return AutotuningResult(
            self.device, merged.values(), dict.fromkeys((*self.skipped, *other.skipped))
        )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, AutotuningResult)
            and self.device == other.device
            and set(self.entries) == set(other.entries)
        )

    __hash__ = None  # type: ignore[assignment]

    # --- as text ---------------------------------------------------------------------------------

    def dumps(self) -> str:
        """The result as JSON text."""
        names = ("op_id", "call_key", "signature", "seconds", "heuristic_seconds")
        entries = [
            {name: getattr(entry, name) for name in names}
            | {
                "speedup": None if entry.gain is None else entry.gain.to_plain(),
                "plain": None if entry.plain is None else entry.plain.to_plain(),
            }
            | {"config": to_plain(entry.cfg), "config_type": qualified_name(type(entry.cfg))}
            for entry in self.entries
        ]
        plain = {"ejkernel_result": SCHEMA, "device": self.device, "entries": entries}
        return json.dumps(plain, indent=1, sort_keys=True)

    @classmethod
    def loads(cls, text: str) -> AutotuningResult:
        """Read what `dumps` wrote; the modules that define the config classes must be loaded."""
        where = "AutotuningResult.loads"
        try:
            plain = parse_json(text, nan=True)
            schema, device, listed = plain["ejkernel_result"], plain["device"], plain["entries"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{where}: the text is not an AutotuningResult: {error!r}") from error
        if type(schema) is not int or schema > SCHEMA:
            raise ValueError(
                f"{where}: written by a newer ejkernel (schema {shown(schema)}, this one knows "
                f"{SCHEMA})"
            )
        if not isinstance(device, str) or not isinstance(listed, list):
            raise ValueError(
                f"{where}: device must be a string and entries a list, "
                f"got {shown(device)} and {shown(listed)}"
            )
        return cls(
            device,
            [_entry_from_plain(item, f"{where}: entries[{i}]") for i, item in enumerate(listed)],
        )

    def __repr__(self) -> str:
        return f"AutotuningResult({self.device!r}, {len(self.entries)} entries)"

    def _shown(self) -> Shown:
        return Shown(
            f"tuned for {self.device}",
            (
                *("operation", "plain JAX", "default", "tuned"),
                *("over plain", "over default", "config", "call"),
            ),
            [_row(entry) for entry in self.entries],
            right=(1, 2, 3, 4, 5),
            details=2,
            notes=[
                *(note for entry in self.entries if (note := _about_plain(entry))),
                *(f"not tuned: {skipped.label}: {skipped.reason}" for skipped in self.skipped),
            ],
        )

    def __str__(self) -> str:
        return as_text(self._shown())


def _entry_from_plain(plain: Any, where: str) -> Entry:
    if not isinstance(plain, dict):
        raise ValueError(f"{where} must be an object, got {shown(plain)}")
    for name in ("op_id", "call_key", "config_type"):
        if not isinstance(plain.get(name), str):
            raise ValueError(f"{where}: {name} must be a string, got {shown(plain.get(name))}")
    if "config" not in plain:
        raise ValueError(f"{where}: the config is missing")
    for name in ("signature", "seconds", "heuristic_seconds"):
        if wrong_about(name, plain.get(name)):
            raise ValueError(f"{where}: its {name} is {shown(plain[name])}")
    op_id, type_name = plain["op_id"], plain["config_type"]
    kernel = kernel_named(op_id)
    known = bool(kernel and kernel.config_types) or config_type_named(type_name) is not Any
    if not known and isinstance(plain["config"], dict):
        raise ValueError(
            f"{where}: the config class {shown(type_name)} of {shown(op_id)} is not loaded; "
            "import the module that defines the kernel first"
        )
    try:
        cfg = (
            from_plain(plain["config"], config_type_named(type_name))
            if kernel is None
            else kernel.config_from_plain(plain["config"], type_name)
        )
    except Exception as error:  # a class may check its fields as it likes
        raise ValueError(f"{where}: {str(error) or type(error).__name__}") from error
    return Entry(
        op_id,
        plain["call_key"],
        cfg,
        plain.get("signature") or "",
        plain.get("seconds"),
        plain.get("heuristic_seconds"),
        origin="loaded",
        gain=Gain.from_plain(plain.get("speedup")),
        plain=PlainJax.from_plain(plain.get("plain")),
    )


def _row(entry: Entry) -> tuple[str, ...]:
    plain = entry.plain
    return (
        entry.op_id,
        duration(None if plain is None else plain.seconds),
        duration(entry.heuristic_seconds),
        duration(entry.seconds),
        "–" if plain is None else plain.faster(entry.seconds),
        speedup(entry.heuristic_seconds, entry.seconds),
        described(entry.cfg),
        shortened(entry.signature) or entry.call_key,
    )


def _about_plain(entry: Entry) -> str:
    """Why plain JAX has no time or was stopped, if so."""
    plain = entry.plain
    return f"plain JAX: {entry.op_id}: {plain.reason}" if plain and plain.reason else ""
