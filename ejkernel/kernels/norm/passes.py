"""The two passes of an implementation, around what it does with the rows of a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from .arguments import Arguments
from .reference import Output


class Normalised(NamedTuple):
    """What the forward pass of an implementation gives."""

    out: jax.Array
    summed: jax.Array | None  # with a residual, what was normalised
    moments: Any = None  # of the rows, if the backward pass shall not compute them again


class Gradients(NamedTuple):
    """The gradients of one call; None for what it did not have."""

    dx: jax.Array
    dweight: jax.Array | None
    dbias: jax.Array | None


Normalise = Callable[[Arguments, Any], Normalised]
"""`normalise(call, cfg)`."""

Cotangents = tuple[jax.Array, jax.Array | None]
"""The gradients of `out` and `summed`."""

Differentiate = Callable[[Arguments, Any, Cotangents, Any], Gradients]
"""`differentiate(call, moments, cotangents, cfg)`; `x` of the call is what was normalised."""


def passes_of(
    normalise: Normalise, differentiate: Differentiate, *, centered: bool
) -> dict[str, Any]:
    """`forward`, `forward_with_residuals` and `backward` of an `Implementation`."""

    def forward_with_residuals(*args: jax.Array, cfg: Any, **options: Any) -> tuple[Output, Any]:
        found = normalise(Arguments(*args, centered=centered, **options), cfg)
        out = found.out if found.summed is None else (found.out, found.summed)
        return out, (found.summed, found.moments)

    def forward(*args: jax.Array, cfg: Any, **options: Any) -> Output:
        return forward_with_residuals(*args, cfg=cfg, **options)[0]

    def backward(
        saved: Any, out: None, dout: Any, *args: jax.Array, cfg: Any, **options: Any
    ) -> tuple[Any, ...]:
        summed, moments = saved
        call = Arguments(*args, centered=centered, **options)
        if summed is None:
            found = differentiate(call, moments, (dout, None), cfg)
        else:
            found = differentiate(dataclasses.replace(call, x=summed), moments, dout, cfg)
        named = {"bias": found.dbias, "residual": found.dx}
        by_keyword = {name: g for name, g in named.items() if options.get(name) is not None}
        return (found.dx, *(found.dweight,) * (len(args) - 1), by_keyword)

    return {
        "forward": forward,
        "forward_with_residuals": forward_with_residuals,
        "backward": backward,
        "reads_out": False,
    }
