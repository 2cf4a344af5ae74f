"""Operations under JAX's settings: 64 bits, strict dtypes and ranks, checks for NaN."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
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

MODES: dict[str, Callable[[], list[Any]]] = {
    "strict": lambda: [jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise")],
    "strict x64": lambda: [*MODES["strict"](), jax.enable_x64(True)],
    "nans": lambda: [jax.debug_nans(True)],
}
TOLERANCES = {"float32": 3e-5, "float16": 2e-2, "bfloat16": 1e-1}


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of arrays of these shapes; `blocks` is a config that cuts them."""

    call: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    blocks: Any


LABELS = np.array([3, -100, 0, 20, 20, 7, 1, 2, 3, -100, 4, 5, 6])
SEGMENTS = np.repeat([0, 1, 2], [3, 4, 6])[None].repeat(2, 0)
NORM = NormXlaConfig(backward_block_m=4)
LOSS = LinearCrossEntropyXlaConfig(5, 5, 8)
CHUNKS = GatedLinearAttentionXlaConfig(chunk_size=4, backward_chunk_size=4)
UNIT = GatedLinearUnitXlaConfig(block_m=4, backward_block_m=4)
GROUPS = GroupedMatmulXlaConfig(8, 8, 8)
KEYS, VALUES = (2, 13, 2, 4), (2, 13, 2, 3)


def loss(reduction: str, **more: Any) -> Callable[..., Any]:
    def call(hidden: Any, weight: Any, bias: Any = None, **options: Any) -> Any:
        return linear_cross_entropy(
            hidden, weight, jnp.asarray(LABELS), bias=bias, reduction=reduction, **more, **options
        )

    return call


def groups(*sizes: int, **more: Any) -> Callable[..., Any]:
    def call(lhs: Any, rhs: Any, existing_out: Any = None, **options: Any) -> Any:
        if "group_offset" in more:
            options["group_offset"] = jnp.asarray(more["group_offset"])
        options["transpose_rhs"] = more.get("transpose_rhs", False)
        return grouped_matmul(lhs, rhs, jnp.asarray(sizes), existing_out=existing_out, **options)

    return call


def unit(activation: str) -> Callable[..., Any]:
    def call(x: Any, gate: Any, up: Any, b_gate: Any, b_up: Any, **options: Any) -> Any:
        return gated_linear_unit(
            x, gate, up, b_gate=b_gate, b_up=b_up, activation=activation, recompute=True, **options
        )

    return call


def linear_attention(q: Any, k: Any, v: Any, g: Any, state: Any, **options: Any) -> Any:
    return gated_linear_attention(
        q,
        k,
        v,
        -abs(g),
        initial_state=state,
        segment_ids=jnp.asarray(SEGMENTS),
        return_state=True,
        **options,
    )


CASES = {
    "rms_norm": Case(
        lambda x, w, r, **o: rms_norm(x, w, residual=r, weight_offset=1.0, **o),
        ((5, 3, 7), (7,), (5, 3, 7)),
        NORM,
    ),
    "layer_norm": Case(layer_norm, ((5, 3, 7), (7,), (7,)), NORM),
    "norm of rows alone": Case(rms_norm, ((15, 7),), NORM),
    "mean loss": Case(
        loss("mean", z_loss=0.01, label_smoothing=0.1, logits_soft_cap=5.0, softmax_scale=0.7),
        ((13, 6), (6, 21), (21,)),
        LOSS,
    ),
    "summed loss": Case(loss("sum", vocab_first=True), ((13, 6), (21, 6)), LOSS),
    "losses": Case(loss("none"), ((13, 6), (6, 21)), LOSS),
    "linear attention": Case(linear_attention, (KEYS, KEYS, VALUES, KEYS, (2, 2, 4, 3)), CHUNKS),
    "linear attention per head": Case(
        lambda q, k, v, g, **o: gated_linear_attention(q, k, v, -abs(g), **o),
        (KEYS, KEYS, VALUES, KEYS[:3]),
        CHUNKS,
    ),
    "linear attention without decay": Case(gated_linear_attention, (KEYS, KEYS, VALUES), CHUNKS),
    "groups": Case(groups(5, 0, 21, 7), ((40, 6), (4, 6, 5), (40, 5)), GROUPS),
    "groups of few rows": Case(
        groups(5, 0, 2, 7, transpose_rhs=True), ((20, 6), (4, 5, 6)), GROUPS
    ),
    "one group": Case(groups(5), ((20, 6), (1, 6, 5)), GROUPS),
    "some of the groups": Case(groups(5, 0, 2, 17, group_offset=2), ((40, 6), (2, 6, 5)), GROUPS),
    "both weights in one": Case(
        lambda x, w, b, **o: gated_linear_unit(x, w, b_gate=b, **o),
        ((3, 4, 6), (6, 2, 5), (2, 5)),
        UNIT,
    ),
} | {
    name: Case(unit(name), ((11, 6), (6, 5), (6, 5), (5,), (5,)), UNIT)
    for name in ("silu", "gelu", "gelu_tanh", "relu", "sigmoid", "identity")
}


