"""The options of the loss that change its mathematics, and the mathematics that they change."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class LossOptions:
    """What is done with the products of hidden states and weights; see the reference."""

    vocab_first: bool = False
    ignore_index: int = -100
    label_smoothing: float = 0.0
    logits_soft_cap: float | None = None
    z_loss: float = 0.0
    softmax_scale: float = 1.0

    def logits(self, products: jax.Array, bias: jax.Array | None) -> jax.Array:
        """Logits from products; `bias` must broadcast to them."""
        if bias is not None:
            products = products + bias.astype(products.dtype)
        if self.softmax_scale != 1.0:
            products = products * self.softmax_scale
        if self.logits_soft_cap is not None:
            products = self.logits_soft_cap * jnp.tanh(products / self.logits_soft_cap)
        return products

    def loss(self, lse: jax.Array, picked: jax.Array, total: jax.Array, vocab: int) -> jax.Array:
        """Loss of rows: their log-sum-exp, the logit of the label, the sum of all logits."""
        loss = lse - (1.0 - self.label_smoothing) * picked
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
