"""Scores that stand for keys that a query does not see.

Both are finite, because -inf - -inf is NaN, and below every score there may be. The maximum starts
above hidden scores, so that their exponential is exactly zero even in a row that has seen no key
yet.
"""

from __future__ import annotations

import numpy as np
from jax.typing import DTypeLike


def hidden_score(dtype: DTypeLike = np.float32) -> float:
    """The score of a key that is not seen."""
    return float(np.finfo(np.dtype(dtype)).min)


def lowest_maximum(dtype: DTypeLike = np.float32) -> float:
    """What the maximum of a row starts with."""
    return hidden_score(dtype) / 2
