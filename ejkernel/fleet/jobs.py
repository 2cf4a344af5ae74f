"""One operation to be tuned elsewhere: how it is sent, and what comes back.

A call is sent as its specification, the text that programs carry too: the name of the kernel's
class, shapes, static values. Nothing of the user's is pickled. The worker imports the kernel by its
name, and refuses, with the reason, what it cannot find.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Mapping
from typing import Any

from ..ops.config.cache import ConfigCache
from ..ops.config.context import AutotunePolicy
from ..ops.config.persistent import PersistentCache
from ..ops.config.selection import ConfigSelectorChain
from ..ops.core.invocation import Invocation
from ..ops.core.kernel import Kernel
from ..ops.core.specification import SpecificationError, read_specification, write_specification
from ..ops.utils.serialize import qualified_name, to_plain
from ..speedup import Gain, PlainJax


@dataclasses.dataclass(frozen=True)
class JobSettings:
    """What holds for all jobs of a run: where results go, and how is measured."""

    store: PersistentCache
    policy: AutotunePolicy
    tuner: Mapping[str, Any]
    jax: Mapping[str, Any]  # JAX's own settings
    force: bool = False  # measure again what the store knows


@dataclasses.dataclass(frozen=True)
class Job:
    """One call to tune."""

    op_id: str
    call_key: str
    specification: str


@dataclasses.dataclass(frozen=True)
class JobResult:
    """What became of a job: a config as plain data, or why there is none (`refused`)."""

    refused: str = ""
    device: str = ""
    host: str = ""
    config: Any = None
    config_type: str = ""
    reason: str = ""
    seconds: float | None = None
    heuristic_seconds: float | None = None
    gain: Gain | None = None
    plain: PlainJax | None = None

    def rebuilt(self, kernel: Kernel[Any, Any]) -> Any:
        """The config, as one of this kernel."""
        return kernel.config_from_plain(self.config, self.config_type)


def job_of(inv: Invocation[Any, Any]) -> Job | str:
    """The job for an invocation; or why it cannot be sent."""
    kernel = inv.kernel
    if kernel is None:
        return "the invocation has no kernel"
    name = qualified_name(type(kernel))
    if name.startswith("__main__:") or "<locals>" in name:
        return (
            f"its kernel {name} cannot be imported by a worker; move the class out of the script "
            "(and out of functions) into a module"
        )
    specification = write_specification(inv, kernel)
    if specification is None:
        return (
            "the call has something in it that cannot be written down (a function, a custom pytree "
            "node, an explicit sharding), so it cannot be sent to a worker"
        )
    return Job(inv.key.op_id, inv.key.call_key, specification)


def run_job(job: Job, wanted: str, settings: JobSettings) -> JobResult:
    """In a worker: give what the store has for a call, or tune it and store it there.

    `wanted` is the kind of device to tune for.
    """
    import jax

    from ..ops.execution.tuning import tuned_or_reason
    from ..ops.tuner.tuner import Tuner
    from ..ops.utils.fingerprint import device_kind

    host = socket.gethostname()
    if wanted == "cpu":  # whatever else the machine has, it was not asked for
        jax.config.update("jax_platforms", "cpu")
    for name, value in settings.jax.items():
        jax.config.update(name, value)
    if device_kind() != wanted:
        return JobResult(
            f"{host} has the declared resources, but JAX finds a {device_kind()} there and no "
            f"{wanted}; is JAX installed for it?"
        )
    try:
        inv = read_specification(job.specification)
    except SpecificationError as error:
        return JobResult(f"on {host}: {error}")
    if (inv.key.op_id, inv.key.call_key) != (job.op_id, job.call_key):
        return JobResult(f"on {host} it is another call ({inv.key})")
    selector = ConfigSelectorChain(
        ConfigCache(), settings.policy, Tuner(**settings.tuner, progress=False), settings.store
    )
    tuned = tuned_or_reason(selector, inv, force=settings.force)
    if isinstance(tuned, str):
        return JobResult(tuned)
    return JobResult(
        device=inv.key.device,
        host=host,
        config=to_plain(tuned.cfg),
        config_type=qualified_name(type(tuned.cfg)),
        reason=tuned.origin,
        seconds=tuned.seconds,
        heuristic_seconds=tuned.heuristic_seconds,
        gain=tuned.gain,
        plain=tuned.plain,
    )
