"""Many machines tune together: the operations of a model, spread over a Ray cluster.

One task per operation and kind of device. A task first looks whether the shared store has its
answer, and else measures and stores it there, so an operation that is finished is never measured
again: not after a worker was lost, and not when the whole run is started again.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..ops.config.context import effective_policy
from ..ops.config.persistent import PersistentCache
from ..ops.config.selection import ConfigSelectorChain
from ..ops.core.invocation import Invocation
from ..ops.core.types import ConfigKey
from ..ops.execution.offline import labelled_invocations
from ..ops.execution.results import AutotuningResult, Entry, Skipped
from ..ops.execution.tuning import distinct_calls
from ..ops.registry import get_invocations
from ..ops.tuner.isolation.worker_bench import CARRIED_SETTINGS
from ..ops.tuner.progress import Bar
from ..ops.tuner.tuner import Tuner
from ..ops.utils.fingerprint import device_fingerprint, device_kind
from ..ops.utils.meta import label
from . import ray_session
from .jobs import Job, JobResult, JobSettings, job_of, run_job
from .ray_session import Resources

logger = logging.getLogger(__name__)


class ClusterResult(AutotuningResult):
    """What a cluster tuned: an `AutotuningResult` for one kind of device, and those for others.

    It is for the device of this process, if that was among them.

    Attributes:
      others: the results for the other kinds of device.
    """

    def __init__(
        self,
        device: str,
        entries: Iterable[Entry] = (),
        skipped: Iterable[Skipped] = (),
        others: Iterable[AutotuningResult] = (),
    ) -> None:
        super().__init__(device, entries, skipped)
        self.others = tuple(others)

    def __str__(self) -> str:
        return "\n\n".join([super().__str__(), *map(str, self.others)])


def tune_on_cluster(
    selector: ConfigSelectorChain,
    what: Any = None,
    *,
    address: str | None = None,
    resources: Resources | Sequence[Resources] | None = None,
    workers: int | None = None,
    retries: int = 3,
    progress: bool | None = None,
    force: bool = False,
) -> ClusterResult:
    """Tune the operations of a model on a Ray cluster; the selector's store gets the results.

    ::

        selector = ConfigSelectorChain(persistent="postgresql+psycopg://host/configs")
        result = tune_on_cluster(selector, jax.jit(model).lower(x), address="auto")

    Args:
      selector: its `persistent` store receives the results and must be reachable from every
        machine: a path is enough on one machine or on a shared file system, else give a server's
        URL. Its tuner and policy say how to measure.
      what: a lowered computation, its text, invocations, or None for what was called so far.
      address: of a Ray cluster; None: the one this process is connected to, else `RAY_ADDRESS`,
        else one that is started on this machine and ended afterwards.
      resources: what one task takes of a machine, in Ray's words, such as `{"GPU": 1, "CPU": 8}`.
        Several of them: every operation is tuned on each. Default: all cores of a machine (or all
        its TPU chips, or one GPU), so that two measurements never share them.
      workers: how many tasks run at the same time, at most.
      retries: how often a task is tried again whose worker was lost.
      progress: show a progress bar; None: in a terminal only.
      force: measure again what the store knows.

    Returns:
      What was tuned, or known already, and in `skipped` what could not be, with the reason.
    """
    _check_arguments(selector, workers, retries)
    settings = dataclasses.replace(_job_settings(selector), force=force)
    calls, skipped = distinct_calls(_calls(what))
    jobs: list[tuple[Invocation[Any, Any], Job]] = []
    for inv in calls.values():
        job = job_of(inv)
        if isinstance(job, str):
            skipped.append(_skipped(inv, job))
        else:
            jobs.append((inv, job))
    results: list[tuple[_Task, JobResult]] = []
    if jobs:
        with ray_session.session(address) as (ray, started):
            kinds = _kinds_of_device(ray, resources, started)
            tasks = [_Task(inv, job, taken) for inv, job in jobs for taken in kinds]
            with Bar("tuning on the cluster", progress) as bar:
                results = list(
                    _run_all(ray, settings, tasks, bar, workers=workers, retries=retries)
                )
    return _result(selector, results, skipped)


# --- what to do ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Task:
    """A job, what it takes of a machine, and how often its worker was lost."""

    inv: Invocation[Any, Any]
    job: Job
    resources: Resources
    lost: int = 0


def _check_arguments(selector: Any, workers: Any, retries: Any) -> None:
    if not isinstance(selector, ConfigSelectorChain):
        raise TypeError(
            f"tune_on_cluster takes (selector, what); the first is {selector!r} "
            f"({type(selector).__name__})"
        )
    if selector.persistent is None or not selector.persist_autotune:
        raise ValueError(
            "tune_on_cluster: the selector keeps nothing on disk; results are shared through its "
            "store: ConfigSelectorChain(persistent=PersistentCache(...)), without "
            "persist_autotune=False"
        )
    if type(selector.tuner) is not Tuner or not isinstance(selector.tuner.strategy, str):
        raise TypeError(
            f"tune_on_cluster: the selector's tuner {selector.tuner!r} cannot be sent to workers; "
            "use Tuner itself, with a strategy by name"
        )
    if workers is not None and (not isinstance(workers, int) or workers < 1):
        raise ValueError(f"tune_on_cluster: workers={workers!r} must be a whole number >= 1")
    if not isinstance(retries, int) or retries < 0:
        raise ValueError(f"tune_on_cluster: retries={retries!r} must be a whole number >= 0")


def _job_settings(selector: ConfigSelectorChain) -> JobSettings:
    import jax

    store, tuner = selector.persistent, selector.tuner
    assert store is not None
    if isinstance(store.path, pathlib.Path):  # a worker may have another current folder
        store = PersistentCache(store.path.absolute())
    names = ("warmup", "iters", "effort", "seconds", "evaluations", "strategy", "isolation", "seed")
    return JobSettings(
        store=store,
        policy=effective_policy(selector.policy, selector.selector_id),
        tuner={name: getattr(tuner, name) for name in names},
        # Which device is used follows from the resources, not from what this process uses.
        jax={
            name: getattr(jax.config, name) for name in CARRIED_SETTINGS if name != "jax_platforms"
        },
    )


def _calls(what: Any) -> Iterable[Invocation[Any, Any] | Skipped]:
    device = device_fingerprint()
    if what is None:
        return get_invocations(device)
    if isinstance(what, str) or hasattr(what, "compiler_ir"):
        return labelled_invocations(what, device)
    if isinstance(what, Iterable):
        return what
    raise TypeError(
        "tune_on_cluster: what must be a lowered computation, its text, invocations or None, "
        f"got {what!r} ({type(what).__name__})"
    )


def _kinds_of_device(
    ray: Any, resources: Resources | Sequence[Resources] | None, started: bool
) -> list[Resources]:
    if resources is None:
        return [ray_session.default_resources(ray, device_kind())]
    kinds = [resources] if isinstance(resources, Mapping) else list(resources)
    if not kinds or not all(isinstance(one, Mapping) and one for one in kinds):
        raise TypeError(
            "tune_on_cluster: resources must be a mapping such as {'CPU': 8}, or several of "
            f"them, got {resources!r}"
        )
    for one in kinds:
        ray_session.check_resources(ray, one, started)
    return kinds


def _skipped(inv: Invocation[Any, Any], reason: str) -> Skipped:
    return Skipped(label(inv.key.op_id, inv.key.call_key), reason)


# --- doing it ------------------------------------------------------------------------------------


def _run_all(
    ray: Any,
    settings: JobSettings,
    tasks: Sequence[_Task],
    bar: Bar,
    *,
    workers: int | None,
    retries: int,
) -> Iterator[tuple[_Task, JobResult]]:
    """Every task with its result, as they come in; those whose worker is lost are tried again."""
    # Ray's own retries are off: it does not count them where a worker ran out of memory.
    function = ray.remote(max_retries=0)(run_job)
    waiting = collections.deque(tasks)
    running: dict[Any, _Task] = {}
    bar.update(total=len(tasks))
    try:
        while waiting or running:
            while waiting and (workers is None or len(running) < workers):
                task = waiting.popleft()
                options = ray_session.task_options(task.resources)
                remote = function.options(**options, name=f"tune {task.job.op_id}")
                kind = ray_session.device_kind_of(task.resources)
                running[remote.remote(task.job, kind, settings)] = task
            done, _ = ray.wait(list(running), timeout=1.0)  # a pause to hear Ctrl-C
            for reference in done:
                task = running.pop(reference)
                result = _job_result(ray, reference, task, retries)
                if result is None:
                    waiting.append(dataclasses.replace(task, lost=task.lost + 1))
                    continue
                bar.update(advance=1, what=task.job.op_id)
                yield task, result
    finally:
        if running:  # end them, and leave them a moment to store what they have measured so far
            for reference in running:
                ray.cancel(reference)
            ray.wait(list(running), num_returns=len(running), timeout=5.0)


def _job_result(ray: Any, reference: Any, task: _Task, retries: int) -> JobResult | None:
    """What a task says; None if its worker was lost and it is to be tried again."""
    try:
        result = ray.get(reference)
    except ray.exceptions.RayTaskError as error:  # raised by our own code, or while loading it
        return JobResult(f"the worker raised {error.cause!r}")
    except ray.exceptions.RayError as error:
        if task.lost >= retries:
            return JobResult(f"its worker was lost {task.lost + 1} times: {error}")
        logger.warning(
            "ejkernel: the worker that tuned %s was lost (%s); it is tried again",
            task.job.op_id,
            type(error).__name__,
        )
        return None
    assert isinstance(result, JobResult)
    return result


# --- what came of it -----------------------------------------------------------------------------


def _result(
    selector: ConfigSelectorChain,
    results: Sequence[tuple[_Task, JobResult]],
    skipped: list[Skipped],
) -> ClusterResult:
    entries: dict[str, list[Entry]] = collections.defaultdict(list)
    store = selector.persistent
    assert store is not None
    for task, result in results:
        entry = _entry(task.inv, result)
        if isinstance(entry, str):
            skipped.append(_skipped(task.inv, entry))
            continue
        entries[result.device].append(entry)
        key = ConfigKey(result.device, entry.op_id, entry.call_key)
        selector.cache.put_quietly(key, entry.cfg)
        if key not in store:
            logger.warning(
                "ejkernel: %s was tuned on %s, but %s, as this machine sees it, does not have it. "
                "A path must be on a file system that all machines share; or give the URL of a "
                "server",
                key,
                result.host,
                store.path,
            )
    here = device_fingerprint()
    if here not in entries and entries:
        here = max(entries, key=lambda device: len(entries[device]))
    tuned_here = entries.pop(here, [])
    others = [AutotuningResult(device, tuned) for device, tuned in entries.items()]
    return ClusterResult(here, tuned_here, skipped, others)


def _entry(inv: Invocation[Any, Any], result: JobResult) -> Entry | str:
    if result.refused:
        return result.refused
    assert inv.kernel is not None
    try:
        cfg = inv.kernel.check_config(result.rebuilt(inv.kernel), "a worker found")
    except (TypeError, ValueError) as error:
        return f"{result.host} tuned it, but its config cannot be used here: {error}"
    return Entry(
        inv.key.op_id,
        inv.key.call_key,
        cfg,
        inv.signature,
        result.seconds,
        result.heuristic_seconds,
        f"{result.reason}, on {result.host}",
        gain=result.gain,
        plain=result.plain,
    )
