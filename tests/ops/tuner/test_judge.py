"""Is a candidate right: the short way of comparing never says more than the long one."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies
from hypothesis.extra import numpy as arrays

from ejkernel.ops.tuner.judge import _clearly_equal, _numbers_differ, differs

SHAPES = arrays.array_shapes(min_dims=0, max_dims=3, max_side=6)


def numbers(dtype, shape):
    width = np.dtype(dtype).itemsize * 8
    return arrays.arrays(dtype, shape, elements=strategies.floats(width=width))


@hypothesis.given(strategies.data())
def test_what_is_clearly_equal_is_equal(data):
    dtype = data.draw(strategies.sampled_from([np.float32, np.float64]))
    shape = data.draw(SHAPES)
    wanted = data.draw(numbers(dtype, shape))
    noise = data.draw(arrays.arrays(dtype, shape, elements=strategies.floats(-2, 2, width=32)))
    with np.errstate(all="ignore"):
        got = wanted + np.asarray(noise * dtype(1e-3) * np.max(np.abs(wanted), initial=0), dtype)
    if _clearly_equal(got, wanted, 1e-3):
        wide = np.float64
        assert _numbers_differ(got.astype(wide), wanted.astype(wide), 1e-3) is None


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_an_odd_value_is_never_clearly_equal(odd):
    fine = np.ones((4, 4), np.float32)
    broken = fine.copy()
    broken[1, 2] = odd
    assert _clearly_equal(fine, fine, 1e-3)
    assert not _clearly_equal(broken, fine, 1e-3)
    assert not _clearly_equal(fine, broken, 1e-3)
    assert "NaN or infinite" in differs(broken, fine)
    assert differs(broken, broken) is None


def test_right_and_wrong():
    wanted = np.linspace(-1, 1, 1000, dtype=np.float32)
    assert differs(wanted * np.float32(1 + 1e-5), wanted) is None
    assert "largest error" in differs(np.zeros_like(wanted), wanted)
    assert "largest error" in differs(wanted + np.float32(0.01), wanted)
    assert differs(np.float32(3), np.float32(3)) is None
