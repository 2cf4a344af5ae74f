"""Tiles on the diagonal, cut into strips: the same values, and less work."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.flash_attention.options import Options
from ejkernel.kernels.flash_attention.reference import attention_reference
from ejkernel.kernels.flash_attention.xla.forward import forward
from ejkernel.kernels.flash_attention.xla.needed import strips, tiles_of


def arrays(
    q_len: int, k_len: int, heads: int = 2, kv_heads: int = 2, value_dim: int = 8
) -> list[jax.Array]:
    shapes = ((2, q_len, heads, 8), (2, k_len, kv_heads, 8), (2, k_len, kv_heads, value_dim))
    numbers = np.random.default_rng(q_len)
    return [jnp.asarray(numbers.standard_normal(shape), jnp.float32) for shape in shapes]


def cut(q: jax.Array, k: jax.Array, block_q: int, block_k: int, **options: Any) -> Any:
    tiles = tiles_of(q, k, block_q, block_k)
    return strips(tiles, Options(**{"causal": True, "softmax_scale": 0.3} | options))


def assert_right(inputs: list[jax.Array], block_q: int, block_k: int, **options: Any) -> None:
    options = {"causal": True, "softmax_scale": 0.3, **options}
    blocks = {"block_q": block_q, "block_k": block_k, "block_heads": 1}
    ours = jax.jit(partial(forward, options=Options(**options), **blocks))(*inputs)
    plain = attention_reference(*inputs, **options, return_lse=True)
    for name, x, y in zip(("out", "lse"), ours, plain, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(
    ("length", "block_q", "block_k", "heads", "value_dim"),
    [
        (600, 1024, 1024, (2, 2), 8),  # one block
        (1300, 700, 700, (2, 2), 8),  # earlier blocks are seen wholly
        (1300, 700, 350, (2, 2), 5),  # in smaller tiles than the one on the diagonal
        (1201, 700, 700, (2, 2), 8),  # with a position appended
        (600, 600, 600, (4, 1), 8),  # several heads share their keys
        (1202, 601, 601, (6, 2), 5),
    ],
)
def test_same_as_the_plain_formula(
    length: int, block_q: int, block_k: int, heads: tuple[int, int], value_dim: int
) -> None:
    inputs = arrays(length, length, *heads, value_dim)
    assert cut(inputs[0], inputs[1], block_q, block_k)
    assert_right(inputs, block_q, block_k)


@pytest.mark.parametrize("options", [{"logits_soft_cap": 2.0}, {"sinks": jnp.array([0.5, -1.0])}])
def test_with_what_does_not_hinder_cutting(options: dict[str, Any]) -> None:
    inputs = arrays(640, 640)
    assert cut(inputs[0], inputs[1], 640, 640, **options)
    assert_right(inputs, 640, 640, **options)


@pytest.mark.parametrize(
    ("lengths", "blocks", "options"),
    [
        ((1200, 1199), (600, 600), {}),  # the last query would see an appended key
        ((1199, 1200), (600, 600), None),  # here it sees only real ones
        ((640, 1280), (640, 640), {}),
        ((1280, 640), (640, 640), {}),
        ((1280, 1280), (640, 500), {}),  # blocks that do not divide
        ((1280, 1280), (640, 1), {}),
        ((640, 640), (640, 640), {"window": (100, None)}),
        ((640, 640), (640, 640), {"bias": jnp.ones((1, 1, 640, 640)).at[0, 0, 5].set(-jnp.inf)}),
        ((640, 640), (640, 640), {"mask": jnp.ones((1, 1, 640, 640), bool).at[..., 3].set(False)}),
        ((640, 640), (640, 640), {"kv_lengths": jnp.array([100, 600])}),
        ((640, 640), (640, 640), {"segment_ids": jnp.arange(1280).reshape(2, 640) // 100}),
        ((128, 128), (128, 128), {}),  # too small to be worth it
        ((1000, 1000), (500, 500), {}),
    ],
)
def test_where_tiles_are_not_cut(
    lengths: tuple[int, int], blocks: tuple[int, int], options: dict[str, Any] | None
) -> None:
    inputs = arrays(*lengths)
    assert (cut(inputs[0], inputs[1], *blocks, **(options or {})) is None) == (options is not None)
    if blocks[1] > 1:
        assert_right(inputs, *blocks, **(options or {}))


def test_strips_cover_all_queries_once() -> None:
    q = jnp.zeros((1, 1000, 1, 8))
    edges = cut(q, q, 1000, 1000)
    assert edges[0][0] == 0
    assert edges[-1][1] == 1000
    assert all(a[1] == b[0] for a, b in itertools.pairwise(edges))


def test_gradients_through_the_public_function() -> None:
    from ejkernel.modules import flash_attention

    inputs = arrays(700, 700)

    def loss(attention: Any, *args: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(attention(*args)))

    ours = partial(flash_attention, causal=True, softmax_scale=0.3, implementation="xla")
    plain = partial(attention_reference, causal=True, softmax_scale=0.3)
    got = jax.jit(jax.grad(partial(loss, ours), argnums=(0, 1, 2)))(*inputs)
    expected = jax.jit(jax.grad(partial(loss, plain), argnums=(0, 1, 2)))(*inputs)
    for name, x, y in zip(("dq", "dk", "dv"), got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5, err_msg=name)


def test_less_is_computed() -> None:
    inputs = arrays(1024, 1024)

    def operations(causal: bool) -> float:
        options = Options(causal, softmax_scale=0.3)
        run = partial(forward, options=options, block_q=1024, block_k=1024, block_heads=4)
        return jax.jit(run).lower(*inputs).compile().cost_analysis()["flops"]

    assert operations(True) < 0.75 * operations(False)
