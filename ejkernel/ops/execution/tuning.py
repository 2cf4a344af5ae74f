"""Tuning on demand: one kernel, all recorded invocations; and a plain benchmark."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, overload

import jax

from ..config.context import policy_override
from ..config.decision import Decision, Miss, StrictMiss
from ..config.hooks import AgreementError, job_agreement
from ..config.outcome import Outcome
from ..config.selection import ConfigSelectorChain, Sources
from ..core.invocation import Invocation
from ..core.kernel import Kernel
from ..registry import get_invocations
from ..utils.fingerprint import device_fingerprint
from ..utils.meta import label
from .results import AutotuningResult, Entry, Skipped

if TYPE_CHECKING:
    from ..tuner.tuner import Tuner

logger = logging.getLogger(__name__)

C = TypeVar("C")
K = TypeVar("K")

SMALL_SHARE = 0.1  # of the time of all operations; less than that deserves less effort
LEAST_SECONDS = 0.1  # of an equal part: what an operation gets however short it runs

__all__ = [
    "AutotuningResult",
    "Entry",
    "autotune",
    "autotune_recorded",
    "benchmark",
]


@overload
def autotune(
    kernel: Kernel[C, Any],
    /,
    *args: Any,
    configs: Iterable[C] | None = None,
    num_warmup: int = 3,
    num_iters: int = 10,
    **kwargs: Any,
) -> C: ...
@overload
def autotune(
    function: Callable[..., Any],
    /,
    *args: Any,
    selector: ConfigSelectorChain | None = None,
    **kwargs: Any,
) -> AutotuningResult: ...
def autotune(what: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Tune a kernel, or every kernel that a function calls, for these arguments, now.

    `autotune(kernel, a, b)` gives the fastest config. `configs=` is tried instead of the kernel's
    own candidates (the heuristic config races too); `num_warmup` and `num_iters` are runs of each
    candidate before and in the screening. Other keywords go to the kernel.

    `autotune(function, a, b)` lowers the function, finds its distinct operations, tunes each, and
    gives an `AutotuningResult`, to be used as `with result:`. `selector=` says how and where the
    results are stored (default: in memory). Other keywords go to the function.

    Nothing is stored and no other call changes: both forms only give back what they measured. To
    store the result and use it from now on, call `ejkernel.tune`.
    """
    if isinstance(what, Kernel):
        return _autotune_kernel(what, args, **kwargs)
    if callable(what) and not isinstance(what, type):
        return _autotune_function(what, args, **kwargs)
    raise TypeError(
        f"autotune takes a kernel or a function first, got {what!r} ({type(what).__name__})"
    )


def _autotune_function(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    selector: ConfigSelectorChain | None = None,
    **kwargs: Any,
) -> AutotuningResult:
    from .offline import autotune_lowered

    jitted = function if hasattr(function, "lower") else jax.jit(function)
    return autotune_lowered(selector or ConfigSelectorChain(), jitted.lower(*args, **kwargs))


def _autotune_kernel(
    kernel: Kernel[Any, Any],
    args: tuple[Any, ...],
    configs: Iterable[Any] | None = None,
    num_warmup: int = 3,
    num_iters: int = 10,
    **kwargs: Any,
) -> Any:
    from ..tuner.session import tune_invocation
    from ..tuner.tuner import Tuner

    inv = kernel.bind(*args, **kwargs)
    candidates = None
    if configs is not None:
        given = [kernel.check_config(cfg, "configs holds") for cfg in configs]
        if not given:
            raise RuntimeError(
                f"autotune: configs is empty; nothing to try for {kernel.full_op_id}"
            )
        candidates = kernel.with_heuristic(inv, given)
    tuner = Tuner(warmup=num_warmup, iters=num_iters)
    return tune_invocation(tuner, inv, kernel, candidates=candidates).best


