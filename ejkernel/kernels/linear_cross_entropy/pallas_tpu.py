"""The loss on TPU: tiles of logits that never leave the chip.

**Forward.** Rows in the outer, vocabulary in the inner dimension of the grid: every row keeps the
largest logit so far and the sum of exponentials relative to it, as in flash attention, and the part
of the loss that is linear in the logits.

**Backward.** Two kernels compute the logits again and use the log-sum-exp of the forward pass: one
walks over the vocabulary and adds up the gradient of a block of rows, the other walks over the rows
and adds up that of a block of the vocabulary. That is five products instead of the three of
`xla.py`, which on the other hand writes and reads its logits several times and the float32 gradient
of the weight once per chunk of rows; by the figures of a v5e (197 TFLOP/s, 819 GB/s) the kernels
come out ahead up to about 4096 features and level beyond.

Example:
    >>> import jax.numpy as jnp
    >>> from .options import LossOptions
    >>> hidden, weight, labels = jnp.zeros((8, 4)), jnp.zeros((4, 16)), jnp.arange(8)
    >>> options = LossOptions()
    >>> loss, lse = losses(hidden, weight, labels, None, options, rows=8, vocab=16, interpret=True)
    >>> round(float(loss[0]), 4)  # log 16
    2.7726
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .options import LossOptions

# Finite, because -inf - -inf is NaN; its exponential is exactly zero all the same.
_MASKED = float(np.finfo(np.float32).min)


def losses(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None,
    options: LossOptions,
    *,
    rows: int,
    vocab: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The loss of every row (0 where ignored), and its log-sum-exp.

    Args:
        hidden: ``(n, d)``.
        weight: ``(d, vocab)``, or ``(vocab, d)`` with ``options.vocab_first``.
        labels: ``(n,)``.
        bias: ``(vocab,)`` or None.
        options: What is computed.
        rows: Rows of a tile, a multiple of 8.
        vocab: Words of a tile, a multiple of 128.
        interpret: Run on any device, slowly.
    """
    grid = _Grid(hidden, weight, options, rows, vocab)
    inputs = grid.inputs(hidden, weight, labels, bias)
    steps = grid.column_blocks

    def body(*refs: Any) -> None:
        *given, lse_ref, linear_ref, largest_ref, total_ref = refs
        tile = _Tile(grid, dict(zip(inputs, given, strict=True)), pl.program_id(1))
        logits = tile.logits()

        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            largest_ref[...] = jnp.full_like(largest_ref, _MASKED)
            total_ref[...] = jnp.zeros_like(total_ref)
            linear_ref[...] = jnp.zeros_like(linear_ref)

        masked = tile.masked(logits, _MASKED)
        before = largest_ref[...]
        largest = jnp.maximum(before, jnp.max(masked, axis=1, keepdims=True))
        new = jnp.sum(jnp.exp(masked - largest), axis=1, keepdims=True)
        total_ref[...] = total_ref[...] * jnp.exp(before - largest) + new
        largest_ref[...] = largest
        share = jnp.where(tile.is_label(), 1.0 - options.label_smoothing, 0.0)
        if options.label_smoothing:
            share = share + options.label_smoothing / grid.vocab
        contributions = tile.masked(share * logits, 0.0)
        linear_ref[...] += jnp.sum(contributions, axis=1, keepdims=True)

        @pl.when(pl.program_id(1) == steps - 1)
        def _() -> None:
            lse_ref[...] = largest_ref[...] + jnp.log(total_ref[...])

    column = jax.ShapeDtypeStruct((grid.padded_rows, 1), jnp.float32)
    lse, linear = grid.call(
        body,
        inputs,
        outputs={"rows_lse": column, "rows_linear": column},
        scratch=[(grid.rows, 1), (grid.rows, 1)],
        inner="columns",
        name="linear_cross_entropy_forward",
        interpret=interpret,
    )
    n = hidden.shape[0]
    lse, linear = lse[:n, 0], linear[:n, 0]
    loss = lse - linear + (options.z_loss * lse * lse if options.z_loss else 0.0)
    known = (labels >= 0) & (labels < grid.vocab)
    loss = jnp.where(known, loss, jnp.nan)
    return jnp.where(labels == options.ignore_index, 0.0, loss), lse


