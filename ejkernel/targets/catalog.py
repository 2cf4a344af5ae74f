"""Devices by name: what a compiler has to know about them, and how their configs are keyed.

A `Target` is plain data. Nothing here imports a plugin or starts a backend.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re

from ..ops.utils.fingerprint import StandIn, device_fingerprint

KIB = 1024
MIB = 1024 * KIB


class TargetError(ValueError):
    """A target that is not known or cannot be used here; the message says what to do."""


@dataclasses.dataclass(frozen=True)
class GpuLimits:
    """What a CUDA device has: the shared-memory check and the occupancy use it.

    Attributes:
      major: the compute capability, before its point.
      minor: and after it.
      cores: streaming multiprocessors.
      shared_per_block: the most shared memory of one block, opted in, in bytes.
      shared_per_core: of one multiprocessor, in bytes.
      threads_per_core: resident threads of one multiprocessor.
      registers_per_core: 32-bit registers of one multiprocessor.
      l2_bytes: size of the second-level cache.
      memory_bytes: size of the memory.
    """

    major: int
    minor: int
    cores: int
    shared_per_block: int
    shared_per_core: int
    threads_per_core: int = 2048
    registers_per_core: int = 65536
    l2_bytes: int = 0
    memory_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Target:
    """A device to compile for.

    Attributes:
      name: `tpu-v5e`, `cuda-sm90`, `cpu`.
      platform: what JAX lowers for: `"tpu"`, `"cuda"` or `"cpu"`.
      device_name: what `jax.Device.device_kind` says there; part of the fingerprint.
      topology: the name of the TPU topology to compile for; one device of it is used.
      gpu: a CUDA device's limits.
      clock_ghz: cycles per nanosecond, to turn estimated cycles into estimated time.
      bandwidth: of the memory, in bytes per second.

    Another device of the same kind is a changed value:

    >>> import dataclasses
    >>> small = dataclasses.replace(find("cuda-sm80"), device_name="NVIDIA A100-SXM4-40GB")
    >>> small.device_fingerprint
    'gpu|nvidia-a100-sxm4-40gb|sm80|108-cores'
    """

    name: str
    platform: str
    device_name: str = ""
    topology: str = ""
    gpu: GpuLimits | None = None
    clock_ghz: float = 1.0
    bandwidth: float = 0.0

    @property
    def device(self) -> StandIn | None:
        """What stands for the device while tracing; None if it is this machine's own."""
        if self.platform == "cpu":
            return None
        if self.gpu is None:
            return StandIn(self.platform, self.device_name)
        capability = f"{self.gpu.major}.{self.gpu.minor}"
        return StandIn("gpu", self.device_name, capability, self.gpu.cores)

    @property
    def device_kind(self) -> str:
        """`"tpu"`, `"gpu"` or `"cpu"`: decides which implementation runs."""
        return "gpu" if self.platform == "cuda" else self.platform

    @property
    def device_fingerprint(self) -> str:
        """What `ejkernel.ops.device_fingerprint()` gives on such a device."""
        device = self.device
        return _fingerprint_of_this_cpu() if device is None else device_fingerprint(device)

    @property
    def gpu_target_config(self) -> str:
        """A CUDA target as XLA's `GpuTargetConfigProto`, in text form."""
        if self.gpu is None:
            raise TargetError(f"target {self.name} is no CUDA device")
        gpu = self.gpu
        return (
            "gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 "
            f"shared_memory_per_block: {48 * KIB} shared_memory_per_core: {gpu.shared_per_core} "
            f"threads_per_core_limit: {gpu.threads_per_core} core_count: {gpu.cores} "
            "fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 "
            f"block_dim_limit_z: 65535 memory_bandwidth: {int(self.bandwidth)} "
            f"l2_cache_size: {gpu.l2_bytes} clock_rate_ghz: {self.clock_ghz} "
            f"device_memory_size: {gpu.memory_bytes} "
            f"shared_memory_per_block_optin: {gpu.shared_per_block} "
            f"cuda_compute_capability {{ major: {gpu.major} minor: {gpu.minor} }} "
            f"registers_per_core_limit: {gpu.registers_per_core} "
            f"registers_per_block_limit: 65536 }} "
            'platform_name: "CUDA" dnn_version_info { major: 9 minor: 7 } '
            "runtime_version { major: 12 minor: 9 patch: 0 } "
            f'device_description_str: "{self.device_name}"'
        )

    def __str__(self) -> str:
        return self.name


