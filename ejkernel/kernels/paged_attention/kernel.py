"""Paged attention as a kernel: its configs, its implementations, its gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ejkernel.ops import (
    Dimension,
    Invocation,
    Kernel,
    Limit,
    Limits,
    NearShapes,
    Partitioning,
    Supports,
)

from ..limits import COUNT, launch
from ..promotion import usual_promotion
from . import xla
from .reference import paged_attention_reference

MOST_ROWS_ON_TPU = 1024
MOST_ROWS_ON_GPU = 128
MOST_FEATURES_ON_GPU = 256


@dataclasses.dataclass(frozen=True)
class PagedAttentionConfig:
    """How much is done at a time; a field that an implementation has no use for is ignored.

    Attributes:
        pages_per_step: XLA and TPU: pages that a step of the loop, or of the grid, works on; on XLA
            there is no loop, and all sequences are worked on together, if that is all pages.
        block_k: GPU: keys that a program loads at a time.
        num_key_splits: GPU: programs that share the keys of a sequence.
        num_warps: GPU: warps that share a program.
        num_stages: GPU: blocks that are loaded ahead, and the one at hand.
    """

    pages_per_step: int = 1
    block_k: int = 64
    num_key_splits: int = 8
    num_warps: int = 4
    num_stages: int = 2


def rows_fit_a_tpu(inv: Invocation[Any, Any]) -> str | None:
    """All query rows of a sequence are in VMEM at once."""
    _, tokens, heads, _ = inv.args[0].shape
    if tokens * heads <= MOST_ROWS_ON_TPU:
        return None
    return (
        f"q has {tokens} tokens of {heads} heads, and at most {MOST_ROWS_ON_TPU} rows are supported"
    )


def rows_fit_a_gpu(inv: Invocation[Any, Any]) -> str | None:
    """All query rows of a key head are in a program's registers at once."""
    (_, tokens, heads, _), kv_heads = inv.args[0].shape, inv.args[1].shape[2]
    if tokens * heads // kv_heads <= MOST_ROWS_ON_GPU:
        return None
    return (
        f"q has {tokens} tokens of {heads // kv_heads} heads for each key head, and at most "
        f"{MOST_ROWS_ON_GPU} rows are supported"
    )


def features_fit_a_gpu(inv: Invocation[Any, Any]) -> str | None:
    """Tiles of wider heads do not fit into the shared memory of a multiprocessor."""
    for name, pages in (("head_dim", inv.args[1]), ("value_dim", inv.args[2])):
        if pages.shape[3] > MOST_FEATURES_ON_GPU:
            return f"{name} is {pages.shape[3]}, and at most {MOST_FEATURES_ON_GPU} are supported"
    return None


LIMITS = {
    "xla": Limits({"pages_per_step": COUNT}),
    "pallas": Limits({"pages_per_step": Limit(least=1, most=64)}),  # each is an operand of its own
    "triton": Limits(
        {"block_k": Limit(least=1, most=1024), "num_key_splits": Limit(least=1, most=1024)}
        | launch("")
    ),
}


