"""The grouped matrix product as a kernel: its configs, its implementations, its gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, ClassVar

import jax
import numpy as np

from ejkernel.ops import (
    Dimension,
    Invocation,
    Kernel,
    Limits,
    NearShapes,
    Partitioning,
    Shards,
    Supports,
)
from ejkernel.ops.tuner.inputs import batched_shapes, random_like

from ..limits import COUNT, LANES, TRITON_SIDE, launch
from ..tile import Tile
from . import xla
from .groups import row_spans
from .reference import grouped_matmul_reference


@dataclasses.dataclass(frozen=True)
class GroupedMatmulConfig:
    """The tiles of the product and of the gradients; for XLA only their rows matter."""

    forward: Tile = dataclasses.field(default_factory=Tile)
    lhs_gradient: Tile = dataclasses.field(default_factory=Tile)
    rhs_gradient: Tile = dataclasses.field(default_factory=Tile)


_PRODUCTS = ("forward", "lhs_gradient", "rhs_gradient")
_SIDES = [f"{product}.{side}" for product in _PRODUCTS for side in ("rows", "columns", "depth")]

LIMITS = {
    "xla": Limits({f"{product}.rows": COUNT for product in _PRODUCTS}),
    "pallas": Limits(dict.fromkeys(_SIDES, LANES)),
    "triton": Limits(
        dict.fromkeys(_SIDES, TRITON_SIDE)
        | launch("forward.", "warps", "stages")
        | launch("lhs_gradient.", "warps", "stages")
        | launch("rhs_gradient.", "warps", "stages")
    ),
}

Gradients = tuple[jax.Array, jax.Array, None]


def _with_local_groups(
    args: tuple[Any, ...], kwargs: dict[str, Any], shards: Shards
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The sizes that the groups have among the rows of this device, and which matrices are here."""
    lhs, rhs, sizes = args
    if (parts := shards.count("m")) > 1:
        rows = lhs.shape[0]
        first = shards.index("m") * rows
        spans = row_spans(sizes, rows * parts, sizes.shape[0])
        starts, ends = (jax.numpy.clip(span - first, 0, rows) for span in spans)
        sizes = ends - starts
    if shards.count("g") > 1:
        offset = kwargs.get("group_offset", 0) + shards.index("g") * rhs.shape[0]
        kwargs = {**kwargs, "group_offset": jax.numpy.asarray(offset, np.int32)}
    return (lhs, rhs, sizes), kwargs


def _no_float64_result(inv: Invocation[Any, Any]) -> str | None:
    preferred = inv.kwargs.get("preferred_element_type")
    if preferred is not None and np.dtype(preferred).itemsize > 4:
        return f"preferred_element_type={preferred} is not supported: sums are kept in float32"
    return None


