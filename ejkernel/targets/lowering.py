"""From a kernel and a config to the program that a target's compiler is given.

It happens in the caller's process, where the kernel lives: plain JAX lowers for any platform. What
is sent to the compiler is the StableHLO module; what the jaxpr says about launches, loops, flops
and bytes is read here, because no compiler tells it for a Pallas kernel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax import export

from ..native.calling import in_exports
from ..ops.config.functions import function_maker
from ..ops.core.invocation import split
from ..ops.core.kernel import Kernel
from ..ops.tuner.inputs import batched_shapes, outside_trace
from ..ops.tuner.isolation.worker import ANY_CUSTOM_CALL, Header
from ..ops.utils.fingerprint import as_if_on
from ..ops.utils.locations import without_locations
from ..ops.utils.serialize import dtype_name
from .catalog import Target, TargetError

if TYPE_CHECKING:
    from ..ops.core.invocation import Invocation

UNKNOWN = 0
"""The trip count of a loop that the program computes while it runs."""


@dataclasses.dataclass(frozen=True)
class Trips:
    """A loop of a kernel's source: how often it runs (`UNKNOWN`: it depends), and those inside."""

    count: int
    inner: tuple[Trips, ...] = ()


@dataclasses.dataclass(frozen=True)
class Launch:
    """One `pallas_call` of a program.

    Attributes:
      name: of the kernel.
      steps: points of its grid; None if the grid depends on run-time values.
      times: how often the program launches it; None if that depends on run-time values.
      loops: the loops of its body.
      moved: bytes of blocks whose index differs from that of the step before: what a TPU copies,
        whose grid runs in order, the last axis fastest. None if that cannot be told.
      loaded: bytes of the blocks of all steps: what a GPU reads, whose blocks know nothing of each
        other.
      unique: bytes of the arrays that the blocks are of.
    """

    name: str
    steps: int | None
    times: int | None
    loops: tuple[Trips, ...]
    moved: int | None = None
    loaded: int | None = None
    unique: int | None = None


@dataclasses.dataclass(frozen=True)
class Program:
    """A lowered program.

    Attributes:
      module: StableHLO, serialised.
      header: how to call it: inputs, outputs, kept inputs.
      launches: its Pallas kernels, in program order.
      flops: floating-point operations of the program as written, matrix products counted as two
        per multiply-add; loops of unknown length are counted once.
      bytes: what has to move at least: inputs and outputs, or the blocks of Pallas kernels.
      touched: bytes that each operation as written reads and writes, as if nothing were fused.
      dynamic: some loop outside of kernels runs an unknown number of times.
    """

    module: bytes
    header: Header
    launches: tuple[Launch, ...]
    flops: int
    bytes: int
    touched: int
    dynamic: bool = False

    @property
    def fingerprint(self) -> str:
        """Equal for equal programs."""
        digest = hashlib.blake2b(self.module, digest_size=16)
        digest.update(repr(self.header).encode())
        return digest.hexdigest()


@contextlib.contextmanager
def standing_on(target: Target) -> Iterator[None]:
    """While active, kernels choose methods, configs and keys as they would on the target.

    JAX is told too, by an abstract device: Pallas asks it what a GPU can do, and kernels may ask it
    (`pltpu.get_tpu_info()`).
    """
    device = target.device
    if device is None:
        yield
        return
    cores = device.core_count or 1
    abstract = jax.sharding.AbstractDevice(device.device_kind, cores, device.platform)
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=abstract)
    with as_if_on(device), jax.sharding.use_abstract_mesh(mesh):
        yield


def require_implementation(kernel: Kernel[Any, Any], target: Target) -> None:
    """Raise a `TargetError` unless some implementation of the kernel runs on the target."""
    if not any(item.runs_on(target.device_kind) for item in kernel.all_implementations()):
        have = ", ".join(item.name for item in kernel.all_implementations())
        raise TargetError(
            f"kernel {kernel.full_op_id} has no implementation for {target.name}: it has {have}; "
            f"add one that runs on a {target.device_kind}"
        )


