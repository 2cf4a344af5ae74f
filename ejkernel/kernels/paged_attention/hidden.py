"""Scores that stand for keys that a query does not see.

Both are finite, because -inf - -inf is NaN, and below every score there may be. The maximum starts
above hidden scores, so that their exponential is exactly zero even in a row that has seen no key
yet.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def hidden_score(dtype: Any = np.float32) -> float:
    """The score of a key that is not seen; `dtype` is that of the sums."""
    return float(np.finfo(dtype).min)


def lowest_maximum(dtype: Any = np.float32) -> float:
    """What the maximum of a row starts with."""
    return hidden_score(dtype) / 2
