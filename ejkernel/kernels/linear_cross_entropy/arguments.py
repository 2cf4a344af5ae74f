"""What a call of the loss may look like: checked, and as implementations read it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops import Invocation

from ..arguments import (
    LARGEST,
    check_axes,
    checked_choice,
    checked_flag,
    checked_floating,
    checked_integer,
    checked_integers,
    checked_number,
    checked_soft_cap,
)
from ..dtypes import accumulation_dtype

_NAME = "linear_cross_entropy"
REDUCTIONS = ("mean", "sum", "none")

IGNORED = -100
"""The label of rows that count for nothing, unless a call says otherwise."""

UNKNOWN = -1
"""What `ejkernel.modules` makes of a label that is not in the vocabulary."""


def scale_below_cap(softmax_scale: float, logits_soft_cap: float) -> float:
    """What products are multiplied with before the hyperbolic tangent; finite in float32.

    A compiler makes one constant of two, and an infinite one would make NaN of a product of zero.
    """
    return max(-LARGEST, min(LARGEST, softmax_scale / logits_soft_cap))


@dataclasses.dataclass(frozen=True)
class Arguments:
    """One call with all rows in one axis, and the mathematics that its options change."""

    hidden: jax.Array  # (rows, features)
    weight: jax.Array  # (features, vocabulary), or the other way round with `vocab_first`
    labels: jax.Array  # (rows,)
    bias: jax.Array | None  # (vocabulary,)
    shape: tuple[int, ...]  # of the labels as they were given
    reduction: str = "mean"
    vocab_first: bool = False
    ignore_index: int = IGNORED
    label_smoothing: float = 0.0
    logits_soft_cap: float | None = None
    z_loss: float = 0.0
    softmax_scale: float = 1.0
    row_axes: tuple[str, ...] = ()  # mesh axes over which the rows are sharded
    vocab_axes: tuple[str, ...] = ()  # and the vocabulary: a device has some of its words

    @staticmethod
    def of(hidden: Any, weight: Any, labels: Any, *, bias: Any = None, **options: Any) -> Arguments:
        """From the arguments of the kernel."""
        rows, flat = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        ignored = flat == options.get("ignore_index", IGNORED)
        # Sums over rows are products, and there a factor of zero does not hide NaN.
        rows = jnp.where(ignored[:, None], jnp.zeros_like(rows), rows)
        return Arguments(rows, weight, flat, bias, labels.shape, **options)

    @property
    def words_axis(self) -> int:
        """The axis of `weight` that has one entry per word."""
        return 0 if self.vocab_first else 1

    @property
    def words(self) -> int:
        """How many words are here: all of the vocabulary, unless it is sharded."""
        return self.weight.shape[self.words_axis]

    @property
    def counts(self) -> jax.Array:
        """Which rows count."""
        return self.labels != self.ignore_index

    def share(self) -> jax.Array:
        """What the sum of all losses is multiplied with; in the dtype of the losses."""
        dtype = accumulation_dtype(self.hidden.dtype)
        if self.reduction != "mean":
            return jnp.ones((), dtype)
        counted = self._over_rows(jnp.sum(self.counts, dtype=jnp.int32))
        return 1.0 / jnp.maximum(counted, 1).astype(dtype)

    def reduced(self, losses: jax.Array) -> jax.Array:
        """What the call gives, from the losses of its rows."""
        if self.reduction == "none":
            return losses.reshape(self.shape)
        # A row that is ignored has the loss 0; a loss that is NaN shows.
        return self._over_rows(jnp.sum(losses)) * self.share()

    def sum_gradients(self) -> jax.Array:
        """The gradient of each row's loss, if the losses are added up."""
        return self._checked(self.counts.astype(accumulation_dtype(self.hidden.dtype)))

    def row_gradients(self, dout: jax.Array) -> jax.Array:
        """The gradient of each row's loss."""
        if self.reduction == "none":
            return self._checked(dout.reshape(-1))
        return self.sum_gradients() * (dout * self.share())

    def gradients(
        self, dhidden: jax.Array, dweight: jax.Array, dbias: jax.Array | None
    ) -> tuple[Any, ...]:
        """In the order that the framework asks for; labels have none."""
        by_keyword = {} if self.bias is None else {"bias": dbias}
        return dhidden.reshape(*self.shape, -1), dweight, None, by_keyword

    def _over_rows(self, value: jax.Array) -> jax.Array:
        """The sum over the devices that have other rows."""
        return jax.lax.psum(value, self.row_axes) if self.row_axes else value

    def _checked(self, factors: jax.Array) -> jax.Array:
        """The factors, NaN for rows whose loss is NaN because there is no such word."""
        known = (self.labels >= 0) & (self.labels < self.vocabulary)
        known |= ~self.counts | (factors == 0.0)
        return jnp.where(known, factors, jnp.nan)

    def over_vocabulary(self, values: jax.Array) -> jax.Array:
        """The sum over all parts of the vocabulary."""
        return jax.lax.psum(values, self.vocab_axes) if self.vocab_axes else values

    @property
    def vocabulary(self) -> int:
        """Words of the whole vocabulary, of which some are here."""
        return self.words * math.prod(map(jax.lax.axis_size, self.vocab_axes))

    @property
    def first_word(self) -> jax.Array | int:
        """The number of the first word here."""
        return jax.lax.axis_index(self.vocab_axes) * self.words if self.vocab_axes else 0

    @property
    def factor(self) -> float:
        """What the logits are, times `unscaled`."""
        return self.softmax_scale if self.logits_soft_cap is None else self.logits_soft_cap

    def unscaled(self, products: jax.Array, bias: jax.Array | None) -> jax.Array:
        """Logits before the last multiplication; `bias` must broadcast to the products."""
        if bias is not None:
            products = products + bias.astype(products.dtype)
        if self.logits_soft_cap is None:
            return products
        return jnp.tanh(products * scale_below_cap(self.softmax_scale, self.logits_soft_cap))

    def scaled(self, unscaled: jax.Array) -> jax.Array:
        """That multiplication; of differences too."""
        return unscaled if self.factor == 1.0 else unscaled * self.factor

    def logits(self, products: jax.Array, bias: jax.Array | None) -> jax.Array:
        """Logits from products; `bias` must broadcast to them."""
        return self.scaled(self.unscaled(products, bias))

    def loss(
        self, log_sum: jax.Array, picked: jax.Array, total: jax.Array, lse: jax.Array
    ) -> jax.Array:
        """Loss of rows, from their logits relative to any number.

        Args:
          log_sum: the logarithm of the sum of the exponentials of these.
          picked: that of the label.
          total: the sum of all.
          lse: the logarithm of the sum of the exponentials of the logits themselves.
        """
        loss = log_sum - (1.0 - self.label_smoothing) * picked
        if self.label_smoothing:
            loss = loss - (self.label_smoothing / self.vocabulary) * total
        return loss + self.z_loss * lse * lse if self.z_loss else loss

    def product_gradients(
        self,
        logits: jax.Array,
        probabilities: jax.Array,
        lse: jax.Array,
        is_label: jax.Array,
        factors: jax.Array,
    ) -> jax.Array:
        """Gradient of the products; `factors` is the gradient of each row's loss.

        Args:
          logits: `(rows, some of the vocabulary)`.
          probabilities: their softmax.
          lse: `(rows, 1)`.
          is_label: where the column is the row's label.
          factors: `(rows, 1)`.
        """
        steep = factors * (1.0 + 2.0 * self.z_loss * lse) if self.z_loss else factors
        gradient = probabilities * steep
        gradient = gradient - jnp.where(is_label, (1.0 - self.label_smoothing) * factors, 0.0)
        if self.label_smoothing:
            gradient = gradient - (self.label_smoothing / self.vocabulary) * factors
        if self.logits_soft_cap is not None:
            capped = logits / self.logits_soft_cap
            gradient = gradient * (1.0 - capped * capped)
        return gradient * self.softmax_scale if self.softmax_scale != 1.0 else gradient


