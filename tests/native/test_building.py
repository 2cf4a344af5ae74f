"""Native libraries: built once, whole or not at all, never unasked, and clear about why not."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from ejkernel import modules, native
from ejkernel.kernels.flash_attention import (
    FlashAttention,
    FlashAttentionCppConfig,
    FlashAttentionXlaConfig,
    attention_reference,
)
from ejkernel.kernels.flash_attention.native import LIBRARY
from ejkernel.native import BuildFailed, Library, building, libraries, loading, toolchain
from ejkernel.ops import NotSupported, default_executor

ROOT = pathlib.Path(__file__).parents[2]
SOURCE = 'extern "C" int ejkernel_test_handler(void*) { return 0; }\n'


@pytest.fixture
def library(tmp_path):
    """One that compiles at once."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "tiny.cc").write_text(SOURCE)
    return Library("tiny", folder / "tiny.cc", ("ejkernel_test_handler",))


@pytest.fixture
def nothing_loaded(monkeypatch):
    monkeypatch.setattr(loading, "_loaded", {})
    monkeypatch.setattr(loading, "_failed", {})
    monkeypatch.setenv("EJKERNEL_NATIVE", "auto")


def no_compiler(monkeypatch, tmp_path):
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("CXX", raising=False)


def script(path: pathlib.Path, compiler, body: str) -> str:
    """A compiler that does something else first."""
    path.write_text(
        f'#!/bin/sh\ncase "$*" in *--version*) echo "slow compiler 1"; exit 0;; esac\n{body}\n'
        f'exec {compiler.command[0]} "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


def start_build(library, **variables) -> subprocess.Popen:
    program = (
        "import pathlib, sys\n"
        "import ejkernel.ops\n"
        "from ejkernel.native import Library, building\n"
        f"library = Library('tiny', pathlib.Path({str(library.source)!r}), ('x',))\n"
        "print(building.build_library(library))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True
    )


def names(folder: pathlib.Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_build_is_found_again_and_leaves_one_file(library, compiler):
    assert building.find(library) is None
    file = building.build_library(library)
    assert building.find(library) == file
    assert names(file.parent) == [file.name]
    before = file.stat().st_mtime_ns
    assert building.build_library(library) == file
    assert file.stat().st_mtime_ns == before
    building.build_library(library, force=True)
    assert file.stat().st_mtime_ns > before


def test_the_key_follows_source_compiler_processor_and_jaxlib(library, compiler, monkeypatch):
    def name() -> str:
        return building.file_name(library, compiler)

    first = name()
    assert name() == first
    library.source.write_text(SOURCE + "// changed\n")
    other_source = name()
    monkeypatch.setattr(building, "processor", lambda: "another one")
    other_processor = name()
    monkeypatch.setattr("jaxlib.__version__", "0.0.1")
    other_jaxlib = name()
    other_compiler = building.file_name(library, toolchain.Compiler(compiler.command, "99"))
    found = [first, other_source, other_processor, other_jaxlib, other_compiler]
    assert len(set(found)) == len(found)


def test_two_processes_at_once_compile_once(library, compiler, tmp_path):
    log = tmp_path / "log"
    slow = script(tmp_path / "slow", compiler, f"echo compiled >> {log}\nsleep 1")
    processes = [start_build(library, CXX=slow) for _ in range(2)]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert outputs[0] == outputs[1] != ""
    assert log.read_text() == "compiled\n"


def test_a_killed_build_leaves_nothing_that_could_be_used(library, compiler, tmp_path, monkeypatch):
    started = tmp_path / "started"
    stuck = script(
        tmp_path / "stuck",
        compiler,
        f'test -e {started} || {{ for last; do :; done; echo half > "$last"; '
        f"echo $$ > {started}; sleep 600; }}",
    )
    process = start_build(library, CXX=stuck)
    deadline = time.monotonic() + 240
    while not (started.exists() and started.read_text().strip()):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.communicate()
    os.kill(int(started.read_text()), signal.SIGTERM)
    monkeypatch.setenv("CXX", stuck)
    assert building.find(library) is None
    [left] = names(building.folder())
    assert left.startswith(".building-")
    file = building.build_library(library)  # the lock died with its holder
    assert names(building.folder()) == [file.name]


def test_a_compiler_that_fails_is_quoted_and_nothing_stays(library, compiler):
    library.source.write_text("this is not C++\n")
    with pytest.raises(BuildFailed, match=r"tiny cannot be compiled with .*(?s:.)*not C\+\+|error"):
        building.build_library(library)
    assert names(building.folder()) == []


def test_a_folder_that_cannot_be_written_is_named(library, compiler, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(BuildFailed, match="EJKERNEL_CACHE_DIR"):
        building.build_library(library)


def test_files_of_others_are_not_loaded(library, compiler):
    file = building.build_library(library)
    file.parent.chmod(0o777)
    assert building.find(library) is None
    file.parent.chmod(0o700)
    assert building.find(library) == file


def test_what_was_built_serves_without_a_compiler(library, compiler, monkeypatch, tmp_path):
    file = building.build_library(library)
    no_compiler(monkeypatch, tmp_path)
    assert building.find(library) == file


@pytest.mark.parametrize(
    ("command", "reason"),
    [("/does/not/exist", "not a program that can be started"), ("false", "--version")],
)
def test_a_bad_CXX_is_named(command, reason, monkeypatch):
    monkeypatch.setenv("CXX", command)
    found = toolchain.find_compiler()
    assert isinstance(found, str)
    assert command in found
    assert reason in found


def attention_inputs():
    return jax.random.normal(jax.random.key(0), (3, 1, 9, 2, 8))


def test_without_a_compiler_xla_serves_and_the_reason_is_shown(
    nothing_loaded, monkeypatch, tmp_path
):
    no_compiler(monkeypatch, tmp_path)
    kernel, options = FlashAttention(), {"causal": True, "softmax_scale": 1.0}
    assert kernel(*attention_inputs(), **options).shape == (1, 9, 2, 8)
    with pytest.raises(NotSupported, match="no C\\+\\+ compiler was found"):
        kernel(*attention_inputs(), implementation="cpu", **options)
    found = native.status()
    assert not found.available
    assert "no C++ compiler was found" in str(found)
    with pytest.raises(BuildFailed, match="no C\\+\\+ compiler was found"):
        native.build()


OPTIONS = {"causal": True, "softmax_scale": 1.0}


def test_a_failed_build_is_tried_once_and_xla_serves(
    nothing_loaded, compiler, monkeypatch, tmp_path, caplog
):
    log = tmp_path / "log"
    broken = script(tmp_path / "broken", compiler, f"echo tried >> {log}\nexit 1")
    monkeypatch.setenv("CXX", broken)
    kernel = FlashAttention()
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 32, 2, 8))
    assert kernel.bind(q, k, v, **OPTIONS).handled_by == "cpu"
    program = jax.jit(lambda q: kernel(q, k, v, **OPTIONS))
    assert "ejkernel_flash_attention_forward" not in program.lower(q).as_text()
    assert caplog.text.count("cannot be compiled") == 1
    np.testing.assert_allclose(program(q), attention_reference(q, k, v, **OPTIONS), atol=1e-5)
    inv = kernel.bind(q, k, v, **OPTIONS)
    assert inv.handled_by == "xla"
    assert isinstance(kernel.heuristic(inv), FlashAttentionXlaConfig)
    for _ in range(2):
        with pytest.raises(NotSupported, match="cannot be compiled"):
            kernel(q, k, v, implementation="cpu", **OPTIONS)
    assert log.read_text() == "tried\n"
    assert caplog.text.count("cannot be compiled") == 1


def test_a_requested_library_that_cannot_be_built_is_an_error_at_once(
    nothing_loaded, compiler, monkeypatch, tmp_path
):
    monkeypatch.setenv("CXX", script(tmp_path / "broken", compiler, "exit 1"))
    kernel = FlashAttention()
    for request in ({"implementation": "cpu"}, {"cfg": FlashAttentionCppConfig()}):
        monkeypatch.setattr(loading, "_failed", {})
        with pytest.raises(NotSupported, match="cannot be compiled"):
            kernel(*attention_inputs(), **request, **OPTIONS)


def recording(path: pathlib.Path, compiler, log: pathlib.Path) -> str:
    """A compiler that writes down that it was started, for its version too."""
    path.write_text(f'#!/bin/sh\necho started >> {log}\nexec {compiler.command[0]} "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("mode", ["auto", "built", "off"])
def test_reading_a_key_starts_no_compiler(mode, nothing_loaded, compiler, monkeypatch, tmp_path):
    log = tmp_path / "log"
    monkeypatch.setenv("CXX", recording(tmp_path / "c++", compiler, log))
    monkeypatch.setenv("EJKERNEL_NATIVE", mode)
    kernel = FlashAttention()
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 32, 2, 8))
    inv = kernel.bind(q, k, v, **OPTIONS)
    assert inv.handled_by == ("cpu" if mode == "auto" else "xla")
    assert len(inv.call_key) == 16
    assert kernel.heuristic(inv) == default_executor().choose_config(kernel, q, k, v, **OPTIONS)
    assert str(modules.supported("flash_attention", q, k, v))
    assert not log.exists()
    assert not building.folder().exists()


