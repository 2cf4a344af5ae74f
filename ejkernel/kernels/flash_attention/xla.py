r"""Flash attention in plain JAX: tiles, an online softmax, no score matrix.

Queries and keys are cut into blocks, and one tile of scores (one query block against one key block,
for all heads) exists at a time, so memory grows linearly with the sequence in both directions.

**Forward.** Walking over the key blocks, every query row keeps three numbers: the largest score so
far :math:`m`, the sum :math:`l = \sum_j e^{s_j - m}` and the output :math:`a = \sum_j e^{s_j - m}
v_j`. A new block with scores :math:`s'` replaces them by

.. math::
    m' = \max(m, \max_j s'_j), \quad
    l' = e^{m - m'} l + \sum_j e^{s'_j - m'}, \quad
    a' = e^{m - m'} a + \sum_j e^{s'_j - m'} v_j ,

and at the end :math:`o = a / l`, while :math:`\mathrm{lse} = m + \log l` is kept for the backward.

**Backward.** The probabilities are recomputed from it, tile by tile. With :math:`\delta_i =
\sum_d \mathrm{do}_{id} \, o_{id}` and :math:`s_{ij} = \text{scale}\; q_i \cdot k_j`:

.. math::
    p_{ij} = e^{s_{ij} - \mathrm{lse}_i}, \quad
    \mathrm{ds}_{ij} = p_{ij} (\mathrm{do}_i \cdot v_j - \delta_i), \\
    \mathrm{dv}_j = \sum_i p_{ij} \, \mathrm{do}_i, \quad
    \mathrm{dq}_i = \text{scale} \sum_j \mathrm{ds}_{ij} \, k_j, \quad
    \mathrm{dk}_j = \text{scale} \sum_i \mathrm{ds}_{ij} \, q_i .

Arrays are ``(batch, sequence, heads, head_dim)``. The query heads that share a key head are laid
out as extra rows of the tile, so keys and values are never repeated. Arithmetic is in float32.

Example:
    >>> import jax.numpy as jnp
    >>> q = k = v = jnp.ones((1, 100, 4, 16))
    >>> options = dict(causal=True, softmax_scale=0.25, block_q=32, block_k=64)
    >>> out, lse = forward(q, k, v, **options)
    >>> out.shape, lse.shape
    ((1, 100, 4, 16), (1, 4, 100))
    >>> dq, dk, dv = backward(q, k, v, out, lse, jnp.ones_like(out), **options)
    >>> dq.shape == q.shape and dk.shape == k.shape and dv.shape == v.shape
    True
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Index: TypeAlias = int | jax.Array
State = TypeVar("State")

# Finite, because -inf - -inf is NaN; its exponential is exactly zero all the same.
MASKED_SCORE = -1e30


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool,
    softmax_scale: float,
    block_q: int,
    block_k: int,
) -> tuple[jax.Array, jax.Array]:
    """Attention, and the logarithm of its softmax denominators.

    Args:
        q: Queries, ``(batch, q_len, q_heads, head_dim)``.
        k: Keys, ``(batch, k_len, kv_heads, head_dim)``; ``kv_heads`` divides ``q_heads``.
        v: Values, ``(batch, k_len, kv_heads, value_dim)``.
        causal: If true, query ``i`` sees the keys ``j <= i``.
        softmax_scale: Factor on the scores.
        block_q: Most queries in a tile.
        block_k: Most keys in a tile.

    Returns:
        ``out``, ``(batch, q_len, q_heads, value_dim)`` in the dtype of ``q``, and ``lse``, float32,
        ``(batch, q_heads, q_len)``.
    """
    tiles = _Tiling.of(q, k, causal, block_q, block_k)
    q = _pad(q, tiles.padded_q_len)
    # Every query block reads all keys and values, so they are brought into tile layout only once.
    k_rows = _to_rows(_pad(k, tiles.padded_k_len), group=1)
    v_rows = _to_rows(_pad(v, tiles.padded_k_len), group=1)

    def attend(i: Index, results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        q_block = softmax_scale * _float32(_to_rows(_block(q, i, tiles.block_q), tiles.group))

        def add_keys(j: Index, softmax: _Softmax, *, masked: bool) -> _Softmax:
            k_block = _float32(_block(k_rows, j, tiles.block_k, axis=2))
            v_block = _float32(_block(v_rows, j, tiles.block_k, axis=2))
            scores = jnp.einsum("bhqd,bhkd->bhqk", q_block, k_block)
            if masked:
                scores = jnp.where(tiles.visible(i, j), scores, MASKED_SCORE)
            return softmax.add(scores, v_block)

        all_visible, end = tiles.keys_seen_by(i)
        softmax = _Softmax.start(q_block, v.shape[-1])
        softmax = _loop(0, all_visible, partial(add_keys, masked=False), softmax)
        softmax = _loop(all_visible, end, partial(add_keys, masked=True), softmax)
        out_block, lse_block = softmax.finish()
        out, lse = results
        out = _set_block(out, i, _from_rows(out_block, tiles.group))
        return out, _set_block(lse, i, _from_rows(lse_block, tiles.group))

    # The log-sum-exp travels as one more array of rows, with a single feature.
    empty = (_zeros(q, v.shape[-1], q.dtype), _zeros(q, 1, jnp.float32))
    out, lse = _loop(0, tiles.q_blocks, attend, empty)
    return out[:, : tiles.q_len], lse[:, : tiles.q_len, :, 0].swapaxes(1, 2)


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    *,
    causal: bool,
    softmax_scale: float,
    block_q: int,
    block_k: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of the inputs of :func:`forward`, from its results and the gradient of ``out``.

    The other arguments are as in :func:`forward`; only the blocks may differ from those used there.

    Args:
        out: First result of :func:`forward`.
        lse: Second result of :func:`forward`.
        dout: Gradient of the loss with respect to ``out``.

    Returns:
        ``dq``, ``dk`` and ``dv``, each with the shape and dtype of its input.
    """
    tiles = _Tiling.of(q, k, causal, block_q, block_k)
    k, v = _pad(k, tiles.padded_k_len), _pad(v, tiles.padded_k_len)

    # Here every key block reads all queries, so it is they that are laid out once.
    def query_rows(x: jax.Array) -> jax.Array:
        return _to_rows(_pad(x, tiles.padded_q_len), tiles.group)

    delta = jnp.sum(_float32(dout) * _float32(out), axis=-1, keepdims=True)
    q_rows, dout_rows, delta_rows = query_rows(q), query_rows(dout), query_rows(delta)
    lse_rows = query_rows(lse.swapaxes(1, 2)[..., None])

    def differentiate(j: Index, gradients: _Gradients) -> _Gradients:
        k_block = softmax_scale * _float32(_to_rows(_block(k, j, tiles.block_k), group=1))
        v_block = _float32(_to_rows(_block(v, j, tiles.block_k), group=1))

        def add_queries(i: Index, sums: _Gradients, *, masked: bool) -> _Gradients:
            take = partial(_block, index=i, size=tiles.block_q * tiles.group, axis=2)
            q_block, dout_block = _float32(take(q_rows)), _float32(take(dout_rows))
            # Tiles are (keys, queries) here: XLA's CPU products take up to twice as long when their
            # large operand must be transposed, and of the three that read a tile only dq would need
            # that. So dq is computed as its own transpose, where the small operand is transposed.
            scores = jnp.einsum("bhkd,bhqd->bhkq", k_block, q_block)
            if masked:
                scores = jnp.where(tiles.visible(i, j).T, scores, MASKED_SCORE)
            p = jnp.exp(scores - take(lse_rows).swapaxes(2, 3))
            dp = jnp.einsum("bhkd,bhqd->bhkq", v_block, dout_block)
            ds = p * (dp - take(delta_rows).swapaxes(2, 3))
            dq_block = jnp.einsum("bhkd,bhkq->bhdq", k_block, ds).swapaxes(2, 3)
            return _Gradients(
                dq=_set_block(sums.dq, i, take(sums.dq) + dq_block, axis=2),
                dk=sums.dk + jnp.einsum("bhkq,bhqd->bhkd", ds, q_block),
                dv=sums.dv + jnp.einsum("bhkq,bhqd->bhkd", p, dout_block),
            )

        first, all_visible = tiles.queries_seeing(j)
        sums = _Gradients(gradients.dq, jnp.zeros_like(k_block), jnp.zeros_like(v_block))
        sums = _loop(first, all_visible, partial(add_queries, masked=True), sums)
        sums = _loop(all_visible, tiles.q_blocks, partial(add_queries, masked=False), sums)
        return _Gradients(
            dq=sums.dq,
            dk=_set_block(gradients.dk, j, _from_rows(softmax_scale * sums.dk, group=1)),
            dv=_set_block(gradients.dv, j, _from_rows(sums.dv, group=1)),
        )

    # Every key block adds to dq, so it stays in float32 and in tile layout to the end.
    empty = _Gradients(jnp.zeros_like(q_rows, jnp.float32), jnp.zeros_like(k), jnp.zeros_like(v))
    sums = _loop(0, tiles.k_blocks, differentiate, empty)
    dq = _from_rows(sums.dq.astype(q.dtype), tiles.group)
    return dq[:, : tiles.q_len], sums.dk[:, : tiles.k_len], sums.dv[:, : tiles.k_len]


