r"""Flash attention for GPU: Pallas kernels that JAX lowers to Triton, forward, dq, and dk with dv.

The mathematics is that of :mod:`.xla`. How it is laid out:

* Arrays are read where they are, `(batch, sequence, heads, features)`; what a block has beyond the
  ends of a sequence or of a feature dimension is masked when it is loaded. Nothing is copied.
* One program computes one output block and loops over the tiles that it needs. Causality, windows,
  lengths and segments shorten the loop. Tiles that positions leave whole have a loop of their own,
  in which no position is compared.
* The program for dk and dv works on transposed tiles, and loops over the query heads that share
  its key head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from .pallas_tiles import (
    HIDDEN_SCORE,
    LOWEST_MAXIMUM,
    Index,
    Options,
    Tiles,
    both,
    delta_of,
    divide,
    least,
    most,
    sinks_gradient,
    without_empty_rows,
)

SMALLEST_BLOCK = 16  # of Triton's matrix products


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    options: Options,
    *,
    block_q: int,
    block_k: int,
    num_warps: int = 4,
    num_stages: int = 2,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention, and the logarithm of its softmax denominators.

    Args:
        q: Queries, `(batch, q_len, heads, head_dim)`.
        k: Keys, `(batch, kv_len, kv_heads, head_dim)`.
        v: Values, `(batch, kv_len, kv_heads, value_dim)`.
        options: The keywords of the call.
        block_q: Queries in a tile; rounded up to a power of two.
        block_k: Keys in a tile; rounded up to a power of two.
        num_warps: Warps that share a program.
        num_stages: Tiles that are loaded ahead, and the one at hand.
        interpret: Run on any device, slowly.

    Returns:
        `out`, `(batch, q_len, heads, value_dim)` of `q`'s dtype, and `lse`, float32,
        `(batch, heads, q_len)`, -inf for rows that attend to nothing.
    """
    batch, q_len, heads, _ = q.shape
    value_dim = v.shape[3]
    call = _Call.of(q, k, options, block_q, block_k)
    tiles = call.tiles
    call.add("q", q, _query_block(tiles, q))
    call.add("k", k, call.all_keys(k))
    call.add("v", v, call.all_keys(v))
    call.add_options(batch)
    out_shape = jax.ShapeDtypeStruct((batch, q_len, heads, value_dim), q.dtype)

    def body(at: _Place, refs: dict[str, Any], outputs: Any) -> None:
        q_tile = _load(refs["q"], (q_len - at.i * tiles.block_q, q.shape[3]))
        rows = tiles.block_q

        def add_keys(j: Index, state: Any, *, masked: bool) -> Any:
            largest, total, weighted = state
            k_tile, v_tile = call.key_tile(refs["k"], j, k), call.key_tile(refs["v"], j, v)
            scores, _ = call.scores(at, refs, at.i, j, q_tile, k_tile, masked=masked)
            before, largest = largest, jnp.maximum(largest, jnp.max(scores, axis=1))
            shrink = jnp.exp(before - largest)
            weights = jnp.exp(scores - largest[:, None])
            total = shrink * total + jnp.sum(weights, axis=1)
            product = plgpu.dot(weights.astype(v_tile.dtype), v_tile)
            return largest, total, shrink[:, None] * weighted + product

        start = (
            jnp.full((rows,), LOWEST_MAXIMUM, jnp.float32),
            jnp.zeros((rows,), jnp.float32),
            jnp.zeros((rows, _padded(value_dim)), jnp.float32),
        )
        largest, total, weighted = call.over_keys(at, refs, add_keys, start)
        if "sinks" in refs:
            sink = plgpu.load(refs["sinks"].at[at.head])
            with_sink = jnp.maximum(largest, sink)
            shrink = jnp.exp(largest - with_sink)
            total = shrink * total + jnp.exp(sink - with_sink)
            weighted = shrink[:, None] * weighted
            largest = with_sink
        real = total > 0.0
        if "q_lengths" in refs:
            row = at.i * tiles.block_q + lax.broadcasted_iota(jnp.int32, (rows,), 0)
            real &= row < plgpu.load(refs["q_lengths"].at[at.batch])
        share = jnp.where(real, 1.0 / jnp.where(real, total, 1.0), 0.0)
        lse = jnp.where(real, largest + jnp.log(jnp.where(real, total, 1.0)), -jnp.inf)
        out_ref, lse_ref = outputs
        left = q_len - at.i * tiles.block_q
        _store(out_ref, weighted * share[:, None], (left, value_dim))
        _store(lse_ref, lse, (left,))

    out, lse = call.run(
        body,
        name="flash_attention_forward",
        grid=(tiles.q_blocks, heads, batch),
        outputs=[
            (out_shape, _query_block(tiles, out_shape)),
            (
                jax.ShapeDtypeStruct((batch, heads, q_len), jnp.float32),
                pl.BlockSpec((None, None, tiles.block_q), lambda i, h, b: (b, h, i)),
            ),
        ],
        num_warps=num_warps,
        num_stages=num_stages,
        interpret=interpret,
    )
    return out, lse


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    options: Options,
    *,
    block_q: int,
    block_k: int,
    num_warps: int = 4,
    num_stages: int = 2,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, dict[str, jax.Array]]:
    """Gradients of `q`, `k`, `v`, and of `sinks` by name if there are any; none of a bias.

    Args:
        q: As in :func:`forward`, and so are `k`, `v`, `options` and the launch parameters.
        out: First result of :func:`forward`.
        lse: Second result of :func:`forward`.
        dout: Gradient of the loss with respect to `out`.
        dlse: The same with respect to `lse`, or None.
    """
    delta = delta_of(out, dout, dlse)
    shared = (q, k, v, dout, without_empty_rows(lse), delta, options, block_q, block_k)
    launch = {"num_warps": num_warps, "num_stages": num_stages, "interpret": interpret}
    dq = _gradient_of_queries(*shared, **launch)
    dk, dv = _gradient_of_keys(*shared, **launch)
    named = {}
    if options.sinks is not None:
        named["sinks"] = sinks_gradient(options.sinks, lse, delta)
    return dq, dk, dv, named