class Sizes(NamedTuple):
    """The sizes of a call that its blocks are chosen by."""

    rows: int
    features: int
    vocab: int
    itemsize: int

    @staticmethod
    def of(inv: Invocation[Any, Any]) -> Sizes:
        hidden, weight, _ = inv.args
        vocab = weight.shape[0 if inv.kwargs.get("vocab_first") else 1]
        features = hidden.shape[-1]
        return Sizes(hidden.size // features, features, vocab, hidden.dtype.itemsize)


def same_dtype(inv: Invocation[Any, Any]) -> str | None:
    """Hidden and weight of one dtype."""
    hidden, weight, _ = inv.args
    if hidden.dtype == weight.dtype:
        return None
    return f"hidden is {hidden.dtype} and weight is {weight.dtype}; they must be the same"


def checked(
    hidden: Any, weight: Any, labels: Any, bias: Any, **given: Any
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], dict[str, Any]]:
    """The arguments and keywords of the kernel from those of a user; errors name what is wrong."""
    hidden = checked_floating(_NAME, "hidden", hidden)
    weight = checked_floating(_NAME, "weight", weight)
    labels = checked_integers(_NAME, "labels", labels)
    bias = None if bias is None else checked_floating(_NAME, "bias", bias)
    vocab_first = checked_flag(_NAME, "vocab_first", given["vocab_first"])
    _check_shapes(hidden, weight, labels, bias, vocab_first)
    scale = checked_number(_NAME, "softmax_scale", given["softmax_scale"])
    if scale == 0:
        raise ValueError(f"{_NAME}: softmax_scale={scale!r} must be finite and not 0")
    cap = given["logits_soft_cap"]
    smoothing = checked_number(_NAME, "label_smoothing", given["label_smoothing"], least=0, below=1)
    options = {
        "bias": bias,
        "vocab_first": vocab_first or None,
        "label_smoothing": smoothing or None,
        "logits_soft_cap": None if cap is None else checked_soft_cap(_NAME, cap),
        "z_loss": checked_number(_NAME, "z_loss", given["z_loss"], least=0) or None,
        "softmax_scale": None if scale == 1.0 else scale,
        "reduction": checked_choice(_NAME, "reduction", given["reduction"], REDUCTIONS),
    }
    bounds = {"least": -(2**31), "most": 2**31 - 1}
    ignored = checked_integer(_NAME, "ignore_index", given["ignore_index"], **bounds)
    known = _int32_labels(labels, ignored, weight.shape[0 if vocab_first else 1])
    return (hidden, weight, known), {n: value for n, value in options.items() if value is not None}