# XLA on CPU divides a batch of matrix products among its threads only inside one product, and only
# if that product's result has at least this many elements. Smaller tiles leave cores idle.
_THREADED_TILE = 512 * 256


def default_blocks(
    q_len: int, k_len: int, head_dim: int, *, causal: bool, backward: bool
) -> tuple[int, int]:
    """Block sizes ``(block_q, block_k)`` that are good, not best, on a CPU.

    From interleaved timings (8 heads, lengths 64 to 4096, dimensions 32 to 128, two Zen 3 cores):

    * The smallest tile that uses all cores wins: larger ones leave the caches and, if causal, reach
      further beyond the diagonal; 1024 x 512 was 1.1 to 2 times slower, 256 x 256 up to 1.7 times.
    * The forward pass prefers long query blocks, because each one reads all keys. In the backward
      pass the roles are exchanged.
    * If even the whole matrix is too small for threads, one tile is best, except in a causal
      forward pass, where tiles of 64 skip almost half of the work.
    * ``head_dim`` changed the times but never the order, so it is not used.

    When there are many more heads (batch x heads of 32 and above), a tile no longer fits into the
    cache anyway, and 128 x 128 can be faster; tune there.
    """
    del head_dim
    if q_len * k_len < _THREADED_TILE:
        largest = 64 if causal and not backward else _THREADED_TILE
        return max(1, min(q_len, largest)), max(1, min(k_len, largest))
    if backward:
        block_k, block_q = _long_and_short_block(k_len, q_len)
    else:
        block_q, block_k = _long_and_short_block(q_len, k_len)
    return block_q, block_k


