"""Tune one invocation of a kernel: from a request of the selection to an outcome."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..config.functions import Function, call_with, function_maker, mapped
from ..config.outcome import Outcome, TuningFailed, known_trials
from ..core.invocation import Invocation, array_owners, is_inexact, split
from ..core.kernel import Kernel
from ..core.requirements import reasons_against_config, without_implementation
from ..core.work import counted_work
from ..utils.fingerprint import stable_json
from .bench import CandidateError
from .build import TuningTask
from .clock import typical
from .inputs import needs_other_processes, outside_trace, random_like, realistic_inputs
from .search.pruning import prune
from .tuner import Tuner

logger = logging.getLogger(__name__)

LONG_RUN_SECONDS = 30.0  # a single run that takes longer is worth a word


def tune_invocation(
    tuner: Tuner,
    inv: Invocation[Any, Any],
    kernel: Kernel[Any, Any],
    *,
    candidates: list[Any] | None = None,
    stored: Sequence[Mapping[str, Any]] = (),
) -> Outcome[Any]:
    """Measure a kernel's candidates for one invocation, differentiated if the invocation is."""
    inv = dataclasses.replace(inv.abstract(), kernel=kernel)
    name = f"{kernel.full_op_id}({inv.signature})"
    if needs_other_processes(inv):
        raise TuningFailed(
            f"{name}: its arguments are sharded over devices of several processes; measuring it "
            "would be a collective, which tuning never is. Call it inside shard_map, or declare "
            "the kernel's partitioning: then its shapes are those of one device"
        )
    with outside_trace():
        with _blaming(name, "candidate_cfgs"):
            configs = kernel.candidates(inv) if candidates is None else candidates
        baseline = None
        with contextlib.suppress(NotImplementedError):
            baseline = kernel.heuristic(inv)
        pruned = prune(tuner, kernel, inv, configs, baseline)
        configs = pruned.candidates
        refused = {  # whatever an earlier run measured
            stable_json(cfg): reasons
            for cfg in configs
            if (reasons := reasons_against_config(kernel, cfg, inv))
        }
        with _blaming(name, "make_inputs"):
            args, kwargs = realistic_inputs(kernel, inv, getattr(tuner, "seed", 0))
        kwargs = without_implementation(kwargs)
        make_fn = function_maker(inv, kernel)
        reference, reference_name = _optional(kernel, "reference", inv)
        plain, plain_name = _optional(kernel, "plain", inv)
        of_users, inputs = make_fn, args
        measured = "forward"
        notes = pruned.notes
        if inv.differentiated:
            fitting = [cfg for cfg in configs if stable_json(cfg) not in refused]
            names = inv.differentiated
            functions = [reference, *map(make_fn, fitting)]
            cotangents = _random_cotangents(functions, names, args, kwargs)
            if isinstance(cotangents, str):
                notes += (f"timed forward only: {cotangents}",)
            else:
                measured = "forward and backward"
                args = (cotangents, *args)
                make_fn, forward = (lambda cfg: with_gradients(forward(cfg), names)), make_fn
                reference = reference and with_gradients(reference, names)
                plain = plain and with_gradients(plain, names)
                of_users = functools.partial(_with_hidden_gradients, make_fn, cotangents)
        if type(tuner).autotune is not Tuner.autotune:
            out = {*pruned.trials, *refused}
            left = [cfg for cfg in configs if stable_json(cfg) not in out]
            with _blaming(name, "the tuner"):
                best = tuner.autotune(of_users, inputs, kwargs, left)
            try:
                kernel.check_config(best, "the tuner returned", inv)
            except ValueError as error:
                raise TuningFailed(f"{name}: {error}") from error
            return Outcome(best, heuristic=baseline)
        known = {**pruned.trials, **known_trials(configs, stored)}
        timed = inv if measured == "forward and backward" else inv.forward()
        work, trouble = _work(kernel, timed)
        return tuner.tune(
            TuningTask(
                name,
                make_fn,
                args,
                kwargs,
                configs,
                reference=reference,
                baseline=baseline,
                reasons_against=lambda cfg: refused.get(stable_json(cfg), ()),
                known={key: trial for key, trial in known.items() if key not in refused},
                guard=_crash_guard(tuner, inv),
                measured=measured,
                notes=notes + trouble,
                work=work,
                plain=plain,
                plain_name=plain_name,
                reference_name=reference_name,
            )
        )


def _work(
    kernel: Kernel[Any, Any], inv: Invocation[Any, Any]
) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """What a call has to do, if the kernel counts it; or a remark on why that failed."""
    try:
        return counted_work(kernel, inv), ()
    except Exception as error:  # noqa: BLE001  a figure for the report must not cost the tuning
        return None, (f"GFLOP/s are not shown: work raised {type(error).__name__}: {error}",)


def _optional(
    kernel: Kernel[Any, Any], name: str, inv: Invocation[Any, Any]
) -> tuple[Function | None, str]:
    """A function that a kernel may have, over the whole batch of a call, and what it is called."""
    function = getattr(kernel, name, None)
    if function is None:
        return None, name
    return mapped(function, inv), getattr(function, "__name__", name)


