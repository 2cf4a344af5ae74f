"""Runs the command line in this process, where it costs no import."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))


@dataclasses.dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def data(self):
        return json.loads(self.out)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(folder))
    monkeypatch.delenv("EJKERNEL_CONFIG_PATH", raising=False)
    return folder


@pytest.fixture
def ej(cache, capsys):
    """`ej("configs", "list")` gives exit code, output and error output."""
    from ejkernel.cli import run

    def call(*arguments):
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return call


@pytest.fixture
def store(cache):
    """The usual store, with two entries put there by hand and one that was interrupted."""
    import jax.numpy as jnp
    from small_model import Config, row_sum

    from ejkernel.ops import PersistentCache
    from ejkernel.ops.config.freshness import made_by

    store = PersistentCache()
    for size, about in (
        (32, {"seconds": 1e-3, "heuristic_seconds": 2e-3, "sure": True, "measured": "forward"}),
        (64, {"seconds": 3e-3, "heuristic_seconds": 3e-3, "incomplete": "the budget is spent"}),
    ):
        inv = row_sum.bind(jnp.ones((size, 4)))
        trials = [
            {"config": {"rows": 16}, "verdict": "measured", "seconds": 1e-3, "samples_ns": [1000]},
            {"config": {"rows": 8}, "verdict": "failed", "reason": "it did not compile"},
        ]
        store.put(inv.key, Config(16), about={**made_by(inv, row_sum), **about, "trials": trials})
    other = ("tpu|tpu-v9", "matmul@v2", "0123456789abcdef")
    store.put(*other, {"block": 64}, about={"when": "2020-01-01T00:00:00+00:00"})
    return store