def benchmark(
    fn: Callable[..., Any], *args: Any, num_iters: int = 100, num_warmup: int = 3, **kwargs: Any
) -> float:
    """Milliseconds per call of `fn(*args, **kwargs)`, called as it is (not jitted for you).

    >>> import jax.numpy as jnp
    >>> benchmark(jnp.sin, jnp.ones(8), num_iters=10) > 0
    True
    """
    from ..tuner.clock import Stopwatch
    from ..tuner.inputs import outside_trace, random_like

    for name, value, least in (("num_iters", num_iters, 1), ("num_warmup", num_warmup, 0)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"benchmark: {name}={value!r} must be a whole number >= {least}")
    with outside_trace():
        args, kwargs = random_like((args, kwargs), only_abstract=True)
        watch = Stopwatch(lambda: fn(*args, **kwargs), shortest_sample=0.0)
        return watch.measure(num_warmup, num_iters) * 1e3


def autotune_recorded(
    source: Iterable[Invocation[Any, Any]] | ConfigSelectorChain | None = None,
    selector: ConfigSelectorChain | None = None,
) -> AutotuningResult:
    """Tune what was called so far: `autotune_recorded(invocations)` or `(selector)`.

    Invocations come from `get_invocations()`; with a selector, all recorded ones of this device
    are tuned, and stored in the selector's caches.
    """
    if isinstance(source, ConfigSelectorChain):
        source, selector = None, source
    device = device_fingerprint()
    invocations = get_invocations(device) if source is None else source
    return tune_invocations(selector or ConfigSelectorChain(), device, invocations)


def tune_invocations(
    selector: ConfigSelectorChain,
    device: str,
    calls: Iterable[Invocation[Any, Any] | Skipped],
    *,
    force: bool = False,
) -> AutotuningResult:
    """Tune each distinct invocation; what cannot be tuned is reported, never fatal.

    What takes most of the time is tuned first and with most effort (see `tuners_by_share`). What
    is stored is not measured again, unless `force` says so.
    """
    from ..tuner.progress_file import progress_file

    distinct, skipped = distinct_calls(calls)
    answers: dict[tuple[str, str], Decision[Any] | Miss | str] = {}
    if not force:
        answers = {key: _attempt(selector, inv, Sources.STORED) for key, inv in distinct.items()}
    open_ones = {
        key: inv for key, inv in distinct.items() if isinstance(answers.get(key), Miss | None)
    }
    with progress_file(len(open_ones)) as file:
        if len(open_ones) > 1:
            file.prepare("timing each operation once")
        for key, tuner in tuners_by_share(selector.tuner, open_ones):
            answers[key] = _attempt(selector, distinct[key], _tuning_sources(force), tuner)
    entries = []
    for key in distinct:
        answer = answers[key]
        if isinstance(answer, Decision):
            entries.append(_entry(distinct[key], answer))
        else:
            why = answer.reason if isinstance(answer, Miss) else answer
            skipped.append(Skipped(label(*key), why))
    return AutotuningResult(device, entries, skipped)


def tuners_by_share(
    tuner: Tuner, invocations: Mapping[K, Invocation[Any, Any]]
) -> list[tuple[K, Tuner | None]]:
    """Each operation with the tuner it deserves (None: the one there is), the slowest first.

    Each is timed once with its heuristic config. One that takes a small share of the total is tuned
    with less effort, and a limit of seconds is divided by share. The slowest come first, so that a
    run which is interrupted has done what counts.
    """
    from ..tuner.tuner import Tuner

    unchanged: list[tuple[K, Tuner | None]] = [(key, None) for key in invocations]
    if len(invocations) < 2 or job_agreement() is not None:  # others may know the answers
        return unchanged
    if type(tuner).autotune is not Tuner.autotune:  # the user's own; it knows what it does
        return unchanged
    seconds = {key: _heuristic_seconds(tuner, inv) for key, inv in invocations.items()}
    total = sum(seconds.values())
    if total <= 0:
        return unchanged
    tuners: list[tuple[K, Tuner | None]] = []
    for key in sorted(invocations, key=lambda key: -seconds[key]):
        share = seconds[key] / total
        part = max(LEAST_SECONDS, share * len(invocations))
        effort = tuner.effort.lower() if share < SMALL_SHARE else None
        limit = None if tuner.seconds is None else tuner.seconds * part
        tuners.append((key, tuner.changed(effort=effort, seconds=limit)))
    return tuners