def test_a_call_that_runs_starts_it(nothing_loaded, compiler, monkeypatch, tmp_path):
    """Else the test before would hold whatever is done: here the recording compiler is started."""
    log = tmp_path / "log"
    monkeypatch.setenv("CXX", recording(tmp_path / "c++", compiler, log))
    monkeypatch.setattr(toolchain.Compiler, "compile", lambda *_: "not in this test")
    kernel = FlashAttention()
    kernel(*jax.random.normal(jax.random.key(0), (3, 1, 32, 2, 8)), **OPTIONS)
    assert log.read_text() == "started\n"


def test_a_build_by_hand_lifts_an_earlier_failure(nothing_loaded, compiler, monkeypatch, library):
    monkeypatch.setattr(libraries, "_declared", {library.name: library})
    library.source.write_text("this is not C++\n")
    assert "cannot be compiled" in str(native.why_not(library))
    library.source.write_text(SOURCE)
    assert "cannot be compiled" in str(native.unavailable(library))
    native.build()
    assert native.unavailable(library) is None


def test_it_is_built_only_when_that_is_allowed(nothing_loaded, compiler, monkeypatch):
    monkeypatch.setenv("EJKERNEL_NATIVE", "built")
    assert "ejkernel native build" in str(native.why_not(LIBRARY))
    assert not native.status().available
    monkeypatch.setenv("EJKERNEL_NATIVE", "off")
    assert "EJKERNEL_NATIVE=off" in str(native.why_not(LIBRARY))
    assert not native.status().available
    monkeypatch.setenv("EJKERNEL_NATIVE", "auto")
    assert native.status().available
    assert not native.status().built
    assert not building.folder().exists()
