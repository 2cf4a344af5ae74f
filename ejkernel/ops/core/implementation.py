"""Run a kernel with a known config: the right method, its gradient, its label."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from ..utils import environment
from ..utils.fingerprint import device_kind
from ..utils.meta import label, stamped
from ..utils.specification import write_specification
from .derivatives import way_out
from .dispatch import defined_methods, find_method
from .gradients import call_with_rule, find_rule
from .kernel import Kernel
from .static_part import split
from .supports import REFERENCE, serving, without_demand

if TYPE_CHECKING:
    from .invocation import Invocation

Stage = Callable[[Callable[..., Any]], Callable[..., Any]]


def find_run(kernel: Kernel[Any, Any], name: str | None = None) -> Any:
    """The `run` method of an implementation; None takes the usual order of the current device."""
    kind = device_kind()
    if name is not None:
        return kernel.implementation(name)
    run = find_method(kernel, "run", kind, Kernel)
    if run is None:
        have = ", ".join(defined_methods(type(kernel), "run", Kernel))
        raise NotImplementedError(
            f"kernel {kernel.full_op_id} has no implementation for {kind}: it has {have}; "
            f"add run_{kind} or run"
        )
    return run


def run_unlabelled(inv: Invocation[Any, Any], kernel: Kernel[Any, Any], cfg: Any) -> Any:
    """The kernel's output with this config, differentiable by the kernel's own rule if any."""
    return _run(inv, kernel, cfg, stage=lambda function: function)


def run_with_default(inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Any:
    """The same with a config that needs no selection: the heuristic one, or the first."""
    cfg = inv.override_cfg
    return run_unlabelled(inv, kernel, kernel.candidates(inv)[0] if cfg is None else cfg)


def run_labelled(inv: Invocation[Any, Any], kernel: Kernel[Any, Any], cfg: Any) -> Any:
    """The same, and every operation of it, forward and backward, carries the call's label."""
    return _run(inv, kernel, cfg, stage=_labelling_stage(inv, kernel, cfg))


def _run(inv: Invocation[Any, Any], kernel: Kernel[Any, Any], cfg: Any, stage: Stage) -> Any:
    name = serving(kernel, inv, cfg)
    run = find_run(kernel, name)
    rule = None if name == REFERENCE else find_rule(kernel, run, cfg, device_kind(), name)
    arrays, rest = split((inv.args, without_demand(inv.kwargs)))

    def primal(*arrays: Any) -> Any:
        args, kwargs = rest.merge(arrays)
        return run(*args, cfg=cfg, **kwargs)

    if rule is None:
        return stage(primal)(*arrays)
    return call_with_rule(
        kernel.full_op_id, rule, primal, arrays, rest, stage, advice=way_out(kernel)
    )


def _labelling_stage(inv: Invocation[Any, Any], kernel: Kernel[Any, Any], cfg: Any) -> Stage:
    """How to run a piece of the kernel such that the program says whose it is.

    The label stands on every operation. The specification, which is longer, stands on the call of
    the piece alone; only in `json` style does it stand everywhere, with the config in it.
    """
    style = environment.STAMP.read() if inv.stamp else "none"
    if style == "none":
        return lambda function: function
    text = label(inv.full_op_id, inv.key.call_key)
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