def _gradient_of_queries(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    options: Options,
    block_q: int,
    block_k: int,
    **launch: Any,
) -> jax.Array:
    batch, q_len, heads, head_dim = q.shape
    call = _Call.of(q, k, options, block_q, block_k)
    tiles = call.tiles
    row = pl.BlockSpec((None, None, tiles.block_q), lambda i, h, b: (b, h, i))
    call.add("q", q, _query_block(tiles, q))
    call.add("k", k, call.all_keys(k))
    call.add("v", v, call.all_keys(v))
    call.add("dout", dout, _query_block(tiles, dout))
    call.add("lse", lse, row)
    call.add("delta", delta, row)
    call.add_options(batch)

    def body(at: _Place, refs: dict[str, Any], outputs: Any) -> None:
        left = q_len - at.i * tiles.block_q
        q_tile = _load(refs["q"], (left, head_dim))
        dout_tile = _load(refs["dout"], (left, dout.shape[3]))
        lse_rows = _load(refs["lse"], (left,), other=-HIDDEN_SCORE)
        delta_rows = _load(refs["delta"], (left,))

        def add_keys(j: Index, total: Any, *, masked: bool) -> Any:
            k_tile, v_tile = call.key_tile(refs["k"], j, k), call.key_tile(refs["v"], j, v)
            scores, slope = call.scores(at, refs, at.i, j, q_tile, k_tile, masked=masked)
            weights = jnp.exp(scores - lse_rows[:, None])
            dweights = plgpu.dot(dout_tile, v_tile.T)
            dscores = weights * (dweights - delta_rows[:, None])
            if slope is not None:
                dscores *= slope
            return total + plgpu.dot(dscores.astype(k_tile.dtype), k_tile)

        start = jnp.zeros((tiles.block_q, _padded(head_dim)), jnp.float32)
        total = call.over_keys(at, refs, add_keys, start)
        _store(outputs[0], options.softmax_scale * total, (left, head_dim))

    (dq,) = call.run(
        body,
        name="flash_attention_dq",
        grid=(tiles.q_blocks, heads, batch),
        outputs=[(jax.ShapeDtypeStruct(q.shape, q.dtype), _query_block(tiles, q))],
        **launch,
    )
    return dq


