"""The function that a call runs with a config: to be measured, or traced for its shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..core.invocation import BatchAxes, Invocation, StaticPart
from ..core.kernel import Kernel
from ..core.requirements import implementation_keyword, without_implementation
from ..core.running import run_unlabelled

Function = Callable[..., Any]


def function_maker(
    inv: Invocation[Any, Any], kernel: Kernel[Any, Any]
) -> Callable[[Any], Function]:
    """Gives the function of an invocation's arguments that runs a kernel with a config."""

    chosen = implementation_keyword(inv.kwargs)

    def make(cfg: Any) -> Function:
        def function(*args: Any, **kwargs: Any) -> Any:
            # `make_inputs` need not know about a requested implementation.
            kwargs = {**without_implementation(kwargs), **chosen}
            return run_unlabelled(dataclasses.replace(inv, args=args, kwargs=kwargs), kernel, cfg)

        return mapped(function, inv)

    return make


def mapped(function: Function, inv: Invocation[Any, Any]) -> Function:
    """The function over the whole batch, if the call is a batched one."""
    batch = inv.batch_axes
    if not isinstance(batch, BatchAxes) or batch.transform != "vmap":
        return function

    def batched(*args: Any, **kwargs: Any) -> Any:
        return jax.vmap(lambda *args: function(*args, **kwargs), in_axes=batch.in_axes)(*args)

    return batched


def call_with(function: Function, rest: StaticPart, arrays: Sequence[Any], *before: Any) -> Any:
    """Call a function with arrays put back among its other arguments, and some before them all."""
    args, kwargs = rest.merge(arrays)
    return function(*before, *args, **kwargs)
