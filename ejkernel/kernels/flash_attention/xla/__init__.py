r"""Flash attention in plain JAX: tiles, an online softmax, no score matrix.

One tile exists at a time, so memory grows linearly with the sequence in both directions. Arithmetic
is in float32, or in float64 where the queries are. README.md of the folder above says which file
has what.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Annotated, Any

import jax

from ...limits import COUNT
from ..options import Options
from ..passes import Choices, Gradients, PassesConfig, Results, implementation
from .backward import backward
from .blocks import candidate_blocks, default_blocks
from .forward import forward
from .needed import UNCUT
from .ring import ring_backward, ring_forward

_Size = Annotated[int | None, COUNT]  # blocks that are longer than sequences are cut


@dataclasses.dataclass(frozen=True)
class FlashAttentionXlaConfig(PassesConfig):
    """The sizes of tiles in each pass; None leaves one to the heuristic.

    Args:
      block_q: most queries in a tile.
      block_k: most keys in a tile.
      block_heads: most key heads in a tile, those of all examples of the batch counted.
      backward_block_q: the same of the backward pass, as are the others.
    """

    block_q: _Size = None
    block_k: _Size = None
    block_heads: _Size = None
    backward_block_q: _Size = None
    backward_block_k: _Size = None
    backward_block_heads: _Size = None

    @classmethod
    def of(cls, q: Any, k: Any, v: Any, options: Options) -> FlashAttentionXlaConfig:
        """Blocks that are good without measuring: see `blocks`."""
        blocks = partial(
            default_blocks,
            q.shape,
            k.shape,
            causal=options.causal,
            window=options.window,
            by_example=options.by_example,
            cut=all(getattr(options, name) is None for name in UNCUT),
        )
        return cls(*blocks(backward=False), *blocks(backward=True))

    @classmethod
    def choices(cls, q: Any, k: Any, v: Any) -> tuple[Choices, Choices]:
        ahead, back = (candidate_blocks(q.shape, k.shape, backward=x) for x in (False, True))
        return ahead, back


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, options: Options, **sizes: Any
) -> tuple[jax.Array, jax.Array]:
    """The output and the log-sum-exp; by heuristic blocks if no sizes are given.

    Those of another implementation's config say nothing about XLA's blocks: on a GPU they are 16 to
    64 keys.
    """
    sizes = sizes or FlashAttentionXlaConfig.of(q, k, v, options).sizes(backward=False)
    run = forward if options.sequence_axis is None else ring_forward
    return run(q, k, v, options, **sizes)


def differentiate(
    results: Results, options: Options, *, bias: bool = False, **sizes: Any
) -> Gradients:
    """The gradients of `q`, `k`, `v` and `sinks`, and that of the bias if it is requested.

    By heuristic blocks if no sizes are given, as in `attend`.
    """
    sizes = sizes or FlashAttentionXlaConfig.of(*results[:3], options).sizes(backward=True)
    run = backward if options.sequence_axis is None else ring_backward
    return run(results, options, differentiate_bias=bias, **sizes)


def differentiate_with_bias(results: Results, options: Options, **sizes: Any) -> Gradients:
    """All gradients, for an implementation that does not have that of the bias.

    It is the whole score matrix, or sums of it over any of its axes, to which several threads or
    programs would have to add. The `sizes` are those of that implementation, so they are not used.
    """
    return differentiate(results, options, bias=True)


XLA = implementation(
    name="xla",
    config=FlashAttentionXlaConfig,
    attend=attend,
    differentiate=differentiate,
    differentiate_with_bias=partial(differentiate, bias=True),
)