class GroupedMatmul(Kernel[GroupedMatmulConfig, jax.Array]):
    """`lhs[i] @ rhs[group of i]`, with its own gradients.

    Arguments are `lhs (m, k)`, `rhs (groups, k, n)` and `group_sizes`; keywords, all of them
    optional, `transpose_rhs`, `preferred_element_type`, `precision` and `group_offset`. Use
    `ejkernel.modules.grouped_matmul`, which checks them.
    """

    version = "1"
    # Tiles follow from the matrices and from how many rows a group has on average.
    near_shapes = NearShapes(Dimension(argument=0, axis=0, rounding="nearest"), within=2.0)
    limits: ClassVar[Mapping[str, Limits]] = LIMITS
    supports: ClassVar[Mapping[str, Supports]] = {
        "pallas": Supports(dtypes=("float32", "bfloat16"), rules=(_no_float64_result,)),
        "triton": Supports(dtypes=("float32", "bfloat16", "float16"), rules=(_no_float64_result,)),
    }

    def __init__(self) -> None:
        super().__init__(name="grouped_matmul")

    def partitioning(self, inv: Invocation[Any, Any]) -> Partitioning:
        matrices = "g n k" if inv.kwargs.get("transpose_rhs") else "g k n"
        return Partitioning(
            f"m k, {matrices}, listed -> m n",
            independent="m n",
            summed="k g",
            localize=_with_local_groups,
        )

    def reference(
        self, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, **options: Any
    ) -> jax.Array:
        return grouped_matmul_reference(lhs, rhs, group_sizes, **options)

    def make_inputs(
        self, inv: Invocation[Any, Any], key: jax.Array
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Random rows and matrices, and groups as uneven as those of a router without a loss."""
        seed = np.asarray(jax.random.key_data(key))
        numbers = np.random.default_rng(seed)
        lhs, rhs, sizes = random_like(batched_shapes(inv.args, inv), int(numbers.integers(2**31)))
        groups, rows = inv.args[2].shape[0], inv.args[0].shape[0]
        if sizes.ndim == 1:
            shares = numbers.dirichlet(np.full(groups, 2.0))
            sizes = np.zeros_like(sizes) + numbers.multinomial(rows, shares)
        else:
            sizes = np.full_like(sizes, rows // groups)
        kwargs = dict(inv.kwargs)
        if "group_offset" in kwargs:
            kwargs["group_offset"] = jax.numpy.zeros((), np.int32)
        return (lhs, rhs, jax.numpy.asarray(sizes, inv.args[2].dtype)), kwargs

    # --- any device ------------------------------------------------------------------------------

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> GroupedMatmulConfig:
        """Measured on two Zen 3 cores.

        XLA's CPU backend divides a product among its threads if the result has 131,072 elements or
        more, and larger tiles leave the caches; but the sum over rows of the gradient of `rhs`
        reads and writes a whole matrix for each tile, so its tiles are long. Shorter groups get
        shorter tiles by themselves (see `xla`).
        """
        depth, columns = _matrix_shape(inv)
        return GroupedMatmulConfig(
            Tile(rows=_threaded_rows(columns)),
            Tile(rows=_threaded_rows(depth)),
            Tile(rows=1024),
        )

    def candidate_cfgs(self, inv: Invocation[Any, Any]) -> list[GroupedMatmulConfig]:
        rows = inv.args[0].shape[0]
        sizes = [size for size in (64, 128, 256, 512, 1024, 2048) if size < 2 * rows]
        return _one_at_a_time(self.heuristic_cfg(inv), [Tile(rows=size) for size in sizes])

    def run_xla(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: jax.Array,
        *,
        cfg: GroupedMatmulConfig,
        **options: Any,
    ) -> jax.Array:
        return _forward(_with_rows_only(xla), (lhs, rhs, group_sizes), cfg, options)

    def custom_vjp_xla(
        self,
        primals: tuple[jax.Array, ...],
        cfg: GroupedMatmulConfig,
        kwargs: Mapping[str, Any],
        cotangents: tuple[jax.Array],
    ) -> Gradients:
        return _backward(_with_rows_only(xla), primals, cfg, kwargs, cotangents[0])

    # --- TPU -------------------------------------------------------------------------------------

    def heuristic_cfg_pallas(self, inv: Invocation[Any, Any]) -> GroupedMatmulConfig:
        """Not measured: what fits twice into 16 MiB of vector memory, and rows as groups have."""
        wide = inv.args[0].dtype.itemsize > 2
        rows = _rows_for(inv, smallest=128, largest=256 if wide else 512)
        tile = Tile(rows, 512, 512) if wide else Tile(rows, 1024, 512)
        return GroupedMatmulConfig(tile, tile, dataclasses.replace(tile, depth=512, columns=512))

    def candidate_cfgs_pallas(self, inv: Invocation[Any, Any]) -> list[GroupedMatmulConfig]:
        tiles = [
            Tile(rows, columns, depth)
            for rows in (128, 256, 512)
            for columns, depth in ((256, 256), (512, 512), (1024, 512), (512, 1024), (1024, 1024))
        ]
        return _one_at_a_time(self.heuristic_cfg_pallas(inv), tiles)

    def run_pallas(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: jax.Array,
        *,
        cfg: GroupedMatmulConfig,
        **options: Any,
    ) -> jax.Array:
        from . import pallas_tpu

        return _forward(pallas_tpu, (lhs, rhs, group_sizes), cfg, options)

    def custom_vjp_pallas(
        self,
        primals: tuple[jax.Array, ...],
        cfg: GroupedMatmulConfig,
        kwargs: Mapping[str, Any],
        cotangents: tuple[jax.Array],
    ) -> Gradients:
        from . import pallas_tpu

        return _backward(pallas_tpu, primals, cfg, kwargs, _narrow(cotangents[0], primals[0]))

    # --- GPU -------------------------------------------------------------------------------------

    def heuristic_cfg_triton(self, inv: Invocation[Any, Any]) -> GroupedMatmulConfig:
        """Not measured: tiles that neither spill registers nor exceed an A100's shared memory."""
        wide = inv.args[0].dtype.itemsize > 2
        rows = _rows_for(inv, smallest=16, largest=128)
        product = Tile(rows, 128, 32 if wide else 64, warps=8 if rows == 128 else 4, stages=3)
        return GroupedMatmulConfig(
            product, product, Tile(rows=32, columns=128, depth=128, warps=8, stages=3)
        )

    def candidate_cfgs_triton(self, inv: Invocation[Any, Any]) -> list[GroupedMatmulConfig]:
        tiles = [
            Tile(rows, columns, depth, warps, stages=3)
            for rows, columns, warps in (
                (16, 128, 4),
                (32, 128, 4),
                (64, 64, 4),
                (64, 128, 4),
                (128, 64, 4),
                (128, 128, 8),
                (64, 256, 8),
            )
            for depth in (32, 64)
        ]
        return _one_at_a_time(self.heuristic_cfg_triton(inv), tiles)

    def run_triton(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: jax.Array,
        *,
        cfg: GroupedMatmulConfig,
        **options: Any,
    ) -> jax.Array:
        from . import pallas_gpu

        return _forward(pallas_gpu, (lhs, rhs, group_sizes), cfg, options)

    def custom_vjp_triton(
        self,
        primals: tuple[jax.Array, ...],
        cfg: GroupedMatmulConfig,
        kwargs: Mapping[str, Any],
        cotangents: tuple[jax.Array],
    ) -> Gradients:
        from . import pallas_gpu

        return _backward(pallas_gpu, primals, cfg, kwargs, _narrow(cotangents[0], primals[0]))


@dataclasses.dataclass(frozen=True)
class _Products:
    """The two products of a module."""

    rows_times_matrices: Callable[..., jax.Array]
    transposed_rows_times_rows: Callable[..., jax.Array]


def _with_rows_only(module: ModuleType) -> _Products:
    """The products of the XLA module, called like the others: with whole tiles."""

    def adapt(product: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return lambda *args, tile, **options: product(*args, tile_rows=tile.rows, **options)

    return _Products(adapt(module.rows_times_matrices), adapt(module.transposed_rows_times_rows))


def _forward(
    products: ModuleType | _Products,
    primals: tuple[jax.Array, ...],
    cfg: GroupedMatmulConfig,
    options: Mapping[str, Any],
) -> jax.Array:
    lhs, rhs, group_sizes = primals
    out: jax.Array = products.rows_times_matrices(
        lhs,
        rhs,
        row_spans(group_sizes, lhs.shape[0], rhs.shape[0], options.get("group_offset")),
        tile=cfg.forward,
        transpose_rhs=options.get("transpose_rhs", False),
        precision=options.get("precision"),
        out_dtype=options.get("preferred_element_type"),
    )
    return out


def _backward(
    products: ModuleType | _Products,
    primals: tuple[jax.Array, ...],
    cfg: GroupedMatmulConfig,
    options: Mapping[str, Any],
    dout: jax.Array,
) -> Gradients:
    lhs, rhs, group_sizes = primals
    spans = row_spans(group_sizes, lhs.shape[0], rhs.shape[0], options.get("group_offset"))
    transposed, precision = options.get("transpose_rhs", False), options.get("precision")
    dlhs = products.rows_times_matrices(
        dout,
        rhs,
        spans,
        tile=cfg.lhs_gradient,
        transpose_rhs=not transposed,
        precision=precision,
        out_dtype=lhs.dtype,
    )
    drhs = products.transposed_rows_times_rows(
        *((dout, lhs) if transposed else (lhs, dout)),
        spans,
        tile=cfg.rhs_gradient,
        precision=precision,
        out_dtype=rhs.dtype,
    )
    return dlhs, drhs, None


def _narrow(dout: jax.Array, lhs: jax.Array) -> jax.Array:
    """With a wider result its gradient is wide too; matrix units take both sides in one dtype."""
    return dout.astype(lhs.dtype)


# Smallest result of a product that XLA's CPU backend divides among its threads.
_THREADED_RESULT = 131_072


def _threaded_rows(columns: int) -> int:
    return min(1024, max(256, _power_of_two_from(-(-_THREADED_RESULT // columns))))


def _rows_for(inv: Invocation[Any, Any], *, smallest: int, largest: int) -> int:
    """The power of two that holds a group of average size, within limits."""
    lhs, _, group_sizes = inv.args
    average = max(1, lhs.shape[0] // group_sizes.shape[0])
    return min(largest, max(smallest, _power_of_two_from(average)))


def _power_of_two_from(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _matrix_shape(inv: Invocation[Any, Any]) -> tuple[int, int]:
    depth, columns = inv.args[1].shape[1:]
    return (columns, depth) if inv.kwargs.get("transpose_rhs") else (depth, columns)


def _one_at_a_time(base: GroupedMatmulConfig, tiles: Iterable[Tile]) -> list[GroupedMatmulConfig]:
    """Every tile for every product; they share nothing, so each varies while the others stay."""
    listed = list(tiles)
    return [
        dataclasses.replace(base, **{field.name: tile})
        for field in dataclasses.fields(base)
        for tile in listed
    ]