def lower(kernel: Kernel[Any, Any], inv: Invocation[Any, Any], cfg: Any, target: Target) -> Program:
    """The program of a call with a config, for a target. Raises whatever lowering raises."""
    inv = dataclasses.replace(inv.abstract(), kernel=kernel)
    arrays, rest = split((batched_shapes(inv.args, inv), dict(inv.kwargs)))
    if any(jnp.issubdtype(array.dtype, jax.dtypes.extended) for array in arrays):
        raise TargetError(
            f"{kernel.full_op_id}: key arrays cannot be sent to a compiler; give key data instead"
        )
    function = function_maker(inv, kernel)(cfg)

    def program(arrays: list[Any]) -> Any:
        args, kwargs = rest.merge(arrays)
        return jax.tree.leaves(function(*args, **kwargs))

    with outside_trace():
        with standing_on(target):
            jitted = jax.jit(program)
            traced = jitted.trace(arrays).jaxpr
            exporting = export.export(
                jitted, platforms=[target.platform], disabled_checks=ANY_CUSTOM_CALL
            )
            with without_locations(), in_exports():
                exported = exporting(arrays)
        jaxpr = getattr(traced, "jaxpr", traced)
        launches = tuple(_launches(jaxpr, 1))
    edges = sum(map(_bytes, (*exported.in_avals, *exported.out_avals)))
    moved = [launch.moved for launch in launches]
    return Program(
        module=bytes(exported.mlir_module_serialized),
        header={
            "inputs": [_plain(aval) for aval in exported.in_avals],
            "outputs": [_plain(aval) for aval in exported.out_avals],
            "kept": list(exported.module_kept_var_idx),
        },
        launches=launches,
        flops=_flops(jaxpr),
        touched=_touched(jaxpr),
        dynamic=_has_unknown(_loops(jaxpr)),
        bytes=edges if None in moved else max(edges, sum(size or 0 for size in moved)),
    )


def _plain(aval: Any) -> list[Any]:
    return [dtype_name(aval.dtype), list(aval.shape), bool(getattr(aval, "weak_type", False))]


def _bytes(aval: Any) -> int:
    return int(math.prod(aval.shape) * np.dtype(aval.dtype).itemsize)


# --- what a jaxpr says ---------------------------------------------------------------------------


def _inside(eqn: Any) -> list[Any]:
    """The jaxprs that an equation holds."""
    held = jax.tree.leaves(
        list(eqn.params.values()),
        is_leaf=lambda leaf: hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr"),
    )
    return [
        getattr(leaf, "jaxpr", leaf)
        for leaf in held
        if hasattr(leaf, "eqns") or hasattr(getattr(leaf, "jaxpr", None), "eqns")
    ]


def _launches(jaxpr: Any, times: int | None) -> Iterator[Launch]:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "pallas_call":
            grid = eqn.params["grid_mapping"].grid
            source = eqn.params.get("name_and_src_info")
            static = all(isinstance(size, int) for size in grid)
            yield Launch(
                str(eqn.params.get("name") or getattr(source, "name", None) or "kernel"),
                math.prod(grid) if static else None,
                times,
                tuple(_loops(eqn.params["jaxpr"])),
                **(_traffic(eqn.params["grid_mapping"]) if static else {}),
            )
            continue
        inner = times
        if name in ("while", "cond"):
            inner = None
        elif name == "scan" and times is not None:
            inner = times * int(eqn.params["length"])
        for held in _inside(eqn):
            yield from _launches(held, inner)


MOST_STEPS = 1 << 16  # a larger grid is not walked through


def _traffic(grid_mapping: Any) -> dict[str, int]:
    """What a `Launch` says about the bytes of its blocks.

    Nothing if the grid is too large or its index maps read run-time values.
    """
    grid = tuple(grid_mapping.grid)
    steps = math.prod(grid)
    if steps > MOST_STEPS or steps == 0:
        return {}
    points = np.indices(grid, np.int32).reshape(len(grid), steps).T
    total = {"moved": 0, "loaded": 0, "unique": 0}
    for mapping in grid_mapping.block_mappings:
        index_map = mapping.index_map_jaxpr
        if len(index_map.in_avals) != len(grid):
            return {}  # it also reads prefetched scalars
        sizes = [getattr(size, "block_size", size) for size in mapping.block_shape]
        elements = math.prod(size if isinstance(size, int) else 1 for size in sizes)
        block = elements * np.dtype(mapping.array_aval.dtype).itemsize
        total["moved"] += _changes(index_map, points) * block
        total["loaded"] += steps * block
        total["unique"] += _bytes(mapping.array_aval)
    return total


