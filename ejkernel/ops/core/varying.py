"""Arrays inside `jax.shard_map`, which by default checks what varies over the devices.

There a loop may not begin with zeros, which are the same on all devices, and go on with what
differs between them: the zeros have to be declared to vary, as the arrays do that are added to
them.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax

Tree = TypeVar("Tree")


def vary_alike(tree: Tree, *others: Any) -> Tree:
    """`tree`, each of its arrays varying over every mesh axis that any array here varies over.

    The arrays of `others` count, but are not returned. Outside of `jax.shard_map` nothing varies,
    and nothing changes.

    >>> import jax.numpy as jnp
    >>> auto = (jax.sharding.AxisType.Auto,)
    >>> mesh = jax.make_mesh((1,), ("devices",), axis_types=auto)
    >>> def total(x):  # of a device's rows
    ...     zeros = vary_alike(jnp.zeros(2), x)
    ...     return jax.lax.fori_loop(0, x.shape[0], lambda i, sum: sum + x[i], zeros)[None]
    >>> rows = jax.sharding.PartitionSpec("devices")
    >>> jax.shard_map(total, mesh=mesh, in_specs=rows, out_specs=rows)(jnp.ones((3, 2))).tolist()
    [[3.0, 3.0]]
    """
    leaves, structure = jax.tree.flatten(tree)
    axes = [_varying(array) for array in (*leaves, *jax.tree.leaves(others))]
    everywhere: frozenset[str] = frozenset().union(*axes)
    varying = [
        jax.lax.pcast(array, tuple(sorted(everywhere - mine)), to="varying")
        if everywhere - mine
        else array
        for array, mine in zip(leaves, axes, strict=False)
    ]
    result: Tree = jax.tree.unflatten(structure, varying)
    return result


def _varying(array: Any) -> frozenset[str]:
    found: frozenset[str] = jax.typeof(array).manual_axis_type.varying
    return found
