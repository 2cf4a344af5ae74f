"""From the calls of a program to tuned configs, stored and in force: what every front door runs."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from ..formatting import counted
from ..ops.config.cache import ConfigCache
from ..ops.config.context import AutotunePolicy, asked_call
from ..ops.config.decision import Decision
from ..ops.config.hooks import job_agreement
from ..ops.config.persistent import PersistentCache
from ..ops.config.selection import ConfigSelectorChain
from ..ops.core.invocation import Invocation
from ..ops.core.types import ConfigKey
from ..ops.execution.executor import default_executor
from ..ops.execution.offline import labelled_invocations
from ..ops.execution.results import AutotuningResult, Skipped
from ..ops.execution.tuning import stored_result, tune_invocations
from ..ops.execution.whole_function import WholeFunction
from ..ops.utils import environment
from ..ops.utils.fingerprint import device_fingerprint
from ..ops.utils.meta import label
from ..report.record import Operation, Run
from .result import TuningResult
from .whole_model import COMPARE_SECONDS, Comparison, compare

if TYPE_CHECKING:
    from ..ops.tuner.tuner import Tuner

Labelled: TypeAlias = Invocation[Any, Any] | Skipped

NOT_COMPARED = Comparison()


class NothingToTune(ValueError):
    """A program has no operation of ours."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while tuning; `result` holds what was learned by then."""

    def __init__(self, result: TuningResult, *, saved: bool = True) -> None:
        kept = "what was learned is stored" if saved else "nothing is stored, as save=False asks"
        super().__init__(f"tuning was interrupted; {kept}")
        self.result = result


def labelled_calls(program: Any, name: str) -> list[Labelled]:
    """The distinct labelled calls of a lowered program or of its text; a `NothingToTune` if none.

    Each is an invocation, or says why it cannot be one.
    """
    found = list(labelled_invocations(program, device_fingerprint()))
    if not found:
        why = (
            "EJKERNEL_OPS_STAMP=none leaves its labels out"
            if environment.STAMP.read() == "none" and not isinstance(program, str)
            else "it calls none, or was traced with EJKERNEL_OPS_STAMP=none"
        )
        raise NothingToTune(f"{name}: there is no operation of ejkernel in the program; {why}")
    return found


@dataclasses.dataclass(frozen=True)
class Order:
    """How a program is to be tuned, and what is to become of the result.

    Attributes:
      store: where results go, and where known ones are.
      tuner: measures; its limit of seconds is that of the whole run.
      save: write results to the store.
      force: measure again what the store knows.
      backward: time every call forward and backward, whatever the program does.
      install: put the result in force in this process.
      compare_seconds: most time for comparing the whole function; None: it is not run.
      on_event: listens to the selector.
      tune: tunes in another way than in this process: on a cluster.
      again: what a person does to measure again.
    """

    store: PersistentCache
    tuner: Tuner
    save: bool = True
    force: bool = False
    backward: bool = False
    install: bool = True
    compare_seconds: float | None = COMPARE_SECONDS
    on_event: Callable[..., None] | None = None
    tune: Callable[[ConfigSelectorChain], AutotuningResult] | None = None
    again: str = "force=True"


def tune_calls(
    calls: Sequence[Labelled],
    order: Order,
    *,
    title: str,
    whole: WholeFunction | None = None,
    against: WholeFunction | None = None,
    command: str = "",
) -> TuningResult:
    """Tune the calls of a program, store the configs, see what they are worth, put them in force.

    Args:
      calls: what `labelled_calls` found.
      order: how.
      title: what reports call it.
      whole: the function that makes the calls, to be run before and after.
      against: the same function in plain JAX.
      command: what was typed, for the record.
    """
    policy = AutotunePolicy(validate_backward=order.backward, strict=False)
    invocations = [call for call in calls if isinstance(call, Invocation)]
    keys = {inv.key: asked_call(inv, policy).key for inv in invocations}
    alone = job_agreement() is None
    before = _configs_before(invocations, order.store, policy) if alone else {}
    earlier = {key: _snapshot(order.store, key) for key in keys.values()} if order.save else {}
    selector = ConfigSelectorChain(
        ConfigCache(),
        policy,
        _limited(order, keys.values()),
        order.store,
        persist_autotune=order.save,
        on_event=order.on_event,
    )
    record = functools.partial(_record, title=title, store=order.store, command=command)
    start = time.perf_counter()
    notes: list[str] = []
    comparison = NOT_COMPARED
    try:
        if order.tune is not None:
            found = order.tune(selector)
        else:
            found = tune_invocations(selector, device_fingerprint(), calls, force=order.force)
        took = time.perf_counter() - start
        notes += _known_already(found, order)
        if whole is not None and order.compare_seconds is not None and not alone:
            # Processes that each stop when they are sure would wait for one another for ever.
            notes.append("not compared before and after: the program runs on several processes")
        elif whole is not None and order.compare_seconds is not None and found.entries:
            comparison = _compared(whole, against, found, before, order.compare_seconds, notes)
    except KeyboardInterrupt:
        took = time.perf_counter() - start
        result = _result(stored_result(selector, invocations))
        result.run = record(result, seconds=took, notes=["interrupted by Ctrl-C"])
        raise Interrupted(result, saved=order.save) from None
    result = _result(found)
    if comparison.is_slower:
        changed = [keys[key] for key in _changed(found, before) if key in keys]
        _restore(order.store, {key: earlier[key] for key in changed if key in earlier})
        stored = "; the store has what it had before" if order.save else ""
        notes.insert(0, f"slower with the tuned configs: they are not put in force{stored}")
    elif order.save:
        result.not_stored = _not_stored(found, order.store, keys)
        if result.not_stored:
            missing = ", ".join(dict.fromkeys(result.not_stored))
            notes.append(f"tuned, but not stored: {missing}")
    counts = None if whole is None else whole.count_calls()
    result.run = record(
        result, seconds=took, notes=notes, comparison=comparison, counts=counts or {}
    )
    result.in_force = order.install and not comparison.is_slower
    if result.in_force:
        result.install(default_executor().selector)
    return result