def heuristic_seconds(tuner: Tuner, inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> float:
    """Seconds per call of a kernel's heuristic config, from a few samples."""
    inv = dataclasses.replace(inv.abstract(), kernel=kernel)
    with outside_trace():
        cfg = kernel.heuristic(inv)
        function = function_maker(inv, kernel)(cfg)
        arrays, rest = split(realistic_inputs(kernel, inv, tuner.seed))
        bench = tuner.bench(arrays)
        handle = bench.compile(bench.lower(lambda *arrays: call_with(function, rest, arrays)))
        with _crash_guard(tuner, inv)(cfg):
            bench.run(handle)
        bench.warm_up(handle, tuner.warmup)
        return typical([bench.sample(handle) for _ in range(tuner.iters)])


def _crash_guard(tuner: Tuner, inv: Invocation[Any, Any]) -> Callable[[Any], Any]:
    """In this process: note durably what is about to run, and refuse what crashed before.

    A worker process needs no notes: its supervisor survives it.
    """
    if tuner.isolation != "none":
        return contextlib.nullcontext
    from ..utils.environment import NoHomeFolder
    from .isolation.journal import Journal

    key = str(inv.key)
    try:
        journal = Journal()
    except NoHomeFolder as error:  # the store says so too, and louder
        logger.info("ejkernel: a candidate that crashes will not be remembered: %s", error)
        return functools.partial(_saying_that_it_hangs, key)
    journal.culprits()

    @contextlib.contextmanager
    def guard(cfg: Any) -> Iterator[None]:
        reason = journal.crashed(key, str(cfg))
        if reason is not None:
            raise CandidateError(reason)
        with journal.about_to_run(key, str(cfg)), _saying_that_it_hangs(key, cfg):
            yield

    return guard


@contextlib.contextmanager
def _saying_that_it_hangs(key: str, cfg: Any, seconds: float = LONG_RUN_SECONDS) -> Iterator[None]:
    """Nothing can end a program that runs in this process; a person can, who has to know."""
    warning = threading.Timer(
        seconds,
        logger.warning,
        (
            "ejkernel: the candidate %s of %s has been running for %g s. It cannot be cut off in "
            "this process. If it hangs, kill the process: the next tuning run will skip this "
            "candidate. Tuner(isolation='process') runs candidates where they can be killed.",
            cfg,
            key,
            seconds,
        ),
    )
    warning.daemon = True
    warning.start()
    try:
        yield
    finally:
        warning.cancel()


def _with_hidden_gradients(
    make_fn: Callable[[Any], Function], cotangents: list[Any], cfg: Any
) -> Function:
    """For a tuner of the user's own: the function has the kernel's output, and computes both."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return jax.lax.optimization_barrier(make_fn(cfg)(cotangents, *args, **kwargs))[0]

    return function


@contextlib.contextmanager
def _blaming(name: str, who: str) -> Iterator[None]:
    """An error in a kernel's helper for tuning, or in a user's tuner, costs the tuning only."""
    try:
        yield
    except Exception as error:
        raise TuningFailed(f"{name}: {who} raised {type(error).__name__}: {error}") from error


def _random_cotangents(
    functions: list[Function | None],
    names: tuple[str, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[Any] | str:
    """What to pull back when measuring the backward pass; or why there is no backward pass.

    The first function that can be differentiated shows the shapes: a candidate that cannot even
    run must not decide for the others.
    """
    arrays, rest = split((args, kwargs))
    reason = "there is nothing to differentiate"
    for function in functions:
        if function is None:
            continue
        try:
            out = jax.eval_shape(lambda *a, f=function: call_with(f, rest, a), *arrays)
            cotangents = random_like(
                [leaf for leaf in jax.tree.leaves(out) if is_inexact(leaf)], seed=1
            )
            both = with_gradients(function, names)
            jax.eval_shape(lambda *a, f=both, c=cotangents: call_with(f, rest, a, c), *arrays)
        except Exception as error:  # noqa: BLE001  whatever it is, the result says so
            reason = f"{type(error).__name__}: {error}"
        else:
            return list(cotangents)
    return reason


def with_gradients(function: Function, names: tuple[str, ...]) -> Function:
    """`function` with cotangents as an argument before its own: gives output and gradients.

    The gradients are those of the arguments with these names, as in `Invocation.differentiated`.
    """

    def both(cotangents: list[Any], *args: Any, **kwargs: Any) -> Any:
        arrays, rest = split((args, kwargs))
        owners = [name for name, _ in array_owners(args, kwargs)]
        wanted = [i for i, x in enumerate(arrays) if owners[i] in names and is_inexact(x)]

        def forward(*values: Any) -> Any:
            filled = dict(zip(wanted, values, strict=True))
            return call_with(function, rest, tuple(filled.get(i, x) for i, x in enumerate(arrays)))

        out, pull_back = jax.vjp(forward, *(arrays[i] for i in wanted))
        supply = iter(cotangents)
        cotangent = jax.tree.map(
            lambda leaf: (
                next(supply) if is_inexact(leaf) else np.zeros(leaf.shape, jax.dtypes.float0)
            ),
            out,
        )
        return out, list(pull_back(cotangent))

    return both
