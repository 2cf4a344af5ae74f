"""Static figures as a stage of the tuner: refuse what does not compile, race only the best few."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from ..ops.core.invocation import Invocation
from ..ops.core.kernel import Kernel
from ..ops.tuner.search.pruning import Pruned
from ..ops.utils.fingerprint import current_device, device_kind
from .catalog import TARGETS, Target, TargetError, find
from .checking import COMPILE_SECONDS, check

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
        if not isinstance(self.best, int) or self.best < 1:
            raise ValueError(f"StaticPruner: best={self.best!r} must be a whole number >= 1")
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
    name = str(device.device_kind)
    for target in TARGETS.values():
        if target.device_kind != kind:
            continue
        if kind == "tpu" and target.device_name == name:
            return target
        if target.gpu is not None:
            capability = f"{target.gpu.major}.{target.gpu.minor}"
            if str(getattr(device, "compute_capability", "")) == capability:
                cores = int(getattr(device, "core_count", None) or target.gpu.cores)
                limits = dataclasses.replace(target.gpu, cores=cores)
                return dataclasses.replace(target, device_name=name, gpu=limits)
    return None
