"""Run a kernel inside a trace: choose a config, find its method, its gradient, its label.

Whether a program differentiates a call is known only when JAX asks for the gradient. So the config
is chosen inside of a custom derivative: once for the call as it stands, and once more, under
another key, for the call with its gradient.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from ..utils import environment
from ..utils.meta import collect_label, label, stamped, when_lowered
from .derivatives import way_out
from .gradients import Choose, Chosen, call_with_rule
from .invocation import array_owners, is_inexact, split
from .kernel import Kernel
from .requirements import (
    REFERENCE,
    implementation_for,
    implementation_keyword,
    requested,
    without_implementation,
)
from .specification import write_specification

if TYPE_CHECKING:
    from .implementation import Implementation
    from .invocation import Invocation

Stage = Callable[[Callable[..., Any]], Callable[..., Any]]
Select = Callable[["Invocation[Any, Any]"], Any]
"""The config of a call; asked for each way in which a program uses it."""


def run_unlabelled(inv: Invocation[Any, Any], kernel: Kernel[Any, Any], cfg: Any) -> Any:
    """The kernel's output with this config, differentiable by the kernel's own rule if any."""
    return _run(inv, kernel, lambda _: cfg, lambda inv, cfg: lambda function: function)


def run_with_default(inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Any:
    """The same with a config that needs no selection."""
    return run_unlabelled(inv, kernel, default_config(inv, kernel))


def default_config(inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Any:
    """A config that needs no selection: the one given, the heuristic one, or the first."""
    return kernel.candidates(inv)[0] if inv.override_cfg is None else inv.override_cfg


def run_selected(
    inv: Invocation[Any, Any],
    kernel: Kernel[Any, Any],
    select: Select,
    runs_forward: Callable[[], None],
) -> Any:
    """The kernel's output with the config that `select` gives for the call as it is used.

    Every operation of it, forward and backward, carries the call's label. `runs_forward` is called
    when a program is lowered that does not differentiate the call.
    """
    stage = functools.partial(_labelling_stage, kernel)
    return _run(inv, kernel, select, stage, runs_forward)


def _run(
    inv: Invocation[Any, Any],
    kernel: Kernel[Any, Any],
    select: Select,
    stage: Callable[[Invocation[Any, Any], Any], Stage],
    runs_forward: Callable[[], None] | None = None,
) -> Any:
    arrays, rest = split((inv.args, without_implementation(inv.kwargs)))
    keyword = implementation_keyword(inv.kwargs)
    # What JAX holds of this call, to differentiate it later, must not hold the arrays of its trace.
    call = dataclasses.replace(inv, args=(), kwargs={})
    owners = [name for name, _ in array_owners(*rest.merge(arrays))]

    def choose(arrays: Sequence[Any], differentiated: Sequence[bool] = ()) -> Chosen:
        args, kwargs = rest.merge(arrays)
        names = dict.fromkeys(name for name, d in zip(owners, differentiated, strict=False) if d)
        asked = dataclasses.replace(
            call, args=args, kwargs={**kwargs, **keyword}, differentiated=tuple(names)
        )
        _build_handler(kernel, asked)
        cfg = select(asked)
        implementation = implementation_for(kernel, asked, cfg)
        run = implementation.forward

        def primal(*arrays: Any) -> Any:
            args, kwargs = rest.merge(arrays)
            out = run(*args, cfg=cfg, **kwargs)
            return out if names or not runs_forward else when_lowered(out, runs_forward)

        return Chosen(implementation, cfg, primal, stage(asked, cfg))

    if requested(inv) == REFERENCE or not any(map(is_inexact, arrays)):
        chosen = choose(arrays)
        return chosen.stage(chosen.primal)(*arrays)
    if _has_rule(kernel, inv):
        return call_with_rule(kernel.full_op_id, choose, arrays, rest, advice=way_out(kernel))
    return _call_with_jvp(choose, arrays)


def _build_handler(kernel: Kernel[Any, Any], inv: Invocation[Any, Any]) -> None:
    """Before a config is chosen: if it cannot be built, another implementation handles the call."""
    if any(item.build for item in kernel.implementations):
        build = implementation_for(kernel, inv, inv.override_cfg).build
        if build is not None:
            build()


def _has_rule(kernel: Kernel[Any, Any], inv: Invocation[Any, Any]) -> bool:
    """Whether a gradient rule of the kernel's own, not JAX, differentiates a call.

    Which implementation runs is known when a config is chosen: until then it may be any that a
    config can be for.
    """
    by_config = kernel.tune_implementations or len(kernel.config_types) > 1
    if by_config and inv.override_cfg is None and requested(inv) is None:
        choices: Sequence[Implementation[Any, Any]] = kernel.implementations_here()
    else:
        choices = [implementation_for(kernel, inv, inv.override_cfg)]
    return any(choice.backward is not None for choice in choices)


def _call_with_jvp(choose: Choose, arrays: list[Any]) -> Any:
    """Call an operation such that differentiating it, which JAX does, chooses a config of its own.

    It can be differentiated in every mode and any number of times, as far as what runs can.
    """

    @jax.custom_jvp
    def differentiable(*arrays: Any) -> Any:
        chosen = choose(arrays)
        return chosen.stage(chosen.primal)(*arrays)

    def jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
        chosen = choose(primals, [_changes(tangent) for tangent in tangents])
        return jvp_of_changing(chosen.stage(chosen.primal), primals, tangents)

    differentiable.defjvp(jvp, symbolic_zeros=True)
    return differentiable(*arrays)


def jvp_of_changing(
    function: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[Any, Any]:
    """`jax.jvp` with respect to the arguments that change.

    What does not change has no tangent rather than one of zeros, which would look as if it were
    differentiated.
    """
    changing = [i for i, tangent in enumerate(tangents) if _changes(tangent)]

    def of_changing(*some: Any) -> Any:
        now = dict(zip(changing, some, strict=True))
        return function(*(now.get(i, primal) for i, primal in enumerate(primals)))

    return jax.jvp(of_changing, [primals[i] for i in changing], [tangents[i] for i in changing])


def _changes(tangent: Any) -> bool:
    return not isinstance(tangent, jax.custom_derivatives.SymbolicZero)


def _labelling_stage(kernel: Kernel[Any, Any], inv: Invocation[Any, Any], cfg: Any) -> Stage:
    """How to run a piece of the kernel such that the program says whose it is.

    The label stands on every operation. The specification, which is longer, stands on the call of
    the piece alone; only in `json` style does it stand everywhere, with the config in it.
    """
    style = environment.STAMP.read() if inv.stamp else "none"
    if style == "none":
        return lambda function: function
    text = label(inv.full_op_id, inv.key.call_key)
    collect_label(text)
    spec = write_specification(inv, kernel, cfg if style == "json" else None)

    def stage(function: Callable[..., Any]) -> Callable[..., Any]:
        def piece(*arrays: Any) -> Any:
            with stamped(text):
                return function(*arrays)

        piece.__name__ = piece.__qualname__ = kernel.op_id.replace("/", "_").replace("-", "_")

        def staged(*arrays: Any) -> Any:
            with stamped(text, spec):
                return function(*arrays) if style == "json" else jax.jit(piece)(*arrays)

        return staged

    return stage
