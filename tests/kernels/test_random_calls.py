"""Random options, sizes and dtypes, beside the definition in float64: results and gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.gated_linear_attention import GatedLinearAttentionXlaConfig
from ejkernel.kernels.gated_linear_unit import GatedLinearUnitXlaConfig
from ejkernel.kernels.grouped_matmul import GroupedMatmulXlaConfig
from ejkernel.kernels.linear_cross_entropy import LinearCrossEntropyXlaConfig
from ejkernel.kernels.norm import NormXlaConfig
from ejkernel.modules import (
    gated_linear_attention,
    gated_linear_unit,
    grouped_matmul,
    layer_norm,
    linear_cross_entropy,
    rms_norm,
)

quick = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
TOLERANCES = {"float32": 1e-4, "float16": 3e-2, "bfloat16": 2e-1}
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32")
Call = tuple[Any, dict[str, np.ndarray], dict[str, Any], Any]


class Dice:
    def __init__(self, seed: int) -> None:
        self.numbers = np.random.default_rng(seed)

    def size(self, most: int) -> int:
        return int(self.numbers.integers(1, most + 1))

    def maybe(self) -> bool:
        return bool(self.numbers.integers(2))

    def one_of(self, *choices: Any) -> Any:
        return choices[self.numbers.integers(len(choices))]

    def array(self, *shape: int) -> np.ndarray:
        return self.numbers.normal(size=shape)


def norm(dice: Dice) -> Call:
    operation = dice.one_of(rms_norm, layer_norm)
    shape = (*(dice.size(5) for _ in range(dice.size(3))), dice.size(9) + 1)
    arrays = {"x": dice.array(*shape)}
    options: dict[str, Any] = {"eps": dice.one_of(1e-6, 1e-3, 1.0)}
    if dice.maybe():
        arrays["weight"] = dice.array(shape[-1])
        options["weight_offset"] = dice.one_of(0.0, 1.0)
    if dice.maybe():
        arrays["residual"] = dice.array(*shape)
    if operation is layer_norm and dice.maybe():
        arrays["bias"] = dice.array(shape[-1])
    return operation, arrays, options, NormXlaConfig(backward_block_m=dice.size(7))


def loss(dice: Dice) -> Call:
    rows, features, vocab = dice.size(20), dice.size(7), dice.size(120)
    dtype = dice.one_of(*INTEGERS)
    labels = dice.numbers.integers(0, vocab, rows)
    vocab_first = dice.maybe()
    options = {
        "labels": jnp.asarray(labels, dtype),
        "ignore_index": dice.one_of(-100, int(labels[0]), 255),
        "vocab_first": vocab_first,
        "label_smoothing": dice.one_of(0.0, 0.3),
        "logits_soft_cap": dice.one_of(None, 2.0),
        "z_loss": dice.one_of(0.0, 0.1),
        "softmax_scale": dice.one_of(1.0, 0.3, -2.0),
        "reduction": dice.one_of("mean", "sum", "none"),
    }
    arrays = {
        "hidden": dice.array(rows, features),
        "weight": dice.array(*((vocab, features) if vocab_first else (features, vocab))),
    }
    if dice.maybe():
        arrays["bias"] = dice.array(vocab)
    cfg = LinearCrossEntropyXlaConfig(dice.size(9), dice.size(9), dice.size(40))
    return linear_cross_entropy, arrays, options, cfg


def linear_attention(dice: Dice) -> Call:
    keys = (dice.size(2), dice.size(30), dice.size(3), dice.size(6))
    value_dim = dice.size(6)
    arrays = {"q": dice.array(*keys), "k": dice.array(*keys)}
    arrays["v"] = dice.array(*keys[:3], value_dim)
    if dice.maybe():
        strength = dice.one_of(0.01, 1.0, 20.0)
        arrays["g"] = -strength * np.abs(dice.array(*(keys if dice.maybe() else keys[:3])))
    if dice.maybe():
        arrays["initial_state"] = dice.array(keys[0], keys[2], keys[3], value_dim)
    options: dict[str, Any] = {"return_state": dice.maybe()}
    if dice.maybe():
        ids = np.cumsum(dice.numbers.integers(0, 6, keys[:2]) == 0, axis=1)
        options["segment_ids"] = jnp.asarray(ids, dice.one_of(*INTEGERS))
    size = dice.one_of(1, 1, 4, 16)
    cfg = GatedLinearAttentionXlaConfig(size, dice.size(4), size, dice.size(4))
    return gated_linear_attention, arrays, options, cfg


def grouped(dice: Dice) -> Call:
    rows, depth, columns, groups = dice.size(70), dice.size(6), dice.size(6), dice.size(5)
    sizes = dice.numbers.multinomial(dice.size(rows), np.full(groups, 1 / groups))
    transposed = dice.maybe()
    shape = (columns, depth) if transposed else (depth, columns)
    arrays = {"lhs": dice.array(rows, depth), "rhs": dice.array(groups, *shape)}
    if dice.maybe():
        arrays["existing_out"] = dice.array(rows, columns)
    options = {
        "group_sizes": jnp.asarray(sizes, dice.one_of(*INTEGERS)),
        "transpose_rhs": transposed,
        "precision": "highest",
    }
    blocks = (2 ** (2 + dice.size(4)) for _ in range(3))
    return grouped_matmul, arrays, options, GroupedMatmulXlaConfig(*blocks)


def unit(dice: Dice) -> Call:
    rows, depth, columns = dice.size(20), dice.size(6), dice.size(6)
    arrays = {"x": dice.array(rows, depth), "w_gate": dice.array(depth, columns)}
    arrays["w_up"] = dice.array(depth, columns)
    arrays |= {name: dice.array(columns) for name in ("b_gate", "b_up") if dice.maybe()}
    options = {
        "activation": dice.one_of("silu", "gelu", "gelu_tanh", "sigmoid", "identity"),
        "recompute": dice.maybe(),
    }
    cfg = GatedLinearUnitXlaConfig(block_m=dice.size(25), backward_block_m=dice.size(25))
    return gated_linear_unit, arrays, options, cfg


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("make", [norm, loss, linear_attention, grouped, unit])
def test_a_random_call(make: Any, seed: int) -> None:
    dice = Dice(seed)
    operation, arrays, options, cfg = make(dice)
    dtype = dice.one_of("float32", "float32", "float16", "bfloat16")
    arrays = {name: jnp.asarray(x, dtype) for name, x in arrays.items()}

    def both(arrays: dict[str, Any], **how: Any) -> Any:
        results, pull_back = jax.vjp(lambda arrays: operation(**arrays, **options, **how), arrays)
        return results, pull_back(jax.tree.map(jnp.ones_like, results))

    found = quick(partial(both, cfg=cfg))(arrays)
    with jax.enable_x64(True):
        exact = {name: jnp.asarray(np.asarray(x, np.float64)) for name, x in arrays.items()}
        expected = quick(partial(both, implementation="reference"))(exact)
    for (path, a), b in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        b = np.asarray(b, np.float64)
        assert np.isfinite(b).all(), path
        limit = TOLERANCES[dtype] * max(1.0, np.abs(b).max())
        message = f"{dtype} {path} {options}"
        np.testing.assert_allclose(
            np.asarray(a, np.float64), b, rtol=0, atol=limit, err_msg=message
        )
