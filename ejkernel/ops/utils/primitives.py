"""Primitives of our own, for what must be decided when JAX differentiates or lowers a program."""

from __future__ import annotations

from typing import Any

import jax


def new_primitive(name: str, *, multiple_results: bool = False) -> Any:
    """A primitive without any rules yet.

    As `jax.extend.core.Primitive(name)`, whose import takes 0.15 s more than that of JAX, because
    `jax.extend` brings Pallas along.
    """
    primitive: Any = type(jax.lax.add_p)(name)
    primitive.multiple_results = multiple_results
    return primitive
