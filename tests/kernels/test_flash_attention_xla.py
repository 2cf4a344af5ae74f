"""The tiled attention against the naive one: values, every gradient, memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.flash_attention.options import Options
from ejkernel.kernels.flash_attention.passes import Results
from ejkernel.kernels.flash_attention.reference import attention_reference
from ejkernel.kernels.flash_attention.xla.backward import backward as xla_backward
from ejkernel.kernels.flash_attention.xla.blocks import default_blocks
from ejkernel.kernels.flash_attention.xla.forward import forward

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def flash(causal: bool, scale: float, block_q: int, block_k: int) -> Attention:
    """`forward` and `backward` joined, with different blocks in the two directions."""
    options = Options(causal, scale)
    ahead = {"block_q": block_q, "block_k": block_k}
    back = {"block_q": block_k, "block_k": block_q}

    @jax.custom_vjp
    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return forward(q, k, v, options, **ahead)[0]

    def save(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
        out, lse = forward(q, k, v, options, **ahead)
        return out, (q, k, v, out, lse)

    def pull_back(saved: Any, dout: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return xla_backward(Results(*saved, dout, None), options, **back)[:3]

    attention.defvjp(save, pull_back)
    return attention


def naive(causal: bool, scale: float) -> Attention:
    return lambda q, k, v: attention_reference(q, k, v, causal=causal, softmax_scale=scale)


def inputs(
    q_len: int,
    k_len: int,
    *,
    q_heads: int = 2,
    kv_heads: int = 2,
    head_dim: int = 8,
    value_dim: int = 8,
    dtype: Any = jnp.float32,
) -> list[jax.Array]:
    """q, k, v and a gradient of the output."""
    shapes = (
        (2, q_len, q_heads, head_dim),
        (2, k_len, kv_heads, head_dim),
        (2, k_len, kv_heads, value_dim),
        (2, q_len, q_heads, value_dim),
    )
    numbers = np.random.default_rng(q_len * 1000 + k_len)
    return [jnp.asarray(numbers.standard_normal(shape), dtype) for shape in shapes]


def value_and_gradients(
    attention: Attention, arrays: list[jax.Array], *, optimised: bool = False
) -> list[jax.Array]:
    """The output and dq, dk, dv. Most of a test is compiling, so that is kept short by default."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> list[jax.Array]:
        out, pull_back = jax.vjp(attention, q, k, v)
        return [out, *pull_back(dout)]

    options: Any = None if optimised else {"xla_backend_optimization_level": 0}
    return list(jax.jit(run, compiler_options=options)(*arrays))


def assert_same(got: list[jax.Array], expected: list[jax.Array], tolerance: float = 2e-5) -> None:
    for name, x, y in zip(("out", "dq", "dk", "dv"), got, expected, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype), name
        np.testing.assert_allclose(
            np.asarray(x, np.float32),
            np.asarray(y, np.float32),
            rtol=tolerance,
            atol=tolerance,
            err_msg=name,
        )


@pytest.mark.parametrize(
    ("q_len", "k_len", "block_q", "block_k", "causal"),
    [
        (1, 1, 512, 512, True),
        (1, 37, 8, 8, False),
        (2, 3, 1, 1, True),
        (64, 64, 16, 32, True),  # blocks divide
        (61, 61, 24, 7, False),  # tails in both directions
        (61, 61, 24, 7, True),
        (61, 61, 1000, 16, False),  # a block larger than the sequence
        (20, 75, 16, 16, True),  # many keys that nobody sees
        (75, 20, 16, 16, True),
    ],
)
def test_lengths_and_blocks(
    q_len: int, k_len: int, block_q: int, block_k: int, causal: bool
) -> None:
    arrays = inputs(q_len, k_len)
    got = value_and_gradients(flash(causal, 0.3, block_q, block_k), arrays)
    assert_same(got, value_and_gradients(naive(causal, 0.3), arrays))


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "value_dim", "causal"),
    [(4, 2, 8, True), (6, 1, 8, False), (2, 2, 5, True), (6, 2, 16, True)],
)
def test_heads(q_heads: int, kv_heads: int, value_dim: int, causal: bool) -> None:
    arrays = inputs(45, 51, q_heads=q_heads, kv_heads=kv_heads, value_dim=value_dim)
    got = value_and_gradients(flash(causal, 0.3, 16, 24), arrays)
    assert_same(got, value_and_gradients(naive(causal, 0.3), arrays))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_computed_in_float32(dtype: Any) -> None:
    arrays = inputs(45, 45, q_heads=4, dtype=dtype)
    got = value_and_gradients(flash(True, 0.3, 16, 16), arrays)
    expected = value_and_gradients(naive(True, 0.3), arrays)
    # Not closer than this: the flash gradients see `out` already rounded to half precision.
    assert_same(got, expected, tolerance=5 * float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize("causal", [False, True])
def test_default_blocks_agree_with_jax(causal: bool) -> None:
    arrays = inputs(300, 300, head_dim=32, value_dim=32)
    shape = (2, 300, 2, 32)
    block_q, block_k, _ = default_blocks(shape, shape, causal=causal, backward=False)
    ours = value_and_gradients(flash(causal, 32**-0.5, block_q, block_k), arrays, optimised=True)
    theirs = value_and_gradients(
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=causal), arrays
    )
    assert_same(ours, theirs)


