"""Blocks of arrays in loops: as any other slice, and never by way of the whole array."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ejkernel.kernels.slicing import put, put_in_dim, take_in_dim, take_rows

DTYPES = ["float32", "bfloat16", "float16"]


def numbers(shape, dtype, seed=0):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [0, 1])
def test_blocks_are_taken_and_put(dtype, axis):
    x, part = numbers((6, 8), dtype), numbers((6, 8), dtype, 1)[:2, :2]
    part = jnp.broadcast_to(part[:1, :1], (2, 8) if axis == 0 else (6, 2))
    for start in (1, jnp.int32(1)):
        taken = take_in_dim(x, start, 2, axis)
        np.testing.assert_array_equal(taken, lax.dynamic_slice_in_dim(x, 1, 2, axis))
        found = put_in_dim(x, part, start, axis)
        np.testing.assert_array_equal(found, lax.dynamic_update_slice_in_dim(x, part, 1, axis))
    np.testing.assert_array_equal(take_rows(x, jnp.array([4, 0, 4])), x[jnp.array([4, 0, 4])])
    corner = put(x, part[:1, :1], (jnp.int32(5), 7))
    np.testing.assert_array_equal(corner, x.at[5, 7].set(part[0, 0]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_derivatives_pass(dtype):
    """Bits have none: without a rule of their own they would be zeros, without a word."""
    x, part, weights = numbers((6, 3), dtype), numbers((2, 3), dtype, 1), numbers((6, 3), dtype, 2)

    def ours(x, part, start):
        changed = put_in_dim(x, part * part, start)
        chosen = take_rows(changed, jnp.array([3, 3, 2, 0]))
        return jnp.sum((changed * weights)[:4] * take_in_dim(changed, start, 4) * chosen)

    def theirs(x, part, start):
        changed = lax.dynamic_update_slice_in_dim(x, part * part, start, 0)
        chosen = changed[jnp.array([3, 3, 2, 0])]
        taken = lax.dynamic_slice_in_dim(changed, start, 4)
        return jnp.sum((changed * weights)[:4] * taken * chosen)

    start = jnp.int32(2)
    for transform in (
        lambda f: jax.jit(jax.grad(f, (0, 1))),
        lambda f: jax.jit(jax.jacfwd(f, (0, 1))),
        lambda f: jax.jit(jax.hessian(f, 1)),
    ):
        for mine, other in zip(
            jax.tree.leaves(transform(ours)(x, part, start)),
            jax.tree.leaves(transform(theirs)(x, part, start)),
            strict=True,
        ):
            assert np.any(np.asarray(other, np.float32))
            np.testing.assert_allclose(
                np.asarray(mine, np.float32), np.asarray(other, np.float32), rtol=2e-2, atol=1e-2
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_batched_starts(dtype):
    x, part, starts = numbers((4, 6), dtype), numbers((4, 2), dtype, 1), jnp.arange(4)
    found = jax.vmap(put_in_dim)(x, part, starts)
    for row in range(4):
        np.testing.assert_array_equal(found[row], put_in_dim(x[row], part[row], row))
    taken = jax.vmap(lambda x, start: take_in_dim(x, start, 2))(found, starts)
    np.testing.assert_array_equal(taken, part)


def test_a_loop_never_converts_the_whole_array():
    def doubled(x):
        def body(i, out):
            return put_in_dim(out, take_in_dim(x, i * 8, 8) * 2, i * 8)

        return lax.fori_loop(0, 64, body, jnp.zeros_like(x))

    x = numbers((512, 33), jnp.bfloat16)
    compiled = jax.jit(doubled).lower(x).compile()
    np.testing.assert_array_equal(compiled(x), x * 2)
    assert "f32[8,33]" in compiled.as_text()  # blocks are computed with in float32
    assert "f32[512,33]" not in compiled.as_text()


def test_nor_do_gathered_rows():
    def added(x, table):
        return lax.fori_loop(
            0, 8, lambda i, total: total + take_rows(x, table[i]), jnp.zeros_like(x[:4])
        )

    x, table = numbers((512, 33), jnp.bfloat16), jnp.arange(32).reshape(8, 4) * 16
    compiled = jax.jit(added).lower(x, table).compile()
    wanted = np.asarray(x, np.float32)[np.asarray(table)].sum(0)
    np.testing.assert_allclose(np.asarray(compiled(x, table), np.float32), wanted, atol=0.05)
    assert "f32[512,33]" not in compiled.as_text()
