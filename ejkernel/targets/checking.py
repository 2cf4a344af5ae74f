"""Does every config of a kernel compile for a device that is not here, and what would it take?"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator
from typing import Any

from ..formatting import described, duration, speedup
from ..ops.core.invocation import Invocation
from ..ops.core.kernel import Kernel
from ..ops.core.requirements import reasons_against_config
from ..ops.core.types import ConfigKey
from ..ops.utils.display import Displayed, Shown, as_text
from ..ops.utils.serialize import to_plain
from .catalog import Target, TargetError, find
from .compiler import compile_all, require
from .lowering import Program, lower, require_implementation, standing_on
from .ranking import Estimate, estimate
from .worker import reason_of

COMPILE_SECONDS = 120.0
_HEADER = ("config", "compile", "memory", "registers, spills", "flops", "bytes", "estimate", "")


@dataclasses.dataclass(frozen=True)
class Check:
    """What a target's compiler said about one config.

    Attributes:
      cfg: the config.
      compiles: the compiler made a program of it (or, with `compile=False`, it was lowered).
      reason: why it does not, in one line.
      full_text: everything the compiler said.
      seconds: time to compile; None if it did not come to that.
      cached: the answer is an earlier run's.
      vmem_bytes: TPU: the most VMEM that a kernel of it takes.
      shared_bytes: CUDA: the most shared memory per block.
      registers: CUDA: the most registers per thread.
      spilled_bytes: registers spilled to memory, of all its kernels.
      temporary_bytes: device memory for intermediate results.
      flops: of the program as written (see `lowering.Program`).
      bytes: what has to move at least.
      estimate: the static cost; None if the toolchain tells too little.
      kernels: every figure of every kernel, as data.
    """

    cfg: Any
    compiles: bool
    reason: str = ""
    full_text: str = dataclasses.field(default="", repr=False)
    seconds: float | None = None
    cached: bool = False
    vmem_bytes: int | None = None
    shared_bytes: int | None = None
    registers: int | None = None
    spilled_bytes: int | None = None
    temporary_bytes: int | None = None
    flops: int | None = None
    bytes: int | None = None
    estimate: Estimate | None = None
    kernels: tuple[dict[str, Any], ...] = dataclasses.field(default=(), repr=False)

    def to_plain(self) -> dict[str, Any]:
        """Everything but the kernels' figures and the full text, as plain data."""
        plain = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("cfg", "estimate", "kernels", "full_text")
        }
        estimated = None if self.estimate is None else dataclasses.asdict(self.estimate)
        return {"config": to_plain(self.cfg), **plain, "estimate": estimated}


@dataclasses.dataclass(frozen=True)
class CheckResult(Displayed):
    """Every config of one call on one target. Prints as a table.

    Attributes:
      target: what was compiled for.
      invocation: the call, its key that of the target's device.
      entries: a `Check` per config, in the order of the configs.
    """

    target: Target
    invocation: Invocation[Any, Any]
    entries: tuple[Check, ...]

    @property
    def key(self) -> ConfigKey:
        """The cache key of this call on the target's device."""
        return self.invocation.key

    @property
    def feasible(self) -> tuple[Check, ...]:
        """Those that compile, the lowest estimate first, those without one last."""
        good = [entry for entry in self.entries if entry.compiles]
        return tuple(sorted(good, key=_rank))

    @property
    def infeasible(self) -> tuple[Check, ...]:
        """Those that do not compile."""
        return tuple(entry for entry in self.entries if not entry.compiles)

    @property
    def best(self) -> Check | None:
        """The lowest estimate: a heuristic, not a measurement. None if there is no estimate."""
        return next((entry for entry in self.feasible if entry.estimate is not None), None)

    def __iter__(self) -> Iterator[Check]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def of(self, cfg: Any) -> Check:
        """The entry of a config."""
        for entry in self.entries:
            if entry.cfg == cfg:
                return entry
        raise KeyError(f"{cfg} was not checked")

    def _shown(self) -> Shown:
        best = None if self.best is None else self.best.estimate
        title = (
            f"{self.invocation.full_op_id}({self.invocation.signature}) for {self.target.name} "
            f"({self.key.device}): {len(self.feasible)} of {len(self)} compile"
        )
        rows = [_row(entry, best) for entry in (*self.feasible, *self.infeasible)]
        remark = "estimates compare configs of this call; they are not measurements"
        notes = () if best is None else (remark,)
        return Shown(title, _HEADER, rows, right=(1, 2, 3, 4, 5, 6), notes=notes)

    def __str__(self) -> str:
        return as_text(self._shown())


