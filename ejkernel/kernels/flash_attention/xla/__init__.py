r"""Flash attention in plain JAX: tiles, an online softmax, no score matrix.

Queries and keys are cut into blocks, and one tile of scores (one query block against one key block,
for some heads) exists at a time, so memory grows linearly with the sequence in both directions.
`forward` and `backward` have the mathematics; arithmetic is in float32, or in float64 where the
queries are.

Which tiles exist follows from positions (`causal`, `window`), from segment ids, lengths and the
mask: `tiling.Needed` turns them into bounds of the loops, and what lies outside is never computed.
What a tile does with its scores is in `tile.Tile`, once for both passes.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax

from ejkernel.ops import Implementation, Invocation, Limits

from ...limits import COUNT
from ..options import BY_EXAMPLE
from ..passes import (
    Gradients,
    Options,
    Results,
    Sizes,
    backward_sizes,
    each_pass_varied,
    passes_of,
)
from .backward import backward
from .blocks import candidate_blocks, default_blocks
from .diagonal import UNCUT
from .forward import forward
from .ring import ring_backward, ring_forward


@dataclasses.dataclass(frozen=True)
class FlashAttentionXlaConfig:
    """The sizes of tiles in each pass; None leaves one to the heuristic.

    Args:
      block_q: most queries in a tile.
      block_k: most keys in a tile.
      block_heads: most key heads in a tile, those of all examples of the batch counted.
      backward_block_q: the same of the backward pass, as are the others.
    """

    block_q: int | None = None
    block_k: int | None = None
    block_heads: int | None = None
    backward_block_q: int | None = None
    backward_block_k: int | None = None
    backward_block_heads: int | None = None


def heuristic_config(q: Any, k: Any, v: Any, **options: Any) -> FlashAttentionXlaConfig:
    """Blocks that are good without measuring: see `blocks`."""
    blocks = partial(
        default_blocks,
        q.shape,
        k.shape,
        causal=bool(options.get("causal", False)),
        window=options.get("window"),
        by_example=any(options.get(name) is not None for name in BY_EXAMPLE),
        cut=all(options.get(name) is None for name in UNCUT),
    )
    return FlashAttentionXlaConfig(*blocks(backward=False), *blocks(backward=True))


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, sizes: Sizes, options: Options
) -> tuple[jax.Array, jax.Array]:
    """The output and the log-sum-exp."""
    run = ring_forward if "sequence_axis" in options else forward
    return run(q, k, v, **sizes, **options)


def differentiate(
    results: Results, sizes: Sizes, options: Options, *, bias: bool = False
) -> Gradients:
    """The gradients of `q`, `k`, `v` and `sinks`, and that of the bias if it is asked for."""
    run = ring_backward if "sequence_axis" in options else backward
    return run(results, differentiate_bias=bias, **sizes, **options)


def differentiate_with_bias(results: Results, sizes: Sizes, options: Options) -> Gradients:
    """All gradients, for an implementation that does not have that of the bias.

    It is the whole score matrix, or sums of it over any of its axes, to which several threads or
    programs would have to add. The `sizes` are those of that implementation's own kernels (on a GPU
    16 to 64 keys) and say nothing about XLA's, so the heuristic ones are used.
    """
    own = heuristic_config(results.q, results.k, results.v, **options)
    return differentiate(results, backward_sizes(own), options, bias=True)


def _heuristic(inv: Invocation[Any, Any]) -> FlashAttentionXlaConfig:
    return heuristic_config(*inv.args, **inv.kwargs)


def _space(inv: Invocation[Any, Any]) -> list[FlashAttentionXlaConfig]:
    if "sequence_axis" in inv.kwargs:
        return []  # a tuner measures outside of the mesh, where there is no ring
    q, k, _ = inv.args
    return each_pass_varied(
        _heuristic(inv),
        candidate_blocks(q.shape, k.shape, backward=False),
        candidate_blocks(q.shape, k.shape, backward=True),
    )


XLA: Implementation[FlashAttentionXlaConfig, Any] = Implementation(
    name="xla",
    config=FlashAttentionXlaConfig,
    heuristic=_heuristic,
    space=_space,
    # Blocks that are longer than sequences are cut.
    limits=Limits({field.name: COUNT for field in dataclasses.fields(FlashAttentionXlaConfig)}),
    **passes_of(
        heuristic_config, attend, differentiate, partial(differentiate, bias=True)
    )._asdict(),
)