def _gradient_of_keys(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    options: Options,
    block_q: int,
    block_k: int,
    **launch: Any,
) -> tuple[jax.Array, jax.Array]:
    batch, q_len = q.shape[:2]
    _, kv_len, kv_heads, head_dim = k.shape
    value_dim = v.shape[3]
    call = _Call.of(q, k, options, block_q, block_k, keys_first=True)
    tiles, group = call.tiles, call.group
    rows = pl.BlockSpec((None, group, tiles.padded_q_len), lambda j, h, b: (b, h, 0))
    call.add("q", q, _queries_of_group(tiles, group, q))
    call.add("k", k, _key_block(tiles, k))
    call.add("v", v, _key_block(tiles, v))
    call.add("dout", dout, _queries_of_group(tiles, group, dout))
    call.add("lse", lse, rows)
    call.add("delta", delta, rows)
    call.add_options(batch)

    def body(at: _Place, refs: dict[str, Any], outputs: Any) -> None:
        left = kv_len - at.j * tiles.block_k
        k_tile = _load(refs["k"], (left, head_dim))
        v_tile = _load(refs["v"], (left, value_dim))

        def add_head(member: Index, sums: Any) -> Any:
            head = _Place(at.batch, at.kv_head * group + member, at.kv_head, at.i, at.j)

            def add_queries(i: Index, sums: Any, *, masked: bool) -> Any:
                dk, dv = sums
                start = i * tiles.block_q
                part, real = pl.ds(start, tiles.block_q), q_len - start
                q_tile = _load(refs["q"].at[part, member, :], (real, head_dim))
                dout_tile = _load(refs["dout"].at[part, member, :], (real, value_dim))
                lse_rows = _load(refs["lse"].at[member, part], (real,), other=-HIDDEN_SCORE)
                delta_rows = _load(refs["delta"].at[member, part], (real,))
                scores, slope = call.scores(head, refs, i, at.j, q_tile, k_tile, masked=masked)
                weights = jnp.exp(scores - lse_rows[None, :])
                dv += plgpu.dot(weights.astype(dout_tile.dtype), dout_tile)
                dweights = plgpu.dot(v_tile, dout_tile.T)
                dscores = weights * (dweights - delta_rows[None, :])
                if slope is not None:
                    dscores *= slope
                return dk + plgpu.dot(dscores.astype(q_tile.dtype), q_tile), dv

            return call.over_queries(at, refs, add_queries, sums)

        sums = (
            jnp.zeros((tiles.block_k, _padded(head_dim)), jnp.float32),
            jnp.zeros((tiles.block_k, _padded(value_dim)), jnp.float32),
        )
        dk, dv = add_head(jnp.int32(0), sums) if group == 1 else lax.fori_loop(0, group, add_head, sums)
        _store(outputs[0], options.softmax_scale * dk, (left, head_dim))
        _store(outputs[1], dv, (left, value_dim))

    dk, dv = call.run(
        body,
        name="flash_attention_dkv",
        grid=(tiles.k_blocks, kv_heads, batch),
        outputs=[(jax.ShapeDtypeStruct(x.shape, x.dtype), _key_block(tiles, x)) for x in (k, v)],
        **launch,
    )
    return dk, dv


# --- a call: its operands, its loops, its tiles --------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """What a program computes: a query block `i` of a head, or a key block `j` of a key head."""

    batch: Index
    head: Index
    kv_head: Index
    i: Index
    j: Index


