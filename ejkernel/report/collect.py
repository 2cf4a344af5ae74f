"""From what a tuning run gives back, or from what a store holds, to a `Run`."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from ..ops import AutotuningResult, PersistentCache
from ..ops.core.types import ConfigKey
from ..ops.execution.results import Entry
from ..ops.tuner.race import SURE, compare
from ..ops.utils.fingerprint import device_fingerprint
from ..ops.utils.provenance import versions
from ..ops.utils.serialize import to_plain
from ..store.rows import sound_about
from .record import BeforeAfter, Candidate, Gain, NotTuned, Operation, Run, is_time

StoreLike = PersistentCache | str | os.PathLike[str] | None

MEASURED = "measured"
CERTAINTY = 0.98  # that the limits of a gain hold it


def run_of_result(
    kind: type[Run],
    result: AutotuningResult,
    title: str,
    seconds: float | None,
    store: StoreLike,
    model: BeforeAfter | None,
    command: str,
    environment: Mapping[str, str],
    notes: tuple[str, ...],
) -> Run:
    """See `Run.of`."""
    if not isinstance(result, AutotuningResult):
        raise TypeError(
            f"Run.of takes an AutotuningResult, got {result!r} ({type(result).__name__})"
        )
    cache = _opened(store)
    return kind(
        title=title or _title(entry.op_id for entry in result.entries),
        device=result.device,
        created=now(),
        seconds=seconds,
        operations=tuple(_operation(entry, result.device, cache) for entry in result.entries),
        not_tuned=tuple(NotTuned(skipped.label, skipped.reason) for skipped in result.skipped),
        model=model,
        store="" if cache is None else str(cache.path),
        command=command,
        environment={**facts(result.device), **environment},
        notes=notes,
    )


def run_of_store(
    kind: type[Run], store: StoreLike, device: str | None, title: str, limit: int
) -> Run:
    """See `Run.of_store`."""
    cache = _opened(store)
    assert cache is not None
    device = device or device_fingerprint()
    entries = [
        entry
        for entry in cache.related(limit=limit, device=device)
        if not entry["about"].get("estimated")  # ranked by a compiler, never run
    ]
    return kind(
        title=title or f"Tuned configs of {device}",
        device=device,
        created=now(),
        operations=tuple(_stored_operation(entry, cache) for entry in entries),
        store=str(cache.path),
        environment=facts(device),
    )


def now() -> str:
    """This moment, UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def facts(device: str) -> dict[str, str]:
    """What is true of this process and its machine."""
    return {
        "device": device,
        **versions(),
        "system": platform.platform(terse=True),
        "host": socket.gethostname(),
    }


def gain_of(slower: Sequence[float], faster: Sequence[float], times: float | None = None) -> Gain:
    """How many times faster the second is, by the samples that both took interleaved.

    The limits hold the median of the ratios with 98 % certainty, however the noise is distributed,
    and are never closer than the race's own standard errors; of fewer than seven rounds they are
    all that was seen. `times` is the figure to show, if another one than the median of the ratios
    is known; the limits then include it.
    """
    middle, error = compare(slower, faster)
    shown = math.exp(middle) if times is None else times
    if not math.isfinite(error):
        return Gain(shown, 0.0, 0.0)
    ratios = sorted(a / b for a, b in zip(slower, faster, strict=False))
    left_out = _left_out(len(ratios))
    low = min(ratios[left_out], math.exp(middle - SURE * error))
    high = max(ratios[-1 - left_out], math.exp(middle + SURE * error))
    return Gain(shown, min(low, shown), max(high, shown))


def _left_out(count: int) -> int:
    """How many of so many sorted values may be left out at each end of limits of their median."""
    outside, number = 0.0, 0
    while True:
        outside += 2 * math.comb(count, number) / 2**count
        if outside > 1 - CERTAINTY or 2 * (number + 1) >= count:
            return number
        number += 1


# --- operations ----------------------------------------------------------------------------------


def _operation(entry: Entry, device: str, cache: PersistentCache | None) -> Operation:
    outcome = entry.outcome
    key = ConfigKey(device, entry.op_id, entry.call_key)
    stored = None if cache is None else cache.entry(key)
    config = _plain(entry.cfg)
    if outcome is not None:
        about: Mapping[str, Any] = {**outcome.about(), "versions": versions()}
        return _from_about(key, entry.signature, config, about, about["trials"], entry.origin)
    if stored is not None and cache is not None and stored["config"] == config:
        return _stored_operation(stored, cache, entry.origin, like=config)
    return Operation(
        op_id=entry.op_id,
        call_key=entry.call_key,
        signature=entry.signature,
        config=config,
        seconds=_time(entry.seconds),
        heuristic_seconds=_time(entry.heuristic_seconds),
        origin=entry.origin,
    )


