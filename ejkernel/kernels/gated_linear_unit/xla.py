r"""The gated linear unit in plain JAX, and the gradient that all implementations share.

With :math:`g = x W_g + b_g` and :math:`u = x W_u + b_u`, and :math:`\mathrm{do}` the gradient of
the output:

.. math::
    \mathrm{dg} = \mathrm{do} \odot u \odot f'(g), \quad
    \mathrm{du} = \mathrm{do} \odot f(g), \quad
    \mathrm{dx} = \mathrm{dg} \, W_g^T + \mathrm{du} \, W_u^T, \quad
    \mathrm{dW}_g = x^T \mathrm{dg}, \quad \mathrm{dW}_u = x^T \mathrm{du} .

The gradient needs :math:`g` and :math:`u`. Saved by the forward pass they take twice the memory of
the output; computed again, block by block, they take none, for a third more products. Everything
else (:math:`f(g)`, :math:`f'(g)`) is computed again in either case.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Annotated, Any, Self

import jax
import jax.numpy as jnp

from ejkernel.ops import Invocation

from ..dot import dot
from ..dtypes import accumulation_dtype
from ..implementations import implementation_of
from ..limits import COUNT
from ..row_blocks import in_row_blocks
from .arguments import BIASES, Arguments, sizes


@dataclasses.dataclass(frozen=True)
class GatedLinearUnitXlaConfig:
    """How many rows are computed at a time.

    Args:
      block_m: in the forward pass.
      backward_block_m: in a gradient that computes the projections again.
    """

    block_m: Annotated[int, COUNT] = 1024
    backward_block_m: Annotated[int, COUNT] = 1024

    @classmethod
    def heuristic(cls, inv: Invocation[Any, Any]) -> Self:
        """All rows at once, unless what XLA writes and reads again is too large (two Zen 3 cores).

        512 rows at a time took 0.78 to 0.99 of the time from 8 million outputs on, and 1.06 with 4
        to 6 million; with both weights in one array 0.74 to 0.96 from 4 million on.
        """
        rows, columns, _ = sizes(*inv.args)
        at_once = rows * columns <= (2**23 - 1 if len(inv.args) == 3 else 2**21)
        return cls(rows if at_once else 512)

    @classmethod
    def space(cls, inv: Invocation[Any, Any]) -> list[Self]:
        rows, base = sizes(*inv.args)[0], cls.heuristic(inv)
        blocks = sorted({min(rows, size) for size in (128, 256, 512, 1024, rows)})
        fields = ("block_m", "backward_block_m") if inv.kwargs.get("recompute") else ("block_m",)
        return [dataclasses.replace(base, **{field: m}) for field in fields for m in blocks]


def project(call: Arguments, cfg: GatedLinearUnitXlaConfig, save: bool) -> tuple[jax.Array, Any]:
    """The output; with `save`, unless they are to be computed again, also the two projections."""
    save = save and not call.recompute

    def block(x: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        gate, up = projections(call, x)
        results = (call.gated(gate, up), *((gate, up) if save else ()))
        return tuple(result.astype(x.dtype) for result in results), None

    rows = call.x.shape[0] if save else cfg.block_m
    results, _ = in_row_blocks(block, (call.x,), rows, like=(call.weights, call.biases))
    return call.results(*results)


def projections(call: Arguments, x: jax.Array) -> list[jax.Array]:
    """``x @ w + b`` for the gate and for the other, in float32 (float64 for float64)."""
    products = [dot(x, w, (1, 0), precision=call.precision) for w in call.weights]
    sums = products if len(products) == 2 else jnp.split(products[0], 2, axis=1)
    return call.biased(sums, (bias[None, :] for bias in call.biases.values()))


def backward(call: Arguments, cfg: Any, saved: Any, dout: jax.Array) -> tuple[Any, ...]:
    """The gradients, from the projections of any implementation; without them, these come first.

    Four plain products, and work by element that XLA fuses into what is around it: there is nothing
    left for a kernel to bring together, so TPU and GPU use this too.
    """
    wide = accumulation_dtype(call.x.dtype)

    def block(x: jax.Array, dout: jax.Array, saved: Any) -> tuple[jax.Array, Any]:
        gate, up = saved or projections(call, x)
        _, pull_back = jax.vjp(call.gated, gate.astype(wide), up.astype(wide))
        gradients = pull_back(dout.astype(wide))
        named = zip(BIASES, gradients, strict=True)
        dbiases = {name: jnp.sum(g, axis=0) for name, g in named if name in call.biases}
        parts = gradients if len(call.weights) == 2 else [jnp.concatenate(gradients, axis=1)]
        parts = [part.astype(x.dtype) for part in parts]
        pairs = zip(parts, call.weights, strict=True)
        dx = sum(dot(part, w, (1, 1), precision=call.precision) for part, w in pairs)
        dweights = [dot(x, part, (0, 0), precision=call.precision) for part in parts]
        return jnp.asarray(dx).astype(x.dtype), (dweights, dbiases)

    rows = (call.x, dout.reshape(-1, dout.shape[-1]), saved)
    at_once = call.x.shape[0] if saved else cfg.backward_block_m
    dx, (dweights, dbiases) = in_row_blocks(block, rows, at_once, like=(call.weights, call.biases))
    by_keyword = {name: g.astype(call.biases[name].dtype) for name, g in dbiases.items()}
    arrays = [dx, *(g.astype(w.dtype) for g, w in zip(dweights, call.weights, strict=True))]
    shaped = (g.reshape(shape) for g, shape in zip(arrays, call.shapes, strict=True))
    return (*shaped, *([by_keyword] if by_keyword else []))


implementation = partial(implementation_of, Arguments.of, backward=backward)
XLA = implementation(project, name="xla", config=GatedLinearUnitXlaConfig)
