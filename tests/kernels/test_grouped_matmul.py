"""Grouped matrix products: every implementation against the naive one, values and gradients."""

from __future__ import annotations

import dataclasses
import importlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from ejkernel import targets
from ejkernel.kernels.grouped_matmul import (
    GroupedMatmul,
    GroupedMatmulGpuBlocks,
    GroupedMatmulTpuBlocks,
    GroupedMatmulXlaConfig,
    grouped_matmul_reference,
    pallas_gpu,
    pallas_tpu,
    xla,
)
from ejkernel.kernels.grouped_matmul.arguments import Arguments
from ejkernel.kernels.grouped_matmul.groups import grid_steps, row_spans, with_rows_of_no_group
from ejkernel.modules import grouped_matmul, support_table
from ejkernel.ops import NotSupported
from ejkernel.targets.lowering import standing_on

FAST_COMPILE: Any = {"xla_backend_optimization_level": 0}

PRODUCTS = {
    "xla": (xla, {"block_m": 16}),
    "tpu": (pallas_tpu, {"blocks": GroupedMatmulTpuBlocks(8, 16, 16), "interpret": True}),
    "gpu": (pallas_gpu, {"blocks": GroupedMatmulGpuBlocks(16, 16, 16), "interpret": True}),
}

# m, k, n, group sizes, matrices here, offset, transposed
CALLS = {
    "ragged": (37, 24, 40, (5, 0, 17, 9), 4, None, False),
    "transposed": (41, 17, 24, (0, 20, 20, 1), 4, None, True),
    "a shard": (45, 16, 9, (4, 7, 0, 19, 2, 9), 3, 2, False),
    "few rows": (7, 16, 16, (0, 3, 0, 0, 1), 5, None, False),
    "nothing": (20, 8, 8, (0, 0), 2, None, False),
    "one group": (33, 8, 16, (30,), 1, None, False),
    "one group of all rows": (33, 8, 16, (33,), 1, None, True),
}


def inputs(m, k, n, groups, transposed, dtype=jnp.float32):
    numbers = np.random.default_rng(m * k + n)
    shapes = ((m, k), (groups, n, k) if transposed else (groups, k, n), (m, n))
    return [jnp.asarray(numbers.standard_normal(shape), dtype) for shape in shapes]


def assert_close(got, expected, tolerance=2e-5, names=("out", "dlhs", "drhs")):
    assert len(got) == len(expected)
    for name, one, other in zip(names, got, expected, strict=False):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        np.testing.assert_allclose(
            np.asarray(one, np.float64),
            np.asarray(other, np.float64),
            rtol=tolerance,
            atol=tolerance * 10,
            err_msg=name,
        )


def value_and_gradients(function, lhs, rhs, dout):
    def run(lhs, rhs, dout):
        out, pull_back = jax.vjp(function, lhs, rhs)
        return [out, *pull_back(dout.astype(out.dtype))]

    return jax.jit(run, compiler_options=FAST_COMPILE)(lhs, rhs, dout)


def poisoned(x, *spans):
    """The same rows, with NaN where a row is in no group."""
    row = np.arange(x.shape[0])[:, None]
    outside = (row < np.asarray(spans[0])[0]) | (row >= np.asarray(spans[1])[-1])
    return jnp.where(outside, jnp.nan, x)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_equal_the_reference_and_its_gradients(name, call):
    m, k, n, sizes, groups, offset, transposed = call
    lhs, rhs, dout = inputs(m, k, n, groups, transposed)
    group_sizes = jnp.asarray(sizes, jnp.int32)
    expected = value_and_gradients(
        lambda lhs, rhs: grouped_matmul_reference(
            lhs, rhs, group_sizes, transpose_rhs=transposed, group_offset=offset
        ),
        lhs,
        rhs,
        dout,
    )
    module, options = PRODUCTS[name]
    spans = row_spans(group_sizes, m, groups, offset)
    # Rows of no group are not used at all, whatever they hold.
    lhs, dout = poisoned(lhs, *spans), poisoned(dout, *spans)

    def products(lhs, rhs, dout):
        call = Arguments.of(lhs, rhs, group_sizes, transpose_rhs=transposed, group_offset=offset)
        return [
            module.times_matrices(call, **options),
            module.times_matrices(call.for_dlhs(dout), **options),
            module.matrix_gradients(call, dout, **options),
        ]

    assert_close(jax.jit(products, compiler_options=FAST_COMPILE)(lhs, rhs, dout), expected)


