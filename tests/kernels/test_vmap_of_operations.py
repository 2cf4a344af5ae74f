"""`vmap` over each argument alone, over all, and nested, beside a loop: results and gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.gated_linear_attention import GatedLinearAttentionXlaConfig
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

EXAMPLES = 3
quick = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
numbers = np.random.default_rng(0)


def random(*shape: int) -> np.ndarray:
    return numbers.normal(size=(EXAMPLES, *shape)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Case:
    """A call by keyword, and three examples of each of its arguments."""

    call: Callable[..., Any]
    arguments: dict[str, np.ndarray]


def segments(*lengths: tuple[int, ...]) -> np.ndarray:
    return np.stack([np.repeat(np.arange(len(row)), row)[None] for row in lengths])


KEYS = (1, 9, 2, 4)
TOKENS = {"q": random(*KEYS), "k": random(*KEYS), "v": random(1, 9, 2, 3)}
STATE = {"initial_state": random(1, 2, 4, 3)}
CHANNEL = {"g": -np.abs(random(*KEYS))}
HEAD = {"g": -np.abs(random(*KEYS[:3]))}
SEGMENTS = {"segment_ids": segments((3, 6), (9,), (1, 1, 7))}
LABELS = np.array([[1, -100, 3, 4, 5, 6, 7], [9, 8, 7, 6, -100, 4, 3], [1, 1, 1, 1, 1, 1, 1]])
LOSS = {"hidden": random(7, 4), "weight": random(4, 11), "bias": random(11), "labels": LABELS}
BLOCKS = LinearCrossEntropyXlaConfig(3, 3, 4)
GROUPS = {"lhs": random(40, 4), "rhs": random(3, 4, 5)}
SIZES = {"group_sizes": np.array([[10, 0, 30], [1, 2, 3], [0, 0, 0]])}
NORM = NormXlaConfig(backward_block_m=2)
CHUNKS = GatedLinearAttentionXlaConfig(chunk_size=4, backward_chunk_size=4)

CASES = {
    "rms_norm": Case(
        partial(rms_norm, cfg=NORM),
        {"x": random(5, 4), "weight": random(4), "residual": random(5, 4)},
    ),
    "layer_norm": Case(layer_norm, {"x": random(5, 4), "weight": random(4), "bias": random(4)}),
    "mean": Case(partial(linear_cross_entropy, z_loss=0.1), LOSS),
    "sum in blocks": Case(partial(linear_cross_entropy, reduction="sum", cfg=BLOCKS), LOSS),
    "losses": Case(partial(linear_cross_entropy, reduction="none", label_smoothing=0.1), LOSS),
    "linear attention": Case(
        partial(gated_linear_attention, return_state=True), TOKENS | CHANNEL | STATE | SEGMENTS
    ),
    "chunks": Case(
        partial(gated_linear_attention, return_state=True, cfg=CHUNKS), TOKENS | HEAD | SEGMENTS
    ),
    "groups": Case(grouped_matmul, GROUPS | SIZES | {"existing_out": random(40, 5)}),
    "some groups": Case(
        grouped_matmul,
        {"lhs": random(20, 4), "rhs": random(2, 4, 5)}
        | SIZES
        | {"group_offset": np.array([0, 1, 1])},
    ),
    "one group": Case(
        grouped_matmul,
        {"lhs": random(6, 4), "rhs": random(1, 4, 5), "group_sizes": np.array([[6], [2], [0]])},
    ),
    "gated unit": Case(
        gated_linear_unit,
        {
            "x": random(5, 4),
            "w_gate": random(4, 3),
            "w_up": random(4, 3),
            "b_gate": random(3),
            "b_up": random(3),
        },
    ),
    "computed again": Case(
        partial(gated_linear_unit, recompute=True), {"x": random(5, 4), "w_gate": random(4, 6)}
    ),
}


def everything(case: Case, integers: dict[str, Any], floats: dict[str, Any]) -> Any:
    """All results, and the gradients of a loss that depends on each."""

    def loss(floats: dict[str, Any]) -> Any:
        results = case.call(**floats, **integers)
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(results)), results

    return jax.grad(loss, has_aux=True)(floats)


@pytest.mark.parametrize("name", CASES)
def test_vmap_equals_a_loop(name: str) -> None:
    case = CASES[name]
    kinds = {key: x.dtype.kind for key, x in case.arguments.items()}

    def run(given: dict[str, Any]) -> Any:
        integers = {key: x for key, x in given.items() if kinds[key] == "i"}
        return everything(case, integers, {k: x for k, x in given.items() if kinds[k] != "i"})

    single = quick(run)
    first = {key: jnp.asarray(x[0]) for key, x in case.arguments.items()}
    keys = list(case.arguments)
    # Each alone, all together, and all but the first: what is not mapped is the first example.
    for mapped in ([key] for key in keys) if len(keys) > 1 else [keys]:
        compare(run, single, case, first, mapped)
    compare(run, single, case, first, keys)
    compare(run, single, case, first, keys[1:])


def compare(run: Any, single: Any, case: Case, first: dict[str, Any], mapped: list[str]) -> None:
    axes = {key: 0 if key in mapped else None for key in first}
    given = first | {key: jnp.asarray(case.arguments[key]) for key in mapped}
    found = quick(jax.vmap(run, in_axes=(axes,)))(given)
    for i in range(EXAMPLES):
        one = first | {key: jnp.asarray(case.arguments[key][i]) for key in mapped}
        for (path, expected), part in zip(
            jax.tree.leaves_with_path(single(one)), jax.tree.leaves(found), strict=True
        ):
            np.testing.assert_allclose(
                part[i], expected, rtol=2e-5, atol=2e-5, err_msg=f"{mapped} {path} example {i}"
            )


@pytest.mark.parametrize("name", ["rms_norm", "sum in blocks", "linear attention", "groups"])
def test_nested_vmap_over_different_arguments(name: str) -> None:
    """The outer map over the last argument, the inner one over the first two."""
    case = CASES[name]
    *_, outer = case.arguments
    inner = list(case.arguments)[:2]
    first = {key: jnp.asarray(x[0]) for key, x in case.arguments.items()}

    def run(given: dict[str, Any]) -> Any:
        return case.call(**given)

    def axes(mapped: list[str]) -> Any:
        return ({key: 0 if key in mapped else None for key in first},)

    both = jax.vmap(jax.vmap(run, in_axes=axes(inner)), in_axes=axes([outer]))
    given = first | {key: jnp.asarray(case.arguments[key]) for key in (outer, *inner)}
    found = quick(both)(given)
    single = quick(run)
    for i in range(EXAMPLES):
        for j in range(EXAMPLES):
            one = first | {outer: jnp.asarray(case.arguments[outer][i])}
            one |= {key: jnp.asarray(case.arguments[key][j]) for key in inner}
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(single(one)), strict=True):
                np.testing.assert_allclose(a[i, j], b, rtol=2e-5, atol=2e-5)
