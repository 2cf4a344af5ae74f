"""A user without a home folder, as in a container: heuristics serve, and one line says why."""

from __future__ import annotations

import json
import logging
import os
import pwd
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest
import small_model

from ejkernel.ops import default_executor, set_default_executor


@pytest.fixture
def bundle(ej, store, tmp_path):
    file = tmp_path / "bundle.json"
    assert ej("configs", "export", file).code == 0
    return file


def nobody(monkeypatch):
    """`docker run --user 12345`: no HOME, and nobody knows this user."""

    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


def nowhere(monkeypatch):
    monkeypatch.setenv("HOME", "/proc/nonexistent")  # where not even root can make a folder


def a_file(monkeypatch):
    monkeypatch.setenv("HOME", "/etc/passwd")


LONG = pytest.mark.long
HOMES = [
    pytest.param(nobody, id="nobody"),
    pytest.param(nowhere, id="nowhere", marks=LONG),
    pytest.param(a_file, id="a file", marks=LONG),
]


@pytest.fixture(params=HOMES)
def homeless(request, monkeypatch, bundle, tmp_path):
    monkeypatch.delenv("EJKERNEL_CACHE_DIR")
    monkeypatch.chdir(tmp_path)
    request.param(monkeypatch)
    set_default_executor(None)
    return request.param


COMMANDS = {
    # what is typed, with which codes it ends without a place to keep things in
    "doctor": (0, 1),
    "tune small_model:tuned": (4,),
    "tune small_model:tuned --store {folder} --no-bench": (0,),
    "tune small_model:tuned --store {folder} --no-bench --record r.json --report r.html": (0,),
    "tune small_model:tuned --store ~/store": (4,),
    "bench small_model:tuned": (1, 4),
    "report": (3,),
    "report --list": (0, 3),
    "report --from-store": (0, 4),
    "dashboard --token short": (2,),  # tests/dashboard has the rest: it does not end
    "configs list": (0,),
    "configs list --store {bundle}": (0,),
    "configs list --store ~/store": (4,),
    "configs list --store ~/bundle.json": (3, 4),
    "configs list --store ~unheard/bundle.json": (3, 4),
    "configs list --store sqlite:///~/store.db": (0, 4),
    "configs show abcd": (2, 4),
    "configs explain small_model:tuned": (0,),
    "configs verify --import small_model": (0,),
    "configs verify --import small_model --store {bundle}": (0, 1),
    "configs prune --all --yes": (0,),
    "configs diff {bundle} {bundle}": (0,),
    "configs export out.json": (2, 4),
    "configs import {bundle}": (4,),
    "configs merge {bundle} {bundle} -o merged.json": (0,),
    "check small_model:tuned --lower-only --target cpu": (0,),
    "labels {program}": (0,),
    "native status": (1,),
    "native build": (5,),
    "completion bash": (0,),
    "--version": (0,),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_ends_well_or_in_one_line(homeless, command, ej, bundle, tmp_path):
    program = tmp_path / "program.txt"
    lowered = jax.jit(small_model.model).lower(jnp.ones((32, 4)))
    program.write_text(lowered.as_text(debug_info=True))
    places = {"folder": tmp_path / "given", "bundle": bundle, "program": program}
    done = ej(*command.format(**places).split())
    assert done.code in COMMANDS[command], done
    assert "Traceback" not in done.err
    assert "bug of ejkernel" not in done.err
    said = [line for line in done.err.splitlines() if line.startswith(("ejkernel:", "error:"))]
    assert len(said) <= 1, done.err
    if done.code in (3, 4, 5):
        assert len(said) == 1
    if homeless is nobody and done.code in (4, 5) and "~" not in command:
        assert "there is no home folder" in done.err
        assert "EJKERNEL_CACHE_DIR" in done.err
    assert not os.path.exists(tmp_path / "~")


def test_a_home_in_which_nothing_can_be_kept_is_not_called_well(ej, monkeypatch):
    monkeypatch.delenv("EJKERNEL_CACHE_DIR")
    monkeypatch.setenv("EJKERNEL_NATIVE", "auto")
    a_file(monkeypatch)
    findings = ej("doctor", "--json").data["findings"]
    (store,) = (finding for finding in findings if finding["area"] == "store")
    assert store["status"] == "warning"
    for text in (store["text"] + store["advice"], ej("native", "status").out):
        assert "/etc/passwd is no folder" in text
        assert "EJKERNEL_CACHE_DIR" in text


def test_the_list_of_commands_is_whole():
    from ejkernel.cli.app import app
    from ejkernel.cli.configs import configs
    from ejkernel.cli.native import native

    for group, start in ((app, ""), (configs, "configs "), (native, "native ")):
        for name in group.commands:
            assert any(command.startswith(f"{start}{name}") for command in COMMANDS), name


def test_an_operation_runs_with_heuristics_and_says_so_once(homeless, monkeypatch, caplog):
    from ejkernel.modules import flash_attention
    from ejkernel.native import loading

    monkeypatch.setenv("EJKERNEL_NATIVE", "auto")
    monkeypatch.setattr(loading, "_loaded", {})
    monkeypatch.setattr(loading, "_failed", {})
    q = jnp.ones((1, 32, 1, 8))  # enough rows for the C++ kernel, which cannot be kept
    with caplog.at_level(logging.WARNING), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(small_model.row_sum(jnp.ones((16, 4)))[0]) == 4.0
        assert float(small_model.row_sum(jnp.ones((24, 4)))[0]) == 4.0
        assert flash_attention(q, q, q).shape == q.shape
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1, said
    assert "EJKERNEL_CACHE_DIR" in said[0]
    persistent = default_executor().selector.persistent
    assert persistent is None or len(persistent) == 0


def test_tuning_works_and_keeps_its_result_in_memory(homeless, monkeypatch, caplog):
    from ejkernel.ops import policy_override

    with warnings.catch_warnings(record=True) as caught, policy_override(autotune=True):
        warnings.simplefilter("always")
        assert float(small_model.row_sum(jnp.ones((32, 4)))[0]) == 4.0
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == len(set(messages)) <= 1


REAL = """
import os, sys, json
import small_model, jax.numpy as jnp
from ejkernel.cli import run
run(["configs", "list", "--store", sys.argv[1]])
run(["configs", "explain", "small_model:tuned", "--store", sys.argv[1]])
run(["doctor"])  # everything is imported: others cannot read all of it
for name in ("HOME", "EJKERNEL_CACHE_DIR"):
    os.environ.pop(name, None)
os.chdir("/")
os.setgroups([]), os.setgid(54321), os.setuid(54321)
print("-----")
codes = [run(words.split()) for words in (
    "doctor", "configs list", "configs explain small_model:tuned", "tune small_model:tuned",
    "native status", "report --list",
)]
print(float(small_model.row_sum(jnp.ones((16, 4)))[0]))
print(codes)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: a real unknown user; that takes root")
def test_a_real_user_whom_nobody_knows(tmp_path):
    here = os.path.dirname(__file__)
    done = subprocess.run(
        [sys.executable, "-c", REAL, str(tmp_path / "store")],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([os.getcwd(), here]),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": "",
        },
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    after = done.stdout.partition("-----")[2].strip().splitlines()
    assert "Traceback" not in done.stderr
    assert after[-2] == "4.0"
    assert json.loads(after[-1])[1:] == [0, 0, 4, 1, 3]
