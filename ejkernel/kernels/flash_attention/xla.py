r"""Flash attention in plain JAX: tiles, an online softmax, no score matrix.

Queries and keys are cut into blocks, and one tile of scores (one query block against one key block,
for some heads) exists at a time, so memory grows linearly with the sequence in both directions.
`forward` and `backward` have the mathematics; arithmetic is in float32, or in float64 where the
queries are.

Which tiles exist follows from positions (`causal`, `window`), from segment ids, lengths and the
mask: `tiling.Needed` turns them into bounds of the loops, and what lies outside is never computed.
What a tile does with its scores is in `tile.Tile`, once for both passes.

Example:
    >>> import jax.numpy as jnp
    >>> q = k = v = jnp.ones((1, 100, 4, 16))
    >>> options = dict(causal=True, softmax_scale=0.25, block_q=32, block_k=64)
    >>> out, lse = forward(q, k, v, **options)
    >>> out.shape, lse.shape
    ((1, 100, 4, 16), (1, 4, 100))
    >>> dq, dk, dv, _ = backward(q, k, v, out, lse, jnp.ones_like(out), **options)
    >>> dq.shape == q.shape and dk.shape == k.shape and dv.shape == v.shape
    True
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from . import forward as forward_pass
from .backward import backward
from .blocks import default_blocks

__all__ = ["backward", "default_blocks", "forward"]


def forward(q: jax.Array, k: jax.Array, v: jax.Array, **keywords: Any) -> Any:
    """`forward.forward`, traced once for the same shapes and options.

    Where a gradient is asked for, JAX traces first what a function computes and then what it
    computes for the gradient; here they are the same.
    """
    arrays = {name: x for name, x in keywords.items() if isinstance(x, jax.Array)}
    rest = tuple((name, x) for name, x in keywords.items() if name not in arrays)
    return _forward(q, k, v, arrays, rest)


@partial(jax.jit, static_argnums=4, inline=True)
def _forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    arrays: dict[str, Any],
    rest: tuple[tuple[str, Any], ...],
) -> tuple[jax.Array, jax.Array]:
    return forward_pass.forward(q, k, v, **arrays, **dict(rest))