def _heuristic_seconds(tuner: Tuner, inv: Invocation[Any, Any]) -> float:
    """The time of one call with the heuristic config; 0 if that cannot be known."""
    from ..tuner.session import heuristic_seconds

    if inv.kernel is None:
        return 0.0
    try:
        return heuristic_seconds(tuner, inv, inv.kernel)
    except Exception as error:  # noqa: BLE001  tuning it will say what is wrong, with all reasons
        logger.info("ejkernel: %s could not be timed before tuning: %s", inv.key, error)
        return 0.0


def distinct_calls(
    calls: Iterable[Invocation[Any, Any] | Skipped],
) -> tuple[dict[tuple[str, str], Invocation[Any, Any]], list[Skipped]]:
    """Each different invocation once, by operation and call key; and what cannot be one."""
    distinct: dict[tuple[str, str], Invocation[Any, Any]] = {}
    skipped: dict[Skipped, None] = {}  # a set in the order of the calls
    for call in calls:
        if isinstance(call, Skipped):
            skipped[call] = None
        elif isinstance(call, Invocation):
            distinct.setdefault((call.key.op_id, call.key.call_key), call)
        else:
            raise TypeError(f"expected an Invocation, got {call!r} ({type(call).__name__})")
    return distinct, list(skipped)


def _entry(inv: Invocation[Any, Any], decision: Decision[Any]) -> Entry:
    outcome = decision.about if isinstance(decision.about, Outcome) else None
    about = outcome.about() if outcome is not None else dict(decision.about or {})
    entry = Entry.of(inv.key, decision.cfg, inv.signature, about, decision.reason)
    return dataclasses.replace(entry, outcome=outcome)


def _tuning_sources(force: bool) -> Sources:
    return Sources.AGAIN if force else Sources.MEASURED


def tuned_or_reason(
    selector: ConfigSelectorChain, inv: Invocation[Any, Any], *, force: bool = False
) -> Entry | str:
    """What is stored for an invocation, else the result of tuning it; or why there is nothing."""
    answer = _attempt(selector, inv, _tuning_sources(force))
    if isinstance(answer, Decision):
        return _entry(inv, answer)
    return answer.reason if isinstance(answer, Miss) else answer


def _attempt(
    selector: ConfigSelectorChain,
    inv: Invocation[Any, Any],
    sources: Sources,
    tuner: Tuner | None = None,
) -> Decision[Any] | Miss | str:
    if inv.kernel is None:
        return "the invocation has no kernel"
    try:
        return selector.answer(inv, inv.kernel, sources, tuner)
    except AgreementError:
        raise  # another process may have an answer: going on without it would be to disagree
    except Exception as error:  # noqa: BLE001  one operation must not end the run of the others
        return f"{type(error).__name__}: {error}"


def stored_result(
    selector: ConfigSelectorChain, invocations: Iterable[Invocation[Any, Any]]
) -> AutotuningResult:
    """What a strict call would run with, for each call; those with nothing stored are skipped."""
    entries, skipped = [], []
    for inv in invocations:
        key = inv.key
        assert inv.kernel is not None
        try:
            with policy_override(selector, strict=True):
                decision = selector.decide(inv, inv.kernel)
        except StrictMiss:
            skipped.append(Skipped(label(key.op_id, key.call_key), "nothing is stored for it"))
            continue
        entries.append(_entry(inv, decision))
    return AutotuningResult(device_fingerprint(), entries, skipped)
