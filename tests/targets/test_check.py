"""Lowering for every target always, compiling where the compilers are installed, and bad input."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from target_kernels import Matmul, Tile, gpu_matmul, reference, tpu_matmul

from ejkernel import targets
from ejkernel.ops import Kernel
from ejkernel.targets import compiler
from ejkernel.targets.catalog import TARGETS

USABLE = {entry.target.name for entry in targets.available() if entry.usable}
SHAPE = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
GOOD = Tile(128, 128, 64)


@pytest.fixture(scope="module", autouse=True)
def no_worker_is_left_behind():
    yield
    targets.stop_workers()


@pytest.fixture
def matmul():
    return Matmul()


def needs(name):
    reason = f"nothing compiles for {name} here; `make targets` installs what does"
    return pytest.mark.skipif(name not in USABLE, reason=reason)


every = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs(name)) for name in targets.names()]
)


# --- the kernels themselves ----------------------------------------------------------------------


@pytest.mark.parametrize("function", [tpu_matmul, gpu_matmul])
@pytest.mark.parametrize("cfg", [Tile(32, 64, 16), Tile(64, 32, 32)])
def test_interpreted_kernels_equal_the_reference(function, cfg):
    x, y = (jax.random.normal(jax.random.key(i), (64, 64)) for i in range(2))
    np.testing.assert_allclose(
        function(x, y, cfg, interpret=True), reference(x, y), rtol=1e-5, atol=1e-5
    )


# --- lowering: needs nothing ---------------------------------------------------------------------


@pytest.mark.parametrize("name", targets.names())
def test_every_config_lowers_for_every_target(matmul, name):
    result = targets.check(matmul, SHAPE, SHAPE, target=name, compile=False)
    assert [entry.compiles for entry in result] == [True] * 3
    assert all(entry.flops >= 2 * 512**3 for entry in result)
    assert all(entry.seconds is None and entry.estimate is None for entry in result)
    assert result.key.device == targets.find(name).device_fingerprint
    assert result.key.call_key == matmul.bind(SHAPE, SHAPE).call_key


def test_the_method_of_the_platform_is_lowered():
    called = []

    class Witness(Matmul):
        def run_pallas(self, x, *, cfg):
            called.append("pallas")
            return x

        def run_triton(self, x, *, cfg):
            called.append("triton")
            return x

        def run_xla(self, x, *, cfg):
            called.append("xla")
            return x

        def candidate_cfgs_pallas(self, inv):
            return [Tile(8, 8)]

    witness = Witness("witness")
    small = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    for name, expected, count in (
        ("tpu-v4", "pallas", 2),
        ("cuda-sm80", "triton", 4),
        ("cpu", "xla", 4),
    ):
        called.clear()
        result = targets.check(witness, small, target=name, compile=False)
        assert set(called) == {expected}
        assert len(result) == count - (name != "tpu-v4")
        assert (Tile(8, 8) in [entry.cfg for entry in result]) == (name == "tpu-v4")


def test_a_kernel_may_ask_pallas_about_the_device():
    from jax.experimental.pallas import tpu as pltpu

    asked = []

    class Asking(Matmul):
        def run_pallas(self, x, *, cfg):
            asked.append(pltpu.get_tpu_info().generation)
            return x

    for name, generation in (("tpu-v4", 4), ("tpu-v5e", 5), ("tpu-v6e", 6)):
        targets.check(Asking("asking"), SHAPE, target=name, compile=False, configs=[GOOD])
        assert asked.pop() == generation


def test_a_block_shape_that_a_tpu_cannot_have_is_an_entry_with_a_reason(matmul):
    bad = Tile(128, 100)
    result = targets.check(
        matmul,
        SHAPE,
        jax.ShapeDtypeStruct((512, 500), jnp.bfloat16),
        target="tpu-v5e",
        configs=[bad, Tile(128, 500)],
        compile=False,
    )
    assert [entry.compiles for entry in result] == [False, True]
    assert "divisible" in result.of(bad).reason
    assert "\n" not in result.of(bad).reason
    assert "divisible" in result.of(bad).full_text
    assert "does not compile" in str(result)


def test_not_supported_is_asked_first():
    class Picky(Matmul):
        def not_supported(self, cfg, inv):
            return ["too wide"] if cfg.columns > 128 else []

    result = targets.check(Picky("picky"), SHAPE, SHAPE, target="tpu-v4", compile=False)
    assert [entry.compiles for entry in result] == [True, True, False]
    assert result.of(Tile(256, 256)).reason == "not supported: too wide"


def test_a_result_is_data(matmul):
    result = targets.check(matmul, SHAPE, SHAPE, target="tpu-v5e", compile=False)
    plain = json.loads(json.dumps([entry.to_plain() for entry in result]))
    assert plain[0]["config"]["rows"] == 128
    assert plain[0]["compiles"] is True
    assert (len(result), len(result.feasible), result.infeasible, result.best) == (3, 3, (), None)
    with pytest.raises(KeyError, match="was not checked"):
        result.of(Tile(1, 1))


# --- bad input -----------------------------------------------------------------------------------


def test_a_kernel_without_an_implementation_says_which_it_has():
    @dataclasses.dataclass(frozen=True)
    class Nothing:
        pass

    class OnlyTriton(Kernel[Nothing, jax.Array]):
        def run_triton(self, x, *, cfg):
            return x

    with pytest.raises(targets.TargetError) as error:
        targets.check(OnlyTriton(), SHAPE, target="tpu-v5e", compile=False)
    message = str(error.value)
    assert "only_triton@v1 has no implementation for tpu-v5e: it has triton" in message
    assert "add one that runs on a tpu" in message


def test_an_unknown_target_is_refused(matmul):
    with pytest.raises(targets.TargetError, match="tpu-v5e, tpu-v5p"):
        targets.check(matmul, SHAPE, SHAPE, target="tpu-v55")


def test_a_missing_package_is_named_before_anything_is_lowered(matmul, monkeypatch):
    monkeypatch.setattr(compiler, "_version", lambda name: "")
    with pytest.raises(targets.TargetError, match=r"tpu-v5e cannot be used.*'\.\[tpu-aot\]'"):
        targets.check(matmul, SHAPE, SHAPE, target="tpu-v5e")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"configs": []}, "configs is empty"),
        ({"jobs": 0}, "jobs=0 must be"),
        ({"seconds": 0}, "seconds=0 must be"),
    ],
)
def test_wrong_arguments_are_refused(matmul, arguments, message):
    with pytest.raises(ValueError, match=message):
        targets.check(matmul, SHAPE, SHAPE, target="tpu-v4", compile=False, **arguments)


def test_a_config_of_another_kernel_is_refused(matmul):
    with pytest.raises(TypeError, match="Tile"):
        targets.check(matmul, SHAPE, SHAPE, target="tpu-v4", compile=False, configs=["fast"])


# --- compiling -----------------------------------------------------------------------------------


@every
def test_both_kernels_compile_for_every_target(matmul, name):
    result = targets.check(matmul, SHAPE, SHAPE, target=name, configs=[GOOD, Tile(256, 256, 64)])
    assert [entry.compiles for entry in result] == [True, True], str(result)
    for entry in result:
        assert entry.seconds > 0
        assert entry.estimate.seconds > 0
        platform = targets.find(name).platform
        if platform == "tpu":
            assert entry.vmem_bytes >= 2 * 128 * 512 * 2
            assert entry.kernels[0]["units"]["MXU"] > 0
            assert entry.estimate.cycles > 0
            assert entry.estimate.notes == ()  # the loop of the source was found in the schedule
        if platform == "cuda":
            assert entry.shared_bytes > 0
            assert 32 <= entry.registers <= 255
            assert 0 < entry.estimate.occupancy <= 1
            assert entry.estimate.notes == ()  # the loop of the source was found in the code
    assert "not measurements" in str(result)
    assert jax.devices()[0].platform == "cpu"


@pytest.mark.parametrize(
    ("name", "cfg", "words"),
    [
        pytest.param("tpu-v5e", Tile(1024, 1024, 256), "vmem", marks=needs("tpu-v5e")),
        pytest.param("cuda-sm80", Tile(256, 256, 256), "Shared memory", marks=needs("cuda-sm80")),
    ],
)
def test_what_does_not_fit_is_refused_with_the_compilers_reason(matmul, name, cfg, words):
    large = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    entry = targets.check(matmul, large, large, target=name, configs=[cfg]).entries[0]
    assert not entry.compiles
    assert words in entry.reason
    assert "exceeded" in entry.reason
    assert "\n" not in entry.reason
    assert len(entry.full_text) >= len(entry.reason)


def test_the_second_check_is_read_from_disk(matmul, monkeypatch):
    first = targets.check(matmul, SHAPE, SHAPE, target="cpu")
    assert not any(entry.cached for entry in first)
    monkeypatch.setattr(compiler, "_compile", None)  # nothing may be compiled
    second = targets.check(matmul, SHAPE, SHAPE, target="cpu")
    assert all(entry.cached for entry in second)
    assert [entry.estimate for entry in second] == [entry.estimate for entry in first]
    monkeypatch.undo()


def test_a_damaged_answer_on_disk_is_compiled_again(matmul, tmp_path):
    targets.check(matmul, SHAPE, SHAPE, target="cpu", configs=[GOOD])
    (file,) = pathlib.Path(tmp_path).rglob("targets/cpu/*.json")
    file.write_text("{")
    assert not targets.check(matmul, SHAPE, SHAPE, target="cpu", configs=[GOOD]).entries[0].cached


def test_a_compiler_that_takes_too_long_is_killed_and_the_next_one_works(matmul):
    slow = targets.check(matmul, SHAPE, SHAPE, target="cpu", configs=[GOOD], seconds=1e-3)
    assert not slow.entries[0].compiles
    assert "still compiling after 0.001 s" in slow.entries[0].reason
    again = targets.check(matmul, SHAPE, SHAPE, target="cpu", configs=[GOOD])
    assert again.entries[0].compiles  # and the limit's failure was not kept
    assert not again.entries[0].cached


def test_several_compilers_give_the_same_answers(matmul):
    results = targets.check(matmul, SHAPE, SHAPE, target="cpu", jobs=2)
    assert [entry.cfg.rows for entry in results] == [128, 256, 256]
    assert all(entry.compiles for entry in results)


@needs("tpu-v5e")
def test_a_topology_that_libtpu_does_not_know(matmul, monkeypatch):
    future = dataclasses.replace(targets.find("tpu-v5e"), name="tpu-v99", topology="v99:2x2")
    monkeypatch.setitem(TARGETS, "tpu-v99", future)
    with pytest.raises(
        targets.TargetError, match=r"libtpu .* does not know the topology 'v99:2x2'"
    ):
        targets.check(matmul, SHAPE, SHAPE, target="tpu-v99")
    entry = targets.available(ask=True)["tpu-v99"]
    assert not entry.usable
    assert "v99:2x2" in entry.lacking
