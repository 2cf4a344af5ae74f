"""What a call of the loss may look like: checked, and as implementations read it."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops import Invocation

from ..arguments import (
    checked_choice,
    checked_flag,
    checked_floating,
    checked_integer,
    checked_integers,
    checked_number,
    checked_soft_cap,
    refuse_empty,
)
from ..dtypes import accumulation_dtype
from .options import IGNORED, UNKNOWN, LossOptions

_NAME = "linear_cross_entropy"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """One call with all rows in one axis, and what is to be made of their losses."""

    hidden: jax.Array  # (rows, features)
    weight: jax.Array  # (features, vocabulary), or the other way round with `vocab_first`
    labels: jax.Array  # (rows,)
    bias: jax.Array | None  # (vocabulary,)
    options: LossOptions
    reduction: str
    row_axes: tuple[str, ...]  # mesh axes over which the rows are sharded
    shape: tuple[int, ...]  # of the labels as they were given

    @staticmethod
    def of(
        hidden: jax.Array,
        weight: jax.Array,
        labels: jax.Array,
        *,
        bias: jax.Array | None = None,
        reduction: str = "mean",
        row_axes: tuple[str, ...] = (),
        **options: Any,
    ) -> Arguments:
        """From the arguments of the kernel."""
        rows, flat = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        chosen = LossOptions(**options)
        # Sums over rows are products, and there a factor of zero does not hide NaN.
        rows = jnp.where((flat == chosen.ignore_index)[:, None], jnp.zeros_like(rows), rows)
        return Arguments(rows, weight, flat, bias, chosen, reduction, row_axes, labels.shape)

    @property
    def words_axis(self) -> int:
        """The axis of `weight` that has one entry per word."""
        return 0 if self.options.vocab_first else 1

    @property
    def words(self) -> int:
        """How many words are here: all of the vocabulary, unless it is sharded."""
        return self.weight.shape[self.words_axis]

    @property
    def counts(self) -> jax.Array:
        """Which rows count."""
        return self.labels != self.options.ignore_index

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
        known = (self.labels >= 0) & (self.labels < self.options.vocabulary(self.words))
        known |= ~self.counts | (factors == 0.0)
        return jnp.where(known, factors, jnp.nan)


class Sizes(NamedTuple):
    """What block sizes are chosen by."""

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
    hidden: Any,
    weight: Any,
    labels: Any,
    *,
    bias: Any,
    vocab_first: Any,
    ignore_index: Any,
    label_smoothing: Any,
    logits_soft_cap: Any,
    z_loss: Any,
    softmax_scale: Any,
    reduction: Any,
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], dict[str, Any]]:
    """The arguments and keywords of the kernel from those of a user; errors name what is wrong."""
    hidden = checked_floating(_NAME, "hidden", hidden)
    weight = checked_floating(_NAME, "weight", weight)
    labels = checked_integers(_NAME, "labels", labels)
    bias = None if bias is None else checked_floating(_NAME, "bias", bias)
    vocab_first = checked_flag(_NAME, "vocab_first", vocab_first)
    _check_shapes(hidden, weight, labels, bias, vocab_first)
    scale = checked_number(_NAME, "softmax_scale", softmax_scale)
    if scale == 0:
        raise ValueError(f"{_NAME}: softmax_scale={softmax_scale!r} must be finite and not 0")
    smoothing = checked_number(_NAME, "label_smoothing", label_smoothing, least=0, below=1)
    cap = None if logits_soft_cap is None else checked_soft_cap(_NAME, logits_soft_cap)
    options = {
        "bias": bias,
        "vocab_first": vocab_first or None,
        "label_smoothing": smoothing or None,
        "logits_soft_cap": cap,
        "z_loss": checked_number(_NAME, "z_loss", z_loss, least=0) or None,
        "softmax_scale": None if scale == 1.0 else scale,
        "reduction": checked_choice(_NAME, "reduction", reduction, ("mean", "sum", "none")),
    }
    ignored = checked_integer(_NAME, "ignore_index", ignore_index, least=-(2**31), most=2**31 - 1)
    known = _int32_labels(labels, ignored, weight.shape[0 if vocab_first else 1])
    given = {name: value for name, value in options.items() if value is not None}
    return (hidden, weight, known), given


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


def _check_shapes(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None,
    vocab_first: bool,
) -> None:
    layout = "(vocabulary, features)" if vocab_first else "(features, vocabulary)"
    if weight.ndim != 2:
        raise ValueError(f"{_NAME}: weight has shape {weight.shape}; it must be {layout}")
    for name, array in (("hidden", hidden), ("weight", weight), ("labels", labels)):
        refuse_empty(_NAME, name, array)
    features, vocab = weight.shape[::-1] if vocab_first else weight.shape
    if hidden.shape[-1:] != (features,):
        turned = hidden.shape[-1:] == (vocab,)
        hint = f"; is it the other way round (vocab_first={not vocab_first})?" if turned else ""
        raise ValueError(
            f"{_NAME}: hidden has shape {hidden.shape} and weight, {layout}, has shape "
            f"{weight.shape}; their features must be equal{hint}"
        )
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"{_NAME}: labels has shape {labels.shape}; for hidden of shape {hidden.shape} "
            f"it must be {hidden.shape[:-1]}, one label per row"
        )
    if bias is not None and bias.shape != (vocab,):
        raise ValueError(
            f"{_NAME}: bias has shape {bias.shape}; it must be {(vocab,)}, one number per word"
        )