def everything(case: Case, options: dict[str, Any]) -> Callable[..., Any]:
    """Results, and gradients of a loss that depends on all of them."""

    def total(arrays: Any) -> Any:
        results = case.call(*arrays, **options)
        parts = [jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in jax.tree.leaves(results)]
        return sum(parts[1:], parts[0]), results

    return jax.grad(total, has_aux=True)


def options_of(case: Case) -> dict[str, dict[str, Any]]:
    return {
        "default": {},
        "blocks": {"cfg": case.blocks},
        "reference": {"implementation": "reference"},
    }


@pytest.mark.parametrize("mode", ["strict", "strict x64"])
@pytest.mark.parametrize("name", CASES)
def test_traces_in_strict_modes(name: str, mode: str) -> None:
    case = CASES[name]
    with contextlib.ExitStack() as stack:
        for setting in MODES[mode]():
            stack.enter_context(setting)
        for dtype in ("bfloat16", "float64") if "x64" in mode else ("bfloat16", "float32"):
            arrays = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in case.shapes)
            for options in options_of(case).values():
                gradients, _ = jax.eval_shape(everything(case, options), arrays)
                assert all(g.dtype == dtype for g in jax.tree.leaves(gradients))


OTHERS = [("strict x64", "float32"), ("nans", "float16"), ("strict", "bfloat16")]


@pytest.mark.parametrize(
    ("name", "mode", "dtype"),
    # The modes take turns; `test_float64.py` has the one that is left.
    [(name, *OTHERS[i % len(OTHERS)]) for i, name in enumerate(CASES)],
)
def test_values_are_those_of_float64(name: str, mode: str, dtype: str) -> None:
    case = CASES[name]
    numbers = np.random.default_rng(0)
    given = [numbers.normal(size=shape) for shape in case.shapes]
    # The numbers that the dtype holds: what differs is the computation.
    given = [np.asarray(jnp.asarray(x, dtype), np.float64) for x in given]
    with jax.enable_x64(True):
        definition = everything(case, {"implementation": "reference"})
        wanted = jax.jit(definition)(tuple(map(jnp.asarray, given)))
        expected = [np.asarray(x) for x in jax.tree.leaves(wanted)]
    with contextlib.ExitStack() as stack:
        for setting in MODES[mode]():
            stack.enter_context(setting)
        arrays = tuple(jnp.asarray(x, dtype) for x in given)
        found = jax.tree.leaves(jax.jit(everything(case, {"cfg": case.blocks}))(arrays))
    for a, b in zip(found, expected, strict=True):
        limit = TOLERANCES[dtype] * max(1.0, np.abs(b).max())
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=0, atol=limit)


