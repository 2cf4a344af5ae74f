"""`tune`: lower a function, tune what it calls, store it, use it from now on."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from ..ops.config.persistent import PersistentCache
from ..ops.execution.whole_function import WholeFunction
from ..ops.utils.display import show
from ..report.runs import save_run
from .pipeline import Interrupted, NothingToTune, Order, labelled_calls, tune_calls
from .result import TuningResult

if TYPE_CHECKING:
    from ..ops.tuner.search.effort import Effort

logger = logging.getLogger(__name__)

__all__ = ["Interrupted", "NothingToTune", "TuningResult", "tune"]


def tune(
    function: Callable[..., Any],
    /,
    *args: Any,
    effort: str | Effort = "standard",
    seconds: float | None = None,
    isolation: Literal["none", "process"] = "none",
    against: Callable[..., Any] | None = None,
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

    If a config changed, the whole function is run with the earlier configs and with the new ones,
    interleaved and on equal state, until the difference is clear, for 20 seconds at most. If it is
    slower with the new ones, they are not put in force and the store gets back what it had.

    Args:
      function: a function, jitted or not; a kernel. Its own keywords go through, except for those
        that are named here: bind such with `functools.partial`.
      args: what it is called with: arrays, or `jax.ShapeDtypeStruct`.
      effort: `"quick"`, `"standard"` or `"full"`.
      seconds: stop tuning after about this time; what was learned is stored, and a later run goes
        on.
      isolation: `"process"` runs candidates where they may crash or hang.
      against: the same function in plain JAX: its outputs are compared, then it is timed with ours.
      save: write what was learned to the store, and the record of the run where `ejkernel report`
        finds it. False: it is in force here, and nothing on disk.
      force: measure again what the store knows; its entry is replaced when that is finished.
      store: another store than the usual one.
      progress: show a progress bar; default: in a terminal and in a notebook.
      quiet: print nothing.
      kwargs: keywords of the function.

    Raises:
      NothingToTune: the function calls no operation of ours.
    """
    from ..ops.tuner.tuner import Tuner

    _check_function("the first argument", function)
    if against is not None:
        _check_function("against", against)
    tuner = Tuner(effort=effort, seconds=seconds, isolation=isolation, progress=progress)
    whole = WholeFunction(function, args, kwargs)
    opened = store if isinstance(store, PersistentCache) else PersistentCache(store)
    result = tune_calls(
        labelled_calls(_lowered(whole), whole.name),
        Order(opened, tuner, save=save, force=force, again="ejkernel.tune(…, force=True)"),
        title=whole.name,
        whole=whole,
        against=None if against is None else WholeFunction(against, args, kwargs),
    )
    if save:
        _save_record(result)
    if not quiet:
        show(result)
    return result


def _save_record(result: TuningResult) -> None:
    """So that `ejkernel report` and the dashboard list the run, as they do those of the command."""
    try:
        save_run(result.run)
    except OSError as error:
        logger.warning("ejkernel: the record of the run is not stored: %s", error)


def _check_function(name: str, given: Any) -> None:
    if isinstance(given, type):
        raise TypeError(
            f"ejkernel.tune: {name} is the class {given.__name__}; give an instance of a kernel, "
            f"such as {given.__name__}(), or a function"
        )
    if not callable(given):
        raise TypeError(
            f"ejkernel.tune: {name} must be a function or a kernel, got {given!r:.80} "
            f"({type(given).__name__})"
        )


def _lowered(whole: WholeFunction) -> Any:
    try:
        return whole.lowered
    except Exception as error:
        if type(error).__name__ == "TraceContextError":  # of Flax, which need not be installed
            error.add_note(
                f"ejkernel.tune: {whole.name} changes a module that is none of its arguments, so "
                "it cannot be lowered as a whole; jit it with nnx.jit and give the module as an "
                "argument: ejkernel.tune(train_step, model, optimizer, batch)"
            )
        raise
