"""The tuner: compile the candidates, refuse the wrong ones, race the rest."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from ..core.partition import split
from ..utils.stable import stable_json
from .clock import Stopwatch, typical
from .inputs import outside_trace, random_like
from .judge import differs
from .outcome import Outcome, Trial, TuningFailed, Verdict
from .race import race

logger = logging.getLogger(__name__)


class Tuner:
    """Measures functions and picks the fastest config that is also right.

    Args:
      warmup: runs of each candidate before its first sample.
      iters: samples of each candidate in the first heat; later heats have more.
      seed: of the random inputs and of the running order.
      timer: a clock in seconds; tests give a fake one.

    >>> import jax.numpy as jnp
    >>> Tuner().measure(jnp.sin, jnp.ones(8)) > 0
    True
    """

    def __init__(
        self,
        warmup: int = 1,
        iters: int = 3,
        *,
        seed: int = 0,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        for name, value, least in (("warmup", warmup, 0), ("iters", iters, 1)):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"Tuner: {name}={value!r} must be a whole number >= {least}")
        self.warmup = warmup
        self.iters = iters
        self.seed = seed
        self.timer = timer

    def measure(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> float:
        """Seconds per call of `fn`, compiled.

        Array leaves are the program's inputs, everything else is built in. Tracers and abstract
        shapes are replaced by random arrays: under `jit` this times execution, not tracing.
        """
        with outside_trace():
            args, kwargs = random_like_if_abstract((args, kwargs), self.seed)
            watch = self._stopwatch(Candidate(fn, args, kwargs))
            return typical([watch.sample() for _ in range(self.iters)])

    def autotune(
        self,
        make_fn: Callable[[Any], Callable[..., Any]],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        candidates: Iterable[Any],
    ) -> Any:
        """The fastest of the candidates; `make_fn(cfg)` gives the function to measure.

        No candidates is a `RuntimeError`, and so is "all failed", which lists each one's error.
        """
        return self.tune(make_fn, args, kwargs, candidates).best

    def tune(
        self,
        make_fn: Callable[[Any], Callable[..., Any]],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        candidates: Iterable[Any],
        *,
        name: str = "autotune",
        reference: Callable[..., Any] | None = None,
        favourite: Any = None,
        measured: str = "forward",
        notes: tuple[str, ...] = (),
    ) -> Outcome[Any]:
        """Like `autotune`, giving everything that was found.

        Args:
          name: what is tuned, for messages.
          reference: the truth to compare outputs with; None compares with the favourite's output,
            or not at all without a favourite.
          favourite: the config that wins ties.
          measured: what `make_fn` computes, for the report.
          notes: remarks to keep with the outcome.
        """
        listed = list(candidates)
        if not listed:
            raise TuningFailed(f"{name}: there are no candidates to tune")
        with outside_trace():
            inputs = random_like_if_abstract((tuple(args), dict(kwargs)), self.seed)
            trials, ready = self._build(name, make_fn, inputs, listed, reference, favourite)
            if not ready:
                raise TuningFailed(_all_failed(name, trials))
            return self._race(listed, trials, ready, favourite, measured, notes)

    def _build(
        self,
        name: str,
        make_fn: Callable[[Any], Callable[..., Any]],
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        candidates: list[Any],
        reference: Callable[..., Any] | None,
        favourite: Any,
    ) -> tuple[dict[int, Trial[Any]], dict[int, Stopwatch]]:
        """Compile and judge every candidate: those that may race, and a trial for the others."""
        trials: dict[int, Trial[Any]] = {}
        ready: dict[int, Stopwatch] = {}
        truth = None if reference is None else _truth(name, reference, inputs)
        chosen = None if favourite is None else stable_json(favourite)
        # The favourite first: without a reference its output is what the others must equal.
        for index in sorted(
            range(len(candidates)),
            key=lambda i: chosen is None or stable_json(candidates[i]) != chosen,
        ):
            cfg = candidates[index]
            try:
                candidate = Candidate(make_fn(cfg), *inputs)
                output = jax.block_until_ready(candidate())
                reason = None if truth is None else differs(output, truth)
                if reason is not None:
                    trials[index] = Trial(cfg, Verdict.WRONG, reason=reason)
                    continue
                ready[index] = self._stopwatch(candidate)
            except Exception as error:  # a candidate may fail in any way; it is kept as data
                trials[index] = Trial(
                    cfg, Verdict.FAILED, reason=f"{type(error).__name__}: {error}"
                )
                logger.debug("candidate %s failed", cfg, exc_info=True)
                continue
            if truth is None and chosen is not None and stable_json(cfg) == chosen:
                truth = output
        return trials, ready

    def _race(
        self,
        candidates: list[Any],
        trials: dict[int, Trial[Any]],
        ready: dict[int, Stopwatch],
        favourite: Any,
        measured: str,
        notes: tuple[str, ...],
    ) -> Outcome[Any]:
        indices = list(ready)
        favoured = None
        if favourite is not None:
            text = stable_json(favourite)
            favoured = next(
                (i for i, index in enumerate(indices) if stable_json(candidates[index]) == text),
                None,
            )
        winner, samples = race(
            [ready[index].sample for index in indices], self.iters, favoured, self.seed
        )
        for index, taken in zip(indices, samples, strict=True):
            trials[index] = Trial(candidates[index], Verdict.MEASURED, typical(taken), tuple(taken))
        return Outcome(
            best=candidates[indices[winner]],
            trials=tuple(trials[index] for index in sorted(trials)),
            heuristic=favourite,
            measured=measured,
            notes=notes,
        )

    def _stopwatch(self, candidate: Candidate) -> Stopwatch:
        watch = Stopwatch(candidate, self.timer)
        watch.warm_up(self.warmup)
        return watch


class Candidate:
    """A function compiled for given inputs, to be called without arguments."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        arrays, rest = split((tuple(args), dict(kwargs)))

        def program(arrays: list[Any]) -> Any:
            args, kwargs = rest.merge(arrays)
            return function(*args, **kwargs)

        self._arrays = arrays
        self._compiled = jax.jit(program).lower(arrays).compile()

    def __call__(self) -> Any:
        return self._compiled(self._arrays)


def random_like_if_abstract(tree: Any, seed: int) -> Any:
    """Replace tracers and abstract shapes by random arrays; keep real arrays."""

    def real(leaf: Any) -> Any:
        abstract = isinstance(leaf, (jax.core.Tracer, jax.ShapeDtypeStruct))
        return random_like(leaf, seed) if abstract else leaf

    return jax.tree.map(real, tree)


def _truth(
    name: str, reference: Callable[..., Any], inputs: tuple[tuple[Any, ...], dict[str, Any]]
) -> Any:
    try:
        return Candidate(reference, *inputs)()
    except Exception as error:
        raise TuningFailed(
            f"{name}: the reference itself failed, so nothing can be checked: "
            f"{type(error).__name__}: {error}"
        ) from error


def _all_failed(name: str, trials: dict[int, Trial[Any]]) -> str:
    lines = [
        f"  {trials[i].cfg}: {trials[i].verdict.value}: {trials[i].reason}" for i in sorted(trials)
    ]
    return f"{name}: none of the {len(lines)} candidates can be used:\n" + "\n".join(lines)
