"""Every test starts with an empty store, an empty registry and a new default executor."""

from __future__ import annotations

import os

# Before JAX starts: several CPU devices, for sharding, pmap and mixed-device tests.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pytest


@pytest.fixture(autouse=True)
def isolated(tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "ejkernel-cache"))
    for name in (
        "EJKERNEL_CONFIG_PATH",
        "EJKERNEL_AUTOTUNE",
        "EJKERNEL_OPS_STAMP",
        "EJKERNEL_OPS_PREFIX",
        "EJKERNEL_OPS_RECORD",
        "EJKERNEL_AGREEMENT_SECONDS",
    ):
        monkeypatch.delenv(name, raising=False)
    # Every test has its own cache folder, so each would compile. Tests of native kernels do.
    monkeypatch.setenv("EJKERNEL_NATIVE", "off")
    from ejkernel.ops import clear_invocations, set_default_executor

    set_default_executor(None)
    clear_invocations()
    yield
    set_default_executor(None)
