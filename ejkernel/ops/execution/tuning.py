"""Tuning on demand: one kernel, all recorded invocations; and a plain benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, overload

import jax

from ..config.decision import Decision, Miss
from ..config.hooks import AgreementError
from ..config.outcome import Outcome
from ..config.selection import ConfigSelectorChain, Sources
from ..core.invocation import Invocation
from ..core.kernel import Kernel
from ..registry import get_invocations
from ..utils.fingerprint import device_fingerprint
from ..utils.meta import label
from .effort_allocation import tuners_by_share
from .results import AutotuningResult, Entry, Skipped

if TYPE_CHECKING:
    from ..tuner.tuner import Tuner

C = TypeVar("C")

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
    results are kept (default: in memory). Other keywords go to the function.
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
    from ..tuner.clock import Stopwatch, typical
    from ..tuner.inputs import outside_trace
    from ..tuner.tuner import random_like_if_abstract

    for name, value, least in (("num_iters", num_iters, 1), ("num_warmup", num_warmup, 0)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"benchmark: {name}={value!r} must be a whole number >= {least}")
    with outside_trace():
        args, kwargs = random_like_if_abstract((args, kwargs), seed=0)
        watch = Stopwatch(lambda: fn(*args, **kwargs), shortest_sample=0.0)
        watch.warm_up(num_warmup)
        return typical([watch.sample() for _ in range(num_iters)]) * 1e3


def autotune_recorded(
    source: Iterable[Invocation[Any, Any]] | ConfigSelectorChain | None = None,
    selector: ConfigSelectorChain | None = None,
) -> AutotuningResult:
    """Tune what was called so far: `autotune_recorded(invocations)` or `(selector)`.

    Invocations come from `get_invocations()`; with a selector, all recorded ones of this device
    are tuned, and kept in the selector's caches.
    """
    if isinstance(source, ConfigSelectorChain):
        source, selector = None, source
    device = device_fingerprint()
    invocations = get_invocations(device) if source is None else list(source)
    if selector is None:
        selector = ConfigSelectorChain()
    return tune_invocations(selector, device, [(inv, None) for inv in invocations])


def tune_invocations(
    selector: ConfigSelectorChain,
    device: str,
    found: Iterable[tuple[Invocation[Any, Any] | None, Skipped | None]],
) -> AutotuningResult:
    """Tune each distinct invocation; what cannot be tuned is reported, never fatal.

    What takes most of the time is tuned first and with most effort (see `shares.py`).
    """
    distinct: dict[tuple[str, str], Invocation[Any, Any]] = {}
    skipped: list[Skipped] = []
    for inv, reason in found:
        if inv is None:
            skipped.extend([reason] if reason is not None else [])
            continue
        if not isinstance(inv, Invocation):
            raise TypeError(f"expected an Invocation, got {inv!r} ({type(inv).__name__})")
        distinct.setdefault((inv.key.op_id, inv.key.call_key), inv)
    answers = {key: _attempt(selector, inv, Sources.STORED) for key, inv in distinct.items()}
    open_ones = {key: distinct[key] for key, answer in answers.items() if isinstance(answer, Miss)}
    for key, tuner in tuners_by_share(selector.tuner, open_ones):
        answers[key] = _attempt(selector, distinct[key], Sources.MEASURED, tuner)
    entries = []
    for key, answer in answers.items():
        if isinstance(answer, Decision):
            entries.append(_entry(distinct[key], answer))
        else:
            why = answer.reason if isinstance(answer, Miss) else answer
            skipped.append(Skipped(label(*key), why))
    return AutotuningResult(device, entries, skipped)


def _entry(inv: Invocation[Any, Any], found: Decision[Any]) -> Entry:
    outcome = found.about if isinstance(found.about, Outcome) else None
    about = outcome.about() if outcome is not None else dict(found.about or {})
    return Entry(
        inv.key.op_id,
        inv.key.call_key,
        found.cfg,
        inv.signature,
        about.get("seconds"),
        about.get("heuristic_seconds"),
        found.reason,
        outcome,
    )


def tuned_or_reason(
    selector: ConfigSelectorChain, inv: Invocation[Any, Any]
) -> Decision[Any] | str:
    """What is stored for an invocation, else the result of tuning it; or why there is nothing."""
    answer = _attempt(selector, inv, Sources.MEASURED)
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
