"""Operations inside `jax.shard_map`, which by default checks what varies over the devices.

The result and the gradients must be those of the call without devices, whatever is sharded, with
and without blocks, and whatever the loss uses of several results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel.kernels.gated_linear_attention import GatedLinearAttentionXlaConfig
from ejkernel.kernels.gated_linear_unit import GatedLinearUnitXlaConfig
from ejkernel.kernels.grouped_matmul import GroupedMatmulXlaConfig
from ejkernel.kernels.linear_cross_entropy import LinearCrossEntropyXlaConfig
from ejkernel.kernels.norm import NormXlaConfig
from ejkernel.modules import (
    flash_attention,
    gated_linear_attention,
    gated_linear_unit,
    grouped_matmul,
    layer_norm,
    linear_cross_entropy,
    paged_attention,
    rms_norm,
)

D = "devices"


@dataclasses.dataclass(frozen=True)
class Case:
    """A call, how its arguments are sharded, and how its results are."""

    call: Callable[..., Any]
    shapes: dict[str, Any]  # a shape, for random numbers, or an array
    sharded: dict[str, P]
    results: Any  # of P; P() where devices' results are added up
    across: Callable[[Any], Any] = lambda results: results  # e.g. psum
    decays: tuple[str, ...] = ()  # arguments that must not be positive


def rows(*axes: int) -> P:
    """Sharded along one axis."""
    return P(*[None] * axes[0], D)


def norm(operation: Any, shape: tuple[int, ...], axis: int, cfg: Any, *names: str) -> Case:
    feature = shape[-1:]
    shapes: dict[str, Any] = {"x": shape}
    for name in names:
        shapes[name] = shape if name == "residual" else feature
    sharded = {name: rows(axis) for name in shapes if shapes[name] == shape}
    results = (rows(axis),) * 2 if "residual" in names else rows(axis)
    return Case(lambda **a: operation(**a, cfg=cfg), shapes, sharded, results)


def blocks(rows: int | None) -> NormXlaConfig | None:
    return None if rows is None else NormXlaConfig(backward_block_m=rows)


def norms() -> dict[str, Case]:
    cases = {}
    for cfg in (None, 7):
        for operation in (rms_norm, layer_norm):
            name = f"{operation.__name__} in blocks of {cfg}"
            more = ("bias",) if operation is layer_norm else ()
            cases[name] = norm(operation, (64, 8), 0, blocks(cfg), "weight", *more)
        cases[f"residual {cfg}"] = norm(rms_norm, (8, 12, 8), 1, blocks(cfg), "weight", "residual")
        cases[f"bare {cfg}"] = norm(layer_norm, (8, 12, 8), 0, blocks(cfg))
    return cases


def loss(reduction: str, cfg: Any, n: int = 96, features: int = 8, vocab: int = 50) -> Case:
    labels = np.random.default_rng(3).integers(0, vocab, n).astype(np.int32)
    labels[::5] = -100
    return Case(
        lambda labels, **a: linear_cross_entropy(
            **a, labels=labels, reduction=reduction, cfg=cfg, z_loss=0.01, label_smoothing=0.1
        ),
        {"hidden": (n, features), "weight": (features, vocab), "bias": (vocab,), "labels": labels},
        {"hidden": rows(0), "labels": rows(0)},
        rows(0) if reduction == "none" else P(),
        lambda result: result if reduction == "none" else jax.lax.psum(result, D),
    )


def losses() -> dict[str, Case]:
    cfg = LinearCrossEntropyXlaConfig
    configs = {"default": None, "5": cfg(5, 5, 16), "8": cfg(8, 24, 64)}
    return {
        f"loss {reduction} {name}": loss(reduction, blocks)
        for reduction in ("sum", "none")
        for name, blocks in configs.items()
    }


def linear_attention(axis: int, cfg: Any, *names: str, **options: Any) -> Case:
    shape, state = (4, 20, 4, 8), (4, 4, 8, 6)
    known = {"g": shape, "initial_state": state, "per_head": shape[:3]}
    shapes: dict[str, Any] = {"q": shape, "k": shape, "v": (*shape[:3], 6)}
    shapes |= {"g" if name == "per_head" else name: known[name] for name in names}
    at_state = rows(0 if axis == 0 else 1)
    sharded = {name: at_state if name == "initial_state" else rows(axis) for name in shapes}
    both = options.get("return_state")
    if options.pop("segments", False):
        segments = np.repeat(np.arange(4), 5)[None].repeat(4, 0)
        shapes["segment_ids"] = segments
        sharded["segment_ids"] = rows(0) if axis == 0 else P()
    return Case(
        lambda **a: gated_linear_attention(**a, **options, cfg=cfg),
        shapes,
        sharded,
        (rows(axis), at_state) if both else rows(axis),
        decays=("g",),
    )


def linear_attentions() -> dict[str, Case]:
    configs = {
        "default": None,
        "one row": GatedLinearAttentionXlaConfig(block_m=1, backward_block_m=1),
        "chunks": GatedLinearAttentionXlaConfig(chunk_size=8, backward_chunk_size=8),
    }
    cases = {}
    for name, cfg in configs.items():
        for axis in (0, 2) if cfg is None else (0,):
            place = f"linear attention axis {axis} {name}"
            cases[f"{place} plain"] = linear_attention(axis, cfg)
            cases[f"{place} decay"] = linear_attention(axis, cfg, "g", segments=True)
            cases[f"{place} state"] = linear_attention(
                axis, cfg, "per_head", "initial_state", return_state=True
            )
    return cases


def grouped() -> dict[str, Case]:
    sizes = np.array([10, 0, 25, 2, 9, 1, 0, 8], np.int32)
    cases = {}
    for name, m, cfg in (
        ("default", 60, None),
        ("few rows", 24, None),
        ("16 rows", 60, GroupedMatmulXlaConfig(16, 16, 16)),
    ):
        known = np.minimum(sizes, 3) if m == 24 else sizes
        shapes = {"lhs": (m, 8), "rhs": (8, 8, 12), "group_sizes": known}

        def call(cfg: Any = cfg, **a: Any) -> Any:
            return grouped_matmul(**a, cfg=cfg)

        def here(cfg: Any = cfg, **a: Any) -> Any:
            return grouped_matmul(**a, cfg=cfg, group_offset=2 * jax.lax.axis_index(D))

        def total(result: Any) -> Any:
            return jax.lax.psum(result, D)

        cases[f"columns {name}"] = Case(call, shapes, {"rhs": rows(2)}, rows(1))
        summed = {"lhs": rows(1), "rhs": rows(1)}
        cases[f"depth {name}"] = Case(call, shapes, summed, P(), total)
        cases[f"experts {name}"] = Case(here, shapes, {"rhs": rows(0)}, P(), total)
    one = {"lhs": (32, 8), "rhs": (1, 8, 12), "group_sizes": np.array([8], np.int32)}
    cases["rows of one group"] = Case(call, one, {"lhs": rows(0)}, rows(0))
    return cases


def gated_units() -> dict[str, Case]:
    cases = {}
    for name, cfg in (
        ("default", None),
        ("blocks", GatedLinearUnitXlaConfig(block_m=3, backward_block_m=3)),
    ):
        for recompute in (False, True) if cfg else (False,):
            shapes = {
                "x": (32, 8),
                "w_gate": (8, 12),
                "w_up": (8, 12),
                "b_gate": (12,),
                "b_up": (12,),
            }

            def call(cfg: Any = cfg, recompute: bool = recompute, **a: Any) -> Any:
                return gated_linear_unit(**a, cfg=cfg, recompute=recompute)

            label = f"gated unit {name} {'again' if recompute else 'kept'}"
            cases[f"{label} rows"] = Case(call, shapes, {"x": rows(0)}, rows(0))
            columns = {name: rows(1 if name[0] == "w" else 0) for name in shapes if name != "x"}
            cases[f"{label} columns"] = Case(call, shapes, columns, rows(1))
    return cases


def attentions() -> dict[str, Case]:
    shape = (4, 40, 4, 8)
    qkv = dict.fromkeys(("q", "k", "v"), shape)
    pages = {
        "q": (4, 2, 4, 8),
        "k_pages": (16, 4, 4, 8),
        "v_pages": (16, 4, 4, 8),
        "page_table": np.arange(16, dtype=np.int32).reshape(4, 4),
        "lengths": np.array([3, 16, 7, 9], np.int32),
    }
    cases = {}
    for axis in (0, 2):
        sharded = {name: rows(axis) for name in qkv}
        for name, options in {
            "causal": {"causal": True},
            "window": {"causal": True, "window": (7, 0)},
        }.items():

            def call(options: Any = options, **a: Any) -> Any:
                return flash_attention(**a, **options)

            cases[f"attention axis {axis} {name}"] = Case(call, qkv, sharded, rows(axis))
    paged = {"q": rows(0), "page_table": rows(0), "lengths": rows(0)}
    cases["paged batch"] = Case(paged_attention, pages, paged, rows(0))
    heads = {name: rows(2) for name in ("q", "k_pages", "v_pages")}
    cases["paged heads"] = Case(paged_attention, pages, heads, rows(2))
    return cases


CASES = norms() | losses() | linear_attentions() | grouped() | gated_units() | attentions()


def filled(case: Case, dtype: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays that are differentiated, and those that are not."""
    numbers = np.random.default_rng(0)
    arrays = {
        name: jnp.asarray(numbers.normal(size=shape), dtype)
        for name, shape in case.shapes.items()
        if isinstance(shape, tuple)
    }
    arrays = {name: -jnp.abs(a) if name in case.decays else a for name, a in arrays.items()}
    known = {k: jnp.asarray(v) for k, v in case.shapes.items() if not isinstance(v, tuple)}
    return arrays, known