def _result(found: AutotuningResult) -> TuningResult:
    return TuningResult(found.device, found.entries, found.skipped)


def _record(
    result: TuningResult,
    *,
    title: str,
    store: PersistentCache,
    command: str,
    seconds: float,
    notes: Sequence[str],
    comparison: Comparison = NOT_COMPARED,
    counts: Mapping[str, int] = MappingProxyType({}),
) -> Run:
    """The record of a run: what was tuned, and what that is in the whole function."""
    run = Run.of(
        result,
        title=title,
        seconds=seconds,
        store=store,
        model=comparison.model,
        command=command,
        notes=(*notes, *comparison.notes),
    )
    step = comparison.step_seconds
    return dataclasses.replace(
        run,
        operations=tuple(_with_share(o, counts, step) for o in run.operations),
        plain=comparison.plain,
        step_seconds=step,
        rejected=comparison.is_slower,
    )


# --- before ---------------------------------------------------------------------------------------


def _configs_before(
    invocations: Iterable[Invocation[Any, Any]], store: PersistentCache, policy: AutotunePolicy
) -> dict[ConfigKey, Any]:
    """What the calls would run with if nothing was tuned now."""
    cache = ConfigCache()
    for key, cfg in default_executor().selector.cache.items():
        cache.put_quietly(key, cfg)
    policy = dataclasses.replace(policy, allow_autotune=False)
    selector = ConfigSelectorChain(cache, policy, persistent=store)
    configs = {}
    for inv in invocations:
        assert inv.kernel is not None
        answer = selector.answer(inv, inv.kernel)
        if isinstance(answer, Decision):
            configs[inv.key] = answer.cfg
    return configs


def _snapshot(store: PersistentCache, key: ConfigKey) -> dict[str, Any] | None:
    """What a store holds for a key, with its trials."""
    entry = store.entry(key)
    if entry is None:
        return None
    return {**entry, "about": {**entry["about"], "trials": store.trials(key)}}


def _restore(store: PersistentCache, earlier: Mapping[ConfigKey, dict[str, Any] | None]) -> None:
    for key, entry in earlier.items():
        store.remove(key)
        if entry is not None:
            store.put_plain(key, entry["config"], entry["config_type"], about=entry["about"])


def _limited(order: Order, keys: Iterable[ConfigKey]) -> Tuner:
    """The tuner with its limit divided: it is that of the whole run, a tuner's is per operation."""
    tuner = order.tuner
    if tuner.seconds is None:
        return tuner
    entries = [None if order.force else order.store.entry(key) for key in set(keys)]
    open_ones = sum(entry is None or bool(entry["about"].get("incomplete")) for entry in entries)
    return tuner.changed(seconds=tuner.seconds / max(1, open_ones))


# --- after ----------------------------------------------------------------------------------------


def _changed(found: AutotuningResult, before: Mapping[ConfigKey, Any]) -> list[ConfigKey]:
    return [key for key, cfg in found.as_mapping().items() if before.get(key) != cfg]


def _compared(
    whole: WholeFunction,
    against: WholeFunction | None,
    found: AutotuningResult,
    before: Mapping[ConfigKey, Any],
    seconds: float,
    notes: list[str],
) -> Comparison:
    try:
        return compare(whole, against, found, before, seconds)
    except Exception as error:  # noqa: BLE001  the configs are tuned and stored all the same
        first = (str(error).strip().splitlines() or [""])[0]
        notes.append(f"not compared before and after: {type(error).__name__}: {first}")
        return NOT_COMPARED


def _not_stored(
    found: AutotuningResult, store: PersistentCache, keys: Mapping[ConfigKey, ConfigKey]
) -> tuple[str, ...]:
    """What was measured and is not in the store, nor in a bundle that it need not be in."""
    return tuple(
        entry.op_id
        for key, entry in zip(found.as_mapping(), found.entries, strict=True)
        if entry.outcome is not None and store.entry(keys.get(key, key)) is None
    )


def _known_already(found: AutotuningResult, order: Order) -> list[str]:
    known = [e for e in found.entries if e.outcome is None and e.origin.startswith("stored")]
    if not known:
        return []
    count = len(known) if len(known) < len(found.entries) else "all"
    of_all = f"{count} of {counted(len(found.entries), 'operation')}"
    return [f"known already, not measured: {of_all}; to measure again: {order.again}"]


def _with_share(operation: Operation, counts: Mapping[str, int], step: float | None) -> Operation:
    calls = counts.get(label(operation.op_id, operation.call_key))
    if calls is None:
        return operation
    known = step and operation.seconds is not None
    share = operation.seconds * calls / step if known else None  # type: ignore[operator]
    return dataclasses.replace(operation, calls=calls, share=share)
