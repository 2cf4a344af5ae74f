"""Programs that leave the process: exported, serialised, cached, or lowered for other platforms."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import arrays_of, function_of, loss_of
from jax import export
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from ejkernel import modules, native
from ejkernel.kernels.flash_attention.native import LIBRARY
from ejkernel.modules import flash_attention

HANDLERS = LIBRARY.handlers
ALLOWED = [export.DisabledSafetyCheck.custom_call(name) for name in HANDLERS]

# What it is given was made elsewhere, and no operation is called before it is used.
USER = """
import json, pickle, sys
import jax, numpy as np
from jax import export
from jax.experimental import serialize_executable
import ejkernel.modules

def error(got, wanted):
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    return max(float(np.abs(np.asarray(a) - b).max() / max(1.0, np.abs(b).max())) for a, b in pairs)

with open(sys.argv[1], "rb") as file:
    made = pickle.load(file)
report = {}
for name, (arrays, parts, wanted) in made["executables"].items():
    one = jax.devices()[:1]
    loaded = serialize_executable.deserialize_and_load(*parts, execution_devices=one)
    report[f"executable {name}"] = error(loaded(*arrays), wanted)
for name, (arrays, data, out, gradients) in made["exports"].items():
    exported = export.deserialize(bytearray(data))
    report[f"export {name}"] = error(exported.call(*arrays), out)
    if gradients is not None:
        loss = lambda *a: jax.numpy.sum(jax.numpy.sin(exported.call(*a)))
        got = jax.jit(jax.grad(loss, tuple(range(len(arrays)))))(*arrays)
        report[f"gradient of export {name}"] = error(got, gradients)
print(json.dumps(report))
"""

# What was compiled before, as the same program in a new process.
AGAIN = """
import collections, json, pickle, sys
import jax, numpy as np
seen = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: seen.update([event]))
sys.path.insert(0, sys.argv[1])
from calls import arrays_of, loss_of
arrays = [np.asarray(x) for x in arrays_of("flash_attention")]
step = jax.jit(jax.value_and_grad(loss_of("flash_attention"), (0, 1, 2)))
native = "ejkernel_flash_attention" in step.lower(*arrays).as_text()
seen.clear()
values = jax.tree.map(lambda x: np.asarray(x).tolist(), step(*arrays))
hits = seen["/jax/compilation_cache/cache_hits"]
print(json.dumps([native, hits, seen["/jax/compilation_cache/cache_misses"], values]))
"""


def run(source: str, *arguments: object, built: Path, **variables: str) -> object:
    environment = {**os.environ, "EJKERNEL_CACHE_DIR": str(built), **variables}
    environment.pop("EJKERNEL_NATIVE", None)
    done = subprocess.run(
        [sys.executable, "-c", source, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def plain(tree):
    return jax.tree.map(np.asarray, tree)


@contextlib.contextmanager
def compiled_anew():
    """What comes from JAX's compilation cache cannot be serialised again on a CPU."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()


def executable_of(name):
    arrays = arrays_of(name)
    step = jax.jit(jax.value_and_grad(loss_of(name), tuple(range(len(arrays)))))
    with compiled_anew():
        compiled = step.lower(*arrays).compile()
    return plain(arrays), serialize_executable.serialize(compiled), plain(compiled(*arrays))


def export_of(name):
    arrays, function = arrays_of(name), function_of(name, implementation="reference")
    exported = export.export(jax.jit(function_of(name)))(*arrays)
    every = tuple(range(len(arrays)))
    gradients = jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(function(*a))), every))(*arrays)
    data = exported.serialize(vjp_order=1)
    return plain(arrays), data, plain(function(*arrays)), plain(gradients)


def native_export_of(name):
    arrays = arrays_of(name)
    with native.in_exports():
        exported = export.export(jax.jit(function_of(name)), disabled_checks=ALLOWED)(*arrays)
    assert HANDLERS[0] in exported.mlir_module()
    return plain(arrays), exported.serialize(), plain(function_of(name)(*arrays)), None


