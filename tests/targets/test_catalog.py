"""Targets by name, what can be used here, and what is said about the rest."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from ejkernel import targets
from ejkernel.ops import device_fingerprint, device_kind, get_device_platform
from ejkernel.ops.utils.fingerprint import as_if_on
from ejkernel.targets import compiler

LISTED = ("tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "cuda-sm80", "cuda-sm90", "cuda-sm100", "cpu")


def test_the_promised_targets_are_there():
    assert set(LISTED) <= set(targets.names())


@pytest.mark.parametrize("name", ["tpu-v99", "", None, 5])
def test_an_unknown_target_is_refused_with_the_known_ones(name):
    with pytest.raises(targets.TargetError) as error:
        targets.find(name)
    assert all(known in str(error.value) for known in LISTED)


@pytest.mark.parametrize(
    ("name", "kind", "platform", "fingerprint"),
    [
        ("tpu-v5e", "tpu", "pallas", "tpu|tpu-v5-lite"),
        ("tpu-v6e", "tpu", "pallas", "tpu|tpu-v6-lite"),
        ("cuda-sm90", "gpu", "triton", "gpu|nvidia-h100-80gb-hbm3|sm90|132-cores"),
        ("cuda-sm100", "gpu", "triton", "gpu|nvidia-b200|sm100|148-cores"),
    ],
)
def test_standing_on_a_target_is_being_there(name, kind, platform, fingerprint):
    target = targets.find(name)
    here = (device_kind(), get_device_platform(), device_fingerprint())
    with as_if_on(target.device):
        assert (device_kind(), get_device_platform()) == (kind, platform)
        assert device_fingerprint() == fingerprint == target.device_fingerprint
    assert (device_kind(), get_device_platform(), device_fingerprint()) == here


def test_the_cpu_target_is_this_machine():
    assert targets.find("cpu").device_fingerprint == device_fingerprint()


def test_what_is_traced_for_a_target_is_not_served_here():
    traced_on = []

    @jax.jit
    def function(x):
        traced_on.append(device_kind())
        return x + 1

    x = jnp.ones(2)
    with as_if_on(targets.find("tpu-v4").device):
        function.lower(x)
    function(x)
    assert traced_on == ["tpu", "cpu"]


def test_a_gpu_config_carries_the_devices_limits():
    target = targets.find("cuda-sm80")
    assert "shared_memory_per_block_optin: 166912 " in target.gpu_target_config
    assert 'device_description_str: "NVIDIA A100-SXM4-80GB"' in target.gpu_target_config
    other = dataclasses.replace(target, device_name="NVIDIA A100-SXM4-40GB")
    assert other.device_fingerprint == "gpu|nvidia-a100-sxm4-40gb|sm80|108-cores"
    with pytest.raises(targets.TargetError, match="tpu-v4 is no CUDA device"):
        _ = targets.find("tpu-v4").gpu_target_config


def test_what_is_missing_is_said_with_what_to_install(monkeypatch):
    monkeypatch.setattr(compiler, "_version", lambda name: "" if "jax" not in name else "1")
    found = targets.available()
    assert [entry.target.name for entry in found] == list(targets.names())
    assert not found["tpu-v5e"].usable
    assert "'.[tpu-aot]'" in found["tpu-v5e"].lacking
    assert found["cpu"].usable
    table = str(found)
    assert all(name in table for name in LISTED)
    assert "'.[tpu-aot]'" in table

    monkeypatch.setattr(compiler, "_version", lambda name: "")
    assert "'.[cuda-aot]'" in targets.available()["cuda-sm90"].lacking


def test_a_missing_ptxas_is_said(monkeypatch):
    monkeypatch.setattr(compiler, "_version", lambda name: "1")
    monkeypatch.setattr(compiler, "find_ptxas", lambda: None)
    found = targets.available()
    assert "ptxas" in found["cuda-sm80"].lacking
    assert found["tpu-v4"].usable


def test_importing_and_listing_imports_no_compiler_and_starts_no_backend():
    code = """if True:
        import sys
        import ejkernel.ops
        assert not any(name.startswith("ejkernel.targets") for name in sys.modules)
        plugins = {name for name in sys.modules if name.startswith(("libtpu", "jax_"))}
        from ejkernel import targets
        targets.names(), targets.available(), targets.find("tpu-v4").device_fingerprint
        assert {name for name in sys.modules if name.startswith(("libtpu", "jax_"))} == plugins
        from jax._src import xla_bridge
        assert not xla_bridge._backends, xla_bridge._backends
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
