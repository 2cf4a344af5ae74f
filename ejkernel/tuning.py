"""`tune`: lower a function, tune what it calls, store it, use it from now on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import jax

from .ops.config.cache import ConfigCache
from .ops.config.context import AutotunePolicy, policy_override
from .ops.config.persistent import PersistentCache
from .ops.config.selection import ConfigSelectorChain
from .ops.core.invocation import split
from .ops.core.kernel import Kernel
from .ops.execution.call_counts import count_calls
from .ops.execution.executor import default_executor
from .ops.execution.offline import labelled_invocations
from .ops.execution.results import AutotuningResult
from .ops.execution.tuning import tune_invocations
from .ops.utils.fingerprint import device_fingerprint

if TYPE_CHECKING:
    import pathlib

    from .ops.tuner.search.effort import Effort
    from .report import Run


class TuningResult(AutotuningResult):
    """What `tune` gives: tuned configs, how they were measured, and what they are worth.

    Attributes:
      run: the record of the run, which reports are made of.
    """

    run: Run

    def report(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Write a page about the run: `.html`, `.md` or `.json`."""
        from . import report

        return report.write(self.run, path)


def tune(
    function: Callable[..., Any],
    /,
    *args: Any,
    effort: str | Effort = "standard",
    seconds: float | None = None,
    isolation: Literal["none", "process"] = "none",
    save: bool = True,
    force: bool = False,
    store: PersistentCache | str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    quiet: bool = False,
    **kwargs: Any,
) -> TuningResult:
    """Tune everything that a function calls, for these arguments, and use it from now on.

    ::

        result = ejkernel.tune(train_step, parameters, batch)
        result.report("tuning.html")

    The function is lowered, and each distinct operation of ours in its program is tuned: forward,
    or forward and backward where the program differentiates it. The configs go to the store, where
    later processes find them, and into this process, also for functions that were jitted before. A
    table says what was gained. What the store knows already is not measured again.

    Args:
      function: a function, jitted or not; a kernel.
      args: what it is called with: arrays, or `jax.ShapeDtypeStruct`.
      effort: `"quick"`, `"standard"` or `"full"`.
      seconds: stop after about this time; what was learned is stored, and a later run goes on.
      isolation: `"process"` runs candidates where they may crash or hang.
      save: write what was learned to the store.
      force: measure again what the store knows.
      store: another store than the usual one.
      progress: show a progress bar; default: in a terminal and in a notebook.
      quiet: print nothing.
      kwargs: keywords of the function.
    """
    from .ops.tuner.tuner import Tuner
    from .report import Run

    if not callable(function) or isinstance(function, type):
        raise TypeError(f"tune takes a function first, got {function!r}")
    start = time.perf_counter()
    traced = _traced(function, args, kwargs)
    calls = count_calls(traced.jaxpr)
    device = device_fingerprint()
    found = list(labelled_invocations(traced.lower(), device))
    opened = store if isinstance(store, PersistentCache) else PersistentCache(store)
    selector = ConfigSelectorChain(
        ConfigCache(),
        AutotunePolicy(strict=False),
        Tuner(effort=effort, seconds=seconds, isolation=isolation, progress=progress),
        opened,
        persist_autotune=save,
    )
    tuned = tune_invocations(selector, device, found, again=force)
    result = TuningResult(tuned.device, tuned.entries, tuned.skipped)
    result.install(default_executor().selector)
    name = getattr(function, "__name__", type(function).__name__)
    took = time.perf_counter() - start
    result.run = Run.of(result, title=name, seconds=took, store=opened)
    assert calls or not result.entries
    if not quiet:
        print(result)
    return result


def _traced(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function traced with what is stored and else with heuristics: nothing is tuned."""
    with policy_override(autotune=False, strict=False):
        if hasattr(function, "trace") and not isinstance(function, Kernel):
            return function.trace(*args, **kwargs)
        arrays, rest = split((args, kwargs))

        def call(*arrays: Any) -> Any:
            positional, keywords = rest.merge(list(arrays))
            return function(*positional, **keywords)

        return jax.jit(call).trace(*arrays)
