"""The loss on TPU: blocks of logits that never leave the chip.

**Forward.** Rows in the outer, vocabulary in the inner dimension of the grid: every row holds the
largest logit so far and the sum of exponentials relative to it, as in flash attention, and the part
of the loss that is linear in the logits.

**Backward.** Two kernels compute the logits again and use the log-sum-exp of the forward pass: one
walks over the vocabulary and adds up the gradient of a block of rows, the other walks over the rows
and adds up that of a block of the vocabulary. That is five products instead of the three of
`xla.py`, which on the other hand writes and reads its logits several times and the float32 gradient
of the weight once per block of rows; by the figures of a v5e (197 TFLOP/s, 819 GB/s) the kernels
come out ahead up to about 4096 features and level beyond.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Annotated, Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.ops import Invocation, Supports

from ..dot import dot
from ..implementations import implementation_of
from ..limits import LANES, SUBLANES
from ..tpu_blocks import clear
from .arguments import Arguments, Sizes, same_dtype

# Finite, because -inf - -inf is NaN; its exponential is exactly zero all the same.
_MASKED = float(np.finfo(np.float32).min)


@dataclasses.dataclass(frozen=True)
class LinearCrossEntropyTpuConfig:
    """Blocks of logits: rows, multiples of 8, and words, multiples of 128.

    Args:
      block_m: rows, in the forward pass.
      block_n: words, in the forward pass.
      backward_block_m: rows, in both kernels of the backward pass.
      backward_block_n: words, in both kernels of the backward pass.
    """

    block_m: Annotated[int, SUBLANES] = 256
    block_n: Annotated[int, LANES] = 512
    backward_block_m: Annotated[int, SUBLANES] = 256
    backward_block_n: Annotated[int, LANES] = 256

    @classmethod
    def heuristic(cls, inv: Invocation[Any, Any]) -> Self:
        sizes = Sizes.of(inv)
        return cls(*_blocks(sizes, backward=False), *_blocks(sizes, backward=True))

    @classmethod
    def space(cls, inv: Invocation[Any, Any]) -> list[Self]:
        sizes, base = Sizes.of(inv), cls.heuristic(inv)
        configs = []
        for rows, words in itertools.product((128, 256, 512, 1024), (256, 512, 1024)):
            if rows * words * sizes.features > 2**29:
                continue  # it would compile for minutes
            if fits(rows, words, sizes, backward=False):
                configs.append(dataclasses.replace(base, block_m=rows, block_n=words))
            if fits(rows, words, sizes, backward=True):
                backward = {"backward_block_m": rows, "backward_block_n": words}
                configs.append(dataclasses.replace(base, **backward))
        return configs


def losses(
    call: Arguments, cfg: LinearCrossEntropyTpuConfig, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The loss of every row (0 where ignored), and its log-sum-exp."""
    from jax.experimental import pallas as pl

    grid = _Grid(call, cfg.block_m, cfg.block_n)
    inputs = grid.inputs()

    def body(*refs: Any) -> None:
        *given, lse_ref, linear_ref, largest_ref, total_ref = refs
        step = pl.program_id(1)
        block = _Block(grid, dict(zip(inputs, given, strict=True)), step)
        logits = block.logits()

        @pl.when(step == 0)
        def _() -> None:
            largest_ref[...] = jnp.full_like(largest_ref, _MASKED)
            total_ref[...] = jnp.zeros_like(total_ref)
            linear_ref[...] = jnp.zeros_like(linear_ref)

        masked = block.masked(logits, _MASKED)
        before = largest_ref[...]
        largest = jnp.maximum(before, jnp.max(masked, axis=1, keepdims=True))
        new = jnp.sum(jnp.exp(masked - largest), axis=1, keepdims=True)
        total_ref[...] = total_ref[...] * jnp.exp(before - largest) + new
        largest_ref[...] = largest
        share = jnp.where(block.is_label(), 1.0 - call.label_smoothing, 0.0)
        if call.label_smoothing:
            share = share + call.label_smoothing / call.words
        contributions = block.masked(share * logits, 0.0)
        linear_ref[...] += jnp.sum(contributions, axis=1, keepdims=True)

        @pl.when(step == grid.word_blocks - 1)
        def _() -> None:
            lse_ref[...] = largest_ref[...] + jnp.log(total_ref[...])

    column = jax.ShapeDtypeStruct((grid.padded_rows, 1), jnp.float32)
    lse, linear = grid.call(
        body,
        inputs,
        outputs={"rows_lse": column, "rows_linear": column},
        scratch=[(grid.block_m, 1), (grid.block_m, 1)],
        inner="words",
        name="linear_cross_entropy_forward",
        interpret=interpret,
    )
    rows, labels = call.hidden.shape[0], call.labels
    lse, linear = lse[:rows, 0], linear[:rows, 0]
    loss = lse - linear + (call.z_loss * lse * lse if call.z_loss else 0.0)
    loss = jnp.where((labels >= 0) & (labels < call.words), loss, jnp.nan)
    return jnp.where(labels == call.ignore_index, 0.0, loss), lse