@pytest.mark.parametrize("name", PRODUCTS)
def test_low_precision_is_summed_in_float32(name):
    module, options = PRODUCTS[name]
    lhs, rhs, dout = inputs(24, 256, 16, 3, False, jnp.bfloat16)
    sizes = jnp.array([9, 0, 15])
    if "blocks" in options:
        options = {**options, "blocks": dataclasses.replace(options["blocks"], block_k=128)}

    def products(lhs, rhs, dout):
        call = Arguments.of(lhs, rhs, sizes, preferred_element_type=jnp.float32)
        return [
            module.times_matrices(call, **options),
            module.matrix_gradients(call, dout, **options),
        ]

    got = jax.jit(products, compiler_options=FAST_COMPILE)(lhs, rhs, dout)
    out, pull_back = jax.vjp(
        lambda rhs: grouped_matmul_reference(lhs, rhs, sizes, preferred_element_type=jnp.float32),
        rhs,
    )
    assert_close(got[:1], [out], 1e-5)
    assert_close(got[1:], pull_back(dout.astype(jnp.float32)), 1e-2)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(-2, 40), min_size=5, max_size=5),
    rows=st.sampled_from([3, 64, 77]),
    aligned=st.booleans(),
)
def test_steps_cover_every_row_of_every_group_once(sizes, rows, aligned):
    block_m, groups = 16, len(sizes)
    spans, steps = jax.tree.map(np.asarray, steps_of(jnp.asarray(sizes), rows, block_m, aligned))
    covered = []
    for group, at, start, end in zip(*steps, strict=True):
        first = at * block_m if aligned else at
        assert 0 <= first < rows
        assert end == start or first <= start < end <= first + block_m
        covered += [(row, group) for row in range(start, end)]
    starts, ends = spans
    assert covered == [(row, g) for g in range(groups + 2) for row in range(starts[g], ends[g])]
    assert len(covered) == rows
    if aligned:  # a block is never left and visited again: it stays in memory between its visits
        assert (np.diff(steps[1]) >= 0).all()


@partial(jax.jit, static_argnums=(1, 2, 3))
def steps_of(sizes, rows, block_m, aligned):
    spans = with_rows_of_no_group(row_spans(sizes, rows, sizes.shape[0]), rows)
    return spans, grid_steps(spans, rows, block_m, aligned=aligned, visit_empty=False)


# --- the function that people call ---------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True])
def test_the_function_and_its_gradients(transposed):
    lhs, rhs, dout = inputs(50, 12, 20, 4, transposed)
    sizes = jnp.array([20, 0, 13, 10])
    options: dict[str, Any] = {"transpose_rhs": transposed}
    got, expected = (
        value_and_gradients(lambda a, b, f=f: f(a, b, sizes, **options), lhs, rhs, dout)
        for f in (grouped_matmul, grouped_matmul_reference)
    )
    assert_close(got, expected)


def test_it_equals_ragged_dot():
    lhs, rhs, dout = inputs(40, 8, 12, 3, False)
    sizes = jnp.array([10, 25, 5])
    got, expected = (
        value_and_gradients(lambda a, b, f=f: f(a, b, sizes), lhs, rhs, dout)
        for f in (grouped_matmul, jax.lax.ragged_dot)
    )
    assert_close(got, expected)


def test_shards_add_up_to_the_whole():
    lhs, rhs, _ = inputs(30, 8, 8, 6, False)
    sizes = jnp.array([3, 9, 0, 2, 8, 5])
    whole = grouped_matmul(lhs, rhs, sizes)
    shard = jax.jit(lambda part, offset: grouped_matmul(lhs, part, sizes, group_offset=offset))
    parts = [shard(rhs[at : at + 2], at) for at in (0, 2, 4)]
    np.testing.assert_allclose(sum(parts), whole, rtol=1e-6)


def test_existing_out_stays_where_there_is_no_matrix():
    lhs, rhs, dout = inputs(10, 4, 4, 2, False)
    out, pull_back = jax.vjp(
        lambda old: grouped_matmul(
            lhs, rhs, jnp.array([2, 3, 4, 0]), group_offset=1, existing_out=old
        ),
        dout,
    )
    np.testing.assert_array_equal(out[:2], dout[:2])
    np.testing.assert_array_equal(out[9:], dout[9:])
    assert not np.allclose(out[2:9], dout[2:9])
    (gradient,) = pull_back(jnp.ones_like(out))
    assert gradient[:, 0].tolist() == [1.0] * 2 + [0.0] * 7 + [1.0]


