"""Batch axes: which axis of which array is mapped, one answer per leaf."""

from __future__ import annotations

from typing import Any

import jax


def axes_per_argument(args: tuple[Any, ...], in_axes: Any) -> tuple[Any, ...]:
    """`in_axes` with one entry per argument, as JAX understands a single number."""
    if isinstance(in_axes, (tuple, list)):
        if len(in_axes) != len(args):
            raise ValueError(
                f"in_axes={in_axes!r} has {len(in_axes)} entries for {len(args)} arguments"
            )
        return tuple(in_axes)
    return (in_axes,) * len(args)


def axes_per_leaf(arg: Any, axes: Any) -> list[int | None]:
    """The mapped axis of each leaf of one argument; `axes` may be a prefix of its structure."""
    found: list[int | None] = []

    def spread(axis: Any, part: Any) -> None:
        if axis is not None and (not isinstance(axis, int) or isinstance(axis, bool)):
            raise TypeError(f"an axis must be a whole number or None, got {axis!r}")
        found.extend([axis] * len(jax.tree.leaves(part)))

    jax.tree.map(spread, axes, arg, is_leaf=lambda axis: axis is None)
    return found


def batch_size(args: tuple[Any, ...], in_axes: Any) -> int:
    """How many examples there are; all mapped axes must agree."""
    sizes: dict[int, str] = {}
    for number, (arg, axes) in enumerate(zip(args, axes_per_argument(args, in_axes), strict=True)):
        for leaf, axis in zip(jax.tree.leaves(arg), axes_per_leaf(arg, axes), strict=True):
            if axis is None:
                continue
            shape = jax.numpy.shape(leaf)
            if not -len(shape) <= axis < len(shape):
                raise ValueError(
                    f"in_axes={in_axes!r} names axis {axis} of argument {number}, whose shape is "
                    f"{shape}"
                )
            sizes.setdefault(shape[axis], f"argument {number} has {shape[axis]} (shape {shape})")
    if not sizes:
        raise ValueError(
            f"in_axes={in_axes!r} maps no argument; at least one axis must be a number"
        )
    if len(sizes) > 1:
        raise ValueError(f"in_axes={in_axes!r}: the sizes differ: {', '.join(sizes.values())}")
    return next(iter(sizes))