@dataclass
class _Call:
    """Operands by name, and the geometry that all programs share."""

    options: Options
    tiles: Tiles
    group: int
    keys_first: bool  # tiles are (keys, queries), and programs own key blocks
    operands: dict[str, tuple[jax.Array, pl.BlockSpec]] = field(default_factory=dict)

    @staticmethod
    def of(
        q: jax.Array,
        k: jax.Array,
        options: Options,
        block_q: int,
        block_k: int,
        *,
        keys_first: bool = False,
    ) -> _Call:
        q_len, kv_len = q.shape[1], k.shape[1]
        tiles = Tiles(
            q_len,
            kv_len,
            fitting_block(q_len, block_q),
            fitting_block(kv_len, block_k),
            options.left,
            options.right,
        )
        return _Call(options, tiles, q.shape[2] // k.shape[2], keys_first)

    def add(self, name: str, x: jax.Array, spec: pl.BlockSpec) -> None:
        self.operands[name] = (x, spec)

    def all_keys(self, x: jax.Array) -> pl.BlockSpec:
        """All keys of a program's key head."""
        group = self.group
        return pl.BlockSpec(
            (None, self.tiles.padded_kv_len, None, _padded(x.shape[3])),
            lambda i, h, b: (b, 0, divide(h, group), 0),
        )

    def add_options(self, batch: int) -> None:
        options, tiles = self.options, self.tiles
        for name in ("q_lengths", "kv_lengths"):
            lengths = getattr(options, name)
            if lengths is not None:
                longest = tiles.q_len if name == "q_lengths" else tiles.kv_len
                self._add_scalars(name, jnp.clip(lengths.astype(jnp.int32), 0, longest))
        if options.sinks is not None:
            self._add_scalars("sinks", options.sinks.astype(jnp.float32))
        if options.segments is not None:
            queries, keys = options.segments
            for name, ids, length in (
                ("q_segments", queries, tiles.padded_q_len),
                ("kv_segments", keys, tiles.padded_kv_len),
            ):
                self.add(name, ids, pl.BlockSpec((None, length), lambda x, h, b: (b, 0)))
            begin, end = _blocks_that_share_segments(queries, keys, tiles, self.keys_first)
            self._add_scalars("segments_begin", begin)
            self._add_scalars("segments_end", end)
        for name in ("bias", "mask"):
            x = getattr(options, name)
            if x is not None:
                # Triton has no memory of booleans; bytes are the smallest it has.
                self._add_scores(name, x.astype(jnp.int8) if name == "mask" else x)

    def _add_scalars(self, name: str, x: jax.Array) -> None:
        self.add(name, x, pl.BlockSpec(x.shape, lambda x_, h, b: (0,) * x.ndim))

    def _add_scores(self, name: str, x: jax.Array) -> None:
        tiles, group = self.tiles, self.group
        batches, heads, queries, keys = x.shape
        # With key heads in the grid, a program reads the scores of all heads that share its own.
        members = 1 if heads == 1 else (group if self.keys_first else 1)

        def index(_: Index, h: Index, b: Index) -> tuple[Index, ...]:
            return (0 if batches == 1 else b, 0 if heads == 1 else h, 0, 0)

        shape = (
            None,
            members,
            1 if queries == 1 else tiles.padded_q_len,
            1 if keys == 1 else tiles.padded_kv_len,
        )
        self.add(name, x, pl.BlockSpec(shape, index))

    def over_keys(
        self, at: _Place, refs: dict[str, Any], add: Callable[..., Any], state: Any
    ) -> Any:
        begin, end = self.tiles.keys_of(at.i)
        if "kv_lengths" in refs:
            length = plgpu.load(refs["kv_lengths"].at[at.batch])
            end = least(end, _blocks_in(length, self.tiles.block_k))
        if "q_lengths" in refs:
            exists = at.i * self.tiles.block_q < plgpu.load(refs["q_lengths"].at[at.batch])
            end = jnp.where(exists, end, begin)
        begin, end = self._in_segments(at, refs, at.i, begin, end)
        return self._loop(begin, end, self.tiles.whole_keys_of(at.i), add, state)

    def over_queries(
        self, at: _Place, refs: dict[str, Any], add: Callable[..., Any], state: Any
    ) -> Any:
        begin, end = self.tiles.queries_of(at.j)
        if "q_lengths" in refs:
            length = plgpu.load(refs["q_lengths"].at[at.batch])
            end = least(end, _blocks_in(length, self.tiles.block_q))
        if "kv_lengths" in refs:
            exists = at.j * self.tiles.block_k < plgpu.load(refs["kv_lengths"].at[at.batch])
            end = jnp.where(exists, end, begin)
        begin, end = self._in_segments(at, refs, at.j, begin, end)
        return self._loop(begin, end, self.tiles.whole_queries_of(at.j), add, state)

    def _in_segments(
        self, at: _Place, refs: dict[str, Any], block: Index, begin: Index, end: Index
    ) -> tuple[Index, Index]:
        if "segments_begin" not in refs:
            return begin, end
        first = plgpu.load(refs["segments_begin"].at[at.batch, block])
        last = plgpu.load(refs["segments_end"].at[at.batch, block])
        return most(begin, first), least(end, last)

    def _loop(
        self,
        begin: Index,
        end: Index,
        whole: tuple[Index, Index],
        add: Callable[..., Any],
        state: Any,
    ) -> Any:
        """Add the blocks; those between `whole` without comparing positions if nothing else counts."""

        def loop(start: Index, stop: Index, state: Any, *, masked: bool) -> Any:
            if isinstance(start, int) and isinstance(stop, int) and start >= stop:
                return state
            return lax.fori_loop(start, stop, lambda x, s: add(x, s, masked=masked), state)

        options, tiles = self.options, self.tiles
        by_value = [options.mask, options.segment_ids, options.kv_lengths]
        if any(x is not None for x in by_value):
            return loop(begin, end, state, masked=True)
        first, last = (least(edge, end) for edge in whole)
        if tiles.left is not None or (self.keys_first and tiles.right is not None):
            state = loop(begin, first, state, masked=True)
        state = loop(first, last, state, masked=False)
        is_ragged = tiles.kv_len < tiles.padded_kv_len
        before_last = tiles.left if self.keys_first else tiles.right
        if is_ragged or before_last is not None:
            state = loop(last, end, state, masked=True)
        return state

    def key_tile(self, ref: Any, j: Index, like: jax.Array) -> Any:
        start = j * self.tiles.block_k
        part = ref.at[pl.ds(start, self.tiles.block_k), :]
        return _load(part, (self.tiles.kv_len - start, like.shape[3]))

    def scores(
        self, at: _Place, refs: dict[str, Any], i: Index, j: Index, q: Any, k: Any, *, masked: bool
    ) -> tuple[Any, Any]:
        """A tile of scores, and their slope by the scaled products if that is not one."""
        options = self.options
        left, right = (k, q) if self.keys_first else (q, k)
        scores = plgpu.dot(left, right.T) * options.softmax_scale
        slope = None
        if options.logits_soft_cap is not None:
            capped = _tanh(scores / options.logits_soft_cap)
            slope = 1.0 - capped * capped
            scores = options.logits_soft_cap * capped
        if "bias" in refs:
            scores += self._score_tile(refs["bias"], at, i, j).astype(jnp.float32)
        if masked:
            visible = self._visible(at, refs, i, j)
            scores = scores if visible is None else jnp.where(visible, scores, HIDDEN_SCORE)
        return scores, slope

    def _visible(self, at: _Place, refs: dict[str, Any], i: Index, j: Index) -> Any:
        tiles = self.tiles
        length = plgpu.load(refs["kv_lengths"].at[at.batch]) if "kv_lengths" in refs else None
        visible = tiles.visible(i, j, length, keys_first=self.keys_first)
        if "mask" in refs:
            visible = both(visible, self._score_tile(refs["mask"], at, i, j) != 0)
        if "q_segments" in refs:
            start_q, start_k = i * tiles.block_q, j * tiles.block_k
            queries = refs["q_segments"].at[pl.ds(start_q, tiles.block_q)]
            keys = refs["kv_segments"].at[pl.ds(start_k, tiles.block_k)]
            q_ids = _load(queries, (tiles.q_len - start_q,))
            kv_ids = _load(keys, (tiles.kv_len - start_k,))
            same = (
                kv_ids[:, None] == q_ids[None, :]
                if self.keys_first
                else q_ids[:, None] == kv_ids[None, :]
            )
            visible = both(visible, same)
        return visible

    def _score_tile(self, ref: Any, at: _Place, i: Index, j: Index) -> Any:
        """A tile of a bias or a mask, as the tiles are turned."""
        tiles = self.tiles
        members, queries, keys = ref.shape
        zero = jnp.int32(0)  # the interpreter does not take a Python integer for an index
        member = at.head - at.kv_head * self.group if members > 1 else zero
        shape = (tiles.block_q, tiles.block_k)
        start_q, start_k = i * tiles.block_q, j * tiles.block_k
        rows, columns = pl.ds(start_q, tiles.block_q), pl.ds(start_k, tiles.block_k)
        if queries == 1 and keys == 1:
            tile = jnp.broadcast_to(plgpu.load(ref.at[member, zero, zero]), shape)
        elif queries == 1:
            line = _load(ref.at[member, zero, columns], (tiles.kv_len - start_k,))
            tile = jnp.broadcast_to(line[None, :], shape)
        elif keys == 1:
            line = _load(ref.at[member, rows, zero], (tiles.q_len - start_q,))
            tile = jnp.broadcast_to(line[:, None], shape)
        else:
            real = (tiles.q_len - start_q, tiles.kv_len - start_k)
            tile = _load(ref.at[member, rows, columns], real)
        return tile.T if self.keys_first else tile

    def run(
        self,
        body: Callable[..., None],
        *,
        name: str,
        grid: tuple[int, ...],
        outputs: list[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
        num_warps: int,
        num_stages: int,
        interpret: bool,
    ) -> list[jax.Array]:
        names = list(self.operands)

        def kernel(*refs: Any) -> None:
            block, head, batch = (pl.program_id(axis) for axis in range(3))
            if self.keys_first:
                at = _Place(batch, None, head, None, block)
            else:
                at = _Place(batch, head, divide(head, self.group), block, None)
            body(at, dict(zip(names, refs, strict=False)), refs[len(names) :])

        results: list[jax.Array] = pl.pallas_call(
            kernel,
            grid=grid,
            in_specs=[spec for _, spec in self.operands.values()],
            out_specs=[spec for _, spec in outputs],
            out_shape=[shape for shape, _ in outputs],
            compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
            interpret=interpret,
            name=name,
        )(*(array for array, _ in self.operands.values()))
        return results


def fitting_block(length: int, block: int) -> int:
    """The block as a power of two, no longer than the sequence needs."""
    return max(SMALLEST_BLOCK, pl.next_power_of_2(min(block, length)))


def _padded(features: int) -> int:
    return max(SMALLEST_BLOCK, pl.next_power_of_2(features))


def _query_block(tiles: Tiles, x: Any) -> pl.BlockSpec:
    shape = (None, tiles.block_q, None, _padded(x.shape[3]))
    return pl.BlockSpec(shape, lambda i, h, b: (b, i, h, 0))


def _key_block(tiles: Tiles, x: Any) -> pl.BlockSpec:
    shape = (None, tiles.block_k, None, _padded(x.shape[3]))
    return pl.BlockSpec(shape, lambda j, h, b: (b, j, h, 0))


def _queries_of_group(tiles: Tiles, group: int, x: Any) -> pl.BlockSpec:
    shape = (None, tiles.padded_q_len, group, _padded(x.shape[3]))
    return pl.BlockSpec(shape, lambda j, h, b: (b, 0, h, 0))


def _blocks_that_share_segments(
    queries: jax.Array, keys: jax.Array, tiles: Tiles, keys_first: bool
) -> tuple[jax.Array, jax.Array]:
    """`(batch, blocks)`: begin and end of the blocks whose ranges of ids overlap with a block's."""

    def ranges(ids: jax.Array, block: int, length: int) -> tuple[jax.Array, jax.Array]:
        # Repeating the last id keeps the range of the last block as it is.
        ids = jnp.pad(ids, ((0, 0), (0, length - ids.shape[1])), mode="edge")
        blocks = ids.reshape(ids.shape[0], -1, block)
        return blocks.min(axis=2), blocks.max(axis=2)

    q_least, q_most = ranges(queries, tiles.block_q, tiles.padded_q_len)
    kv_least, kv_most = ranges(keys, tiles.block_k, tiles.padded_kv_len)
    overlap = (q_least[:, :, None] <= kv_most[:, None]) & (kv_least[:, None] <= q_most[:, :, None])
    overlap = overlap.swapaxes(1, 2) if keys_first else overlap
    number = jnp.arange(overlap.shape[2], dtype=jnp.int32)
    begin = jnp.min(jnp.where(overlap, number, overlap.shape[2]), axis=2)
    end = jnp.max(jnp.where(overlap, number + 1, 0), axis=2)
    return begin.astype(jnp.int32), end.astype(jnp.int32)


def _tanh(x: Any) -> Any:
    # Triton lowers tanh to a library call per element; this is two instructions more than exp.
    positive = jnp.exp(-2.0 * jnp.abs(x))
    return jnp.sign(x) * (1.0 - positive) / (1.0 + positive)


def _blocks_in(length: Index, block: int) -> Index:
    return divide(length + (block - 1), block)


def _inside(shape: tuple[int, ...], real: tuple[Index, ...]) -> Any:
    """Which elements of a block exist; None if that is known to be all of them."""
    conditions = []
    for axis, (size, limit) in enumerate(zip(shape, real, strict=True)):
        if not (isinstance(limit, int) and limit >= size):
            conditions.append(lax.broadcasted_iota(jnp.int32, shape, axis) < limit)
    return both(*conditions)


def _load(ref: Any, real: tuple[Index, ...], other: float = 0) -> Any:
    mask = _inside(ref.shape, real)
    return plgpu.load(ref, mask=mask, other=None if mask is None else other)


def _store(ref: Any, x: Any, real: tuple[Index, ...]) -> None:
    plgpu.store(ref, x.astype(ref.dtype), mask=_inside(ref.shape, real))
