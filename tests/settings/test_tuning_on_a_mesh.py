"""A sharded call is selected for, labelled, tuned and stored with the shapes of one device."""

from __future__ import annotations

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ejkernel.ops import (
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Kernel,
    Partitioning,
    autotune_lowered,
    find_labels_in_lowered,
    get_invocations,
    overlay_cache,
    set_default_executor,
)

KINDS = [pytest.param(AxisType.Explicit, id="explicit"), pytest.param(AxisType.Auto, id="auto")]


@dataclasses.dataclass(frozen=True)
class Config:
    block: int


class Rows(Kernel[Config, jax.Array]):
    """Twice the rows; every config is seen by the test."""

    partitioning = Partitioning("r d -> r d", independent="r")

    def __init__(self):
        super().__init__("rows_on_a_mesh")
        self.ran = []

    def run(self, x, *, cfg):
        self.ran.append((x.shape, cfg.block))
        return jax.lax.map(lambda row: row * 2, x)

    def heuristic_cfg(self, inv):
        return Config(inv.args[0].shape[0])

    def candidate_cfgs(self, inv):
        return [Config(1), Config(2)]


def _array(kind, shape=(16, 8)):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
    x = jnp.arange(float(np.prod(shape))).reshape(shape)
    return mesh, jax.device_put(x, NamedSharding(mesh, PartitionSpec("x")))


@pytest.mark.parametrize("kind", KINDS)
def test_local_shapes_are_selected_for_and_tuned(kind):
    kernel, (mesh, x) = Rows(), _array(kind)
    local = kernel.bind(jax.ShapeDtypeStruct((4, 8), jnp.float32))
    with jax.set_mesh(mesh):
        jitted = jax.jit(kernel)
        lowered = jitted.lower(x)
        labels = find_labels_in_lowered(lowered)
        assert [label.rpartition(":")[2] for label in labels] == [local.call_key]
        np.testing.assert_array_equal(np.asarray(jitted(x)), 2 * np.asarray(x))
        assert ((4, 8), 4) in kernel.ran
        assert [inv.signature for inv in get_invocations()] == ["float32[4,8]"]
        result = autotune_lowered(ConfigSelectorChain(cache=ConfigCache()), lowered)
        (entry,) = result.entries
        assert (entry.op_id, entry.call_key) == ("rows_on_a_mesh@v1", local.call_key)
        kernel.ran.clear()
        with overlay_cache({local.key: Config(2)}):
            np.testing.assert_array_equal(np.asarray(jitted(x)), 2 * np.asarray(x))
        assert ((4, 8), 2) in kernel.ran


@pytest.mark.parametrize("kind", KINDS)
def test_autotuning_measures_what_a_device_runs(kind):
    kernel, (mesh, x) = Rows(), _array(kind)
    selector = ConfigSelectorChain(cache=ConfigCache())
    set_default_executor(Executor(selector))
    with jax.set_mesh(mesh):
        jax.block_until_ready(jax.jit(kernel)(x))
    local = kernel.bind(jax.ShapeDtypeStruct((4, 8), jnp.float32))
    assert [key.call_key for key in selector.cache.keys()] == [local.call_key]  # noqa: SIM118


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_kept_is_gathered_with_one_warning(kind, caplog, monkeypatch):
    monkeypatch.setattr("ejkernel.ops.execution.partitioned.passes._warned", set())
    kernel, (mesh, x) = Rows(), _array(kind)
    with jax.set_mesh(mesh), caplog.at_level(logging.WARNING, "ejkernel"):
        x = jax.device_put(np.asarray(x), NamedSharding(mesh, PartitionSpec(None, "x")))
        for _ in range(2):
            out = jax.jit(lambda x: kernel(x))(x)
            np.testing.assert_array_equal(np.asarray(out), 2 * np.asarray(x))
    said = [r.getMessage() for r in caplog.records if "gathered" in r.getMessage()]
    assert len(said) == 1
    for word in ("rows_on_a_mesh@v1", "argument 0", "'x'", "dimension 1"):
        assert word in said[0]


def test_settings_of_the_caller_hold_where_the_compiler_asks():
    kernel, (mesh, _) = Rows(), _array(AxisType.Auto)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), jax.set_mesh(mesh):
        x = jax.device_put(np.arange(128.0).reshape(16, 8), NamedSharding(mesh, PartitionSpec("x")))
        out = jax.jit(kernel)(x)
        assert out.dtype == np.float64
        np.testing.assert_array_equal(np.asarray(out), 2 * np.asarray(x))


def test_a_kernel_that_declares_nothing_is_left_to_jax():
    class Plain(Rows):
        partitioning = None

    kernel, (mesh, x) = Plain(), _array(AxisType.Auto)
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(np.asarray(jax.jit(kernel)(x)), 2 * np.asarray(x))
    assert kernel.ran == [((16, 8), 16)]


@pytest.mark.parametrize("given", ["b h", 3, {"b": 1}])
def test_a_partitioning_that_is_none_is_refused(given):
    class Wrong(Rows):
        partitioning = given

    mesh, x = _array(AxisType.Auto)
    with jax.set_mesh(mesh), pytest.raises(TypeError, match="must be a Partitioning"):
        jax.jit(Wrong())(x)


@pytest.mark.parametrize("dims", ["r d, -> r d ]", "r d -> r (d", "r d ->r d!", "r d"])
def test_dimensions_that_cannot_be_read_are_refused(dims):
    with pytest.raises(ValueError, match="Partitioning"):
        Partitioning(dims)


def test_a_dimension_that_no_array_has_is_refused():
    with pytest.raises(ValueError, match=r"no array of .* has a dimension 'h'; it has b, d"):
        Partitioning("b d -> b d", independent="b h")
