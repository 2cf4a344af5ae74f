"""SPEC 1: every documented name is where the documentation says, and importing costs nothing."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = {
    "ejkernel.ops.core": ["Kernel", "Invocation", "Cfg", "Out"],
    "ejkernel.ops.config": [
        "ConfigCache",
        "overlay_cache",
        "PersistentCache",
        "ConfigSelectorChain",
        "AutotunePolicy",
        "Tuner",
        "policy_override",
        "forward_autotune_only",
    ],
    "ejkernel.ops.execution": [
        "Executor",
        "ConfigChooser",
        "vmap_with_config",
        "pmap_with_config",
        "autotune",
        "benchmark",
        "autotune_recorded",
        "AutotuningResult",
        "Entry",
        "autotune_lowered",
    ],
    "ejkernel.ops.registry": ["record_invocation", "get_invocations"],
    "ejkernel.ops.utils": [
        "device_fingerprint",
        "device_kind",
        "get_device_platform",
        "sharding_fingerprint",
        "default_key_builder_with_sharding",
        "stable_json",
        "short_hash",
        "abstractify",
        "label",
        "LABEL_RE",
        "LABEL_PREFIXES",
        "extract_labels_from_hlo_text",
        "find_labels_in_lowered",
        "labels_to_configs",
        "to_json",
        "from_json",
        "FwdParams",
        "BwdParams",
    ],
}

FILES = {
    "ejkernel.ops.core.kernel": ["Kernel", "Invocation"],
    "ejkernel.ops.core.types": ["Cfg", "Out"],
    "ejkernel.ops.config.cache": ["ConfigCache", "overlay_cache"],
    "ejkernel.ops.config.persistent": ["PersistentCache"],
    "ejkernel.ops.config.selection": [
        "ConfigSelectorChain",
        "AutotunePolicy",
        "Tuner",
        "policy_override",
        "forward_autotune_only",
    ],
    "ejkernel.ops.execution.executor": ["Executor", "ConfigChooser"],
    "ejkernel.ops.execution.batch": ["vmap_with_config", "pmap_with_config"],
    "ejkernel.ops.execution.tuning": [
        "autotune",
        "benchmark",
        "autotune_recorded",
        "AutotuningResult",
        "Entry",
    ],
    "ejkernel.ops.execution.offline": ["autotune_lowered"],
    "ejkernel.ops.utils.fingerprint": [
        "device_fingerprint",
        "device_kind",
        "get_device_platform",
        "sharding_fingerprint",
        "default_key_builder_with_sharding",
        "stable_json",
        "short_hash",
        "abstractify",
    ],
    "ejkernel.ops.utils.meta": [
        "label",
        "LABEL_RE",
        "LABEL_PREFIXES",
        "extract_labels_from_hlo_text",
        "find_labels_in_lowered",
        "labels_to_configs",
    ],
    "ejkernel.ops.utils.serialize": ["to_json", "from_json"],
}


def places(table: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(module, name) for module, names in table.items() for name in names]


@pytest.mark.parametrize(("module", "name"), places(PACKAGES) + places(FILES))
def test_a_documented_name_is_importable_and_is_the_one_of_ejkernel_ops(module, name):
    import ejkernel.ops

    found = getattr(importlib.import_module(module), name)
    assert found is getattr(ejkernel.ops, name)


@pytest.mark.parametrize("module", ["ejkernel.ops", *PACKAGES])
def test_a_star_import_gives_every_documented_name(module):
    names = [name for _, name in places(PACKAGES)] if module == "ejkernel.ops" else PACKAGES[module]
    space: dict[str, object] = {}
    exec(f"from {module} import *", space)
    assert set(names) <= set(space)


@pytest.mark.parametrize("module", ["ejkernel.ops", *PACKAGES, *FILES])
def test_everything_in_all_exists(module):
    loaded = importlib.import_module(module)
    assert [name for name in getattr(loaded, "__all__", []) if not hasattr(loaded, name)] == []


def test_the_default_executor_is_reached_from_ejkernel_ops():
    from ejkernel.ops import Executor, default_executor, set_default_executor

    mine = Executor()
    set_default_executor(mine)
    assert default_executor() is mine


def test_an_unknown_name_in_the_selection_module_is_an_attribute_error():
    from ejkernel.ops.config import selection

    with pytest.raises(AttributeError, match="Tunner"):
        _ = selection.Tunner


# --- what importing does --------------------------------------------------------------------------


def run_python(source: str, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("EJKERNEL")},
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source), *arguments],
        env=environment,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


OBSERVE = """
    import json, os, sys, threading
    import jax, jax.numpy, numpy
    from jax._src import xla_bridge

    before = set(sys.modules)
    threads = threading.active_count()
    environment = dict(os.environ)
    written, read, other = [], [], []

    def watch(event, args):
        if event == "open":
            path, mode, flags = args
            writing = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND))
            if writing or (isinstance(mode, str) and set(mode) & set("wax+")):
                written.append(str(path))
            elif not str(path).endswith((".py", ".pyc", ".so")):
                read.append(str(path))
        elif event in ("os.mkdir", "os.rename", "os.remove", "subprocess.Popen",
                       "socket.connect", "os.system", "sqlite3.connect"):
            other.append(event)

    sys.addaudithook(watch)
    import ejkernel.ops
    report = {
        "written": list(written),
        "read": list(read),
        "other": list(other),
        "backends": sorted(xla_bridge._backends),
        "threads": threading.active_count() - threads,
        "environment": dict(os.environ) == environment,
        "modules": sorted({name.partition(".")[0] for name in set(sys.modules) - before}),
        "ejkernel": [name for name in sys.modules if name.startswith("ejkernel")],
    }
    print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def home_and_report(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    return home, json.loads(run_python(OBSERVE, home).stdout)


def test_importing_really_imported_the_framework(home_and_report):
    loaded = home_and_report[1]["ejkernel"]
    assert {"ejkernel.ops", *PACKAGES} <= set(loaded)


def test_importing_starts_no_backend(home_and_report):
    assert home_and_report[1]["backends"] == []


def test_importing_opens_no_file_for_writing(home_and_report):
    report = home_and_report[1]
    assert report["written"] == []
    assert report["other"] == []


def test_importing_reads_nothing_but_code(home_and_report):
    assert home_and_report[1]["read"] == []


def test_importing_leaves_the_home_folder_empty(home_and_report):
    assert list(home_and_report[0].iterdir()) == []


def test_importing_starts_no_thread_and_sets_no_environment_variable(home_and_report):
    report = home_and_report[1]
    assert report["threads"] == 0
    assert report["environment"]


def test_importing_loads_no_heavy_module(home_and_report):
    heavy = {
        *("rich", "sqlalchemy", "sqlite3", "asyncio", "pandas", "matplotlib", "ray", "torch"),
        *("triton", "flax", "optuna", "sklearn", "requests", "typer", "click", "multiprocessing"),
    }
    assert heavy & set(home_and_report[1]["modules"]) == set()


def test_importing_needs_nothing_beside_jax_and_what_jax_needs(home_and_report):
    allowed = {"ejkernel", *sys.stdlib_module_names}
    assert set(home_and_report[1]["modules"]) - allowed == set()


def test_importing_with_a_home_that_cannot_hold_files_works(tmp_path):
    home = tmp_path / "home"
    home.write_text("a file, so that nothing can be made below it, not even by root")
    source = "import os; os.environ['HOME'] = os.sys.argv[1]; import ejkernel.ops; print('ready')"
    done = run_python(source, tmp_path, str(home))
    assert done.stdout == "ready\n"
    assert done.stderr == ""


def test_each_module_can_be_the_first_one_imported(tmp_path):
    # Import cycles show only when the unlucky module comes first. The package `ejkernel.ops` is
    # replaced by an empty one, so that it does not import everything before.
    source = """
        import importlib, sys, types
        import jax
        for module in sys.argv[2:]:
            for name in [name for name in sys.modules if name.startswith("ejkernel")]:
                del sys.modules[name]
            package = types.ModuleType("ejkernel.ops")
            package.__path__ = [sys.argv[1]]
            sys.modules["ejkernel.ops"] = package
            try:
                importlib.import_module(module)
            except Exception as error:
                print(module, repr(error))
    """
    folder = str(ROOT / "ejkernel" / "ops")
    assert run_python(source, tmp_path, folder, *PACKAGES, *FILES).stdout == ""