def gradients(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    lse: jax.Array,
    factors: jax.Array,
    bias: jax.Array | None,
    options: LossOptions,
    *,
    rows: int,
    vocab: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Gradients of ``sum(factors * losses)`` for hidden, weight and bias.

    Args:
        hidden: As in :func:`losses`, and so are the arguments that are not listed here.
        lse: Second result of :func:`losses`.
        factors: ``(n,)``; rows to be ignored are treated as if theirs were 0.
    """
    grid = _Grid(hidden, weight, options, rows, vocab)
    factors = jnp.where(labels != options.ignore_index, factors.astype(jnp.float32), 0.0)
    inputs = grid.inputs(hidden, weight, labels, bias)
    inputs |= {"rows_lse": grid.column(lse), "rows_factors": grid.column(factors)}

    def hidden_body(*refs: Any) -> None:
        *given, out_ref, sum_ref = refs
        step = pl.program_id(1)
        tile = _Tile(grid, dict(zip(inputs, given, strict=True)), step)
        _start(sum_ref, step)
        gradient = tile.gradient().astype(weight.dtype)
        # Beyond the vocabulary the weights are anything, and zero times anything may be NaN.
        words = tile.masked(tile.weight, 0, axis=grid.words_axis)
        sum_ref[...] += _product(gradient, words, (1, grid.words_axis))
        _finish(out_ref, sum_ref, step, grid.column_blocks)

    (dhidden,) = grid.call(
        hidden_body,
        inputs,
        outputs={"hidden": jax.ShapeDtypeStruct((grid.padded_rows, grid.features), hidden.dtype)},
        scratch=[(grid.rows, grid.features)],
        inner="columns",
        name="linear_cross_entropy_dhidden",
        interpret=interpret,
    )

    def weight_body(*refs: Any) -> None:
        step = pl.program_id(1)
        tile = _Tile(grid, dict(zip(inputs, refs, strict=False)), pl.program_id(0))
        outputs = refs[len(inputs) :]
        sums = outputs[len(outputs) // 2 :]
        for sum_ref in sums:
            _start(sum_ref, step)
        gradient = tile.gradient()
        factor = gradient.astype(hidden.dtype)
        left, right = (factor, tile.hidden) if options.vocab_first else (tile.hidden, factor)
        sums[0][...] += _product(left, right, (0, 0))
        if bias is not None:
            sums[1][...] += jnp.sum(gradient, axis=0, keepdims=True)
        for out_ref, sum_ref in zip(outputs, sums, strict=False):
            _finish(out_ref, sum_ref, step, grid.row_blocks)

    tile_shape = grid.weight_tile
    outputs = {"weight": jax.ShapeDtypeStruct(weight.shape, weight.dtype)}
    if bias is not None:
        outputs["bias"] = jax.ShapeDtypeStruct((1, grid.vocab), jnp.float32)
    dweight, *dbias = grid.call(
        weight_body,
        inputs,
        outputs=outputs,
        scratch=[tile_shape] if bias is None else [tile_shape, (1, grid.columns)],
        inner="rows",
        name="linear_cross_entropy_dweight",
        interpret=interpret,
    )
    return dhidden[: hidden.shape[0]], dweight, dbias[0][0] if dbias else None


def default_tile(
    n: int, features: int, vocab: int, itemsize: int, *, backward: bool
) -> tuple[int, int]:
    """Rows and words of a tile: the largest that fits into VMEM, as square as may be.

    Beyond 512 of each the matrix unit is busy all the time, and only the compiler has more to do:
    it unrolls a tile's products, and takes minutes for 512 x 512 x 4096.
    """
    fitting = [
        (rows, words)
        for rows in (512, 256, 128, 64)
        for words in (512, 256, 128)
        if fits(rows, words, features, itemsize, backward=backward)
        and rows * words * features <= 2**28
    ]
    rows, words = max(fitting or [(64, 128)], key=lambda tile: (min(tile), sum(tile)))
    return min(rows, -(-n // 8) * 8), min(words, -(-vocab // 128) * 128)


def fits(rows: int, words: int, features: int, itemsize: int, *, backward: bool) -> bool:
    """Whether a tile fits into VMEM, with an eighth left for what the compiler needs."""
    needed = _tile_bytes(rows, words, features, itemsize, backward=backward)
    return needed <= _vmem_limit() * 7 // 8


def _tile_bytes(rows: int, words: int, features: int, itemsize: int, *, backward: bool) -> int:
    """About the VMEM that a tile needs: blocks twice, sums, the logits and what comes of them."""
    blocks = 2 * itemsize * features * (rows + words)
    logits = (4 if backward else 3) * 4 * rows * words
    largest = max(rows, words) * features
    return blocks + logits + (largest * (4 + 2 * itemsize) if backward else 0)


def _vmem_limit() -> int:
    """VMEM of a kernel: half of what the chip has, but the default of 16 MiB at least."""
    if not pltpu.is_tpu_device():  # lowered or interpreted elsewhere
        return 16 * 2**20
    capacity: int = pltpu.get_tpu_info().vmem_capacity_bytes
    return max(16 * 2**20, min(64 * 2**20, capacity // 2))


class _Grid:
    """How rows and vocabulary are cut into tiles, and the blocks that a tile reads and writes."""

    def __init__(
        self, hidden: jax.Array, weight: jax.Array, options: LossOptions, rows: int, vocab: int
    ) -> None:
        n, self.features = hidden.shape
        self.options = options
        self.words_axis = 0 if options.vocab_first else 1
        self.vocab = weight.shape[self.words_axis]
        self.rows = min(rows, -(-n // 8) * 8)
        self.columns = min(vocab, self.vocab)
        self.row_blocks = pl.cdiv(n, self.rows)
        self.column_blocks = pl.cdiv(self.vocab, self.columns)
        self.padded_rows = self.row_blocks * self.rows

    @property
    def weight_tile(self) -> tuple[int, int]:
        shape = (self.columns, self.features)
        return shape if self.options.vocab_first else shape[::-1]

    def column(self, values: jax.Array, fill: int = 0) -> jax.Array:
        """One number per row, as a matrix of one column, padded to whole tiles."""
        missing = self.padded_rows - values.shape[0]
        return jnp.pad(values, (0, missing), constant_values=fill)[:, None]

    def inputs(
        self, hidden: jax.Array, weight: jax.Array, labels: jax.Array, bias: jax.Array | None
    ) -> dict[str, jax.Array]:
        missing = self.padded_rows - hidden.shape[0]
        given = {
            "hidden": jnp.pad(hidden, ((0, missing), (0, 0))) if missing else hidden,
            "weight": weight,
            "rows_labels": self.column(labels.astype(jnp.int32), self.options.ignore_index),
        }
        return given if bias is None else given | {"bias": bias[None, :]}

    def call(
        self,
        body: Any,
        inputs: dict[str, jax.Array],
        *,
        outputs: dict[str, jax.ShapeDtypeStruct],
        scratch: list[tuple[int, int]],
        inner: Literal["rows", "columns"],
        name: str,
        interpret: bool,
    ) -> list[jax.Array]:
        def block(key: str) -> pl.BlockSpec:
            shape, row, column = {
                "hidden": ((self.rows, self.features), True, False),
                "bias": ((1, self.columns), False, True),
                "weight": (self.weight_tile, False, True),
            }.get(key, ((self.rows, 1), True, False))
            by_row = column and self.options.vocab_first and key == "weight"

            def index(outer: Any, inside: Any) -> tuple[Any, Any]:
                i, j = (outer, inside) if inner == "columns" else (inside, outer)
                if row:
                    return i, 0
                return (j, 0) if by_row else (0, j)

            return pl.BlockSpec(shape, index)

        sizes = (self.row_blocks, self.column_blocks)
        results: list[jax.Array] = pl.pallas_call(
            body,
            grid=sizes if inner == "columns" else sizes[::-1],
            in_specs=[block(key) for key in inputs],
            out_specs=[block(key) for key in outputs],
            out_shape=list(outputs.values()),
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_vmem_limit()
            ),
            interpret=interpret,
            name=name,
        )(*inputs.values())
        return results


class _Tile:
    """One tile of logits, computed from the blocks that are in VMEM."""

    def __init__(self, grid: _Grid, refs: dict[str, Any], column_block: Any) -> None:
        self.grid, self.refs = grid, refs
        self.first_word = column_block * grid.columns
        self.hidden, self.weight = refs["hidden"][...], refs["weight"][...]

    def logits(self) -> jax.Array:
        products = _product(self.hidden, self.weight, (1, 1 - self.grid.words_axis))
        bias = self.refs["bias"][...] if "bias" in self.refs else None
        return self.grid.options.logits(products, bias)

    def words(self, shape: tuple[int, ...], axis: int) -> jax.Array:
        offset: jax.Array = lax.broadcasted_iota(jnp.int32, shape, axis)
        found: jax.Array = offset + self.first_word
        return found

    def is_label(self) -> jax.Array:
        labels: jax.Array = self.refs["rows_labels"][...]
        return self.words((self.grid.rows, self.grid.columns), 1) == labels

    def masked(self, values: jax.Array, other: float, axis: int = 1) -> jax.Array:
        """`values` with what lies beyond the vocabulary replaced."""
        if self.grid.vocab % self.grid.columns == 0:
            return values
        real = self.words(values.shape, axis) < self.grid.vocab
        return jnp.where(real, values, jnp.asarray(other, values.dtype))

    def gradient(self) -> jax.Array:
        """Gradient of the products, 0 beyond the vocabulary."""
        logits, lse = self.logits(), self.refs["rows_lse"][...]
        found = self.grid.options.product_gradients(
            logits,
            jnp.exp(logits - lse),
            lse,
            self.is_label(),
            self.refs["rows_factors"][...],
            self.grid.vocab,
        )
        return self.masked(found, 0.0)


def _product(a: jax.Array, b: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    axes = ((contracted[:1], contracted[1:]), ((), ()))
    return lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)


def _start(sum_ref: Any, step: Any) -> None:
    @pl.when(step == 0)
    def _() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)


def _finish(out_ref: Any, sum_ref: Any, step: Any, steps: int) -> None:
    @pl.when(step == steps - 1)
    def _() -> None:
        out_ref[...] = sum_ref[...].astype(out_ref.dtype)
