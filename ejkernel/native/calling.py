"""Calls of native kernels in programs, which are not always run where they were traced.

What JAX traces on a CPU may be lowered for another platform, or exported to run elsewhere. There a
call of a library that was compiled for this very processor is of no use, so every such call comes
with a function in plain JAX that computes the same, and which of the two a program holds is decided
when it is lowered. The other function is not even traced where it is not needed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.interpreters import batching, mlir

Function = Callable[..., Any]

# A user context is part of every jit key: what was lowered with another answer is not reused.
# Created once, at import, as JAX wants it.
_exports = jax.make_user_context(False)


def in_exports() -> contextlib.AbstractContextManager[Any]:
    """While active in this thread, `jax.export` keeps calls of native kernels in its programs.

    Such a program runs where the same libraries are loaded (`load_libraries`), and JAX wants
    to be told that it is allowed: `disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(…)]`
    with the names of their handlers.
    """
    return _exports(True)  # type: ignore[no-any-return]


def call(native: Function, other: Function, *arrays: Any) -> Any:
    """`native(*arrays)` in programs for this CPU, `other(*arrays)` in all others.

    Args:
      native: calls a native library.
      other: computes the same in plain JAX.
      arrays: pytrees of arrays, and nothing else.
    """
    leaves, structure = jax.tree.flatten(arrays)
    nested: list[Any] = []

    def flat(*leaves: Any) -> list[Any]:
        result = native(*jax.tree.unflatten(structure, leaves))
        nested[:] = [jax.tree.structure(result)]
        return jax.tree.leaves(result)

    def flat_other(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(other(*jax.tree.unflatten(structure, leaves)))

    traced = jax.make_jaxpr(flat)(*leaves)
    return jax.tree.unflatten(nested[0], _call.bind(*leaves, native=traced, other=flat_other))


def call_handler(
    name: str,
    results: tuple[tuple[tuple[int, ...], Any], ...],
    operands: tuple[jax.Array, ...],
    attributes: dict[str, Any],
    *,
    vmap_method: str = "broadcast_all",
) -> Any:
    """What a handler of a library gives, under any transform and inside `shard_map` too.

    Args:
      results: shapes and dtypes.
      vmap_method: as in `jax.ffi.ffi_call`; by default the handler takes any number of leading axes
        as a batch.
    """
    types = [jax.typeof(operand) for operand in operands]
    varying = frozenset[str]().union(*(x.manual_axis_type.varying for x in types))
    more: dict[str, Any] = {}
    if varying:
        # Inside `shard_map`: what is the same on all devices is brought to the type of the rest.
        operands = tuple(
            jax.lax.pcast(x, tuple(varying - t.manual_axis_type.varying), to="varying")
            if varying != t.manual_axis_type.varying
            else x
            for x, t in zip(operands, types, strict=True)
        )
        like = jax.typeof(operands[0])
        everywhere = jax.sharding.NamedSharding(like.sharding.mesh, jax.sharding.PartitionSpec())
        more = {"sharding": everywhere, "manual_axis_type": like.manual_axis_type}
    shapes = tuple(jax.ShapeDtypeStruct(shape, dtype, **more) for shape, dtype in results)
    return jax.ffi.ffi_call(name, shapes, vmap_method=vmap_method)(*operands, **attributes)


def _evaluate(traced: Any, *arrays: Any) -> Any:
    return jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *arrays)


# As `jax.extend.core.Primitive(name)`, whose import takes 0.15 s more than that of JAX.
_call: Any = type(jax.lax.add_p)("ejkernel_native_call")
_call.multiple_results = True
_call.def_impl(lambda *arrays, native, other: _evaluate(native, *arrays))
_call.def_abstract_eval(lambda *_, native, other: native.out_avals)


def _lower(context: Any, *operands: Any, native: Any, other: Function) -> Any:
    module = context.module_context
    platforms = tuple(context.platforms or module.platforms)
    stays = not module.lowering_parameters.for_export or _exports.value
    function = functools.partial(_evaluate, native) if platforms == ("cpu",) and stays else other
    return mlir.lower_fun(function, multiple_results=True)(context, *operands)


def _batch(arrays: Any, axes: Any, *, native: Any, other: Function) -> tuple[Any, Any]:
    mapped = jax.vmap(functools.partial(_evaluate, native), in_axes=tuple(axes))
    traced = jax.make_jaxpr(mapped)(*arrays)
    out = _call.bind(*arrays, native=traced, other=jax.vmap(other, in_axes=tuple(axes)))
    return out, [0] * len(out)


mlir.register_lowering(_call, _lower)
batching.primitive_batchers[_call] = _batch
