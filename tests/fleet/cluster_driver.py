"""Tunes twenty operations on a Ray cluster of this machine. Run by test_cluster.py."""

from __future__ import annotations

import json
import logging
import pathlib
import sys

import jax
import jax.numpy as jnp
import ray
from cluster_kernels import Config, Halves, Named

from ejkernel.fleet import tune_on_cluster
from ejkernel.ops import ConfigCache, ConfigSelectorChain, PersistentCache, Tuner, get_invocations

folder = pathlib.Path(sys.argv[1])
logging.basicConfig(level=logging.WARNING)
halves = Halves()


class InTheScript(Halves):
    pass


def model(*inputs):
    return sum(halves(x).sum() for x in inputs)


def selector():
    return ConfigSelectorChain(
        ConfigCache(), tuner=Tuner(effort="quick"), persistent=PersistentCache(folder / "store")
    )


def told(result):
    return {
        "device": result.device,
        "configs": {entry.signature: entry.cfg.rows for entry in result},
        "types_fit": all(isinstance(entry.cfg, Config) for entry in result),
        "seconds": [entry.seconds for entry in result],
        "origins": [entry.origin for entry in result],
        "skipped": {skipped.label: skipped.reason for skipped in result.skipped},
        "others": len(result.others),
    }


report = {}
inputs = [jnp.ones(8 * (i + 1)) for i in range(20)]
lowered = jax.jit(model).lower(*inputs)

first = selector()
report["first"] = told(tune_on_cluster(first, lowered, resources={"CPU": 1}, progress=True))
report["in_memory"] = len(first.cache)
report["up_after_first"] = ray.is_initialized()
report["log_after_first"] = (folder / "cache" / "tunings").read_text()

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
homeless = [Named("nowhere").bind(jnp.ones(8)), InTheScript().bind(jnp.ones(8))]
report["again"] = told(tune_on_cluster(selector(), [*get_invocations(), *homeless], workers=1))
report["up_after_again"] = ray.is_initialized()
report["log_after_again"] = (folder / "cache" / "tunings").read_text()
ray.shutdown()

(folder / "report.json").write_text(json.dumps(report))
