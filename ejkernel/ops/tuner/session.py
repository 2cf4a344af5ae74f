"""Tune one invocation of a kernel: from a request of the selection to an outcome."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.implementation import run_unlabelled
from ..core.invocation import BatchAxes, Invocation
from ..core.kernel import Kernel
from ..core.partition import split
from ..utils.fingerprint import is_array
from .inputs import outside_trace, random_like, realistic_inputs
from .outcome import Outcome
from .tuner import Tuner

if TYPE_CHECKING:
    from ..config.tiers import Request

Function = Callable[..., Any]


def tune_request(tuner: Tuner, request: Request) -> Outcome[Any]:
    """The outcome of tuning what a selection asked for."""
    return tune_invocation(
        tuner, request.inv, request.kernel, backward=request.policy.validate_backward
    )


def tune_invocation(
    tuner: Tuner,
    inv: Invocation[Any, Any],
    kernel: Kernel[Any, Any],
    *,
    candidates: list[Any] | None = None,
    backward: bool = False,
) -> Outcome[Any]:
    """Measure a kernel's candidates for one invocation."""
    inv = dataclasses.replace(inv.abstract(), kernel=kernel)
    configs = kernel.candidates(inv) if candidates is None else candidates
    favourite = _favourite(kernel, inv)
    with outside_trace():
        args, kwargs = realistic_inputs(kernel, inv, getattr(tuner, "seed", 0))
        make_fn = _function_maker(inv, kernel)
        reference = getattr(kernel, "reference", None)
        if reference is not None:
            reference = _mapped(reference, inv)
        measured = "forward"
        notes: tuple[str, ...] = ()
        if backward:
            try:
                cotangents = _random_cotangents(make_fn, configs, args, kwargs)
            except Exception as error:  # noqa: BLE001  whatever it is, the result says so
                notes = (f"timed forward only: {type(error).__name__}: {error}",)
            else:
                measured = "forward and backward"
                args = (cotangents, *args)
                make_fn, forward = (lambda cfg: with_gradients(forward(cfg))), make_fn
                reference = reference and with_gradients(reference)
    if type(tuner).autotune is not Tuner.autotune:
        # A tuner of the user's own: it decides, and says no more than what it chose.
        best = tuner.autotune(make_fn, args, kwargs, configs)
        return Outcome(kernel.check_config(best, "the tuner returned"), heuristic=favourite)
    return tuner.tune(
        make_fn,
        args,
        kwargs,
        configs,
        name=f"{kernel.full_op_id}({inv.signature})",
        reference=reference,
        favourite=favourite,
        measured=measured,
        notes=notes,
    )


def _favourite(kernel: Kernel[Any, Any], inv: Invocation[Any, Any]) -> Any:
    try:
        return kernel.heuristic(inv)
    except NotImplementedError:
        return None


def _function_maker(
    inv: Invocation[Any, Any], kernel: Kernel[Any, Any]
) -> Callable[[Any], Function]:
    def make(cfg: Any) -> Function:
        def function(*args: Any, **kwargs: Any) -> Any:
            return run_unlabelled(dataclasses.replace(inv, args=args, kwargs=kwargs), kernel, cfg)

        return _mapped(function, inv)

    return make


def _mapped(function: Function, inv: Invocation[Any, Any]) -> Function:
    """The function over the whole batch, if the call is a batched one."""
    batch = inv.batch_axes
    if not isinstance(batch, BatchAxes) or batch.transform != "vmap":
        return function

    def batched(*args: Any, **kwargs: Any) -> Any:
        return jax.vmap(lambda *args: function(*args, **kwargs), in_axes=batch.in_axes)(*args)

    return batched


def _random_cotangents(
    make_fn: Callable[[Any], Function],
    configs: list[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[Any]:
    """What to pull back when measuring the backward pass; raises if there is no backward pass."""

    def output(*arrays: Any) -> Any:
        return make_fn(configs[0])(*rest.merge(arrays)[0], **rest.merge(arrays)[1])

    arrays, rest = split((args, kwargs))
    out = jax.eval_shape(output, *arrays)
    cotangents = random_like([leaf for leaf in jax.tree.leaves(out) if _is_inexact(leaf)], seed=1)
    jax.eval_shape(
        lambda *arrays: with_gradients(make_fn(configs[0]))(
            cotangents, *rest.merge(arrays)[0], **rest.merge(arrays)[1]
        ),
        *arrays,
    )
    return list(cotangents)


def with_gradients(function: Function) -> Function:
    """`function` with cotangents as an argument before its own: gives output and gradients."""

    def both(cotangents: list[Any], *args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        inexact = [i for i, leaf in enumerate(leaves) if is_array(leaf) and _is_inexact(leaf)]

        def forward(wanted: list[Any]) -> Any:
            filled = list(leaves)
            for i, leaf in zip(inexact, wanted, strict=True):
                filled[i] = leaf
            return function(*jax.tree.unflatten(structure, filled), **kwargs)

        out, pull_back = jax.vjp(forward, [leaves[i] for i in inexact])
        supply = iter(cotangents)
        cotangent = jax.tree.map(
            lambda leaf: (
                next(supply) if _is_inexact(leaf) else np.zeros(leaf.shape, jax.dtypes.float0)
            ),
            out,
        )
        return out, pull_back(cotangent)[0]

    return both


def _is_inexact(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))
