"""Compilers: which ones are installed, their processes, and a cache of what they answered."""

from __future__ import annotations

import atexit
import collections
import concurrent.futures
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..installation import how_to_install
from ..ops.tuner.isolation.process import START_SECONDS, Process, WorkerLost, WorkerUnavailable
from ..ops.tuner.isolation.worker import Header
from ..ops.utils import environment
from ..ops.utils.display import Displayed, Shown, as_text
from ..ops.utils.fingerprint import short_hash
from ..store.private import PrivateFolder
from ..store.reading import parse_json
from .catalog import TARGETS, Target, TargetError
from .figures import find_ptxas

if TYPE_CHECKING:
    from .lowering import Program

FORMAT = 1  # of what a worker answers: raise it when a figure is read differently
_PACKAGES = {"tpu": ("libtpu",), "cuda": ("jax-cuda13-plugin", "jax-cuda13-pjrt"), "cpu": ()}
_EXTRAS = {"tpu": "tpu-aot", "cuda": "cuda-aot"}


# --- what is installed ---------------------------------------------------------------------------


def compiler_versions(platform: str) -> dict[str, str]:
    """The versions of everything that compiles for a platform; "" for what is not installed."""
    return {name: _version(name) for name in ("jax", "jaxlib", *_PACKAGES[platform])}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def missing(platform: str) -> str:
    """What to install before anything can be compiled for a platform; "" if all is there."""
    lacking = [name for name in _PACKAGES[platform] if not _version(name)]
    if lacking:
        return f"install {' and '.join(lacking)}: {how_to_install(_EXTRAS[platform])}"
    if platform == "cuda" and find_ptxas() is None:
        return "put a CUDA 13 `ptxas` on the PATH (CUDA toolkit), or install nvidia-cuda-nvcc"
    return ""


def require(target: Target) -> None:
    """Raise a `TargetError` that says what to install, unless the target can be used."""
    lacking = missing(target.platform)
    if lacking:
        raise TargetError(f"target {target.name} cannot be used here: {lacking}")


@dataclasses.dataclass(frozen=True)
class Availability:
    """One target: can it be compiled for, and if not, what to do.

    Attributes:
      target: the target.
      usable: True if configs can be compiled for it here.
      lacking: what to install or change; "" if usable.
      compiler: who compiles, with version.
    """

    target: Target
    usable: bool
    lacking: str
    compiler: str


@dataclasses.dataclass(frozen=True)
class Available(Displayed):
    """All known targets. Prints as a table."""

    entries: tuple[Availability, ...]

    def __iter__(self) -> Iterator[Availability]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, name: str) -> Availability:
        return next(entry for entry in self.entries if entry.target.name == name)

    @property
    def usable(self) -> tuple[Target, ...]:
        """The targets that can be compiled for here."""
        return tuple(entry.target for entry in self.entries if entry.usable)

    def _shown(self) -> Shown:
        rows, lacking = [], dict[str, list[str]]()
        for entry in self.entries:
            name, device = entry.target.name, entry.target.device_name or "this machine"
            rows.append(
                (name, device, f"with {entry.compiler}" if entry.usable else "no: lowers only")
            )
            if not entry.usable:
                lacking.setdefault(entry.lacking, []).append(name)
        notes = [f"to compile for {', '.join(names)}: {how}" for how, names in lacking.items()]
        return Shown("", ("target", "device", "compiles here"), rows, notes=notes)

    def __str__(self) -> str:
        return as_text(self._shown())


def available(*, ask: bool = False) -> Available:
    """Every target, and whether it can be used here.

    By default this looks at installed packages only. With `ask=True` each compiler is started and
    asked for the device: it takes seconds, and finds a topology that the installed libtpu does not
    know. Any target can be lowered for (`check(..., compile=False)`), whatever is installed.
    """
    entries = []
    for target in TARGETS.values():
        lacking = missing(target.platform) or (probe(target) if ask else "")
        named = _PACKAGES[target.platform] or ("jaxlib",)
        compiler = ", ".join(f"{name} {_version(name)}" for name in named)
        entries.append(Availability(target, not lacking, lacking, compiler))
    return Available(tuple(entries))


# --- workers -------------------------------------------------------------------------------------


class _Worker:
    """One worker process of a platform, started when needed, and its folder for dumps."""

    def __init__(self, platform: str) -> None:
        self._platform = platform
        self._process: Process | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def ask(self, header: Header, blobs: Sequence[bytes], seconds: float, doing: str) -> Header:
        if self._process is None or self._folder is None or not self._process.alive():
            self.stop()
            self._folder = tempfile.TemporaryDirectory(prefix="ejkernel-targets-")
            settings = _environment(self._platform, self._folder.name)
            programs = os.path.dirname(find_ptxas() or "") if self._platform == "cuda" else ""
            variables = environment.for_child(settings, programs)
            self._process = Process("ejkernel.targets.worker", variables)
        dump = "" if self._platform == "cpu" else self._folder.name
        answer, _ = self._process.ask({**header, "dump": dump}, blobs, seconds, doing)
        return answer

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
        if self._folder is not None:
            self._folder.cleanup()
        self._process = self._folder = None


