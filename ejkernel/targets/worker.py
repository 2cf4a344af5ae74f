"""The process that compiles for devices that are not here.

It is started with the environment that the compiler of one platform wants (see `compiler.py`), is
given StableHLO programs, and answers with what the compiler said. None of the user's code runs
here, and nothing of a plugin ever enters the process of the user.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import shutil
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from ..ops.tuner.isolation.worker import ANY_CUSTOM_CALL, Header, serve_parent
from .catalog import GpuLimits, Target
from .figures import read_cuda_dump, read_tpu_dump


class CompilerProcess:
    """Answers requests to compile; keeps the topologies it has made."""

    def __init__(self) -> None:
        self._devices: dict[str, Any] = {}

    def answer(self, header: Header, blobs: list[bytearray]) -> Header:
        """What came of a request; the parent is told an exception's text."""
        gpu = header["target"]["gpu"]
        target = Target(**{**header["target"], "gpu": gpu and GpuLimits(**gpu)})
        try:
            device = self._device(target)
        except Exception as error:  # noqa: BLE001  the parent says what is missing
            return {"unusable": f"{type(error).__name__}: {error}"}
        if header["do"] == "probe":
            return {"version": str(device.client.platform_version)}
        return self._compile(header, target, device, bytes(blobs[0]))

    def _device(self, target: Target) -> Any:
        if target.platform == "cpu":
            return jax.local_devices(backend="cpu")[0]
        key = target.topology or target.gpu_target_config
        if key not in self._devices:
            from jax.experimental import topologies

            if target.platform == "tpu":
                topology = topologies.get_topology_desc(target.topology, platform="tpu")
            else:
                topology = topologies.get_topology_desc(
                    platform="cuda", target_config=target.gpu_target_config, topology="1x1x1"
                )
            self._devices[key] = topology.devices[0]
        return self._devices[key]

    def _compile(self, header: Header, target: Target, device: Any, module: bytes) -> Header:
        folder = pathlib.Path(header["dump"]) if header["dump"] else None
        if folder is not None:
            for old in folder.iterdir():
                shutil.rmtree(old) if old.is_dir() else old.unlink()
        sharding = jax.sharding.SingleDeviceSharding(device)
        inputs = [_abstract(plain, sharding) for plain in header["inputs"]]
        call: Any = _exported(header, target.platform, module).call
        traced = jax.jit(call).trace(inputs)
        lowered = traced.lower(lowering_platforms=(target.platform,))
        start = time.perf_counter()
        try:
            compiled = lowered.compile()
        except Exception as error:  # noqa: BLE001  whatever the compiler says is the answer
            seconds = time.perf_counter() - start
            return {"refused": f"{type(error).__name__}: {error}", "seconds": seconds}
        seconds = time.perf_counter() - start
        read = read_tpu_dump if target.platform == "tpu" else read_cuda_dump
        kernels = [] if folder is None else [dataclasses.asdict(one) for one in read(folder)]
        cost, memory = _cost(compiled), _memory(compiled)
        return {"seconds": seconds, "memory": memory, "cost": cost, "kernels": kernels}


def _abstract(plain: list[Any], sharding: Any = None) -> jax.ShapeDtypeStruct:
    name, shape, weak = plain
    return jax.ShapeDtypeStruct(tuple(shape), np.dtype(name), weak_type=weak, sharding=sharding)


def _exported(header: Header, platform: str, module: bytes) -> export.Exported:
    """The program as `jax.export` knows it; see `tuner/isolation/worker.py` for why."""
    outputs = [_abstract(plain) for plain in header["outputs"]]
    trivial = jax.jit(lambda _: [jnp.zeros(out.shape, out.dtype) for out in outputs])
    exporting = export.export(trivial, platforms=[platform], disabled_checks=ANY_CUSTOM_CALL)
    like = exporting([_abstract(plain) for plain in header["inputs"]])
    return dataclasses.replace(
        like, mlir_module_serialized=module, module_kept_var_idx=tuple(header["kept"])
    )


def _memory(compiled: Any) -> dict[str, int]:
    found = compiled.memory_analysis()
    return {} if found is None else {"temp": int(found.temp_size_in_bytes)}


def _cost(compiled: Any) -> dict[str, float]:
    """What the compiler itself says the optimised program costs; CUDA's says nothing."""
    found = compiled.cost_analysis()
    found = (found[0] if isinstance(found, list) else found) or {}
    return {name: float(found[name]) for name in ("optimal_seconds",) if name in found}


def reason_of(text: str) -> str:
    """The sentence of a compiler's message that says why, without the program in it."""
    stripped = re.sub(
        r"%[\w.-]+ = .*?(?:\bmetadata=\{[^}]*\}|\)\.)", "the kernel", text, flags=re.S
    )
    lines = [line.strip() for line in stripped.splitlines() if line.strip()]
    telling = re.compile(r"exceed|limit|out of memory|not supported|unsupported|must|cannot", re.I)
    chosen = next((line for line in lines if telling.search(line)), lines[0] if lines else "")
    head = re.match(r"(?:\w+: )?([A-Z_]{6,}): ", lines[0]) if lines else None
    prefix = f"{head[1]}: " if head is not None and head[1] not in chosen else ""
    line = re.sub(r"^\w*Error: ", "", prefix + chosen)
    return line if len(line) <= 300 else f"{line[:297]}..."


def main() -> None:
    """Compile for the parent."""
    serve_parent(CompilerProcess().answer)