def _changes(index_map: Any, points: Any) -> int:
    """How often the block index differs from that of the step before, the first one included."""
    evaluate = jax.extend.core.jaxpr_as_fun(index_map)
    indices = jax.vmap(lambda point: evaluate(*[point[i] for i in range(point.shape[0])]))(points)
    columns = np.stack([np.broadcast_to(np.asarray(i), (len(points),)) for i in indices], 1)
    return 1 + int(np.any(columns[1:] != columns[:-1], axis=1).sum())


def _loops(jaxpr: Any) -> Iterator[Trips]:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        inner = tuple(trips for held in _inside(eqn) for trips in _loops(held))
        if name == "scan":
            unroll = int(eqn.params.get("unroll", 1))
            trips = max(1, int(eqn.params["length"]) // max(1, unroll))
            yield from inner if trips == 1 else (Trips(trips, inner),)
        elif name == "while":
            yield Trips(UNKNOWN, inner)
        else:
            yield from inner


def _has_unknown(loops: Iterable[Trips]) -> bool:
    return any(trips.count == UNKNOWN or _has_unknown(trips.inner) for trips in loops)


def _flops(jaxpr: Any) -> int:
    return sum(map(_flops_of, jaxpr.eqns))


def _flops_of(eqn: Any) -> int:
    name = eqn.primitive.name
    inside = [_flops(held) for held in _inside(eqn)]
    if name == "scan":
        return int(eqn.params["length"]) * sum(inside)
    if name == "pallas_call":
        grid = eqn.params["grid_mapping"].grid
        steps = math.prod(size for size in grid if isinstance(size, int))
        return steps * _flops(eqn.params["jaxpr"])
    if name == "cond":
        return max(inside, default=0)
    if inside:
        return sum(inside)
    if name == "dot_general":
        (contracting, _), _ = eqn.params["dimension_numbers"]
        left = eqn.invars[0].aval.shape
        return 2 * _size(eqn.outvars[0]) * int(math.prod(left[axis] for axis in contracting))
    if name.startswith("reduce_") or name in ("argmax", "argmin"):
        return _size(eqn.invars[0])
    return _size(eqn.outvars[0]) if _is_arithmetic(eqn) else 0


def _touched(jaxpr: Any) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        inside = sum(map(_touched, _inside(eqn)))
        if inside or eqn.primitive.name == "scan":
            total += int(eqn.params.get("length", 1)) * inside
        elif eqn.primitive.name not in _VIEWS:
            avals = [var.aval for var in (*eqn.invars, *eqn.outvars)]
            numbers = [a for a in avals if hasattr(getattr(a, "dtype", None), "itemsize")]
            total += sum(map(_bytes, numbers))
    return total


_VIEWS = frozenset(("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "stop_gradient"))
_FREE: frozenset[str] = frozenset(
    (
        "broadcast_in_dim", "reshape", "transpose", "slice", "dynamic_slice", "concatenate", "copy",
        "convert_element_type", "squeeze", "get", "swap", "masked_load", "masked_swap", "iota",
        "dynamic_update_slice", "gather", "scatter", "select_n", "pad", "rev", "program_id",
        "stop_gradient", "copy_p", "bitcast_convert_type", "expand_dims", "optimization_barrier",
    )
)  # fmt: skip


def _is_arithmetic(eqn: Any) -> bool:
    if eqn.primitive.name in _FREE or not eqn.outvars:
        return False
    dtype = getattr(eqn.outvars[0].aval, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.inexact))


def _size(var: Any) -> int:
    return int(math.prod(getattr(var.aval, "shape", ())))
