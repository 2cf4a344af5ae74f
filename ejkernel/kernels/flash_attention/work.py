"""How many scores count, in calls as the tuner measures them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ejkernel.ops import Invocation

from .options import Options

SEGMENTS = 4
"""Of every sequence in the inputs of the tuner, if there are segments."""


def visible_pairs(inv: Invocation[Any, Any]) -> int:
    """Pairs of a query and a key that it sees, over the whole batch; of one head.

    What only the values of arrays say is as in the inputs of the tuner: sequences of full length, a
    mask that hides nothing, and some segments of equal length.
    """
    q, k, _ = inv.args
    batch, q_len, kv_len = q.shape[0], q.shape[1], k.shape[1]
    window = inv.kwargs.get("window")
    left, right = Options(bool(inv.kwargs.get("causal")), 1.0, window=window).band
    rows = np.arange(q_len)
    first = np.zeros(q_len, np.int64) if left is None else np.maximum(rows - left, 0)
    last = np.full(q_len, kv_len) if right is None else np.minimum(rows + right + 1, kv_len)
    if "segment_ids" in inv.kwargs:
        segment = rows * SEGMENTS // q_len
        # The keys of segment s: those for which key * SEGMENTS // kv_len is s.
        first = np.maximum(first, -(-segment * kv_len // SEGMENTS))
        last = np.minimum(last, -(-(segment + 1) * kv_len // SEGMENTS))
    return int(batch * np.maximum(last - first, 0).sum())