def test_options_of_the_result():
    lhs, rhs, _ = inputs(10, 4, 4, 2, False, jnp.bfloat16)
    sizes = jnp.array([4, 6])
    assert grouped_matmul(lhs, rhs, sizes).dtype == jnp.bfloat16
    wide = grouped_matmul(lhs, rhs, sizes, preferred_element_type="float32", precision="highest")
    assert wide.dtype == jnp.float32
    gradient = jax.eval_shape(
        jax.grad(lambda a: grouped_matmul(a, rhs, sizes, preferred_element_type="float32").sum()),
        lhs,
    )
    assert gradient.dtype == jnp.bfloat16


def test_inside_jit_sizes_that_do_not_add_up_are_cut():
    lhs, rhs, _ = inputs(10, 4, 4, 3, False)
    traced = jax.jit(grouped_matmul)
    np.testing.assert_allclose(
        traced(lhs, rhs, jnp.array([4, 100, 3])), grouped_matmul(lhs, rhs, jnp.array([4, 6, 0]))
    )
    np.testing.assert_allclose(
        traced(lhs, rhs, jnp.array([4, -5, 3])), grouped_matmul(lhs, rhs, jnp.array([4, 0, 3]))
    )


def test_a_batch_of_calls():
    lhs, rhs, _ = inputs(24, 4, 4, 2, False)
    sizes = jnp.array([[3, 9], [12, 0]])
    batch = lhs.reshape(2, 12, 4)
    got = jax.vmap(grouped_matmul, in_axes=(0, None, 0))(batch, rhs, sizes)
    for i in range(2):
        np.testing.assert_allclose(got[i], grouped_matmul(batch[i], rhs, sizes[i]), rtol=1e-6)