def test_mixed_dtypes_in_strict_mode() -> None:
    """Weights in float32 for activations in bfloat16, and the other way round, where accepted."""
    shape = jax.ShapeDtypeStruct
    calls: list[tuple[Callable[..., Any], list[tuple[int, ...]]]] = [
        (lambda x, w: rms_norm(x, w, weight_offset=1.0), [(5, 7), (7,)]),
        (layer_norm, [(5, 7), (7,), (7,)]),
        (loss("mean"), [(13, 6), (6, 21), (21,)]),
        (loss("none"), [(13, 6), (6, 21), (21,)]),
        (linear_attention, [KEYS, KEYS, VALUES, KEYS, (2, 2, 4, 3)]),
    ]
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for call, shapes in calls:
            for odd in range(len(shapes)):
                for one, other in (("bfloat16", "float32"), ("float32", "float16")):
                    arrays = [shape(s, other if i == odd else one) for i, s in enumerate(shapes)]
                    found, _ = jax.eval_shape(everything(Case(call, (), None), {}), tuple(arrays))
                    assert [g.dtype for g in found] == [a.dtype for a in arrays]


# --- the loss's own precision --------------------------------------------------------------------


def test_mean_of_float64_is_exact_to_float64() -> None:
    """Through a factor of 1/3 in float32 it would be wrong in the eighth digit."""
    numbers = np.random.default_rng(0)
    with jax.enable_x64(True):
        hidden, weight = (jnp.asarray(numbers.normal(size=s)) for s in ((3, 6), (6, 21)))
        labels = jnp.asarray([1, 2, 3])

        def both(reduction: str, scale: float) -> Any:
            def run(hidden: Any, weight: Any) -> Any:
                return linear_cross_entropy(hidden, weight, labels, reduction=reduction) * scale

            return jax.value_and_grad(run, argnums=(0, 1))(hidden, weight)

        for a, b in zip(
            jax.tree.leaves(both("mean", 1.0)), jax.tree.leaves(both("sum", 1 / 3)), strict=True
        ):
            assert a.dtype == jnp.float64
            np.testing.assert_allclose(a, b, rtol=1e-13)


@pytest.mark.parametrize("cfg", [None, LOSS], ids=["default", "blocks"])
def test_loss_scaling_of_float16(cfg: Any) -> None:
    """Small gradients, which float16 rounds to zero, are there when the loss is scaled."""
    numbers = np.random.default_rng(0)
    rows, features, vocab = 512, 8, 32
    hidden = jnp.asarray(numbers.normal(size=(rows, features)), jnp.float16)
    weight = jnp.asarray(1e-3 * numbers.normal(size=(features, vocab)), jnp.float16)
    labels = jnp.asarray(numbers.integers(0, vocab, rows))

    def gradient(dtype: Any, scale: float) -> np.ndarray:
        def scaled(hidden: Any) -> Any:
            return scale * linear_cross_entropy(hidden, weight.astype(dtype), labels, cfg=cfg)

        return np.asarray(jax.grad(scaled)(hidden.astype(dtype)), np.float64)

    found, expected = gradient(jnp.float16, 2.0**12), gradient(jnp.float32, 2.0**12)
    np.testing.assert_allclose(found, expected, rtol=5e-3, atol=3e-3 * np.abs(expected).max())


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_label_that_is_no_word_shows_in_loss_and_gradient(
    reduction: str, implementation: str
) -> None:
    hidden, weight = jnp.ones((5, 4)), jnp.ones((4, 10))
    for wrong in (10, -1, 1000, -101):
        labels = jnp.asarray([1, wrong, -100, 2, 3])

        def run(hidden: Any, weight: Any, labels: Any = labels) -> Any:
            return linear_cross_entropy(
                hidden, weight, labels, reduction=reduction, implementation=implementation
            )

        loss, pull_back = jax.vjp(run, hidden, weight)
        dhidden, dweight = pull_back(jnp.ones_like(loss))
        bad = np.array([False, True, False, False, False])
        np.testing.assert_array_equal(np.isnan(dhidden).all(1), bad)
        np.testing.assert_array_equal(np.isnan(dhidden).any(1), bad)
        assert np.isnan(dweight).all()
        np.testing.assert_array_equal(np.isnan(loss), bad if reduction == "none" else True)
        if reduction == "none" and implementation == "xla":
            # A row that the program leaves out leaves no trace.
            for part in pull_back(jnp.where(bad, 0.0, 1.0)):
                assert np.isfinite(part).all()
