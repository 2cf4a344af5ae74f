"""What the implementations in Pallas share: passes around kernels, and what a tile computes.

Nothing here imports Pallas, which takes a while: `pallas_tpu` and `pallas_gpu` do, when one of
their kernels is traced. Each has a `Call` of its own, which says how arrays are brought to a
program and in which order it visits tiles; what happens to a tile is here, once for both.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.ops import Implementation, Supports

from .options import Options
from .passes import Gradients, PassesConfig, Results, implementation
from .rows import Rows, Statistics, exact_rows, sinks_gradient, softmax_statistics, with_shares
from .scalars import times_cap
from .tiles import Index, Tiles, both
from .xla import differentiate_with_bias

HIDDEN_SCORE = -jnp.inf
# A running maximum starts at the lowest number there is, because -inf - -inf is NaN. So a hidden
# score weighs nothing even in a row that has seen no key yet, and the lowest score does.
LOWEST_MAXIMUM = float(np.finfo(np.float32).min)


def pallas_implementation(
    package: str,
    *,
    config: type[PassesConfig],
    dtypes: tuple[str, ...],
    rules: tuple[Any, ...] = (),
    **fields: Any,
) -> Implementation[Any, Any]:
    """An implementation around the `forward` and the `backward` of the kernels in a package.

    Pallas takes a while to import, so that is done when one of them is traced.
    """

    def imported(name: str) -> Callable[..., Any]:
        def run(*arguments: Any, **sizes: Any) -> Any:
            kernels = importlib.import_module(".kernels", package)
            return getattr(kernels, name)(*arguments, **sizes)

        return run

    return implementation(
        config=config,
        attend=imported("forward"),
        differentiate=imported("backward"),
        differentiate_with_bias=differentiate_with_bias,
        supports=Supports(
            dtypes=dtypes, without=("dropout_rate", "dropout_key", "sequence_axis"), rules=rules
        ),
        **fields,
    )


def gradients(
    results: Results,
    options: Options,
    statistics: Callable[[Rows], Iterable[Statistics]],
    of_queries: Callable[[Rows], jax.Array],
    of_keys: Callable[[jax.Array, dict[str, jax.Array]], Iterable[jax.Array]],
) -> Gradients:
    """The backward pass around its kernels.

    Args:
      results: the arrays of the call, its results and their gradients.
      options: those of the call.
      statistics: of the rows, for tiles as they are and for turned ones: the kernels for queries
        and for keys turn tiles differently, which may round differently.
      of_queries: the gradient of the queries by the statistics of the rows.
      of_keys: the gradients of keys and values by `dout`, multiplied by the shares of its rows, and
        the rows' shift and delta.
    """
    _, _, _, out, lse, dout, dlse = results
    rows = softmax_statistics(out, lse, dout, dlse)
    straight, turned = (exact_rows(rows, x, options.sinks, dlse) for x in statistics(rows))
    dq = of_queries(straight)
    shift, delta, shared = with_shares(turned, dout, options)
    dk, dv = of_keys(shared.astype(dout.dtype), {"shift": shift, "delta": delta})
    named = {}
    if options.sinks is not None:
        named["sinks"] = sinks_gradient(options.sinks, straight)
    return Gradients(dq, dk, dv, named)


class Place(NamedTuple):
    """What a program computes, or a step of it: `(i, j)` is its tile, None what it loops over."""

    batch: Index
    head: Index
    kv_head: Index
    i: Index
    j: Index
    needed: Index = True
    is_first: Index = True  # of the steps that add to one output block
    is_last: Index = True


Refs = dict[str, Any]


@dataclass
class Call:
    """A call of a kernel: operands by name, and what its programs do with a tile."""

    options: Options
    tiles: Tiles
    keys_first: bool  # programs own key blocks
    turned: bool  # tiles are (keys, queries)
    interpret: bool  # run on any device, slowly
    launch: dict[str, int]  # what a config says in addition to blocks
    operands: dict[str, tuple[jax.Array, Any]] = field(default_factory=dict)

    # What each device has of its own. `column(x)` makes a number for each query a factor of
    # `(block_q, features)`; `dot_rows(a, b)` is the product with the transpose of `b`.
    keepdims: ClassVar[bool]  # whether reductions leave an axis of size 1
    fitting_block: ClassVar[Callable[..., int]]  # for a length, from the config's block
    add_queries: ClassVar[Callable[..., None]]  # an operand (batch, q_len, heads, features)
    add_keys: ClassVar[Callable[..., None]]  # (batch, kv_len, kv_heads, features)
    add_rows: ClassVar[Callable[..., None]]  # a number for each query, (batch, heads, q_len)
    add_scalars: ClassVar[Callable[..., None]]  # of which programs read single numbers
    add_segments: ClassVar[Callable[..., None]]  # ids, and what says which tiles they leave out
    add_table: ClassVar[Callable[..., None]]  # a bias or a mask
    number: ClassVar[Callable[..., Any]]  # one of an operand of scalars
    table: ClassVar[Callable[..., Any]]  # a tile of a bias or a mask, as the tiles are turned
    same_segment: ClassVar[Callable[..., Any]]  # where query and key of a tile share a segment
    dot: ClassVar[Callable[..., Any]]
    dot_rows: ClassVar[Callable[..., Any]]
    tanh: ClassVar[Callable[..., Any]]
    column: ClassVar[Callable[..., Any]]

    @classmethod
    def of(
        cls,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        options: Options,
        *,
        block_q: int,
        block_k: int,
        dout: jax.Array | None = None,
        rows: dict[str, jax.Array] | None = None,
        keys_first: bool = False,
        turned: bool = False,
        interpret: bool = False,
        **launch: int,
    ) -> Self:
        """A call with these operands, and those of the options."""
        lengths = (q.shape[1], k.shape[1])
        block_q, block_k = map(cls.fitting_block, lengths, (block_q, block_k))
        tiles = Tiles(*lengths, block_q, block_k, *options.band, q.shape[2] // k.shape[2])
        call = cls(options, tiles, keys_first, turned, interpret, launch)
        call.add_queries("q", q)
        call.add_keys("k", k)
        call.add_keys("v", v)
        if dout is not None:
            call.add_queries("dout", dout)
        for name, row in (rows or {}).items():
            call.add_rows(name, row)
        for name, longest in zip(("q_lengths", "kv_lengths"), lengths, strict=True):
            if (given := getattr(options, name)) is not None:
                call.add_scalars(name, jnp.clip(given.astype(jnp.int32), 0, longest))
        if options.sinks is not None:
            call.add_scalars("sinks", options.sinks.astype(jnp.float32))
        if options.segment_ids is not None and options.kv_segment_ids is not None:
            ids = (options.segment_ids, options.kv_segment_ids)
            call.add_segments(*(x.astype(jnp.int32) for x in ids))
        for name, table in (("bias", options.bias), ("mask", options.mask)):
            if table is not None:
                # There is no memory of booleans; bytes are the smallest.
                call.add_table(name, table.astype(jnp.int8) if name == "mask" else table)
        return call

    def scores(self, at: Place, refs: Refs, q: Any, k: Any) -> tuple[Any, Any]:
        """A tile of scores, and their slope by the scaled products if that is not one."""
        options = self.options
        scores = self.dot_rows(*self._as_turned(q, k)) * options.softmax_scale
        slope = None
        if options.logits_soft_cap is not None:
            capped = self.tanh(scores / options.logits_soft_cap)
            slope = 1.0 - capped * capped
            scores = times_cap(capped, options.logits_soft_cap)
        if "bias" in refs:
            scores += self.table(refs["bias"], at).astype(jnp.float32)
        return scores, slope

    def visible(self, at: Place, refs: Refs) -> Any:
        """Which scores of a tile count; None: all."""
        visible = self.tiles.visible(at.i, at.j, *self.lengths(at, refs), turned=self.turned)
        if "mask" in refs:
            visible = both(visible, self.table(refs["mask"], at) != 0)
        if "q_segments" in refs:
            visible = both(visible, self.same_segment(at, refs))
        return visible

    def lengths(self, at: Place, refs: Refs) -> tuple[Index, Index]:
        """Lengths beyond which a tile hides queries, where it sums over them, and keys, or None."""
        names = ("q_lengths" if self.keys_first else None, "kv_lengths")
        q, kv = (self.number(refs[n], at.batch) if n in refs else None for n in names)
        return q, kv

    def attend(
        self, at: Place, refs: Refs, arrays: Sequence[Any], met: Sequence[Any], *, masked: bool
    ) -> tuple[Any, Any, Any, Any]:
        """A tile of `q, k, v` added to the online softmax.

        What rows have `met` so far are the largest scores and totals.
        Gives these, by what earlier sums of weighted values shrink, and what to add to them.
        """
        q, k, v = arrays
        visible = self.visible(at, refs) if masked else None
        if masked:
            k, v = keys_that_stay_apart(k, v)
        largest, total, shrink, weights = self._add_to_softmax(at, refs, q, k, met, visible)
        return largest, total, shrink, self.dot(weights.astype(v.dtype), v)

    def collect(
        self, at: Place, refs: Refs, arrays: Sequence[Any], met: Sequence[Any], *, masked: bool
    ) -> tuple[Any, Any, Any, Any]:
        """As `attend`, of `q, k, v, dout`, with sums of what weights add to the loss."""
        q, k, v, dout = arrays
        visible = self.visible(at, refs) if masked else None
        largest, total, shrink, weights = self._add_to_softmax(at, refs, q, k, met, visible)
        added = shown(weights * self.dot_rows(*self._as_turned(dout, v)), visible)
        return largest, total, shrink, jnp.sum(added, axis=self._key_axis, keepdims=self.keepdims)

    def _add_to_softmax(
        self, at: Place, refs: Refs, q: Any, k: Any, met: Sequence[Any], visible: Any
    ) -> tuple[Any, Any, Any, Any]:
        """`met` with a tile added, by what earlier sums shrink, and the tile's weights."""
        before, total = met
        over: dict[str, Any] = {"axis": self._key_axis, "keepdims": self.keepdims}
        scores = shown(self.scores(at, refs, q, k)[0], visible, HIDDEN_SCORE)
        largest = jnp.maximum(before, jnp.max(scores, **over))
        shrink = jnp.exp(before - largest)
        by_row = largest if self.keepdims else jnp.expand_dims(largest, self._key_axis)
        weights = jnp.exp(scores - by_row)
        return largest, shrink * total + jnp.sum(weights, **over), shrink, weights

    def finish(
        self, at: Place, refs: Refs, largest: Any, total: Any, weighted: Any
    ) -> tuple[Any, Any, Any]:
        """The log-sum-exp at the end, the sums with the sink, and each query's share in them.

        A row that sees no key gives nothing, sink or not: what is weighted there may be NaN.
        """
        real = total != 0.0
        if "sinks" in refs:
            sink = self.number(refs["sinks"], at.head)
            with_sink = jnp.maximum(largest, sink)
            shrink = jnp.exp(largest - with_sink)
            total = shrink * total + jnp.exp(sink - with_sink)
            weighted = self.column(shrink) * weighted
            largest = with_sink
        if "q_lengths" in refs:
            row = at.i * self.tiles.block_q + lax.broadcasted_iota(jnp.int32, total.shape, 0)
            real &= row < self.number(refs["q_lengths"], at.batch)
        share = jnp.where(real, 1.0 / jnp.where(real, total, 1.0), 0.0)
        lse = jnp.where(real, largest + jnp.log(jnp.where(real, total, 1.0)), -jnp.inf)
        return lse, weighted, share

    def weights(
        self, at: Place, refs: Refs, q: Any, k: Any, shift: Any, *, masked: bool
    ) -> tuple[Any, Any, Any]:
        """The weights of a tile by the shifts of its rows, the slope, and which scores count.

        Hidden weights are zero where they are summed over queries.
        """
        visible = self.visible(at, refs) if masked else None
        scores, slope = self.scores(at, refs, q, k)
        weights = jnp.exp(scores - shift)
        return (shown(weights, visible) if self.keys_first else weights), slope, visible

    def d_scores(
        self, weights: tuple[Any, Any, Any], v: Any, dout: Any, delta: Any, x: Any, *, masked: bool
    ) -> tuple[Any, Any]:
        """The gradient of the products of queries and keys, and `x` that it is multiplied with."""
        p, slope, visible = weights
        ds = p * (self.dot_rows(*self._as_turned(dout, v)) - delta)
        if slope is not None:
            ds *= slope
        if masked:
            ds, x = shown(ds, visible), finite_part(x)
        return ds.astype(x.dtype), x

    @property
    def sides(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """Names of lengths and sizes of blocks: of the block that a program owns, of the others."""
        q, kv = ("q_lengths", self.tiles.block_q), ("kv_lengths", self.tiles.block_k)
        return (kv, q) if self.keys_first else (q, kv)

    @property
    def _key_axis(self) -> int:
        return 0 if self.turned else 1

    def _as_turned(self, of_queries: Any, of_keys: Any) -> tuple[Any, Any]:
        return (of_keys, of_queries) if self.turned else (of_queries, of_keys)


def padded_ids(ids: jax.Array, length: int) -> jax.Array:
    """Segment ids up to a whole number of blocks: the last one again, which widens no range."""
    return jnp.pad(ids, ((0, 0), (0, length - ids.shape[1])), mode="edge")


def id_ranges(ids: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """The smallest and the largest of the padded ids in each block, `(batch, blocks)`."""
    blocks = ids.reshape(ids.shape[0], -1, block)
    return blocks.min(axis=2), blocks.max(axis=2)


def shown(x: Any, visible: Any, other: float = 0.0) -> Any:
    """A tile with `other` where it is not visible; None: all of it is."""
    return x if visible is None else jnp.where(visible, x, other)


# Zero times NaN is NaN, so in a tile that hides anything, what is summed over with weights of zero
# has to be finite: see `finite`. Half precision is not compared on all devices.


def finite_part(x: Any) -> Any:
    """A tile with zeros for NaN and infinity."""
    wide = x.astype(jnp.float32)
    return jnp.where(jnp.abs(wide) < jnp.inf, wide, 0.0).astype(x.dtype)


def keys_that_stay_apart(k: Any, v: Any) -> tuple[Any, Any]:
    """Tiles of keys to compute scores with, NaN where a value is not finite, and of values."""
    size = jnp.abs(v.astype(jnp.float32))
    bad = jnp.max(jnp.where(size < jnp.inf, 0.0, 1.0), axis=1, keepdims=True)
    # Numbers are broadcast rather than booleans, which Mosaic cannot.
    apart = jnp.where(jnp.broadcast_to(bad, k.shape) > 0.0, jnp.nan, k.astype(jnp.float32))
    return apart.astype(k.dtype), finite_part(v)
