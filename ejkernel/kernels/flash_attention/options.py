"""What a call of attention asks for in addition to its queries, keys and values."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from .scalars import Index

# Given one of these, what may be skipped differs between the examples of a batch.
BY_EXAMPLE = ("segment_ids", "q_lengths", "kv_lengths")

Window = tuple[int | None, int | None]

_FARTHEST = 2**30  # positions and their sums with a side of a window are int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Options:
    """The options of one call, under the names that users give them.

    Arrays are in the forms that `ejkernel.modules.flash_attention` brings them into: `bias` and
    `mask` with four axes, `window` a pair, `dropout_key` the `uint32` words of a key.

    The fields `first_*` say where the arrays at hand begin: in the whole sequence, where it is
    shared out to several devices, and in the whole batch, where it is sharded or worked off in
    slices.
    """

    causal: bool
    softmax_scale: float
    bias: jax.Array | None = None
    mask: jax.Array | None = None
    segment_ids: jax.Array | None = None
    kv_segment_ids: jax.Array | None = None
    window: Window | None = None
    logits_soft_cap: float | None = None
    sinks: jax.Array | None = None
    q_lengths: jax.Array | None = None
    kv_lengths: jax.Array | None = None
    dropout_rate: float = 0.0
    dropout_key: jax.Array | None = None
    sequence_axis: str | None = None
    first_query: Index = 0
    first_key: Index = 0
    first_example: Index = 0
    first_head: Index = 0

    def __post_init__(self) -> None:
        if self.segment_ids is not None and self.kv_segment_ids is None:
            object.__setattr__(self, "kv_segment_ids", self.segment_ids)
        if self.window is not None:
            sides = (None if side is None else min(side, _FARTHEST) for side in self.window)
            object.__setattr__(self, "window", tuple(sides))

    @property
    def band(self) -> Window:
        """How far back and how far ahead a query sees; None: without limit."""
        left, right = self.window or (None, None)
        return left, (0 if self.causal else right)

    @property
    def by_example(self) -> bool:
        """True if what may be skipped differs between the examples of a batch."""
        return any(getattr(self, name) is not None for name in BY_EXAMPLE)

    @property
    def hides_anywhere(self) -> bool:
        """True if every tile may hold scores that do not count."""
        return self.mask is not None or self.by_example or self.band[0] is not None

    @property
    def may_hide(self) -> bool:
        """True if there may be a query that does not see all keys."""
        return self.hides_anywhere or self.bias is not None or self.band[1] is not None

    def replace(self, **changes: Any) -> Options:
        """The same with some fields changed."""
        return dataclasses.replace(self, **changes)