def test_experts_spread_over_devices_in_shard_map():
    mesh = jax.make_mesh((1,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    here, P = jax.sharding.PartitionSpec("expert"), jax.sharding.PartitionSpec
    lhs, rhs, dout = inputs(16, 4, 4, 2, False)
    sizes = jnp.array([7, 5])

    def shard(lhs, rhs):
        offset = jax.lax.axis_index("expert") * rhs.shape[0]
        return jax.lax.psum(grouped_matmul(lhs, rhs, sizes, group_offset=offset), "expert")

    sharded = jax.shard_map(shard, mesh=mesh, in_specs=(P(), here), out_specs=P(), check_vma=False)
    got = value_and_gradients(sharded, lhs, rhs, dout)
    expected = value_and_gradients(
        lambda a, b: grouped_matmul_reference(a, b, sizes), lhs, rhs, dout
    )
    assert_close(got, expected)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"lhs": jnp.ones((4, 5, 6))}, ValueError, ["lhs", "(4, 5, 6)", "(m, k)"]),
        ({"rhs": jnp.ones((3, 6, 4))}, ValueError, ["lhs (10, 5)", "rhs (3, 6, 4)"]),
        ({"rhs": jnp.ones((3, 5, 4), jnp.int8)}, TypeError, ["rhs is int8", "floating"]),
        ({"rhs": jnp.ones((3, 5, 4), jnp.bfloat16)}, TypeError, ["float32", "bfloat16", "cast"]),
        ({"rhs": jnp.ones((2, 5, 4))}, ValueError, ["3 groups", "2 matrices", "group_offset"]),
        ({"lhs": jnp.ones((0, 5))}, ValueError, ["lhs", "(0, 5)", "empty"]),
        ({"group_sizes": jnp.array([4, 4, 4])}, ValueError, ["add up to 12", "10 rows"]),
        ({"group_sizes": jnp.array([4, -1, 4])}, ValueError, ["negative", "-1"]),
        ({"group_sizes": jnp.ones(3)}, TypeError, ["group_sizes is float32", "integers"]),
        ({"group_sizes": jnp.ones((3, 1), int)}, ValueError, ["group_sizes", "(groups,)"]),
        ({"group_offset": 1}, ValueError, ["group_offset is 1", "from 0 to 0"]),
        ({"precision": "exact"}, ValueError, ["precision", "'exact'", "'highest'"]),
        ({"preferred_element_type": int}, TypeError, ["preferred_element_type", "int"]),
        ({"existing_out": jnp.ones((10, 5))}, ValueError, ["existing_out", "(10, 5)", "(10, 4)"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_input_is_named(change, error, words):
    arguments: dict[str, Any] = {
        "lhs": jnp.ones((10, 5)),
        "rhs": jnp.ones((3, 5, 4)),
        "group_sizes": jnp.array([2, 3, 4]),
    }
    with pytest.raises(error) as raised:
        grouped_matmul(**{**arguments, **change})
    for word in ("grouped_matmul", *words):
        assert word in str(raised.value)


# --- the kernel ----------------------------------------------------------------------------------


def test_a_requested_implementation_that_cannot_run_says_why():
    lhs, rhs, _ = inputs(8, 4, 4, 2, False)
    with pytest.raises(NotSupported, match="this is a cpu"):
        grouped_matmul(lhs, rhs, jnp.array([4, 4]), implementation="pallas")
    assert "grouped_matmul" in str(support_table("grouped_matmul"))


def test_blocks_of_every_config_give_the_same():
    kernel = GroupedMatmul()
    lhs, rhs, _ = inputs(300, 8, 8, 3, False)
    sizes = jnp.array([150, 37, 100])
    expected = grouped_matmul_reference(lhs, rhs, sizes)
    candidates = kernel.candidates(kernel.bind(lhs, rhs, sizes))
    assert len(candidates) > 5
    for rows in (64, 512):
        cfg = GroupedMatmulXlaConfig(block_m=rows)
        assert rows in {other.block_m for other in candidates}
        np.testing.assert_allclose(
            grouped_matmul(lhs, rhs, sizes, cfg=cfg), expected, rtol=1e-5, atol=1e-5
        )


def test_measured_groups_are_ragged_and_add_up():
    kernel = GroupedMatmul()
    call = (jnp.ones((100, 8)), jnp.ones((4, 8, 8)), jnp.array([100, 0, 0, 0]))
    (lhs, rhs, sizes), kwargs = kernel.make_inputs(kernel.bind(*call), jax.random.key(0))
    assert (lhs.shape, rhs.shape) == ((100, 8), (4, 8, 8))
    assert sizes.sum() == 100
    assert len(set(sizes.tolist())) > 1
    assert kwargs == {}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("platform", "suffix", "target"),
    [("tpu", "pallas", "tpu-v5e"), ("cuda", "triton", "cuda-sm80")],
)
def test_candidates_lower_in_both_directions(platform, suffix, target, dtype):
    kernel = GroupedMatmul()
    call = (
        jax.ShapeDtypeStruct((1000, 768), dtype),
        jax.ShapeDtypeStruct((8, 768, 320), dtype),
        jax.ShapeDtypeStruct((8,), jnp.int32),
    )
    implementation = kernel.implementation(suffix)

    def both(cfg, *args):
        out, residuals = implementation.forward_with_residuals(*args, cfg=cfg)
        return out, implementation.backward(residuals, None, out, *args, cfg=cfg)[:2]

    choices = {cfg.forward for cfg in implementation.space(kernel.bind(*call))}
    for blocks in sorted(choices, key=repr)[:: max(1, len(choices) // 3)]:
        cfg = implementation.config(blocks, blocks, blocks)
        with standing_on(targets.find(target)):
            jax.jit(partial(both, cfg)).trace(*call).lower(lowering_platforms=(platform,))


def test_a_program_that_has_run_can_be_serialised():
    """XLA cannot do that if there is a sort in it."""
    arguments = (jnp.ones((12, 4)), jnp.ones((3, 4, 5)), jnp.array([5, 0, 6]))
    jax.config.update("jax_enable_compilation_cache", False)  # only what is compiled here
    compilation_cache.reset_cache()
    try:
        program = jax.jit(grouped_matmul).lower(*arguments).compile()
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()
    jax.block_until_ready(program(*arguments))
    assert serialize_executable.serialize(program)


def test_existing_out_is_refused_before_anything_is_computed(monkeypatch):
    module = importlib.import_module("ejkernel.modules.grouped_matmul")
    monkeypatch.setattr(module, "_kernel", lambda *_, **__: pytest.fail("computed"))
    with pytest.raises(ValueError, match="existing_out"):
        grouped_matmul(
            jnp.ones((4, 2)), jnp.ones((1, 2, 3)), jnp.array([4]), existing_out=jnp.ones((4, 2))
        )