def _int32_labels(labels: jax.Array, ignore_index: int, vocab: int) -> jax.Array:
    """Labels as kernels read them, whatever their dtype: those to be ignored are `IGNORED`.

    `ignore_index` and the size of the vocabulary need not fit into the dtype of the labels: -100 as
    a uint8 is 156, which may be a word.
    """
    wide = labels.astype(jnp.int32) if labels.dtype.itemsize < 4 else labels
    limits = np.iinfo(wide.dtype)
    in_vocabulary = (wide >= 0) & (wide <= min(vocab - 1, int(limits.max)))
    numbers = jnp.where(in_vocabulary, wide, 0).astype(jnp.int32)
    found = jnp.where(in_vocabulary, numbers, jnp.int32(UNKNOWN))
    if not limits.min <= ignore_index <= limits.max:
        return found  # no label is this number
    return jnp.where(wide == ignore_index, jnp.int32(IGNORED), found)


def _check_shapes(hidden: Any, weight: Any, labels: Any, bias: Any, vocab_first: bool) -> None:
    layout = "vocabulary features" if vocab_first else "features vocabulary"
    vocab = weight.shape[:1] if vocab_first else weight.shape[1:]
    turned = hidden.shape[-1:] == vocab and vocab * 2 != weight.shape
    hint = f"; is it the other way round (vocab_first={not vocab_first})?" if turned else ""
    arrays = {
        "hidden": (hidden, "... features"),
        "weight": (weight, layout),
        "labels": (labels, "..."),
        **({} if bias is None else {"bias": (bias, "vocabulary")}),
    }
    check_axes(_NAME, arrays, advice=hint)
