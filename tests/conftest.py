"""Every test starts with an empty store, an empty registry and a new default executor."""

from __future__ import annotations

import atexit
import os
import pathlib
import shutil
import tempfile

# Before JAX starts: several CPU devices, for sharding, pmap and mixed-device tests.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Most of a run is compiling, and most programs are compiled again and again: by each test, because
# a new default executor makes every function be traced again, and by each process.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    compiled = tempfile.mkdtemp(prefix="ejkernel-compiled-")
    atexit.register(shutil.rmtree, compiled, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import pytest

# What `make test` leaves to `make test-long`: sweeps over the options and sizes of operations,
# several hosts, whole programs, browsers.
LONG = (
    "kernels/",
    "settings/",
    "fleet/",
    "targets/",
    "report/test_browser.py",
    "dashboard/test_dashboard_browser.py",
    "test_example_train_transformer.py",
    "test_examples.py",
)
SHORT = (
    "kernels/test_slicing.py",
    "kernels/test_flash_attention_xla.py",
    "kernels/test_flash_attention_native.py",  # the default on a CPU
    "settings/test_tuning_on_a_mesh.py",
)


def pytest_report_header():
    """Say at the top what cannot be tested here."""
    import ejkernel.modules  # noqa: F401  it says what is built
    from ejkernel import native

    found = native.find_compiler()
    return f"THE C++ KERNELS ARE NOT TESTED: {found}" if isinstance(found, str) else None


def pytest_collection_modifyitems(config, items):
    """Mark the long tests; of these, run the share of them that `EJKERNEL_TEST_SHARE` says.

    CI divides them between its two Pythons: with `1/2` every other one is run, with `2/2` the rest.
    """
    here = pathlib.Path(__file__).parent
    for item in items:
        name = item.path.relative_to(here).as_posix() if item.path.is_relative_to(here) else ""
        if name.startswith(LONG) and not name.startswith(SHORT):
            item.add_marker(pytest.mark.long)
    part, of = map(int, os.environ.get("EJKERNEL_TEST_SHARE", "1/1").split("/"))
    long = [item for item in items if item.get_closest_marker("long")]
    left_out = [item for i, item in enumerate(long) if i % of != part - 1]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        out = set(left_out)
        items[:] = [item for item in items if item not in out]


@pytest.fixture(autouse=True)
def isolated(tmp_path, monkeypatch):
    from ejkernel.ops.utils import environment

    for variable in environment.VARIABLES:
        if variable.name.startswith("EJKERNEL_"):  # not CXX: that says which compiler there is
            monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "ejkernel-cache"))
    # Every test has its own cache folder, so each would compile. Tests of native kernels do.
    monkeypatch.setenv("EJKERNEL_NATIVE", "off")
    from ejkernel.ops import clear_invocations, set_default_executor

    set_default_executor(None)
    clear_invocations()
    yield
    set_default_executor(None)


class Clock:
    """Time that passes only when a test spends it."""

    def __init__(self):
        self.now = 0.0
        self.runs = 0

    def __call__(self):
        return self.now

    def spend(self, seconds):
        self.now += seconds
        self.runs += 1


@pytest.fixture
def clock():
    return Clock()
