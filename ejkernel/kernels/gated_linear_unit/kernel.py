"""The gated linear unit as a kernel: its configs, its implementations, its gradient."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar

import jax

from ejkernel.ops import (
    Dimension,
    Invocation,
    Kernel,
    Limits,
    NearShapes,
    Partitioning,
    Supports,
)

from ..limits import COUNT, LANES, TRITON_SIDE, launch
from ..tile import Tile
from . import xla
from .reference import gated_linear_unit_reference


@dataclasses.dataclass(frozen=True)
class GatedLinearUnitConfig:
    """How much is computed at a time.

    Args:
      forward: tile of the forward pass; for XLA only its rows matter.
      backward_rows: rows at a time of a gradient that computes the projections again.
    """

    forward: Tile = dataclasses.field(default_factory=Tile)
    backward_rows: int = 1024


Saved = tuple[jax.Array, jax.Array] | None


def _halves_are_whole_blocks(inv: Invocation[Any, Any]) -> str | None:
    if len(inv.args) == 2 and xla.width_of(inv.args[1:]) % 128:
        return (
            f"w_gate {inv.args[1].shape} holds both weights, and half of its columns are no "
            "multiple of 128"
        )
    return None


def _columns_divide_the_halves(cfg: GatedLinearUnitConfig, inv: Invocation[Any, Any]) -> str | None:
    columns = xla.width_of(inv.args[1:])
    block = min(cfg.forward.columns, columns)
    if len(inv.args) == 3 or columns % block == 0:
        return None
    return (
        f"forward.columns={cfg.forward.columns} must divide the {columns} columns of each of the "
        "two weights that w_gate holds"
    )


_SIDES = ("forward.rows", "forward.columns", "forward.depth")
_BACKWARD = {"backward_rows": COUNT}  # the gradient is that of XLA everywhere

LIMITS = {
    "xla": Limits({"forward.rows": COUNT} | _BACKWARD),
    "pallas": Limits(dict.fromkeys(_SIDES, LANES) | _BACKWARD, rules=(_columns_divide_the_halves,)),
    "triton": Limits(
        dict.fromkeys(_SIDES, TRITON_SIDE) | launch("forward.", "warps", "stages") | _BACKWARD
    ),
}


class GatedLinearUnit(Kernel[GatedLinearUnitConfig, jax.Array]):
    """`activation(x @ w_gate) * (x @ w_up)`, with its own gradient.

    Arguments are `x (..., k)` and `w_gate, w_up`, each `(k, n)`, or both in one `(k, 2 n)` or
    `(k, 2, n)`; keywords are `activation` and, optional, `b_gate`, `b_up`, `precision` and
    `recompute`. Use `ejkernel.modules.gated_linear_unit`, which checks them.
    """

    version = "1"
    limits: ClassVar[Mapping[str, Limits]] = LIMITS
    near_shapes = NearShapes(
        *(Dimension(argument=0, axis=axis, rounding="nearest") for axis in (0, -2)), within=2.0
    )
    supports: ClassVar[Mapping[str, Supports]] = {
        "pallas": Supports(dtypes=("float32", "bfloat16"), rules=(_halves_are_whole_blocks,)),
        "triton": Supports(dtypes=("float32", "bfloat16", "float16")),
    }

    def __init__(self) -> None:
        super().__init__(name="gated_linear_unit")

    def partitioning(self, inv: Invocation[Any, Any]) -> Partitioning:
        weights = "k n, k n"
        if len(inv.args) == 2:
            weights = "k two n" if len(inv.args[1].shape) == 3 else "k (two n)"
        return Partitioning(
            f"... k, {weights} -> ... n",
            keywords={"b_gate": "n", "b_up": "n"},
            independent="n",
        )

    def entries_are_independent(self, *args: Any, **options: Any) -> bool:
        return True

    def reference(self, x: jax.Array, *weights: jax.Array, **options: Any) -> jax.Array:
        return gated_linear_unit_reference(x, *weights, **options)

    # --- any device ------------------------------------------------------------------------------

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> GatedLinearUnitConfig:
        """All rows at once, unless what XLA writes and reads again is too large (two Zen 3 cores).

        512 rows at a time took 0.78 to 0.99 of the time from 8 million outputs on, and 1.06 with 4
        to 6 million; with both weights in one array 0.74 to 0.96 from 4 million on.
        """
        weights = inv.args[1:]
        rows, columns = _row_count(inv), xla.width_of(weights)
        block = rows if rows * columns <= _AT_ONCE[len(weights)] else 512
        return GatedLinearUnitConfig(Tile(rows=block), backward_rows=1024)

    def candidate_cfgs(self, inv: Invocation[Any, Any]) -> list[GatedLinearUnitConfig]:
        rows = _row_count(inv)
        sizes = sorted({min(rows, size) for size in (128, 256, 512, 1024, rows)})
        base = self.heuristic_cfg(inv)
        ahead = [dataclasses.replace(base, forward=Tile(rows=size)) for size in sizes]
        if not inv.kwargs.get("recompute"):
            return ahead
        return ahead + [dataclasses.replace(base, backward_rows=size) for size in sizes]

    def run_xla(
        self, x: jax.Array, *weights: jax.Array, cfg: GatedLinearUnitConfig, **options: Any
    ) -> jax.Array:
        out = xla.forward(
            _rows(x),
            _side_by_side(weights),
            _biases(options),
            activation=options["activation"],
            rows=cfg.forward.rows,
            precision=options.get("precision"),
        )
        return _like(x, out)

    def fwd_with_residuals_xla(
        self, x: jax.Array, *weights: jax.Array, cfg: GatedLinearUnitConfig, **options: Any
    ) -> tuple[jax.Array, Saved]:
        if options.get("recompute"):
            return self.run_xla(x, *weights, cfg=cfg, **options), None
        out, saved = xla.forward_and_projections(
            _rows(x),
            _side_by_side(weights),
            _biases(options),
            activation=options["activation"],
            precision=options.get("precision"),
        )
        return _like(x, out), saved

    def vjp_xla(
        self,
        saved: Saved,
        out: jax.Array,
        dout: jax.Array,
        x: jax.Array,
        *weights: jax.Array,
        cfg: GatedLinearUnitConfig,
        **options: Any,
    ) -> tuple[Any, ...]:
        gradients = xla.backward(
            _rows(x),
            _side_by_side(weights),
            _biases(options),
            _rows(dout),
            saved=saved,
            activation=options["activation"],
            rows=cfg.backward_rows,
            precision=options.get("precision"),
        )
        named = {
            name: gradient
            for name, gradient in zip(("b_gate", "b_up"), gradients.biases, strict=True)
            if gradient is not None
        }
        dweights = (g.reshape(w.shape) for g, w in zip(gradients.weights, weights, strict=True))
        return (gradients.x.reshape(x.shape), *dweights, *([named] if named else []))

    # --- TPU and GPU -----------------------------------------------------------------------------
    #
    # The gradient is that of XLA: four plain products, and element-wise work that XLA fuses into
    # what is around it. There is nothing left for a kernel to bring together.

    def heuristic_cfg_pallas(self, inv: Invocation[Any, Any]) -> GatedLinearUnitConfig:
        """Not measured: two weight blocks, three results and two sums within 16 MiB."""
        wide = inv.args[0].dtype.itemsize > 2
        rows = min(256 if wide else 512, -(-_row_count(inv) // 128) * 128)
        return GatedLinearUnitConfig(Tile(rows, _columns(inv, 512), 512))

    def candidate_cfgs_pallas(self, inv: Invocation[Any, Any]) -> list[GatedLinearUnitConfig]:
        columns = sorted({_columns(inv, largest) for largest in (256, 512, 1024)})
        return [
            GatedLinearUnitConfig(Tile(rows, width, depth))
            for rows in (128, 256, 512)
            for width in columns
            for depth in (256, 512, 1024)
        ]

    def run_pallas(
        self, x: jax.Array, *weights: jax.Array, cfg: GatedLinearUnitConfig, **options: Any
    ) -> jax.Array:
        from . import pallas_tpu

        return _run(pallas_tpu, x, weights, cfg, options, save=False)[0]

    def fwd_with_residuals_pallas(
        self, x: jax.Array, *weights: jax.Array, cfg: GatedLinearUnitConfig, **options: Any
    ) -> tuple[jax.Array, Saved]:
        from . import pallas_tpu

        return _run_and_save(pallas_tpu, x, weights, cfg, options)

    def vjp_pallas(self, *residuals_and_args: Any, **options: Any) -> tuple[Any, ...]:
        return self.vjp_xla(*residuals_and_args, **options)

    def heuristic_cfg_triton(self, inv: Invocation[Any, Any]) -> GatedLinearUnitConfig:
        """Not measured: two sums of 64 columns take the registers of one of 128."""
        rows = min(128, max(16, 1 << (_row_count(inv) - 1).bit_length()))
        wide = inv.args[0].dtype.itemsize > 2
        return GatedLinearUnitConfig(
            Tile(rows, 64, 32 if wide else 64, warps=8 if rows == 128 else 4, stages=3)
        )

    def candidate_cfgs_triton(self, inv: Invocation[Any, Any]) -> list[GatedLinearUnitConfig]:
        return [
            GatedLinearUnitConfig(Tile(rows, columns, depth, warps, stages=3))
            for rows, columns, warps in (
                (16, 64, 4),
                (32, 64, 4),
                (64, 64, 4),
                (128, 64, 4),
                (128, 64, 8),
                (64, 128, 8),
                (128, 128, 8),
            )
            for depth in (32, 64)
        ]

    def run_triton(
        self, x: jax.Array, *weights: jax.Array, cfg: GatedLinearUnitConfig, **options: Any
    ) -> jax.Array:
        from . import pallas_gpu

        return _run(pallas_gpu, x, weights, cfg, options, save=False)[0]

    def fwd_with_residuals_triton(
        self, x: jax.Array, *weights: jax.Array, cfg: GatedLinearUnitConfig, **options: Any
    ) -> tuple[jax.Array, Saved]:
        from . import pallas_gpu

        return _run_and_save(pallas_gpu, x, weights, cfg, options)

    def vjp_triton(self, *residuals_and_args: Any, **options: Any) -> tuple[Any, ...]:
        return self.vjp_xla(*residuals_and_args, **options)


# Outputs that are computed at once, by the number of arrays that hold the weights.
_AT_ONCE = {1: 2**21, 2: 2**23 - 1}


def _run(
    module: ModuleType,
    x: jax.Array,
    weights: xla.Weights,
    cfg: GatedLinearUnitConfig,
    options: Mapping[str, Any],
    *,
    save: bool,
) -> tuple[jax.Array, ...]:
    out, *saved = module.forward(
        _rows(x),
        _side_by_side(weights),
        _biases(options),
        activation=options["activation"],
        tile=cfg.forward,
        save=save,
        precision=options.get("precision"),
    )
    return _like(x, out), *saved


def _run_and_save(
    module: ModuleType,
    x: jax.Array,
    weights: xla.Weights,
    cfg: GatedLinearUnitConfig,
    options: Mapping[str, Any],
) -> tuple[jax.Array, Saved]:
    if options.get("recompute"):
        return _run(module, x, weights, cfg, options, save=False)[0], None
    out, gate, up = _run(module, x, weights, cfg, options, save=True)
    return out, (gate, up)


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


def _row_count(inv: Invocation[Any, Any]) -> int:
    return math.prod(inv.args[0].shape[:-1])


def _like(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows of results with the leading axes of `x`."""
    return rows.reshape(*x.shape[:-1], rows.shape[-1])


def _side_by_side(weights: xla.Weights) -> xla.Weights:
    """Weights as matrices: `(k, 2, n)` as `(k, 2 n)`."""
    return tuple(w.reshape(w.shape[0], -1) for w in weights)


def _biases(options: Mapping[str, Any]) -> xla.Biases:
    return options.get("b_gate"), options.get("b_up")


def _columns(inv: Invocation[Any, Any], largest: int) -> int:
    """Columns of a tile on TPU; where one array holds both weights, such that they divide it."""
    columns = xla.width_of(inv.args[1:])
    if len(inv.args) == 3:
        return largest
    return next((size for size in (largest, 512, 256) if columns % size == 0), 128)
