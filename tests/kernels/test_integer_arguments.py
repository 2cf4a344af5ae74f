"""Integer arguments of every dtype: group sizes, offsets, labels, segment ids.

Constants that are compared with them (the number of rows, the size of the vocabulary, an index to
be ignored) may be larger than their dtype holds.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.grouped_matmul.groups import row_spans
from ejkernel.modules import gated_linear_attention, grouped_matmul, linear_cross_entropy

DTYPES = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]


@pytest.fixture(autouse=True, params=DTYPES)
def dtype(request):
    with jax.enable_x64("64" in request.param):
        yield np.dtype(request.param)


def random(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def test_group_sizes_and_offsets(dtype):
    lhs, rhs = random(1000, 4), random(4, 4, 3)  # 1000 is more than 8 bits hold
    sizes = np.array([100, 0, 7, 120])
    expected = np.concatenate(
        [
            np.asarray(part @ matrix)
            for part, matrix in zip(
                np.split(np.asarray(lhs)[:227], np.cumsum(sizes)[:-1]), np.asarray(rhs), strict=True
            )
        ]
        + [np.zeros((773, 3))]
    )

    def both(lhs: Any, rhs: Any, sizes: Any, **options: Any) -> Any:
        out, pull_back = jax.vjp(lambda *a: grouped_matmul(*a, sizes, **options), lhs, rhs)
        return out, *pull_back(jnp.ones_like(out))

    given = jnp.asarray(sizes, dtype)
    found = jax.jit(both)(lhs, rhs, given)
    np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(found[1:], both(lhs, rhs, jnp.asarray(sizes, jnp.int32))[1:], strict=True):
        np.testing.assert_array_equal(a, b)
    existing = grouped_matmul(lhs, rhs, given, existing_out=jnp.ones((1000, 3)))
    assert (np.asarray(existing[227:]) == 1).all()
    for offset, rows in ((1, np.s_[100:107]), (2, np.s_[100:227])):
        part = jax.jit(
            lambda lhs, rhs, sizes, offset: grouped_matmul(lhs, rhs, sizes, group_offset=offset)
        )(lhs, rhs[offset : offset + 2], given, jnp.asarray(offset, dtype))
        np.testing.assert_allclose(part[rows], expected[rows], rtol=1e-5, atol=1e-5)


def test_sizes_that_are_too_large_or_negative(dtype):
    most = np.iinfo(dtype).max
    sizes = jnp.asarray(np.array([3, most, most], dtype))
    starts, ends = jax.jit(lambda sizes: row_spans(sizes, 100, 3))(sizes)
    assert starts.dtype == ends.dtype == jnp.int32
    assert (starts.tolist(), ends.tolist()) == ([0, 3, 100], [3, 100, 100])
    if dtype.kind == "i":
        _, ends = row_spans(jnp.asarray(np.array([np.iinfo(dtype).min, 3], dtype)), 100, 2)
        assert ends.tolist() == [0, 3]
    # The sum of four such sizes is zero in 32 bits.
    _, ends = row_spans(jnp.full(4, min(most, 2**30), dtype), 2**30, 4)
    assert ends.tolist() == np.minimum(np.arange(1, 5) * min(most, 2**30), 2**30).tolist()


@pytest.mark.parametrize("vocab", [50, 200, 300])
def test_labels(dtype, vocab):
    hidden, weight = random(40, 4), random(4, vocab)
    labels = np.random.default_rng(1).integers(0, min(vocab, np.iinfo(dtype).max + 1), 40)
    labels[:4] = 0, min(vocab, np.iinfo(dtype).max + 1) - 1, 44, 44  # -100 - 2**8 * n is 156
    if vocab > 156 and dtype != np.int8:
        labels[4] = 156
    logits = np.asarray(hidden, np.float64) @ np.asarray(weight, np.float64)
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(40), labels]

    def run(**options: Any) -> Any:
        given = jnp.asarray(labels.astype(dtype))
        return jax.jit(
            lambda hidden, labels: linear_cross_entropy(
                hidden, weight, labels, reduction="none", **options
            )
        )(hidden, given)

    np.testing.assert_allclose(run(), losses, rtol=1e-5)
    for ignored in (44, 0, 44 - 2**8, 44 + 2**16, -(2**31)):
        expected = np.where(labels == ignored, 0.0, losses)
        np.testing.assert_allclose(run(ignore_index=ignored), expected, rtol=1e-5)
    if dtype.kind == "i":
        labels[7] = -100
        assert run()[7] == 0.0
        assert np.isnan(run(ignore_index=-1)[7])
    if dtype.itemsize > 1:
        labels[8] = min(np.iinfo(dtype).max, 2**62)
        assert np.isnan(run()[8])


def test_segment_ids(dtype):
    q = random(1, 12, 1, 4)
    numbers = [3, 3, 3, 0, 0, np.iinfo(dtype).max, np.iinfo(dtype).max, 1, 1, 1, 3, 3]
    ids = np.array([numbers], dtype)
    if dtype.itemsize == 8:
        ids[0, 3:5] = 2**32 + 3  # differs from 3 in its upper half only
    found = gated_linear_attention(q, q, q, segment_ids=jnp.asarray(ids))
    expected = gated_linear_attention(
        q, q, q, segment_ids=jnp.asarray([[0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 4, 4]])
    )
    np.testing.assert_array_equal(found, expected)