def check(
    call: Kernel[Any, Any] | Invocation[Any, Any],
    /,
    *args: Any,
    target: str | Target,
    configs: Iterable[Any] | None = None,
    compile: bool = True,
    seconds: float = COMPILE_SECONDS,
    jobs: int | None = None,
    **kwargs: Any,
) -> CheckResult:
    """Lower and compile every config of a kernel for a device, which need not be here.

    Args:
      call: the kernel to check; the implementation that would run on the device is compiled. Or an
        `Invocation` of it (see `ejkernel.ops.get_invocations`), which has its arguments.
      args: the kernel's arguments; shapes (`jax.ShapeDtypeStruct`) will do.
      target: a name (see `targets.names()`) or a `Target`.
      configs: to check instead of the kernel's candidates for that device.
      compile: False only lowers, which needs nothing installed and finds errors of block shapes.
      seconds: a config that compiles longer is given up, its compiler killed.
      jobs: compilers at work at the same time; default: one per two cores.
      kwargs: the kernel's keywords.
    """
    if isinstance(call, Invocation) and (args or kwargs):
        raise TypeError("check: an Invocation has its arguments, and takes no others")
    inv = call if isinstance(call, Invocation) else call.bind(*args, **kwargs)
    goal = find(target)
    kernel = inv.kernel
    if kernel is None:
        raise TargetError(f"check: the invocation of {inv.full_op_id} has no kernel")
    if jobs is None:
        jobs = max(1, (os.cpu_count() or 2) // 2)
    if not isinstance(jobs, int) or jobs < 1:
        raise ValueError(f"check: jobs={jobs!r} must be a whole number >= 1")
    if not seconds > 0:
        raise ValueError(f"check: seconds={seconds!r} must be more than 0")
    require_implementation(kernel, goal)
    if compile:
        require(goal)
    # A new one: it keeps its key, which has to be that of the target.
    inv = dataclasses.replace(inv.abstract(), metadata={"device": goal.device_fingerprint})
    with standing_on(goal):
        listed = kernel.candidates(inv) if configs is None else list(configs)
        inv.key  # noqa: B018  computed here, where it is that of the target, and cached
    if not listed:
        raise ValueError(f"check: configs is empty; nothing to check for {kernel.full_op_id}")
    listed = [kernel.check_config_class(cfg, "configs holds") for cfg in listed]
    programs = [_lowered(kernel, inv, cfg, goal) for cfg in listed]
    ready = [program for program in programs if isinstance(program, Program)]
    none: list[dict[str, Any] | None] = [None] * len(ready)
    answers = iter(compile_all(goal, ready, seconds=seconds, jobs=jobs) if compile else none)
    entries = [
        Check(cfg, False, reason_of(program), program)
        if isinstance(program, str)
        else _entry(goal, cfg, program, next(answers))
        for cfg, program in zip(listed, programs, strict=True)
    ]
    return CheckResult(goal, inv, tuple(entries))


def _lowered(
    kernel: Kernel[Any, Any], inv: Invocation[Any, Any], cfg: Any, target: Target
) -> Program | str:
    """The program, or why there is none."""
    with standing_on(target):
        reasons = reasons_against_config(kernel, cfg, inv)
    if reasons:
        return f"not supported: {'; '.join(reasons)}"
    try:
        return lower(kernel, inv, cfg, target)
    except TargetError:
        raise
    except Exception as error:  # noqa: BLE001  a config may fail in any way: that is data
        return f"{type(error).__name__}: {error}"


def _entry(target: Target, cfg: Any, program: Program, answer: dict[str, Any] | None) -> Check:
    known: dict[str, Any] = {"flops": program.flops, "bytes": program.bytes}
    if answer is None:
        return Check(cfg, True, **known)
    cached = bool(answer.get("cached"))
    if "refused" in answer:
        text = answer["refused"]
        return Check(cfg, False, reason_of(text), text, answer["seconds"], cached, **known)
    kernels = answer["kernels"]

    def figures(name: str) -> list[int]:
        return [kernel[name] for kernel in kernels if kernel[name] is not None]

    def most(name: str) -> int | None:
        return max(figures(name), default=None)

    return Check(
        cfg,
        True,
        seconds=answer["seconds"],
        cached=cached,
        vmem_bytes=most("vmem_bytes"),
        shared_bytes=most("shared_bytes"),
        registers=most("registers"),
        spilled_bytes=sum(figures("spilled_bytes")) if figures("spilled_bytes") else None,
        temporary_bytes=answer["memory"].get("temp"),
        estimate=estimate(target, program, answer),
        kernels=tuple(kernels),
        **known,
    )


def _rank(entry: Check) -> tuple[float, float]:
    """By estimate; where memory makes two the same, the one with less to do comes first."""
    if entry.estimate is None:
        return float("inf"), 0.0
    return entry.estimate.seconds, entry.estimate.cycles or 0.0


# --- for people ----------------------------------------------------------------------------------


def _row(entry: Check, best: Estimate | None) -> tuple[str, ...]:
    memory = entry.vmem_bytes if entry.vmem_bytes is not None else entry.shared_bytes
    registers = "" if entry.registers is None else str(entry.registers)
    if entry.spilled_bytes:
        registers = f"{registers} +{_scaled(entry.spilled_bytes, _BYTES, 'B')}".strip()
    estimated, remark = "", entry.reason
    if entry.estimate is not None:
        estimated = duration(entry.estimate.seconds)
        if best is not None and best.seconds:
            estimated += f" ({speedup(best.seconds, entry.estimate.seconds)})"
        remark = ", ".join((entry.estimate.bound, *entry.estimate.notes))
    took = "" if entry.seconds is None else duration(entry.seconds)
    return (
        described(entry.cfg),
        f"{took} (cached)" if entry.cached else took,
        _scaled(memory, _BYTES, "B"),
        registers,
        _scaled(entry.flops, _THOUSANDS),
        _scaled(entry.bytes, _BYTES, "B"),
        estimated,
        remark if entry.compiles else f"does not compile: {remark}",
    )


_BYTES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_THOUSANDS = ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))


def _scaled(count: int | None, units: tuple[tuple[int, str], ...], one: str = "") -> str:
    if count is None:
        return ""
    size, unit = next((unit for unit in units if count >= unit[0]), (1, one))
    return f"{count / size:.4g} {unit}".rstrip()