def _stored_operation(
    entry: Mapping[str, Any], cache: PersistentCache, origin: str = "", like: Any = None
) -> Operation:
    """An operation from its entry; fields of configs in the order that they have in `like`."""
    about = sound_about(entry["about"])
    about["heuristic"] = _in_order(about.get("heuristic"), like)
    trials = [
        {**trial, "config": _in_order(trial.get("config"), like)}
        for trial in cache.trials(entry["key"])
    ]
    config, signature = _in_order(entry["config"], like), str(about.get("signature", ""))
    return _from_about(entry["key"], signature, config, about, trials, origin)


def _in_order(config: Any, like: Any) -> Any:
    """A store sorts the fields of a config; people know them in the order of their class."""
    if not isinstance(config, dict) or not isinstance(like, dict):
        return config
    names = sorted(config, key=lambda name: list(like).index(name) if name in like else len(like))
    return {name: _in_order(config[name], like.get(name)) for name in names}


def _from_about(
    key: Any,
    signature: str,
    config: Any,
    about: Mapping[str, Any],
    trials: Sequence[Mapping[str, Any]],
    origin: str,
) -> Operation:
    """An operation from what is stored with a config; whatever is missing there is left out."""
    candidates = tuple(_candidate(trial) for trial in trials)
    heuristic, sure, found = about.get("heuristic"), about.get("sure"), about.get("versions")
    by_config = {_name(candidate.config): candidate for candidate in candidates}
    best, base = by_config.get(_name(config)), by_config.get(_name(heuristic))
    return Operation(
        op_id=str(key[1]),
        call_key=str(key[2]),
        signature=signature,
        config=config,
        heuristic=heuristic,
        seconds=_time(about.get("seconds")),
        heuristic_seconds=_time(about.get("heuristic_seconds")),
        gain=_gain(base, best),
        lead=_lead(best, candidates),
        measured=str(about.get("measured") or ""),
        clock=str(about.get("clock") or ""),
        sure=sure if isinstance(sure, bool) else None,
        incomplete=str(about.get("incomplete") or ""),
        took=_time(about.get("took")),
        origin=origin,
        when=str(about.get("when") or ""),
        where=str(about.get("where") or ""),
        versions=(
            {str(name): str(value) for name, value in found.items()}
            if isinstance(found, dict)
            else {}
        ),
        notes=tuple(str(note) for note in about.get("notes") or ()),
        candidates=candidates,
    )


def _candidate(trial: Mapping[str, Any]) -> Candidate:
    return Candidate(
        config=trial.get("config"),
        verdict=str(trial.get("verdict", "")),
        seconds=_time(trial.get("seconds")),
        samples=tuple(
            ns * 1e-9
            for ns in trial.get("samples_ns") or ()
            if type(ns) in (int, float) and 1e-6 < ns < 1e21
        ),
        reason=str(trial.get("reason") or ""),
    )


def _gain(base: Candidate | None, best: Candidate | None) -> Gain | None:
    """How much the winner gained over the heuristic config; the same config gains nothing."""
    if base is None or best is None:
        return None
    if base == best:
        return Gain(1.0, 1.0, 1.0)
    if not (base.samples and best.samples and base.seconds and best.seconds):
        return None
    return _known(gain_of(base.samples, best.samples, base.seconds / best.seconds))


def _lead(best: Candidate | None, candidates: Sequence[Candidate]) -> Gain | None:
    """How far the winner is ahead of the best of the others."""
    others = [c for c in candidates if c is not best and c.verdict == MEASURED and c.seconds]
    if best is None or not best.samples or not best.seconds or not others:
        return None
    second = min(others, key=lambda candidate: candidate.seconds or math.inf)
    if not second.samples or not second.seconds:
        return None
    return _known(gain_of(second.samples, best.samples, second.seconds / best.seconds))


def _known(gain: Gain) -> Gain | None:
    return gain if gain.high > 0 else None  # a single sample has no limits


# --- small things --------------------------------------------------------------------------------


def _opened(store: StoreLike) -> PersistentCache | None:
    if store is None or isinstance(store, PersistentCache):
        return store
    return PersistentCache(store)


def _title(op_ids: Any) -> str:
    names = list(dict.fromkeys(op_id.partition("@v")[0] for op_id in op_ids))
    if len(names) > 3:
        return f"{', '.join(names[:3])} and {len(names) - 3} more"
    return ", ".join(names) or "Nothing to tune"


def _plain(cfg: Any) -> Any:
    try:
        return to_plain(cfg)
    except TypeError:  # a config of the user's own that is no data: shown as text
        return str(cfg)


def _name(config: Any) -> str:
    return json.dumps(config, sort_keys=True, default=str)


def _time(value: Any) -> float | None:
    """Seconds, unless what somebody stored is none."""
    return float(value) if type(value) in (int, float) and is_time(value) else None
