"""Ray: loaded when it is needed, started if it does not run, and asked what its machines have."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from ..installation import how_to_install
from ..ops.utils import environment

logger = logging.getLogger(__name__)

Resources = Mapping[str, float]
"""What a task takes of a machine, in Ray's words: `{"CPU": 8}`, `{"GPU": 1, "CPU": 4}`."""

_OBJECT_STORE = 100 * 2**20  # bytes; jobs and results are small, Ray would take a third of memory


def load() -> Any:
    """The module `ray`."""
    environment.preset("RAY_USAGE_STATS_ENABLED", "0")
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ImportError(
            f"tune_on_cluster needs Ray, which is not installed here: {how_to_install('ray')}"
        ) from error


@contextlib.contextmanager
def session(address: str | None) -> Iterator[tuple[Any, bool]]:
    """Ray, connected, and whether this machine alone is the cluster because it was started here.

    A connection that was there before is used as it is and left as it is. One that is made here
    is closed afterwards, and a cluster that was started here is ended.
    """
    ray = load()
    if ray.is_initialized():
        if address is not None:
            raise ValueError(
                f"tune_on_cluster: address={address!r} was given, but this process is connected to "
                "a Ray cluster already; leave address out, or ray.shutdown() first"
            )
        yield ray, False
        return
    started = address is None and not environment.is_set("RAY_ADDRESS")
    options = {"include_dashboard": False, "object_store_memory": _OBJECT_STORE} if started else {}
    where = "local" if started else address
    ray.init(address=where, log_to_driver=False, logging_level=logging.ERROR, **options)
    try:
        yield ray, started
    finally:
        ray.shutdown()


def device_kind_of(resources: Resources) -> str:
    """The kind of device that a task with these resources finds."""
    return next((kind for kind in ("tpu", "gpu") if resources.get(kind.upper(), 0) > 0), "cpu")


def default_resources(ray: Any, kind: str) -> Resources:
    """What a task takes if nothing was said: so much that two never disturb each other's times.

    On CPU, all cores of a machine, so that one task runs there at a time: of the machine with the
    most, because a larger one would otherwise run two. On a TPU all chips of a machine, which one
    process owns anyhow. Of GPUs one, with its share of the cores.
    """
    machines = _machines(ray)
    name = kind.upper()
    having = [machine for machine in machines if machine.get(name, 0) > 0]
    if not having:
        raise ValueError(
            f"tune_on_cluster: no machine of the Ray cluster has a {name}, the kind of device of "
            f"this process; say with resources= what a task takes. There are: {machines}"
        )
    largest = max(having, key=lambda machine: machine[name])
    if kind == "gpu":
        return {"GPU": 1, "CPU": largest.get("CPU", 0) // largest["GPU"]}
    return {name: largest[name]}


def check_resources(ray: Any, resources: Resources, started: bool) -> None:
    """Refuse what no machine can give; in a cluster that may grow, say that it is waited for."""
    machines = _machines(ray)
    if any(all(m.get(name, 0) >= n for name, n in resources.items()) for m in machines):
        return
    text = (
        f"no machine of the Ray cluster has resources={dict(resources)!r}, which one task takes; "
        f"there are: {machines}"
    )
    if started:
        raise ValueError(f"tune_on_cluster: {text}")
    logger.warning("ejkernel: %s; waiting for one to join", text)


def task_options(resources: Resources) -> dict[str, Any]:
    """Resources as the options of a Ray task."""
    others = {name: n for name, n in resources.items() if name not in ("CPU", "GPU", "memory")}
    options: dict[str, Any] = {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        "resources": others,
    }
    if "memory" in resources:
        options["memory"] = resources["memory"]
    return options


def _machines(ray: Any) -> list[dict[str, float]]:
    """The resources of each machine that is up; without those that only name it."""
    return [
        {
            name: amount
            for name, amount in node["Resources"].items()
            if not name.startswith("node:") and name != "object_store_memory"
        }
        for node in ray.nodes()
        if node["Alive"]
    ]