def scalar(results: Any, used: int | None) -> jax.Array:
    """A loss that depends on every number of all results, or of one of them."""
    leaves = jax.tree.leaves(results)
    chosen = leaves if used is None else leaves[used : used + 1]
    return sum(
        jnp.sum((jnp.sin(leaf) if leaf.ndim else leaf).astype(jnp.float32)) * (1.0 + i)
        for i, leaf in enumerate(chosen)
    )


def close(found: Any, expected: Any, dtype: Any) -> None:
    tolerance = 5e-5 if dtype == jnp.float32 else 6e-2
    flat, flat_expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert len(flat) == len(flat_expected)
    for a, b in zip(flat, flat_expected, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.isfinite(b).all()
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1, np.abs(b).max()))


def inside_shard_map(case: Case) -> Callable[[dict[str, Any]], Any]:
    mesh = jax.make_mesh(
        (4,), (D,), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,)
    )
    return jax.shard_map(
        lambda given: case.across(case.call(**given)),
        mesh=mesh,
        in_specs=({name: case.sharded.get(name, P()) for name in case.shapes},),
        out_specs=case.results,
    )


def without_devices(name: str, case: Case, given: dict[str, Any]) -> Any:
    if name.startswith("experts"):
        return grouped_matmul(**given)
    if name == "rows of one group":  # every device has the same sizes, for rows of its own
        parts = jnp.split(given["lhs"], 4)
        return jnp.concatenate([case.call(**given | {"lhs": part}) for part in parts])
    return case.call(**given)


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_without_devices(name: str) -> None:
    case = CASES[name]
    dtype = jnp.bfloat16 if "16 rows" in name or "5" in name else jnp.float32
    arrays, known = filled(case, dtype)
    mapped = inside_shard_map(case)

    def plain(given: dict[str, Any]) -> Any:
        return without_devices(name, case, given)

    several = isinstance(case.results, tuple) and not isinstance(case.results, P)
    for used in (None, *(range(len(case.results)) if several else ())):

        def everything(arrays: Any, f: Any, used: int | None = used) -> Any:
            def loss(arrays: Any) -> Any:
                results = f(arrays | known)
                return scalar(results, used), results

            return jax.grad(loss, has_aux=True)(arrays)

        found, expected = (
            jax.jit(everything, static_argnums=1)(arrays, f) for f in (mapped, plain)
        )
        close(found, expected, dtype)


@pytest.mark.parametrize("name", losses() | grouped() | gated_units())
def test_forward_without_gradients(name: str) -> None:
    case = CASES[name]
    arrays, known = filled(case, jnp.float32)
    found = jax.jit(inside_shard_map(case))(arrays | known)
    close(found, without_devices(name, case, arrays | known), jnp.float32)


@pytest.mark.parametrize("operation", [rms_norm, layer_norm, linear_cross_entropy])
def test_ordinary_sizes_with_default_configs(operation: Any) -> None:
    """1,024 rows per device, where default configs have blocks."""
    if operation is linear_cross_entropy:
        case = loss("sum", None, n=4096, features=16, vocab=4096)
    else:
        names = ("weight",) if operation is rms_norm else ("weight", "bias")
        case = norm(operation, (4096, 3200), 0, None, *names)
    arrays, known = filled(case, jnp.float32)
    found, expected = (
        jax.jit(jax.grad(lambda a, f=f: scalar(f(a | known), None)))(arrays)
        for f in (inside_shard_map(case), lambda given: case.call(**given))
    )
    close(found, expected, jnp.float32)
