"""Outputs that under `vmap` are mapped together, so that their cotangents are too."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from ..utils.meta import new_primitive


def batched_alike(outputs: Any, arrays: Any) -> Any:
    """The outputs; under a `vmap` over any of the arrays each has a copy for every example.

    JAX gives each example's backward pass the whole cotangent of an output that is the same for
    all of them, and adds up what comes of it: so it would count once per example. With a copy for
    each example every copy has its own cotangent.
    """
    leaves, structure = jax.tree.flatten(outputs)
    tied = _tied.bind(*leaves, *jax.tree.leaves(arrays), count=len(leaves))
    return jax.tree.unflatten(structure, tied)


# The first `count` operands, which depend on the others as far as batching is concerned.
_tied = new_primitive("ejkernel_batched_alike", multiple_results=True)


def _first(*operands: Any, count: int) -> list[Any]:
    return list(operands[:count])


_tied.def_impl(_first)
_tied.def_abstract_eval(_first)
mlir.register_lowering(_tied, lambda ctx, *operands, count: list(operands[:count]))


def _jvp(primals: Any, tangents: Any, *, count: int) -> tuple[Any, Any]:
    return _tied.bind(*primals, count=count), list(tangents[:count])


def _batch(operands: Any, dims: Any, *, count: int) -> tuple[Any, Any]:
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    copies = [
        jnp.broadcast_to(x, (size, *jnp.shape(x))) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(operands[:count], dims[:count], strict=True)
    ]
    # Tied again, for the `vmap` around this one.
    return _tied.bind(*copies, *operands[count:], count=count), [0] * count


ad.primitive_jvps[_tied] = _jvp
batching.primitive_batchers[_tied] = _batch