@functools.lru_cache(maxsize=1)
def _fingerprint_of_this_cpu() -> str:
    import jax

    return device_fingerprint(jax.local_devices(backend="cpu")[0])


def _cuda(
    name: str,
    device_name: str,
    major: int,
    cores: int,
    shared_kib: int,
    l2_mib: int,
    memory_gib: int,
    clock_ghz: float,
    bandwidth: float,
) -> Target:
    """A CUDA target; of a multiprocessor's shared memory a block has all but 1 KiB."""
    shared, memory = shared_kib * KIB, memory_gib * 1024 * MIB
    gpu = GpuLimits(
        major, 0, cores, shared - KIB, shared, l2_bytes=l2_mib * MIB, memory_bytes=memory
    )
    return Target(name, "cuda", device_name, gpu=gpu, clock_ghz=clock_ghz, bandwidth=bandwidth)


# Names of TPU devices are those that libtpu's topologies report. Clocks and bandwidths are the
# published ones; they scale an estimate of one target and never change the order of its configs,
# except where a config is bound by memory.
_TARGETS = (
    Target("tpu-v4", "tpu", "TPU v4", "v4:2x2x1", clock_ghz=1.05, bandwidth=1.2e12),
    Target("tpu-v5e", "tpu", "TPU v5 lite", "v5e:2x2", clock_ghz=1.5, bandwidth=0.82e12),
    Target("tpu-v5p", "tpu", "TPU v5", "v5p:2x2x1", clock_ghz=1.75, bandwidth=2.77e12),
    Target("tpu-v6e", "tpu", "TPU v6 lite", "v6e:2x2", clock_ghz=1.75, bandwidth=1.64e12),
    Target("tpu-v7x", "tpu", "TPU7x", "tpu7x:2x2x1", clock_ghz=1.9, bandwidth=3.7e12),
    _cuda("cuda-sm80", "NVIDIA A100-SXM4-80GB", 8, 108, 164, 40, 80, 1.41, 2.039e12),
    _cuda("cuda-sm90", "NVIDIA H100 80GB HBM3", 9, 132, 228, 50, 80, 1.98, 3.352e12),
    _cuda("cuda-sm100", "NVIDIA B200", 10, 148, 228, 126, 180, 1.965, 7.7e12),
    Target("cpu", "cpu"),
)
TARGETS: dict[str, Target] = {target.name: target for target in _TARGETS}


def names() -> tuple[str, ...]:
    """The names of all known targets."""
    return tuple(TARGETS)


def find(target: str | Target) -> Target:
    """A target by its name, or by a part of its name or its device's; a `Target` as it is.

    >>> find("tpu-v5e").device_fingerprint
    'tpu|tpu-v5-lite'
    >>> [find(name).name for name in ("h100", "SM_90", "TPU v5e", "v6e")]
    ['cuda-sm90', 'cuda-sm90', 'tpu-v5e', 'tpu-v6e']
    """
    if isinstance(target, Target):
        return target
    wanted = _letters(target) if isinstance(target, str) else ""
    if wanted in (exact := {_letters(name): name for name in TARGETS}):
        return TARGETS[exact[wanted]]
    spellings = {
        spelling: known
        for known in TARGETS.values()
        for spelling in (known.name, known.device_name or known.name)
    }
    matching = {known.name for text, known in spellings.items() if wanted in _letters(text)}
    if wanted and len(matching) == 1:
        return TARGETS[matching.pop()]
    if not wanted or not matching:
        words = {
            _letters(word): known.name
            for text, known in spellings.items()
            for word in (text, *text.split())
        }
        matching = {words[near] for near in difflib.get_close_matches(wanted, words, n=2)}
    hint = f": did you mean {' or '.join(sorted(matching))}?" if wanted and matching else "."
    raise TargetError(f"target {target!r} is not known{hint} Known are {', '.join(TARGETS)}")


def _letters(name: str) -> str:
    """A name as people may spell it: `SM_90` and `sm90` are the same."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