def _environment(platform: str, dump: str) -> dict[str, str]:
    """What a platform's compiler wants to find in its environment."""
    settings = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "JAX_ENABLE_COMPILATION_CACHE": "0"}
    if platform == "tpu":
        settings |= {
            "TPU_SKIP_MDS_QUERY": "1",  # else it waits for a metadata server
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nothing here opens a device
            "LIBTPU_INIT_ARGS": (
                f"--xla_jf_dump_to={dump} "
                "--xla_jf_dump_llo_pass_label_regex=.*final_(bundles|hlo).*"
            ),
        }
    elif platform == "cuda":
        # Nothing can be timed without a device, so XLA must not try to tune.
        settings["XLA_FLAGS"] = (
            f"--xla_dump_to={dump} --xla_dump_emitter_re=ptx --xla_gpu_autotune_level=0"
        )
    return settings


_workers: list[_Worker] = []
_idle: collections.defaultdict[str, list[_Worker]] = collections.defaultdict(list)
_lock = threading.Lock()


@contextlib.contextmanager
def _worker(platform: str) -> Iterator[_Worker]:
    """A worker that nobody else uses; there are as many as were ever used at once."""
    with _lock:
        if _idle[platform]:
            worker = _idle[platform].pop()
        else:
            worker = _Worker(platform)
            _workers.append(worker)
    try:
        yield worker
    finally:
        _idle[platform].append(worker)


def stop_workers() -> None:
    """End all compiling processes; the next request starts others."""
    with _lock:
        for worker in _workers:
            worker.stop()


def _forget_in_fork() -> None:
    """A forked child must not talk through its parent's pipes."""
    global _lock
    _lock = threading.Lock()
    _workers.clear()
    _idle.clear()


atexit.register(stop_workers)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_fork)


# --- requests ------------------------------------------------------------------------------------


def probe(target: Target) -> str:
    """Why a target's compiler does not work here though it is installed; "" if it does."""
    header = {"do": "probe", "target": dataclasses.asdict(target)}
    try:
        with _worker(target.platform) as worker:
            answer = worker.ask(header, (), START_SECONDS, "starting")
    except (WorkerLost, WorkerUnavailable) as error:
        return str(error)
    return _why_unusable(target, answer) or ""


def compile_all(
    target: Target, programs: Sequence[Program], *, seconds: float, jobs: int
) -> list[Header]:
    """What the target's compiler says about each program, in their order.

    An answer has `refused` (the compiler's full text) or figures; `seconds` is compile time.
    Answers are cached on disk, by program, target and compiler version.
    """
    answers = [_recall(target, program) for program in programs]
    open_ones = [i for i, answer in enumerate(answers) if answer is None]
    if open_ones:
        require(target)
        with concurrent.futures.ThreadPoolExecutor(min(jobs, len(open_ones))) as threads:
            done = threads.map(lambda i: _compile(target, programs[i], seconds), open_ones)
            for i, answer in zip(open_ones, done, strict=True):
                answers[i] = answer
    return [answer for answer in answers if answer is not None]


def _compile(target: Target, program: Program, seconds: float) -> Header:
    header = {"do": "compile", "target": dataclasses.asdict(target), **program.header}
    try:
        with _worker(target.platform) as worker:
            answer = worker.ask(header, [program.module], seconds, "compiling")
    except WorkerLost as lost:
        if not lost.started:
            raise TargetError(f"target {target.name}: no compiler could be had: {lost}") from lost
        # A crash or a hang of the compiler is the program's fault, and is not cached: the limit may
        # be another one next time.
        return {"refused": f"the compiler did not survive it: {lost}", "seconds": None}
    reason = _why_unusable(target, answer)
    if reason is not None:
        raise TargetError(reason)
    if "error" in answer:
        return {"refused": answer["error"], "seconds": None}
    _remember(target, program, answer)
    return answer


def _why_unusable(target: Target, answer: Header) -> str | None:
    reason = answer.get("unusable") or answer.get("error")
    if reason is None or ("unusable" not in answer and "version" not in answer):
        return None
    if target.platform == "tpu" and ("Invalid TPU" in reason or "topology" in reason.lower()):
        return (
            f"target {target.name}: the installed libtpu {_version('libtpu')} does not know the "
            f"topology {target.topology!r} ({reason}); install the libtpu of a newer JAX"
        )
    return f"target {target.name}: its compiler cannot be started: {reason}"


# --- the cache -----------------------------------------------------------------------------------


def _name(target: Target, program: Program) -> str:
    made_of = {
        "format": FORMAT,
        "target": dataclasses.asdict(target),
        "versions": compiler_versions(target.platform),
        "ptxas": find_ptxas() if target.platform == "cuda" else None,
        "program": program.fingerprint,
    }
    return f"{short_hash(made_of, digits=32)}.json"


def _answers(
    target: Target, *, create: bool = False
) -> contextlib.AbstractContextManager[PrivateFolder]:
    """The folder of the answers for a target."""
    return PrivateFolder.open_inner(environment.cache_folder("targets"), target.name, create=create)


def _recall(target: Target, program: Program) -> Header | None:
    try:
        with _answers(target) as folder:
            answer = parse_json(folder.read(_name(target, program)), nan=True)
    except (OSError, ValueError):
        return None  # not there, damaged, or of somebody else: compiled again
    return {**answer, "cached": True} if isinstance(answer, dict) else None


def _remember(target: Target, program: Program, answer: Header) -> None:
    stored = {name: value for name, value in answer.items() if name != "blobs"}
    # No room, no right, no such folder: then it is compiled again next time.
    with contextlib.suppress(OSError), _answers(target, create=True) as folder:
        folder.write(_name(target, program), json.dumps(stored).encode())
