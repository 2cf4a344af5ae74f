"""The grouped matrix product as a kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops import Dimension, Invocation, Kernel, NearShapes, Partitioning, Shards
from ejkernel.ops.core.work import Work, traffic
from ejkernel.ops.tuner.inputs import batched_shapes, random_like

from .groups import row_spans
from .pallas_gpu import PALLAS_GPU
from .pallas_tpu import PALLAS_TPU
from .plain import ragged_dot
from .reference import grouped_matmul_reference
from .xla import XLA


class GroupedMatmul(Kernel[Any, jax.Array]):
    """`lhs[i] @ rhs[group of i]`, with its own gradients.

    Arguments are `lhs (m, k)`, `rhs (groups, k, n)` and `group_sizes`; keywords, all of them
    optional, `transpose_rhs`, `preferred_element_type`, `precision` and `group_offset`. Use
    `ejkernel.modules.grouped_matmul`, which checks them.
    """

    implementations = (PALLAS_TPU, PALLAS_GPU, XLA)
    reference = staticmethod(grouped_matmul_reference)
    plain = staticmethod(ragged_dot)
    # Blocks follow from the matrices and from how many rows a group has on average.
    near_shapes = NearShapes(Dimension(argument=0, axis=0, rounding="nearest"), within=2.0)

    def partitioning(self, inv: Invocation[Any, Any]) -> Partitioning:
        matrices = "g n k" if inv.kwargs.get("transpose_rhs") else "g k n"
        axes = f"m k, {matrices}, listed -> m n"
        return Partitioning(axes, independent="m n", summed="k g", localize=_with_local_groups)

    def make_inputs(
        self, inv: Invocation[Any, Any], key: jax.Array
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Random rows and matrices, and groups as uneven as those of a router without a loss."""
        numbers = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        lhs, rhs, sizes = random_like(batched_shapes(inv.args, inv), int(numbers.integers(2**31)))
        groups, rows = inv.args[2].shape[0], inv.args[0].shape[0]
        if sizes.ndim == 1:
            shares = numbers.dirichlet(np.full(groups, 2.0))
            sizes = np.zeros_like(sizes) + numbers.multinomial(rows, shares)
        else:
            sizes = np.full_like(sizes, rows // groups)
        kwargs = dict(inv.kwargs)
        if "group_offset" in kwargs:
            kwargs["group_offset"] = jnp.zeros((), np.int32)
        return (lhs, rhs, jnp.asarray(sizes, inv.args[2].dtype)), kwargs

    def work(self, inv: Invocation[Any, Any]) -> Work | None:
        """A product of every row with one matrix, and as much for each of the gradients."""
        if "group_offset" in inv.kwargs:
            return None  # how many rows belong to the matrices that are here depends on the sizes
        lhs, rhs, _ = inv.args
        columns = rhs.shape[1 if inv.kwargs.get("transpose_rhs") else 2]
        products = 1 + len({"0", "1"}.intersection(inv.differentiated))
        dtype = inv.kwargs.get("preferred_element_type", lhs.dtype)
        out = jax.ShapeDtypeStruct((lhs.shape[0], columns), dtype)
        return Work(2.0 * products * lhs.size * columns, traffic(inv, out))


def _with_local_groups(
    args: tuple[Any, ...], kwargs: dict[str, Any], shards: Shards
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The sizes that the groups have among the rows of this device, and which matrices are here."""
    lhs, rhs, sizes = args
    if (parts := shards.count("m")) > 1:
        rows = lhs.shape[0]
        first = shards.index("m") * rows
        spans = row_spans(sizes, rows * parts, sizes.shape[0])
        starts, ends = (jnp.clip(span - first, 0, rows) for span in spans)
        sizes = ends - starts
    if shards.count("g") > 1:
        offset = kwargs.get("group_offset", 0) + shards.index("g") * rhs.shape[0]
        kwargs = {**kwargs, "group_offset": jnp.asarray(offset, np.int32)}
    return (lhs, rhs, sizes), kwargs
