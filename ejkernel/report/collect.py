"""From what a tuning run gives back, or from what a store holds, to a `Run`."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import platform
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from ..formatting import is_time
from ..ops import AutotuningResult, PersistentCache
from ..ops.core.types import ConfigKey
from ..ops.execution.results import Entry
from ..ops.utils.fingerprint import device_fingerprint
from ..ops.utils.provenance import versions
from ..ops.utils.serialize import to_plain
from ..speedup import Gain, PlainJax, gain_of
from ..store.rows import sound_about
from .commit import commit_here
from .record import Candidate, CountedWork, NotTuned, Operation, Roofline

StoreLike = PersistentCache | str | os.PathLike[str] | None

TEXTS = ("measured", "clock", "incomplete", "when", "where")  # of what is stored with a config


def fields_of_result(
    result: AutotuningResult, store: StoreLike, title: str, environment: Mapping[str, str]
) -> dict[str, Any]:
    """What `Run.of` takes from a result and its store."""
    if not isinstance(result, AutotuningResult):
        raise TypeError(
            f"Run.of takes an AutotuningResult, got {result!r} ({type(result).__name__})"
        )
    cache = store if store is None or isinstance(store, PersistentCache) else PersistentCache(store)
    operations = tuple(_operation(entry, result.device, cache) for entry in result.entries)
    return {
        "title": title or _title(operations),
        "operations": operations,
        "not_tuned": tuple(NotTuned(skipped.label, skipped.reason) for skipped in result.skipped),
        "store": "" if cache is None else str(cache.path),
        "roofline": _roofline(result.device, operations),
        **_here(result.device, environment),
    }


def fields_of_store(
    store: PersistentCache | str | os.PathLike[str], device: str | None, title: str, limit: int
) -> dict[str, Any]:
    """What `Run.of_store` takes from a store."""
    cache = store if isinstance(store, PersistentCache) else PersistentCache(store)
    device = device or device_fingerprint()
    operations = tuple(
        _stored_operation(entry, cache)
        for entry in cache.related(limit=limit, device=device)
        if not entry["about"].get("estimated")  # ranked by a compiler, never run
    )
    return {
        "title": title or f"Tuned configs of {device}",
        "operations": operations,
        "store": str(cache.path),
        "roofline": _roofline(device, operations),
        **_here(device, {}),
    }


def _here(device: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """The moment, and what is true of this process and its machine."""
    facts = {"system": platform.platform(terse=True), "host": socket.gethostname()}
    if (commit := commit_here()) is not None:
        facts["commit"] = commit
    return {
        "device": device,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "environment": {"device": device, **versions(), **facts, **environment},
    }


def _roofline(device: str, operations: Sequence[Operation]) -> Roofline | None:
    """What the device can do at most, where there is something to compare with it."""
    dtypes = [operation.work.dtype for operation in operations if operation.work is not None]
    if not dtypes:
        return None
    from .roofline import roofline_of

    return roofline_of(device, dtypes)


# --- operations ----------------------------------------------------------------------------------


def _operation(entry: Entry, device: str, cache: PersistentCache | None) -> Operation:
    key = ConfigKey(device, entry.op_id, entry.call_key)
    stored = None if cache is None else cache.entry(key)
    try:
        config = to_plain(entry.cfg)
    except TypeError:  # a config of the user's own that is no data: shown as text
        config = str(entry.cfg)
    if entry.outcome is not None:
        about = {**entry.outcome.about(), "versions": versions()}
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
        gain=entry.gain,
        plain=entry.plain,
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
    found = found if isinstance(found, dict) else {}
    known: dict[str, Any] = {name: str(about.get(name) or "") for name in TEXTS}
    known |= {name: _time(about.get(name)) for name in ("seconds", "heuristic_seconds", "took")}
    by_config = {_name(candidate.config): candidate for candidate in candidates}
    best, base = by_config.get(_name(config)), by_config.get(_name(heuristic))
    gain = Gain.from_plain(about.get("speedup"))
    if "speedup" not in about:  # of an earlier version: their samples tell it
        candidates = tuple(_paired(candidate, base) for candidate in candidates)
        gain = _gain(base, best)
        if gain is not None and known["heuristic_seconds"]:
            known["seconds"] = known["heuristic_seconds"] / gain.times
    others = [c for c in candidates if c is not best and c.verdict == "measured" and c.seconds]
    second = min(others, key=lambda candidate: candidate.seconds or math.inf, default=None)
    return Operation(
        op_id=str(key[1]),
        call_key=str(key[2]),
        signature=signature,
        config=config,
        heuristic=heuristic,
        gain=gain,
        lead=_gain(second, best),
        sure=sure if isinstance(sure, bool) else None,
        origin=origin,
        versions={str(name): str(value) for name, value in found.items()},
        notes=tuple(str(note) for note in about.get("notes") or ()),
        candidates=candidates,
        work=_work(about.get("work")),
        plain=PlainJax.from_plain(about.get("plain")),
        **known,
    )


def _work(stored: Any) -> CountedWork | None:
    """What one call has to do, unless what somebody stored is no count."""
    if not isinstance(stored, dict):
        return None
    try:
        flops, moved = (
            None if stored.get(name) is None else float(stored[name]) for name in ("flops", "bytes")
        )
        return CountedWork(flops, moved, str(stored.get("dtype") or ""))
    except (TypeError, ValueError, OverflowError):
        return None


def _candidate(trial: Mapping[str, Any]) -> Candidate:
    order = trial.get("order")
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
        order=order if type(order) is int and 0 < order < 10**9 else None,
        speedup=Gain.from_plain(trial.get("speedup")),
    )


def _paired(candidate: Candidate, base: Candidate | None) -> Candidate:
    """A candidate with its speedup over the heuristic config, and the time that agrees with it."""
    gain = _gain(base, candidate)
    if gain is None or base is None or base.seconds is None:
        return candidate
    return dataclasses.replace(candidate, speedup=gain, seconds=base.seconds / gain.times)


def _gain(base: Candidate | None, best: Candidate | None) -> Gain | None:
    """How many times faster the second is, if both have what tells it."""
    if base is None or best is None:
        return None
    if base == best:
        return Gain(1.0, 1.0, 1.0)
    if not (base.samples and best.samples and base.seconds and best.seconds):
        return None
    gain = gain_of(base.samples, best.samples)
    return gain if gain.high > 0 else None  # a single sample has no confidence interval


def _title(operations: Sequence[Operation]) -> str:
    names = list(dict.fromkeys(operation.name for operation in operations))
    if len(names) > 3:
        return f"{', '.join(names[:3])} and {len(names) - 3} more"
    return ", ".join(names) or "Nothing to tune"


def _name(config: Any) -> str:
    return json.dumps(config, sort_keys=True, default=str)


def _time(value: Any) -> float | None:
    """Seconds, unless what somebody stored is none."""
    return float(value) if type(value) in (int, float) and is_time(value) else None
