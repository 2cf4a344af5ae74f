"""What the kernels for TPU and GPU share: their two passes around one function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from .arguments import Arguments
from .xla import Saved, rows_like

Project = Callable[[Arguments, Any, bool], tuple[jax.Array, ...]]
"""`project(call, cfg, save)`: the output, and with `save` both projections behind it."""


def passes_of(
    project: Project,
) -> tuple[Callable[..., jax.Array], Callable[..., tuple[jax.Array, Saved]]]:
    """The forward pass, and the one that saves the projections unless they are recomputed."""

    def forward(x: jax.Array, *weights: jax.Array, cfg: Any, **options: Any) -> jax.Array:
        return rows_like(x, project(Arguments.of(x, *weights, **options), cfg, False)[0])

    def forward_with_residuals(
        x: jax.Array, *weights: jax.Array, cfg: Any, **options: Any
    ) -> tuple[jax.Array, Saved]:
        call = Arguments.of(x, *weights, **options)
        out, *saved = project(call, cfg, not call.recompute)
        return rows_like(x, out), (saved[0], saved[1]) if saved else None

    return forward, forward_with_residuals
