"""The options of the loss that change its mathematics, and the mathematics that they change."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from ..arguments import LARGEST

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
class LossOptions:
    """What is done with the products of hidden states and weights; see the reference."""

    vocab_first: bool = False
    ignore_index: int = IGNORED
    label_smoothing: float = 0.0
    logits_soft_cap: float | None = None
    z_loss: float = 0.0
    softmax_scale: float = 1.0
    vocab_axes: tuple[str, ...] = ()
    """The mesh axes over which the vocabulary is sharded: a device has some of its words."""

    def over_vocabulary(self, values: jax.Array) -> jax.Array:
        """The sum over all parts of the vocabulary."""
        return jax.lax.psum(values, self.vocab_axes) if self.vocab_axes else values

    def vocabulary(self, here: int) -> int:
        """Words of the whole vocabulary, of which some are here."""
        return here * math.prod(map(jax.lax.axis_size, self.vocab_axes))

    def first_word(self, here: int) -> jax.Array | int:
        """The number of the first word here."""
        return jax.lax.axis_index(self.vocab_axes) * here if self.vocab_axes else 0

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
        self,
        log_sum: jax.Array,
        picked: jax.Array,
        total: jax.Array,
        vocab: int,
        lse: jax.Array,
    ) -> jax.Array:
        """Loss of rows, from their logits relative to any number.

        Args:
          log_sum: the logarithm of the sum of the exponentials of these.
          picked: that of the label.
          total: the sum of all.
          vocab: how many there are.
          lse: the logarithm of the sum of the exponentials of the logits themselves.
        """
        loss = log_sum - (1.0 - self.label_smoothing) * picked
        if self.label_smoothing:
            loss = loss - (self.label_smoothing / vocab) * total
        return loss + self.z_loss * lse * lse if self.z_loss else loss

    def product_gradients(
        self,
        logits: jax.Array,
        probabilities: jax.Array,
        lse: jax.Array,
        is_label: jax.Array,
        factors: jax.Array,
        vocab: int,
    ) -> jax.Array:
        """Gradient of the products; `factors` is the gradient of each row's loss.

        Args:
          logits: `(rows, some of the vocabulary)`.
          probabilities: their softmax.
          lse: `(rows, 1)`.
          is_label: where the column is the row's label.
          factors: `(rows, 1)`.
          vocab: size of the whole vocabulary.
        """
        steep = factors * (1.0 + 2.0 * self.z_loss * lse) if self.z_loss else factors
        gradient = probabilities * steep
        gradient = gradient - jnp.where(is_label, (1.0 - self.label_smoothing) * factors, 0.0)
        if self.label_smoothing:
            gradient = gradient - (self.label_smoothing / vocab) * factors
        if self.logits_soft_cap is not None:
            capped = logits / self.logits_soft_cap
            gradient = gradient * (1.0 - capped * capped)
        return gradient * self.softmax_scale if self.softmax_scale != 1.0 else gradient
