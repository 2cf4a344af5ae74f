"""Inputs to measure with: fresh random arrays of the call's shapes, dtypes and shardings.

Never the caller's arrays, which may be tracers, donated or all zero; and made outside the current
trace, so that a measurement inside `jit` measures execution.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.batching import axes_per_argument, axes_per_leaf
from ..core.invocation import BatchAxes
from ..utils.fingerprint import is_array

if TYPE_CHECKING:
    from ..core.invocation import Invocation
    from ..core.kernel import Kernel


@contextlib.contextmanager
def outside_trace() -> Iterator[None]:
    """Run things for real, even while JAX is tracing; the caller's JAX settings stay active."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.core.eval_context())
        if not jax.sharding.get_abstract_mesh().empty:
            # Inside a `shard_map` JAX would take everything for a part of something sharded.
            no_mesh = jax.sharding.AbstractMesh((), ())
            stack.enter_context(jax.sharding.use_abstract_mesh(no_mesh))
        yield


def realistic_inputs(
    kernel: Kernel[Any, Any], inv: Invocation[Any, Any], seed: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs for an invocation: from the kernel's `make_inputs(inv, key)` if it has one."""
    make_inputs = getattr(kernel, "make_inputs", None)
    if make_inputs is None:
        args, kwargs = random_like((inv.args, dict(inv.kwargs)), seed)
        shapes = batched_shapes(args, inv)
        return (args if shapes is args else tuple(random_like(shapes, seed))), kwargs
    made = make_inputs(inv, jax.random.key(seed))
    if not isinstance(made, tuple) or len(made) != 2:
        raise TypeError(
            f"kernel {kernel.full_op_id}: make_inputs must return (args, kwargs), got {made!r}"
        )
    args, kwargs = made
    return tuple(args), dict(kwargs)


def needs_other_processes(inv: Invocation[Any, Any]) -> bool:
    """True if the arguments are sharded over devices of which some belong to other processes."""
    leaves = jax.tree.leaves((inv.args, dict(inv.kwargs)))
    shardings = [_concrete_sharding(leaf) for leaf in leaves if is_array(leaf)]
    return any(s is not None and not s.is_fully_addressable for s in shardings)


def random_like(tree: Any, seed: int = 0, *, only_abstract: bool = False) -> Any:
    """Replace every array of a pytree by a random one like it; leave other leaves alone.

    With `only_abstract`, only tracers and abstract shapes, and no array that has values.
    """
    generator = np.random.default_rng(seed)
    replaced = (jax.core.Tracer, jax.ShapeDtypeStruct) if only_abstract else object

    def real(leaf: Any) -> Any:
        return _random(leaf, generator) if is_array(leaf) and isinstance(leaf, replaced) else leaf

    return jax.tree.map(real, tree)


def batched_shapes(args: tuple[Any, ...], inv: Invocation[Any, Any]) -> tuple[Any, ...]:
    """The arguments of a batched call as shapes: the invocation holds those of one example.

    Of a call that is not batched, the arguments themselves.
    """
    batch = inv.batch_axes
    if not isinstance(batch, BatchAxes) or batch.transform != "vmap":
        return args

    def with_axis(leaf: Any, axis: int | None) -> Any:
        if axis is None or not is_array(leaf):
            return leaf
        position = axis % (leaf.ndim + 1)
        shape = (*leaf.shape[:position], batch.size, *leaf.shape[position:])
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    shapes = []
    for arg, axes in zip(args, axes_per_argument(args, batch.in_axes), strict=True):
        leaves, structure = jax.tree.flatten(arg)
        mapped = map(with_axis, leaves, axes_per_leaf(arg, axes))
        shapes.append(jax.tree.unflatten(structure, mapped))
    return tuple(shapes)


def _random(like: Any, generator: np.random.Generator) -> Any:
    shape, dtype = like.shape, like.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        count = int(np.prod(shape, dtype=np.int64))
        keys = jax.random.split(jax.random.key(int(generator.integers(2**31))), max(count, 1))
        return keys[:count].reshape(shape)
    values: Any
    if jnp.issubdtype(dtype, jnp.bool_):
        values = generator.integers(0, 2, shape).astype(bool)
    elif jnp.issubdtype(dtype, jnp.integer):
        values = generator.integers(0, 2, shape)
    elif jnp.issubdtype(dtype, jnp.complexfloating):
        values = generator.standard_normal(shape) + 1j * generator.standard_normal(shape)
    else:
        values = generator.standard_normal(shape, dtype=np.float32)
    array = jnp.asarray(values).astype(dtype)
    sharding = _concrete_sharding(like)
    return array if sharding is None else jax.device_put(array, sharding)


def _concrete_sharding(like: Any) -> Any:
    """The sharding to measure with; an abstract mesh is replaced by the active one."""
    if isinstance(like, jax.core.Tracer):
        sharding = getattr(jax.typeof(like), "sharding", None)
    else:
        sharding = getattr(like, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    if isinstance(sharding.mesh, jax.sharding.Mesh):
        return sharding
    if all(axis is None for axis in sharding.spec):
        return None
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return None
    return jax.sharding.NamedSharding(mesh, sharding.spec)
