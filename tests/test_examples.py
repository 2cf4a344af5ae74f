"""Every example is a program that runs to its end, in a process of its own."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"

# What each of them must say, and the arguments that keep it short.
SAYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "custom_kernel": ((), ("measured 4 of 4 candidates", "chosen   by overlay")),
    "two_hosts": ((), ("they agree on Rows(rows=",)),
    "tune_transformer": (
        ("--length", "64"),
        ("linear_cross_entropy@v1", "of the step", "plain JAX", "default configs"),
    ),
    "serve_strictly": ((), ("(8, 512): served", "(3, 512): refused", "ejkernel tune")),
    "tune_jax_kernels": (
        (),
        (
            "nearest@v1",
            "jax/flash_attention_tpu@v1",
            "jax/splash_attention_tpu@v1",
            "jax/attention_gpu@v1",
            "jax/decode_attention_gpu@v1",
        ),
    ),
    "pallas_on_a_laptop": ((), ("equal to XLA's", "does not compile: The Pallas TPU lowering")),
}
ELSEWHERE = {"train_transformer": "tests/test_example_train_transformer.py"}


def run(name, arguments, tmp_path):
    root = str(EXAMPLES.parent)
    return subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={**os.environ, "EJKERNEL_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": root},
    )


@pytest.mark.parametrize("name", sorted(SAYS))
def test_example(name, tmp_path):
    arguments, said = SAYS[name]
    done = run(name, arguments, tmp_path)
    assert done.returncode == 0, done.stderr
    for text in said:
        assert text in done.stdout


def test_no_example_is_forgotten():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SAYS) | set(ELSEWHERE)
