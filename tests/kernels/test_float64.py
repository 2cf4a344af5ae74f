"""Float64 in, float64 all the way: results and every gradient, whatever the options.

The definitions are compared with NumPy; the fast versions with the definitions, whole and cut into
blocks. Kernels of accelerators, which have no float64, refuse it, so that such calls find another.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy_definitions
import pytest
from config_calls import CALLS, kernel_of

from ejkernel import modules
from ejkernel.kernels.gated_linear_attention import GatedLinearAttentionXlaConfig
from ejkernel.kernels.gated_linear_unit import GatedLinearUnitXlaConfig
from ejkernel.kernels.grouped_matmul import GroupedMatmulXlaConfig
from ejkernel.kernels.linear_cross_entropy import LinearCrossEntropyXlaConfig
from ejkernel.kernels.norm import NormXlaConfig
from ejkernel.kernels.paged_attention import (
    PagedAttentionXlaConfig,
    RaggedPagedAttentionXlaConfig,
)

quick = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

KEYS, VALUES = (2, 13, 2, 4), (2, 13, 2, 3)
LINEAR_ATTENTION = {"q": KEYS, "k": KEYS, "v": VALUES}
PAGES = {"q": (3, 2, 4, 8), "k_pages": (7, 3, 2, 8), "v_pages": (7, 3, 2, 5)}
UNIT = {"x": (11, 6), "w_gate": (6, 5), "w_up": (6, 5)}
LOSS = {"hidden": (13, 6), "weight": (6, 21), "bias": (21,)}
NORM = {"x": (5, 3, 7), "weight": (7,)}

SEGMENTS = np.repeat([[0, 1, 2]], [3, 4, 6], axis=1).repeat(2, 0)
FIXED: dict[str, dict[str, Any]] = {
    "paged_attention": {
        "page_table": np.array([[3, 1, 2, 0], [6, 0, 5, 1], [4, 4, 2, 2]], np.int32),
        "lengths": np.array([4, 12, 1], np.int32),
    },
    "ragged_paged_attention": {
        "page_table": np.array([[3, 1, 2, 0], [6, 0, 5, 1], [4, 4, 2, 2]], np.int32),
        "lengths": np.array([4, 12, 1], np.int32),
        "query_starts": np.array([0, 1, 6, 7], np.int32),
    },
    "linear_cross_entropy": {
        "labels": np.array([3, -100, 0, 20, 20, 7, 1, 2, 3, -100, 4, 5, 6], np.int32)
    },
    "grouped_matmul": {"group_sizes": np.array([5, 0, 21, 7], np.int32)},
}
BLOCKS: dict[str, Any] = {
    "rms_norm": NormXlaConfig(backward_block_m=4),
    "layer_norm": NormXlaConfig(backward_block_m=4),
    "gated_linear_unit": GatedLinearUnitXlaConfig(block_m=4, backward_block_m=4),
    "grouped_matmul": GroupedMatmulXlaConfig(8, 8, 8),
    "linear_cross_entropy": LinearCrossEntropyXlaConfig(5, 5, 8),
    "gated_linear_attention": GatedLinearAttentionXlaConfig(chunk_size=4, backward_chunk_size=4),
    "paged_attention": PagedAttentionXlaConfig(pages_per_step=1),
    "ragged_paged_attention": RaggedPagedAttentionXlaConfig(block_q=2, pages_per_step=1),
}

# An operation, the shapes of its floating arrays, its options.
WALK: list[tuple[str, dict[str, tuple[int, ...]], dict[str, Any]]] = [
    ("rms_norm", {"x": (15, 7)}, {}),
    ("rms_norm", NORM | {"residual": NORM["x"]}, {"weight_offset": 0.1, "eps": 1e-3}),
    ("layer_norm", NORM, {"weight_offset": 1.0}),
    ("layer_norm", NORM | {"bias": (7,), "residual": NORM["x"]}, {}),
    *(
        ("gated_linear_unit", UNIT | {"b_gate": (5,), "b_up": (5,)}, {"activation": activation})
        for activation in numpy_definitions.ACTIVATIONS
    ),
    ("gated_linear_unit", UNIT, {"recompute": True}),
    ("gated_linear_unit", {"x": (3, 4, 6), "w_gate": (6, 2, 5), "b_gate": (2, 5)}, {}),
    ("gated_linear_unit", {"x": (3, 6), "w_gate": (6, 10)}, {"recompute": True}),
    ("grouped_matmul", {"lhs": (40, 6), "rhs": (4, 6, 5), "existing_out": (40, 5)}, {}),
    ("grouped_matmul", {"lhs": (36, 6), "rhs": (4, 5, 6)}, {"transpose_rhs": True}),
    ("grouped_matmul", {"lhs": (40, 6), "rhs": (2, 6, 5)}, {"group_offset": 2}),
    ("grouped_matmul", {"lhs": (20, 6), "rhs": (1, 6, 5)}, {"group_sizes": np.array([5])}),
    ("grouped_matmul", {"lhs": (20, 6), "rhs": (2, 6, 5)}, {"group_sizes": np.array([5, 7])}),
    *(("linear_cross_entropy", LOSS, {"reduction": kind}) for kind in ("mean", "sum", "none")),
    ("linear_cross_entropy", {"hidden": (13, 6), "weight": (21, 6)}, {"vocab_first": True}),
    ("linear_cross_entropy", LOSS, {"label_smoothing": 0.1, "z_loss": 0.01}),
    (
        "linear_cross_entropy",
        LOSS,
        {"softmax_scale": 0.7, "logits_soft_cap": 5.0, "reduction": "none"},
    ),
    ("gated_linear_attention", LINEAR_ATTENTION, {}),
    ("gated_linear_attention", LINEAR_ATTENTION | {"g": KEYS[:3]}, {"scale": 0.3}),
    ("gated_linear_attention", LINEAR_ATTENTION | {"g": KEYS}, {"return_state": True}),
    ("gated_linear_attention", LINEAR_ATTENTION, {"segment_ids": SEGMENTS}),
    (
        "gated_linear_attention",
        LINEAR_ATTENTION | {"g": KEYS[:3], "initial_state": (2, 2, 4, 3)},
        {"segment_ids": SEGMENTS, "return_state": True},
    ),
    (
        "gated_linear_attention",
        LINEAR_ATTENTION | {"g": KEYS, "initial_state": (2, 2, 4, 3)},
        {"segment_ids": SEGMENTS, "return_state": True},
    ),
    ("paged_attention", PAGES, {}),
    ("paged_attention", PAGES | {"q": (3, 4, 8)}, {"softmax_scale": 0.3, "window": 2}),
    ("paged_attention", PAGES | {"sinks": (4,)}, {"logits_soft_cap": 2.0, "window": 4}),
    ("ragged_paged_attention", PAGES | {"q": (8, 4, 8)}, {"window": 3}),
    ("ragged_paged_attention", PAGES | {"q": (8, 4, 8), "k_scale": (7, 2)}, {"causal": False}),
    (
        "ragged_paged_attention",
        PAGES | {"q": (8, 4, 8), "sinks": (4,), "v_scale": (7, 3, 2)},
        {"logits_soft_cap": 2.0},
    ),
]


def arrays(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(0)
    drawn = {name: numbers.standard_normal(shape) for name, shape in shapes.items()}
    return drawn | {"g": -np.abs(drawn["g"])} if "g" in drawn else drawn


def close(found: Any, expected: Any, tolerance: float) -> None:
    for (path, a), b in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        assert a.dtype == np.float64, path
        limit = tolerance * max(1.0, np.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=0, atol=limit, err_msg=str(path))


def named(case: Any) -> str:
    operation, shapes, options = case
    return "-".join([operation, *list(shapes)[2:], *options])


@pytest.mark.parametrize("case", WALK, ids=named)
def test_all_of_it_is_in_float64(case: Any) -> None:
    operation, shapes, options = case
    options = FIXED.get(operation, {}) | options
    given = arrays(shapes)
    with jax.enable_x64(True):

        def everything(arrays: dict[str, Any], **how: Any) -> Any:
            """Results, and gradients of a loss that depends on all of them."""

            def run(arrays: dict[str, Any]) -> Any:
                return getattr(modules, operation)(**arrays, **options, **how)

            results, pull_back = jax.vjp(run, arrays)
            return results, pull_back(jax.tree.map(lambda x: jnp.cos(3 * x), results))[0]

        exact = quick(partial(everything, implementation="reference"))(given)
        defined = getattr(numpy_definitions, operation)(**given, **options)
        close(exact[0], defined, 1e-13)
        for how in ({}, {"cfg": BLOCKS[operation]}):
            close(quick(partial(everything, **how))(given), exact, 1e-10)


@pytest.mark.parametrize("operation", modules.OPERATIONS)
def test_kernels_of_accelerators_refuse_it(operation: str) -> None:
    kernel = kernel_of(operation)
    args, kwargs, differentiated = CALLS[operation]()
    with jax.enable_x64(True):
        for odd in range(len(differentiated)):  # one array of it is enough
            wide = [a.astype(jnp.float64) if i == odd else a for i, a in enumerate(args)]
            call = kernel.bind(*wide, **kwargs)
            for name in ("pallas", "triton"):
                reasons = kernel.implementation(name).supports.reasons_against(call)
                assert any("float64" in reason for reason in reasons), name
