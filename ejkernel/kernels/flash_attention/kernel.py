"""Flash attention as a kernel: its configs, its implementations, its gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from ejkernel.ops import BwdParams, Dimension, FwdParams, Invocation, Kernel, NearShapes, Supports

from . import accelerators, xla


@dataclasses.dataclass(frozen=True)
class FlashAttentionConfig:
    """Block sizes of the forward and of the backward pass; None leaves one to the heuristic."""

    fwd: FwdParams = dataclasses.field(default_factory=FwdParams)
    bwd: BwdParams = dataclasses.field(default_factory=BwdParams)


class FlashAttention(accelerators.Accelerators, Kernel[FlashAttentionConfig, jax.Array]):
    """`softmax(scale * q kᵀ) v`, block by block, with its own backward pass.

    Arguments are `q, k, v` as `(batch, sequence, heads, head_dim)`, keywords `causal` and
    `softmax_scale`. Use `ejkernel.modules.flash_attention`, which checks them.
    """

    version = "1"
    supports: ClassVar[Mapping[str, Supports]] = accelerators.SUPPORTS
    # Blocks are chosen for a length; the number of sequences hardly matters, and a block that is
    # longer than a sequence is cut to it.
    near_shapes = NearShapes(
        Dimension(argument=(0, 1, 2), axis=0, rounding="nearest"),
        Dimension(argument=(0, 1, 2), axis=1, rounding="nearest"),
        within=4.0,
    )

    def __init__(self) -> None:
        super().__init__(name="flash_attention")

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> FlashAttentionConfig:
        forward, backward = (
            _default_blocks(inv, backward=False),
            _default_blocks(inv, backward=True),
        )
        return _config(forward, backward)

    def candidate_cfgs(self, inv: Invocation[Any, Any]) -> list[FlashAttentionConfig]:
        q, k, _ = inv.args
        forward = _blocks_that_differ(FORWARD_BLOCKS, q.shape[1], k.shape[1])
        backward = _blocks_that_differ(BACKWARD_BLOCKS, q.shape[1], k.shape[1])
        # The passes do not share anything, so each is varied while the other stays as it is.
        heuristic = self.heuristic_cfg(inv)
        return [
            *(
                dataclasses.replace(heuristic, fwd=_config(blocks, blocks).fwd)
                for blocks in forward
            ),
            *(
                dataclasses.replace(heuristic, bwd=_config(blocks, blocks).bwd)
                for blocks in backward
            ),
        ]

    def run_xla(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        cfg: FlashAttentionConfig,
        causal: bool,
        softmax_scale: float,
    ) -> jax.Array:
        return self.fwd_with_residuals_xla(
            q, k, v, cfg=cfg, causal=causal, softmax_scale=softmax_scale
        )[0]

    def fwd_with_residuals_xla(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        cfg: FlashAttentionConfig,
        causal: bool,
        softmax_scale: float,
    ) -> tuple[jax.Array, jax.Array]:
        heuristic = xla.default_blocks(
            q.shape[1], k.shape[1], q.shape[3], causal=causal, backward=False
        )
        return xla.forward(
            q,
            k,
            v,
            causal=causal,
            softmax_scale=softmax_scale,
            block_q=cfg.fwd.q_blocksize or heuristic[0],
            block_k=cfg.fwd.kv_blocksize or heuristic[1],
        )

    def vjp_xla(
        self,
        lse: jax.Array,
        out: jax.Array,
        dout: jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        cfg: FlashAttentionConfig,
        causal: bool,
        softmax_scale: float,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        heuristic = xla.default_blocks(
            q.shape[1], k.shape[1], q.shape[3], causal=causal, backward=True
        )
        return xla.backward(
            q,
            k,
            v,
            out,
            lse,
            dout,
            causal=causal,
            softmax_scale=softmax_scale,
            block_q=cfg.bwd.q_blocksize or heuristic[0],
            block_k=cfg.bwd.kv_blocksize or heuristic[1],
        )


# (block_q, block_k) worth racing; see `xla.default_blocks` for why these shapes.
FORWARD_BLOCKS = ((64, 64), (128, 128), (256, 256), (256, 512), (512, 256), (512, 512))
BACKWARD_BLOCKS = ((128, 128), (256, 256), (256, 512), (512, 256), (512, 512), (128, 1024))


def _default_blocks(inv: Invocation[Any, Any], *, backward: bool) -> tuple[int, int]:
    q, k, _ = inv.args
    return xla.default_blocks(
        q.shape[1],
        k.shape[1],
        q.shape[3],
        causal=bool(inv.kwargs.get("causal", False)),
        backward=backward,
    )


def _config(forward: tuple[int, int], backward: tuple[int, int]) -> FlashAttentionConfig:
    return FlashAttentionConfig(
        FwdParams(q_blocksize=forward[0], kv_blocksize=forward[1]),
        BwdParams(q_blocksize=backward[0], kv_blocksize=backward[1]),
    )


def _blocks_that_differ(
    blocks: tuple[tuple[int, int], ...], q_len: int, k_len: int
) -> list[tuple[int, int]]:
    """Blocks no longer than the sequence, each once: a longer one is the same program."""
    clamped = ((min(block_q, q_len), min(block_k, k_len)) for block_q, block_k in blocks)
    return list(dict.fromkeys(clamped))