class PagedAttention(Kernel[PagedAttentionConfig, jax.Array]):
    """Attention of the last tokens of sequences whose keys and values are in pages.

    Arguments are `q, k_pages, v_pages, page_table, lengths`, keywords those of
    `paged_attention_reference`. Use `ejkernel.modules.paged_attention`, which checks them.
    """

    version = "1"
    limits: ClassVar[Mapping[str, Limits]] = LIMITS
    supports: ClassVar[Mapping[str, Supports]] = {
        "pallas": Supports(dtypes=("float32", "bfloat16"), rules=(rows_fit_a_tpu,)),
        "triton": Supports(
            dtypes=("float32", "bfloat16", "float16"), rules=(rows_fit_a_gpu, features_fit_a_gpu)
        ),
    }
    partitioning = Partitioning(
        "b s (k g) d, n p k d, n p k e, b m, b -> b s (k g) e",
        keywords={"sinks": "(k g)"},
        independent="b k g",
    )
    # What is best for a step depends on the pages; how many there are hardly matters.
    near_shapes = NearShapes(
        Dimension(argument=(0, 3, 4), axis=0, rounding="nearest"),
        Dimension(argument=(1, 2), axis=0, rounding="nearest"),
        Dimension(argument=3, axis=1, rounding="nearest"),
        within=4.0,
    )

    def __init__(self) -> None:
        super().__init__(name="paged_attention")

    def entries_are_independent(self, *args: Any, **options: Any) -> bool:
        return True

    def reference(self, *args: jax.Array, **options: Any) -> jax.Array:
        return paged_attention_reference(*args, **options)

    def make_inputs(
        self, inv: Invocation[Any, Any], key: jax.Array
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Sequences of all lengths up to the longest, and pages in any order."""
        q, k_pages, v_pages, table, lengths = inv.args
        keys = iter(jax.random.split(key, 8))

        def normal(like: Any) -> jax.Array:
            return jax.random.normal(next(keys), like.shape, like.dtype)

        batch, per_sequence = table.shape
        pages, page_size = k_pages.shape[:2]
        order = jax.random.permutation(next(keys), max(pages, batch * per_sequence)) % pages
        longest = per_sequence * page_size
        # Half to whole, and one whole: an average that does not depend on the draw.
        share = 1.0 - 0.5 * jnp.arange(batch) / batch
        args = (
            normal(q),
            normal(k_pages),
            normal(v_pages),
            order[: batch * per_sequence].reshape(batch, per_sequence).astype(table.dtype),
            jnp.maximum(share * longest, 1).astype(lengths.dtype),
        )
        kwargs = dict(inv.kwargs)
        if kwargs.get("sinks") is not None:
            kwargs["sinks"] = normal(kwargs["sinks"])
        return args, kwargs

    # Nobody trains through a cache of pages in a loop, but gradients through a decoding step are
    # asked for now and then (sinks, learned prefixes). They are those of the definition.
    @usual_promotion
    def custom_vjp(
        self,
        primals: tuple[jax.Array, ...],
        cfg: PagedAttentionConfig,
        kwargs: dict[str, Any],
        cotangents: tuple[jax.Array, ...],
    ) -> tuple[Any, ...]:
        q, k_pages, v_pages, table, lengths = primals
        arrays = {name: kwargs.pop(name) for name in ("sinks",) if name in kwargs}

        def definition(q: Any, k: Any, v: Any, arrays: dict[str, Any]) -> jax.Array:
            return paged_attention_reference(q, k, v, table, lengths, **arrays, **kwargs)

        _, vjp = jax.vjp(definition, q, k_pages, v_pages, arrays)
        dq, dk, dv, named = vjp(cotangents[0])
        return (dq, dk, dv, None, None, named) if named else (dq, dk, dv, None, None)

    # --- XLA, on any device ----------------------------------------------------------------------

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> PagedAttentionConfig:
        q, k_pages, _, table = inv.args[:4]
        pages = xla.default_pages_per_step(q.shape, k_pages.shape, table.shape[1])
        return PagedAttentionConfig(pages_per_step=pages)

    def candidate_cfgs(self, inv: Invocation[Any, Any]) -> list[PagedAttentionConfig]:
        per_sequence = inv.args[3].shape[1]
        steps = [n for n in (1, 2, 4, 8) if n < per_sequence]
        # All pages of all sequences are worth trying only where few of them may be unused.
        all_of_them = [per_sequence] if per_sequence <= 64 else []
        return [PagedAttentionConfig(pages_per_step=n) for n in (*steps, *all_of_them)]

    def run_xla(self, *args: jax.Array, cfg: PagedAttentionConfig, **options: Any) -> jax.Array:
        return xla.forward(*args, pages_per_step=cfg.pages_per_step, **options)

    # --- TPU -------------------------------------------------------------------------------------

    def heuristic_cfg_pallas(self, inv: Invocation[Any, Any]) -> PagedAttentionConfig:
        page_size, per_sequence = inv.args[1].shape[1], inv.args[3].shape[1]
        return PagedAttentionConfig(pages_per_step=_pages_for(TPU_KEYS, page_size, per_sequence))

    def candidate_cfgs_pallas(self, inv: Invocation[Any, Any]) -> list[PagedAttentionConfig]:
        page_size, per_sequence = inv.args[1].shape[1], inv.args[3].shape[1]
        steps = {_pages_for(keys, page_size, per_sequence) for keys in (16, 64, 128, 256, 512)}
        return [PagedAttentionConfig(pages_per_step=step) for step in sorted(steps)]

    def run_pallas(self, *args: jax.Array, cfg: PagedAttentionConfig, **options: Any) -> jax.Array:
        from . import pallas_tpu

        return pallas_tpu.forward(*args, pages_per_step=cfg.pages_per_step, **options)

    # --- GPU -------------------------------------------------------------------------------------

    def heuristic_cfg_triton(self, inv: Invocation[Any, Any]) -> PagedAttentionConfig:
        (batch, *_), kv_heads = inv.args[0].shape, inv.args[1].shape[2]
        # Two programs for each of about 128 multiprocessors, and no split shorter than two blocks.
        longest = inv.args[1].shape[1] * inv.args[3].shape[1]
        wanted = -(-256 // (batch * kv_heads))
        return PagedAttentionConfig(num_key_splits=max(1, min(wanted, longest // 128, 32)))

    def candidate_cfgs_triton(self, inv: Invocation[Any, Any]) -> list[PagedAttentionConfig]:
        first = self.heuristic_cfg_triton(inv)
        splits = {max(1, first.num_key_splits // 2), first.num_key_splits, first.num_key_splits * 2}
        return [
            dataclasses.replace(first, num_key_splits=split, block_k=block, num_warps=warps)
            for split in sorted(splits)
            for block, warps in ((32, 2), (64, 4), (128, 4))
        ]

    def run_triton(self, *args: jax.Array, cfg: PagedAttentionConfig, **options: Any) -> jax.Array:
        from . import pallas_gpu

        return pallas_gpu.forward(
            *args,
            block_k=cfg.block_k,
            num_key_splits=cfg.num_key_splits,
            num_warps=cfg.num_warps,
            num_stages=cfg.num_stages,
            **options,
        )


TPU_KEYS = 256  # a step's fixed cost is about that of fetching so many keys; not measured


def _pages_for(keys: int, page_size: int, per_sequence: int) -> int:
    """Pages that hold about so many keys."""
    return max(1, min(keys // page_size, per_sequence, 16))