def test_default_blocks_fit() -> None:
    flags, lengths = (False, True), itertools.product((1, 257, 777, 4096), (1, 300, 2048))
    more: list[dict[str, Any]] = [
        {"shares_out_batches": True},
        {"shares_out_batches": False},
        {"cut": False},
        {"by_example": True},
        {"window": (30, 30)},
    ]
    for (q_len, k_len), causal, backward, rest in itertools.product(lengths, flags, flags, more):
        q_shape, k_shape = (3, q_len, 8, 64), (3, k_len, 2, 64)
        blocks = default_blocks(q_shape, k_shape, causal=causal, backward=backward, **rest)
        assert 1 <= blocks.q <= q_len
        assert 1 <= blocks.k <= k_len
        assert 1 <= blocks.heads <= 6


@pytest.mark.parametrize("length", [256, 512, 1024])
def test_a_causal_tile_is_large_only_if_it_can_be_cut(length: int) -> None:
    shape = (1, length, 8, 64)
    blocks = partial(
        default_blocks, shape, shape, causal=True, backward=False, shares_out_batches=False
    )
    assert blocks()[:2] == (length, length)
    assert max(blocks(cut=False)[:2]) < length


def test_causal_tiles_are_small_where_a_batch_of_them_uses_all_cores() -> None:
    blocks = partial(default_blocks, causal=True, shares_out_batches=True)
    for backward in (False, True):
        long = blocks((1, 2048, 8, 64), (1, 2048, 8, 64), backward=backward)
        assert long == (256, 256, 8)
    assert blocks((8, 512, 8, 64), (8, 512, 8, 64), backward=True) == (128, 128, 8)


def test_log_sum_exp() -> None:
    q, k, v, _ = inputs(19, 23)
    run = partial(forward, options=Options(False, 0.3), block_q=8, block_k=8)
    _, lse = jax.jit(run)(q, k, v)
    scores = 0.3 * np.einsum("bqhd,bkhd->bhqk", q, k)
    assert lse.dtype == jnp.float32
    np.testing.assert_allclose(lse, np.log(np.exp(scores).sum(-1)), rtol=1e-5, atol=1e-5)


def test_large_scores_do_not_overflow() -> None:
    """Scores near -10000 in every row: padded keys, whose score is 0, must not take over."""
    q, k, v, dout = inputs(13, 13)
    q, k = jnp.asarray(np.abs(q) * 40), jnp.asarray(-np.abs(k) * 40)
    got = value_and_gradients(flash(False, 1.0, 5, 4), [q, k, v, dout])
    assert all(np.isfinite(x).all() for x in got)
    expected = value_and_gradients(naive(False, 1.0), [q, k, v, dout])
    assert_same(got, expected, tolerance=5e-3)


def test_no_keys_gives_zeros() -> None:
    q, k, v, dout = inputs(5, 0)
    for attention in (flash(False, 0.3, 4, 4), naive(False, 0.3)):
        out, dq, dk, dv = value_and_gradients(attention, [q, k, v, dout])
        assert not np.any(out)
        assert not np.any(dq)
        assert dk.size == dv.size == 0


def test_heads_that_do_not_divide_are_refused() -> None:
    q, k, v, _ = inputs(4, 4, q_heads=3, kv_heads=2)
    with pytest.raises(ValueError, match="3 query heads"):
        forward(q, k, v, Options(False, 1.0), block_q=4, block_k=4)


def test_vmap() -> None:
    arrays = [jnp.asarray(np.stack([x, 2 * x, -x])) for x in map(np.asarray, inputs(21, 21))]
    attention, expected = flash(True, 0.3, 8, 16), naive(True, 0.3)
    assert_same(
        value_and_gradients(jax.vmap(attention), arrays),
        value_and_gradients(jax.vmap(expected), arrays),
    )
    # With only the queries batched, the loops carry a mixture.
    shared = [arrays[0], arrays[1][0], arrays[2][0], arrays[3]]
    assert_same(
        value_and_gradients(jax.vmap(attention, (0, None, None)), shared),
        value_and_gradients(jax.vmap(expected, (0, None, None)), shared),
        tolerance=1e-4,
    )


def test_remat_inside_scan() -> None:
    def stack(attention: Attention) -> Attention:
        layer = jax.checkpoint(lambda x, k, v: x + attention(x, k, v))

        def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jax.lax.scan(lambda x, _: (layer(x, k, v), None), q, length=3)[0]

        return run

    arrays = inputs(21, 21)
    got = value_and_gradients(stack(flash(True, 0.3, 8, 16)), arrays)
    assert_same(got, value_and_gradients(stack(naive(True, 0.3)), arrays), tolerance=1e-4)


def test_shard_map_over_the_batch() -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    attention = flash(True, 0.3, 8, 16)
    mapped = jax.shard_map(attention, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    arrays = inputs(21, 21)
    assert_same(value_and_gradients(mapped, arrays), value_and_gradients(attention, arrays))


@pytest.mark.parametrize("causal", [False, True])
def test_memory_is_linear_in_the_sequence(causal: bool) -> None:
    """At S = 4096 the scores of one head would take 64 MiB; all temporaries together take less."""
    attention = flash(causal, 0.125, 256, 256)

    def run(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
        out, pull_back = jax.vjp(attention, q, k, v)
        return out, pull_back(dout)

    shape = jax.ShapeDtypeStruct((1, 4096, 1, 64), jnp.float32)
    memory = jax.jit(run).lower(*[shape] * 4).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 10 * 2**20