def _long_and_short_block(long_len: int, short_len: int) -> tuple[int, int]:
    """A block of at most 512, and the smallest other one that makes the tile large enough."""
    long_block = _ceil_div(long_len, _ceil_div(long_len, 512))  # equal blocks, as in _Tiling
    needed = _ceil_div(_THREADED_TILE, long_block)
    # Rounding the number of blocks down rounds the size of equal blocks up.
    return long_block, _ceil_div(short_len, max(1, short_len // needed))


class _Gradients(NamedTuple):
    dq: jax.Array
    dk: jax.Array
    dv: jax.Array


class _Softmax(NamedTuple):
    """The online softmax: what query rows remember of the keys they have met so far."""

    largest: jax.Array  # (batch, kv_heads, rows, 1)
    total: jax.Array  # (batch, kv_heads, rows, 1)
    weighted: jax.Array  # (batch, kv_heads, rows, value_dim)

    @staticmethod
    def start(q_block: jax.Array, value_dim: int) -> _Softmax:
        total = _zeros(q_block, 1, jnp.float32)
        return _Softmax(total + MASKED_SCORE, total, _zeros(q_block, value_dim, jnp.float32))

    def add(self, scores: jax.Array, v_block: jax.Array) -> _Softmax:
        largest = jnp.maximum(self.largest, jnp.max(scores, axis=-1, keepdims=True))
        shrink = jnp.exp(self.largest - largest)
        weights = jnp.exp(scores - largest)
        total = shrink * self.total + jnp.sum(weights, axis=-1, keepdims=True)
        weighted = shrink * self.weighted + jnp.einsum("bhqk,bhkd->bhqd", weights, v_block)
        return _Softmax(largest, total, weighted)

    def finish(self) -> tuple[jax.Array, jax.Array]:
        """The output (zeros where no key was met) and the log-sum-exp."""
        total = jnp.where(self.total == 0.0, 1.0, self.total)
        return self.weighted / total, self.largest + jnp.log(total)


@dataclass(frozen=True)
class _Tiling:
    """How the score matrix is cut into tiles, and which tiles are needed.

    The blocks are equal: 1000 queries in blocks of at most 512 become 500 and 500, not 512 and 488.
    Then fewer zeros are appended than there are blocks, and nothing if the length divides evenly.
    """

    q_len: int
    k_len: int
    group: int  # query heads per key head; row r of a query block is query r // group
    causal: bool
    q_blocks: int
    k_blocks: int

    @staticmethod
    def of(q: jax.Array, k: jax.Array, causal: bool, block_q: int, block_k: int) -> _Tiling:
        (_, q_len, q_heads, _), (_, k_len, kv_heads, _) = q.shape, k.shape
        if q_heads % kv_heads:
            raise ValueError(f"{q_heads} query heads cannot be shared out to {kv_heads} key heads")
        q_blocks, k_blocks = max(1, _ceil_div(q_len, block_q)), max(1, _ceil_div(k_len, block_k))
        return _Tiling(q_len, k_len, q_heads // kv_heads, causal, q_blocks, k_blocks)

    @property
    def block_q(self) -> int:
        return max(1, _ceil_div(self.q_len, self.q_blocks))

    @property
    def block_k(self) -> int:
        return max(1, _ceil_div(self.k_len, self.k_blocks))

    @property
    def padded_q_len(self) -> int:
        return self.q_blocks * self.block_q

    @property
    def padded_k_len(self) -> int:
        return self.k_blocks * self.block_k

    def visible(self, i: Index, j: Index) -> jax.Array:
        """Which scores of tile ``(i, j)`` count: ``(block_q * group, block_k)``."""
        row = jnp.arange(self.block_q * self.group)[:, None]
        key = jnp.arange(self.block_k)[None, :] + j * self.block_k
        real = key < self.k_len
        return real & (key <= row // self.group + i * self.block_q) if self.causal else real

    def keys_seen_by(self, i: Index) -> tuple[Index, Index]:
        """Ends of the key blocks that query block ``i`` sees wholly, and that it sees at all."""
        unpadded = self.k_len // self.block_k
        if not self.causal:
            return unpadded, self.k_blocks
        if self.k_blocks == 1:
            return 0, 1  # see _loop
        first_query, last_query = i * self.block_q, (i + 1) * self.block_q - 1
        all_visible = jnp.minimum((first_query + 1) // self.block_k, unpadded)
        return all_visible, jnp.minimum(last_query // self.block_k + 1, self.k_blocks)

    def queries_seeing(self, j: Index) -> tuple[Index, Index]:
        """The first query blocks that see anything of key block ``j``, and all of it."""
        first_key, last_key = j * self.block_k, (j + 1) * self.block_k - 1
        first: Index = 0
        all_visible: Index = 0
        if self.causal:
            first = jnp.minimum(first_key // self.block_q, self.q_blocks)
            all_visible = jnp.minimum((last_key - 1) // self.block_q + 1, self.q_blocks)
        if self.k_len < self.padded_k_len:
            all_visible = jnp.where(last_key < self.k_len, all_visible, self.q_blocks)
        if self.q_blocks == 1 and not isinstance(all_visible, int):
            all_visible = 1  # see _loop
        return first, all_visible


def _loop(begin: Index, end: Index, body: Callable[[Index, State], State], state: State) -> State:
    """``fori_loop``, except that a loop known to be empty leaves no trace in the program.

    When a loop has at most one step, XLA recognises its work as independent of the loop counter and
    moves it in front of the loop, where it is done even if the loop turns out to be empty. Bounds
    are therefore kept static where there is a single block.
    """
    if isinstance(begin, int) and isinstance(end, int) and begin >= end:
        return state
    result: State = lax.fori_loop(begin, end, body, state)
    return result


def _to_rows(x: jax.Array, group: int) -> jax.Array:
    """``(batch, length, heads, d)`` to ``(batch, heads / group, length * group, d)``."""
    batch, length, heads, features = x.shape
    x = x.reshape(batch, length, heads // group, group, features).swapaxes(1, 2)
    return x.reshape(batch, heads // group, length * group, features)


def _from_rows(x: jax.Array, group: int) -> jax.Array:
    """The inverse of :func:`_to_rows`."""
    batch, kv_heads, rows, features = x.shape
    x = x.reshape(batch, kv_heads, rows // group, group, features).swapaxes(1, 2)
    return x.reshape(batch, rows // group, kv_heads * group, features)


def _block(x: jax.Array, index: Index, size: int, axis: int = 1) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, index * size, size, axis)


def _set_block(x: jax.Array, index: Index, block: jax.Array, axis: int = 1) -> jax.Array:
    start = index * block.shape[axis]
    return lax.dynamic_update_slice_in_dim(x, block.astype(x.dtype), start, axis)


def _pad(x: jax.Array, length: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, 0)))


def _zeros(like: jax.Array, features: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Zeros with another last dimension; made from ``like`` to inherit how it is sharded."""
    return jnp.broadcast_to(jnp.zeros_like(like[..., :1], dtype), (*like.shape[:-1], features))


def _float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
