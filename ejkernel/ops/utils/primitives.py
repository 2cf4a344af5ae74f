"""Primitives of our own, for what must be decided when JAX differentiates or lowers a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.interpreters import batching, mlir


def new_primitive(name: str, *, multiple_results: bool = False) -> Any:
    """A primitive without any rules yet.

    As `jax.extend.core.Primitive(name)`, whose import takes 0.15 s more than that of JAX, because
    `jax.extend` brings Pallas along.
    """
    primitive: Any = type(jax.lax.add_p)(name)
    primitive.multiple_results = multiple_results
    return primitive


def identity_primitive(name: str, lower: Callable[..., None] = lambda **_: None) -> Any:
    """A primitive that gives what it gets, under every transform.

    `lower(**params)` is called when it is lowered, or run without `jit`.
    """
    primitive = new_primitive(name)
    primitive.def_abstract_eval(lambda x, **_: x)

    def run(x: Any, **params: Any) -> Any:
        lower(**params)
        return x

    def lowering(ctx: Any, x: Any, **params: Any) -> list[Any]:
        lower(**params)
        return [x]

    primitive.def_impl(run)
    mlir.register_lowering(primitive, lowering)
    batching.primitive_batchers[primitive] = lambda args, axes, **params: (
        primitive.bind(args[0], **params),
        axes[0],
    )
    return primitive


_lowered = identity_primitive("ejkernel_lowered", lambda notify: notify())


def when_lowered(outputs: Any, notify: Callable[[], None]) -> Any:
    """The same outputs; `notify()` is called when a program that computes them is lowered.

    Not everything that is traced becomes part of a program: JAX traces a function forward before it
    asks for its gradient.
    """
    leaves, structure = jax.tree.flatten(outputs)
    if not leaves:
        notify()
        return outputs
    leaves[0] = _lowered.bind(leaves[0], notify=notify)
    return jax.tree.unflatten(structure, leaves)