@pytest.mark.parametrize(
    "names",
    [
        ("flash_attention",),
        pytest.param(modules.OPERATIONS, marks=pytest.mark.long),
    ],
    ids=["flash_attention", "every operation"],
)
def test_programs_run_in_a_process_that_has_called_nothing(names, native_library, tmp_path):
    pytest.importorskip("flatbuffers", reason="JAX serialises exported programs with it")
    made = {
        "executables": {name: executable_of(name) for name in names},
        "exports": {name: export_of(name) for name in names}
        | {"with C++": native_export_of("flash_attention")},
    }
    file = tmp_path / "made"
    file.write_bytes(pickle.dumps(made))
    report = run(USER, file, built=native_library)
    assert len(report) == 3 * len(names) + 1
    assert {what: error for what, error in report.items() if not error < 3e-5} == {}


def test_a_second_process_takes_its_program_from_the_compilation_cache(native_library, tmp_path):
    variables = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    here = Path(__file__).parent
    first = run(AGAIN, here, built=native_library, **variables)
    again = run(AGAIN, here, built=native_library, **variables)
    assert first[0]
    assert again[0]
    assert first[2] > 0
    assert again[1] > 0
    assert again[2] == 0
    assert again[3] == first[3]


# --- other platforms -----------------------------------------------------------------------------


def holds_native_call(text: str) -> bool:
    return any(name in text for name in HANDLERS)


@pytest.mark.parametrize("platform", ["tpu", "cuda", "rocm"])
def test_a_program_for_another_platform_holds_no_call_of_this_cpu(native_library, platform):
    arrays = arrays_of("flash_attention")
    step = jax.jit(jax.value_and_grad(loss_of("flash_attention"), (0, 1, 2)))
    mapped = jax.jit(jax.vmap(function_of("flash_attention")))
    for function, given in ((step, arrays), (mapped, [x[None] for x in arrays])):
        assert holds_native_call(function.lower(*given).as_text())
        traced = function.trace(*given)
        assert not holds_native_call(traced.lower(lowering_platforms=(platform,)).as_text())


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"return_lse": True, "sinks": jnp.array([0.5, -1.0, 2.0, 0.0])}, id="sinks"),
        *(
            pytest.param(options, id=name, marks=pytest.mark.long)
            for name, options in {
                "plain": {},
                "lengths": {
                    "kv_lengths": jnp.array([7, 12]),
                    "window": 4,
                    "logits_soft_cap": 5.0,
                },
                "bias": {"bias": jnp.linspace(-1, 1, 24 * 12).reshape(1, 1, 24, 12)},
            }.items()
        ),
    ],
)
def test_an_export_for_several_platforms_is_right_here(native_library, options):
    def loss(*arrays):
        out = flash_attention(*arrays, causal=True, **options)
        return sum(jnp.sum(jnp.sin(part)) for part in jax.tree.leaves(out))

    arrays = arrays_of("flash_attention")
    step = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    exported = export.export(step, platforms=["cpu", "tpu", "cuda"])(*arrays)
    assert not holds_native_call(exported.mlir_module())
    for got, wanted in zip(
        jax.tree.leaves(exported.call(*arrays)), jax.tree.leaves(step(*arrays)), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


def test_inside_shard_map_too(native_library):
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("batch")
    arrays = arrays_of("flash_attention")
    step = jax.jit(
        jax.shard_map(
            jax.grad(loss_of("flash_attention"), (0, 1, 2)),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
        )
    )
    assert holds_native_call(step.lower(*arrays).as_text())
    lowered = step.trace(*arrays).lower(lowering_platforms=("tpu",))
    assert not holds_native_call(lowered.as_text())


# --- what importing does -------------------------------------------------------------------------

IMPORT = """
import json, sys
import jax
started = []
sys.addaudithook(lambda event, args: started.append(event) if event == "subprocess.Popen" else None)
import ejkernel.modules
from ejkernel.native import loaded
from jax._src import xla_bridge
print(json.dumps([started, sorted(xla_bridge._backends), sorted(loaded())]))
"""


def test_importing_loads_what_is_built_and_starts_nothing(native_library, tmp_path):
    assert run(IMPORT, built=native_library) == [[], [], ["flash_attention", "paged_attention"]]
    assert run(IMPORT, built=tmp_path / "empty") == [[], [], []]
    assert not (tmp_path / "empty").exists()


def test_libraries_can_be_loaded_by_hand(native_library, monkeypatch):
    native.load_libraries()
    monkeypatch.setenv("EJKERNEL_NATIVE", "off")
    with pytest.raises(RuntimeError, match=r"flash_attention cannot be loaded: .*=off"):
        native.load_libraries()
