"""Sizes of blocks, and what follows from sizes."""

from __future__ import annotations

from typing import Any


def next_power_of_two(size: int) -> int:
    """The smallest power of two that is not less; Pallas has the same, and takes long to import.

    >>> [next_power_of_two(size) for size in (1, 5, 8)]
    [1, 8, 8]
    """
    return 1 << (size - 1).bit_length()


def default_scale(name: str, *args: Any) -> dict[str, float]:
    """The keyword of a scale with its default, `features ** -0.5` of the first argument.

    >>> import jax, jax.numpy as jnp
    >>> default_scale("scale", jax.ShapeDtypeStruct((8, 16), jnp.float32))
    {'scale': 0.25}
    """
    features = (getattr(args[0], "shape", None) or (0,))[-1] if args else 0
    return {name: features**-0.5} if isinstance(features, int) and features > 0 else {}
