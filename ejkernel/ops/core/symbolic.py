"""Calls whose sizes are symbols: programs that `jax.export` makes for many shapes at once.

Configs are chosen, and loops are cut, by numbers. Where the symbol is the size of a batch whose
entries have nothing to do with each other, one entry has only numbers for sizes, and `jax.vmap`
does the rest. Other symbols are left to what the kernel's methods make of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax

from ..utils.serialize import is_symbolic
from .invocation import readable, split, symbolic_sizes
from .requirements import IMPLEMENTATION, REFERENCE, has_reference, without_implementation

if TYPE_CHECKING:
    from .kernel import Kernel

Run = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]


def run_with_symbols(
    kernel: Kernel[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Run
) -> Any:
    """`run(args, kwargs)`, of which some sizes are symbols; errors have the kernel's name."""
    found = symbolic_sizes((args, kwargs))
    arrays, rest = split((args, dict(kwargs)))
    batch = arrays[0].shape[0] if arrays and arrays[0].ndim else None
    mapped = [bool(x.ndim) and is_symbolic(x.shape[0]) for x in arrays]
    try:
        if found != [batch] or _elsewhere(arrays) or not _independent(kernel, args, kwargs):
            return run(args, kwargs)

        def one(*arrays: Any) -> Any:
            alone = [x[None] if m else x for x, m in zip(arrays, mapped, strict=True)]
            return jax.tree.map(lambda out: out[0], run(*rest.merge(alone)))

        return jax.vmap(one, in_axes=tuple(0 if m else None for m in mapped))(*arrays)
    except jax.errors.InconclusiveDimensionOperation as error:
        raise ValueError(_message(kernel, args, kwargs, found)) from error


def _independent(
    kernel: Kernel[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    return kernel.entries_are_independent(*args, **without_implementation(kwargs))


def _elsewhere(arrays: list[Any]) -> bool:
    return any(is_symbolic(size) for array in arrays for size in array.shape[1:])


def _message(
    kernel: Kernel[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], found: list[Any]
) -> str:
    shown = [readable(arg) for arg in args]
    shown += [f"{name}={readable(value)}" for name, value in kwargs.items()]
    way_out = "Give these dimensions numbers"
    if has_reference(kernel) and kwargs.get(IMPLEMENTATION) != REFERENCE:
        way_out += (
            f", or use {IMPLEMENTATION}={REFERENCE!r}: the definition, which is slow and takes any "
            "size"
        )
    return (
        f"{kernel.full_op_id}({', '.join(shown)}): the sizes {', '.join(map(str, found))} are "
        f"symbols, and how the call is computed depends on their values. {way_out}."
    )