def gradients(
    call: Arguments,
    lse: jax.Array,
    factors: jax.Array,
    cfg: LinearCrossEntropyTpuConfig,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Gradients of ``sum(factors * losses)`` for hidden, weight and bias.

    Args:
        lse: Second result of :func:`losses`.
        factors: ``(rows,)``; rows to be ignored are treated as if theirs were 0.
    """
    from jax.experimental import pallas as pl

    hidden, weight = call.hidden, call.weight
    grid = _Grid(call, cfg.backward_block_m, cfg.backward_block_n)
    factors = jnp.where(call.counts, factors.astype(jnp.float32), 0.0)
    inputs = grid.inputs() | {"rows_lse": grid.column(lse), "rows_factors": grid.column(factors)}

    def hidden_body(*refs: Any) -> None:
        *given, out_ref, sum_ref = refs
        step = pl.program_id(1)
        block = _Block(grid, dict(zip(inputs, given, strict=True)), step)
        clear(step == 0, sum_ref)
        gradient = block.gradient().astype(weight.dtype)
        # Beyond the vocabulary the weights are anything, and zero times anything may be NaN.
        words = block.masked(block.weight, 0, axis=call.words_axis)
        sum_ref[...] += dot(gradient, words, (1, call.words_axis))
        _finish(out_ref, sum_ref, step, grid.word_blocks)

    (dhidden,) = grid.call(
        hidden_body,
        inputs,
        outputs={"hidden": jax.ShapeDtypeStruct((grid.padded_rows, hidden.shape[1]), hidden.dtype)},
        scratch=[(grid.block_m, hidden.shape[1])],
        inner="words",
        name="linear_cross_entropy_dhidden",
        interpret=interpret,
    )

    def weight_body(*refs: Any) -> None:
        step = pl.program_id(1)
        block = _Block(grid, dict(zip(inputs, refs, strict=False)), pl.program_id(0))
        outputs = refs[len(inputs) :]
        sums = outputs[len(outputs) // 2 :]
        clear(step == 0, *sums)
        gradient = block.gradient()
        narrow = gradient.astype(hidden.dtype)
        left, right = (block.hidden, narrow) if call.words_axis else (narrow, block.hidden)
        sums[0][...] += dot(left, right, (0, 0))
        if call.bias is not None:
            sums[1][...] += jnp.sum(gradient, axis=0, keepdims=True)
        for out_ref, sum_ref in zip(outputs, sums, strict=False):
            _finish(out_ref, sum_ref, step, grid.row_blocks)

    outputs = {"weight": jax.ShapeDtypeStruct(weight.shape, weight.dtype)}
    scratch = [grid.weight_block]
    if call.bias is not None:
        outputs["bias"] = jax.ShapeDtypeStruct((1, call.words), jnp.float32)
        scratch.append((1, grid.block_n))
    dweight, *dbias = grid.call(
        weight_body,
        inputs,
        outputs=outputs,
        scratch=scratch,
        inner="rows",
        name="linear_cross_entropy_dweight",
        interpret=interpret,
    )
    return dhidden[: hidden.shape[0]], dweight, dbias[0][0] if dbias else None


class _Grid:
    """How rows and vocabulary are cut into blocks, and what a step of the grid reads and writes."""

    def __init__(self, call: Arguments, block_m: int, block_n: int) -> None:
        rows, features = call.hidden.shape
        self.arguments = call
        self.block_m = min(block_m, -(-rows // 8) * 8)
        self.block_n = min(block_n, call.words)
        self.row_blocks = -(-rows // self.block_m)
        self.word_blocks = -(-call.words // self.block_n)
        self.padded_rows = self.row_blocks * self.block_m
        weight_block = (self.block_n, features)
        self.weight_block = weight_block if call.vocab_first else weight_block[::-1]

    def column(self, values: jax.Array, fill: int = 0) -> jax.Array:
        """One number per row, as a matrix of one column, padded to whole blocks."""
        missing = self.padded_rows - values.shape[0]
        return jnp.pad(values, (0, missing), constant_values=fill)[:, None]

    def inputs(self) -> dict[str, jax.Array]:
        call = self.arguments
        missing = self.padded_rows - call.hidden.shape[0]
        labels = call.labels.astype(jnp.int32)
        given = {
            "hidden": jnp.pad(call.hidden, ((0, missing), (0, 0))) if missing else call.hidden,
            "weight": call.weight,
            "rows_labels": self.column(labels, call.ignore_index),
        }
        return given if call.bias is None else given | {"bias": call.bias[None, :]}

    def call(
        self,
        body: Any,
        inputs: dict[str, jax.Array],
        *,
        outputs: dict[str, jax.ShapeDtypeStruct],
        scratch: list[tuple[int, int]],
        inner: Literal["rows", "words"],
        name: str,
        interpret: bool,
    ) -> list[jax.Array]:
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import tpu as pltpu

        def spec(key: str) -> pl.BlockSpec:
            def index(outer: Any, inside: Any) -> tuple[Any, Any]:
                row, word = (outer, inside) if inner == "words" else (inside, outer)
                if key not in ("weight", "bias"):
                    return row, 0
                first = key == "weight" and self.arguments.vocab_first
                return (word, 0) if first else (0, word)

            shapes = {
                "hidden": (self.block_m, self.arguments.hidden.shape[1]),
                "weight": self.weight_block,
                "bias": (1, self.block_n),
            }
            return pl.BlockSpec(shapes.get(key, (self.block_m, 1)), index)

        blocks = (self.row_blocks, self.word_blocks)
        results: list[jax.Array] = pl.pallas_call(
            body,
            grid=blocks if inner == "words" else blocks[::-1],
            in_specs=[spec(key) for key in inputs],
            out_specs=[spec(key) for key in outputs],
            out_shape=list(outputs.values()),
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_vmem_limit()
            ),
            interpret=interpret,
            name=name,
        )(*inputs.values())
        return results


class _Block:
    """One block of logits, computed from what is in VMEM."""

    def __init__(self, grid: _Grid, refs: dict[str, Any], word_block: Any) -> None:
        self.grid, self.refs, self.arguments = grid, refs, grid.arguments
        self.first_word = word_block * grid.block_n
        self.hidden, self.weight = refs["hidden"][...], refs["weight"][...]

    def logits(self) -> jax.Array:
        products = dot(self.hidden, self.weight, (1, 1 - self.arguments.words_axis))
        bias = self.refs["bias"][...] if "bias" in self.refs else None
        return self.arguments.logits(products, bias)

    def words(self, shape: tuple[int, ...], axis: int) -> jax.Array:
        found: jax.Array = lax.broadcasted_iota(jnp.int32, shape, axis) + self.first_word
        return found

    def is_label(self) -> jax.Array:
        labels: jax.Array = self.refs["rows_labels"][...]
        return self.words((self.grid.block_m, self.grid.block_n), 1) == labels

    def masked(self, values: jax.Array, other: float, axis: int = 1) -> jax.Array:
        """`values` with what lies beyond the vocabulary replaced."""
        if self.arguments.words % self.grid.block_n == 0:
            return values
        real = self.words(values.shape, axis) < self.arguments.words
        return jnp.where(real, values, jnp.asarray(other, values.dtype))

    def gradient(self) -> jax.Array:
        """Gradient of the products, 0 beyond the vocabulary."""
        logits, lse = self.logits(), self.refs["rows_lse"][...]
        found = self.arguments.product_gradients(
            logits,
            jnp.exp(logits - lse),
            lse,
            self.is_label(),
            self.refs["rows_factors"][...],
        )
        return self.masked(found, 0.0)


def _finish(out_ref: Any, sum_ref: Any, step: Any, steps: int) -> None:
    from jax.experimental import pallas as pl

    @pl.when(step == steps - 1)
    def _() -> None:
        out_ref[...] = sum_ref[...].astype(out_ref.dtype)


def run(call: Arguments, cfg: LinearCrossEntropyTpuConfig, save: bool) -> tuple[jax.Array, Any]:
    """The loss, and the log-sum-exp of every row."""
    found, lse = losses(call, cfg)
    return call.reduced(found), lse


def backward(
    call: Arguments, cfg: LinearCrossEntropyTpuConfig, lse: jax.Array, dout: jax.Array
) -> tuple[Any, ...]:
    """The gradients, from logits that are computed again."""
    return call.gradients(*gradients(call, lse, call.row_gradients(dout), cfg))


def fits(rows: int, words: int, sizes: Sizes, *, backward: bool) -> bool:
    """Whether a block fits into VMEM, with an eighth left for what the compiler needs.

    It needs about: inputs twice, sums, the logits and what comes of them.
    """
    inputs = 2 * sizes.itemsize * sizes.features * (rows + words)
    logits = (4 if backward else 3) * 4 * rows * words
    largest = max(rows, words) * sizes.features
    sums = largest * (4 + 2 * sizes.itemsize) if backward else 0
    return inputs + logits + sums <= _vmem_limit() * 7 // 8


def _vmem_limit() -> int:
    """VMEM of a kernel: half of what the chip has, but the default of 16 MiB at least."""
    from jax.experimental.pallas import tpu as pltpu

    if not pltpu.is_tpu_device():  # lowered or interpreted elsewhere
        return 16 * 2**20
    capacity: int = pltpu.get_tpu_info().vmem_capacity_bytes
    return max(16 * 2**20, min(64 * 2**20, capacity // 2))


def _features_fit(inv: Invocation[Any, Any]) -> str | None:
    """Features of which 64 rows and 128 words fit into VMEM."""
    sizes = Sizes.of(inv)
    if fits(64, 128, sizes, backward=True):
        return None
    return f"hidden has {sizes.features} features; 64 rows and 128 words of them do not fit"


def _blocks(sizes: Sizes, *, backward: bool) -> tuple[int, int]:
    """Rows and words of a block: the largest that fits into VMEM, as square as may be.

    Beyond 512 of each the matrix unit is busy all the time, and only the compiler has more to do:
    it unrolls a block's products, and takes minutes for 512 x 512 x 4096.
    """
    fitting = [
        (rows, words)
        for rows in (512, 256, 128, 64)
        for words in (512, 256, 128)
        if fits(rows, words, sizes, backward=backward) and rows * words * sizes.features <= 2**28
    ]
    rows, words = max(fitting or [(64, 128)], key=lambda block: (min(block), sum(block)))
    return min(rows, -(-sizes.rows // 8) * 8), min(words, -(-sizes.vocab // 128) * 128)


PALLAS_TPU = implementation_of(
    Arguments.of,
    run,
    backward,
    name="pallas",
    devices=("tpu",),
    config=LinearCrossEntropyTpuConfig,
    supports=Supports(
        dtypes=("float32", "bfloat16"),
        without=("vocab_axes",),
        rules=(same_dtype, _features_fit),
    ),
)
