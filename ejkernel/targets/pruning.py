"""Static figures prune what a tuner measures: refuse what does not compile, race only the best few.

It is a stage of a tuning run (`StaticPruner`), or done before on another machine and sent to the
device as a bundle (`export`).
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any

from ..formatting import described
from ..ops.config.explain import call_fields
from ..ops.core.invocation import Invocation
from ..ops.core.kernel import Kernel
from ..ops.tuner.search.pruning import Pruned
from ..ops.utils.fingerprint import current_device, device_kind
from ..ops.utils.provenance import source_hash
from ..ops.utils.serialize import qualified_name, to_plain
from ..store.bundle import Bundle
from .catalog import TARGETS, Target, TargetError, find
from .checking import COMPILE_SECONDS, CheckResult, check
from .compiler import compiler_versions

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class StaticPruner:
    """Compiles all candidates first and lets the tuner measure only the best estimated ones.

    Use it as `Tuner(prune=StaticPruner())`. A candidate that the compiler refuses is recorded as
    unsupported, with the compiler's reason; of the others the `best` many are measured, in the
    order of their estimates, and the heuristic config in any case. A candidate without an estimate
    is measured too.

    Attributes:
      target: the device; None: the current one, if it is like a known target.
      best: how many candidates are left.
      seconds: limit of one compilation.
      jobs: compilers at work at the same time.
    """

    target: str | Target | None = None
    best: int = 8
    seconds: float = COMPILE_SECONDS
    jobs: int | None = None

    def __post_init__(self) -> None:
        _check_best(self.best, "StaticPruner")
        if self.target is not None:
            find(self.target)  # refuse an unknown name here, where the caller sees it

    def __call__(
        self, kernel: Kernel[Any, Any], inv: Invocation[Any, Any], candidates: Sequence[Any]
    ) -> Pruned | None:
        """What a tuner asks: which of these are worth measuring."""
        target = like_current_device() if self.target is None else find(self.target)
        if target is None:
            logger.warning(
                "ejkernel: no target is like this device (%s), so nothing is pruned; give "
                "StaticPruner a target=",
                getattr(current_device(), "device_kind", "?"),
            )
            return None
        call = dataclasses.replace(inv, kernel=kernel)
        try:
            result = check(
                call, target=target, configs=candidates, seconds=self.seconds, jobs=self.jobs
            )
        except TargetError as error:
            logger.warning("ejkernel: nothing is pruned: %s", error)
            return None
        ranked = [entry.cfg for entry in result.feasible if entry.estimate is not None]
        unranked = [entry.cfg for entry in result.feasible if entry.estimate is None]
        refused = [
            (entry.cfg, f"does not compile for {target.name}: {entry.reason}")
            for entry in result.infeasible
        ]
        return Pruned([*ranked[: self.best], *unranked], refused, f"estimated for {target.name}")


def like_current_device() -> Target | None:
    """The target that the current device is, or is like: same TPU, same compute capability."""
    device, kind = current_device(), device_kind()
    if kind == "cpu":
        return TARGETS["cpu"]
    name, capability = str(device.device_kind), str(getattr(device, "compute_capability", ""))
    for target in TARGETS.values():
        if kind == target.device_kind == "tpu" and target.device_name == name:
            return target
        gpu = target.gpu
        if kind == "gpu" and gpu is not None and f"{gpu.major}.{gpu.minor}" == capability:
            cores = int(getattr(device, "core_count", None) or gpu.cores)
            limits = dataclasses.replace(gpu, cores=cores)
            return dataclasses.replace(target, device_name=name, gpu=limits)
    return None


def _check_best(best: Any, where: str) -> None:
    if not isinstance(best, int) or best < 1:
        raise ValueError(f"{where}: best={best!r} must be a whole number >= 1")


# --- as a bundle ---------------------------------------------------------------------------------

Call = Invocation[Any, Any] | CheckResult


def export(
    calls: Call | Iterable[Call],
    path: str | os.PathLike[str] | None = None,
    *,
    target: str | Target | None = None,
    best: int = 5,
    seconds: float = COMPILE_SECONDS,
    jobs: int | None = None,
) -> Bundle:
    """A bundle of the best estimated candidates of calls, written to `path` if one is given.

    Its entries are keyed for the target's device and say that they are estimates: no tier uses
    them as tuned. A tuning run on the device that finds the bundle (`EJKERNEL_CONFIG_PATH`)
    measures only these candidates and the heuristic one, and records those that do not compile
    with the compiler's reason.

    Args:
      calls: results of `check`, or calls (`kernel.bind(...)`, `get_invocations()`) to check now.
      path: a file, written whole or not at all.
      target: the device, for calls that are not checked yet.
      best: how many candidates to name for each call.
      seconds: as `check` takes it.
      jobs: as `check` takes it.
    """
    _check_best(best, "export")
    listed = [calls] if isinstance(calls, (Invocation, CheckResult)) else list(calls)
    if not listed:
        raise ValueError("export: calls is empty; give results of check() or kernel.bind(...)")
    entries: dict[Any, dict[str, Any]] = {}
    for call in listed:
        if not isinstance(call, (Invocation, CheckResult)):
            raise TypeError(
                f"export: calls holds {call!r} ({type(call).__name__}); it takes results of "
                "check() and invocations"
            )
        if isinstance(call, Invocation):
            if target is None:
                raise TypeError("export: target= is needed for calls that are not checked yet")
            call = check(call, target=target, seconds=seconds, jobs=jobs)
        entries[call.key] = _entry(call, best)
    bundle = Bundle(entries.values())
    if path is not None:
        bundle.save(path)
    return bundle


def _entry(result: CheckResult, best: int) -> dict[str, Any]:
    inv = result.invocation
    name = f"{inv.full_op_id}({inv.signature})"
    if not result.feasible:
        reasons = "; ".join(
            f"{described(entry.cfg)}: {entry.reason}" for entry in result.infeasible[:3]
        )
        raise TargetError(
            f"export: no config of {name} compiles for {result.target.name}: {reasons}"
        )
    if all(entry.seconds is None for entry in result.feasible):
        raise TargetError(f"export: {name} was only lowered; check it with compile=True")
    chosen = result.feasible[:best]
    return {
        "key": tuple(result.key),
        "config": to_plain(chosen[0].cfg),
        "config_type": qualified_name(type(chosen[0].cfg)),
        "about": {
            "estimated": True,
            "target": result.target.name,
            "compiled_with": compiler_versions(result.target.platform),
            "signature": inv.signature,
            "call": call_fields(inv),
            "source": source_hash(inv.kernel),
            "when": datetime.date.today().isoformat(),
            "ranked": [
                {
                    "config": to_plain(entry.cfg),
                    "estimated_seconds": entry.estimate.seconds if entry.estimate else None,
                    "bound": entry.estimate.bound if entry.estimate else "",
                }
                for entry in chosen
            ],
            "refused": [
                {"config": to_plain(entry.cfg), "reason": entry.reason}
                for entry in result.infeasible
            ],
        },
    }
