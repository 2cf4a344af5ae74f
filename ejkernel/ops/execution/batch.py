"""A kernel over a batch, or over devices, with one config for all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ..core.invocation import BatchAxes
from ..core.kernel import Kernel
from .executor import Executor, default_executor


def vmap_with_config(
    *executor_and_kernel: Any, in_axes: Any = 0, out_axes: Any = 0
) -> Callable[..., Any]:
    """A kernel vectorised by `jax.vmap`: `vmap_with_config(kernel, in_axes=(0, 0))(a, b)`.

    One config is selected for the whole batch, under a key of its own: the best block for sixteen
    matrices need not be the best for one. An executor may come before the kernel. Keywords, and
    `cfg=`, are passed on and not mapped.
    """
    executor, kernel = _executor_and_kernel(executor_and_kernel, "vmap_with_config")

    def mapped(*args: Any, **kwargs: Any) -> Any:
        batch = BatchAxes("vmap", in_axes, _batch_size(kernel, args, in_axes))
        return _mapped(executor, kernel, jax.vmap, batch, args, kwargs, {"out_axes": out_axes})

    return mapped


def pmap_with_config(
    *executor_and_kernel: Any, axis_name: str = "devices", in_axes: Any = 0, out_axes: Any = 0
) -> Callable[..., Any]:
    """A kernel over devices by `jax.pmap`: `pmap_with_config(kernel, axis_name="devices")(a, b)`.

    One config is selected for all devices, for the shapes that one device sees.
    """
    executor, kernel = _executor_and_kernel(executor_and_kernel, "pmap_with_config")

    def mapped(*args: Any, **kwargs: Any) -> Any:
        batch = BatchAxes("pmap", in_axes, _batch_size(kernel, args, in_axes))
        options = {"out_axes": out_axes, "axis_name": axis_name}
        return _mapped(executor, kernel, jax.pmap, batch, args, kwargs, options)

    return mapped


def _mapped(
    executor: Executor | None,
    kernel: Kernel[Any, Any],
    transform: Callable[..., Any],
    batch: BatchAxes,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: dict[str, Any],
) -> Any:
    cfg = kwargs.pop("cfg", None)

    def one(*args: Any) -> Any:
        # Inside the transform every argument has the shape of one example.
        chosen = executor or default_executor()
        return chosen.run(kernel, args, kwargs, cfg=cfg, batch_axes=batch)

    return transform(one, in_axes=batch.in_axes, **options)(*args)


def _executor_and_kernel(
    given: tuple[Any, ...], caller: str
) -> tuple[Executor | None, Kernel[Any, Any]]:
    executor = given[0] if len(given) == 2 else None
    kernel = given[-1] if given else None
    if (
        len(given) not in (1, 2)
        or not isinstance(kernel, Kernel)
        or (executor is not None and not isinstance(executor, Executor))
    ):
        names = ", ".join(type(value).__name__ for value in given) or "nothing"
        raise TypeError(f"{caller} takes (kernel) or (executor, kernel), got {names}")
    return executor, kernel


def _batch_size(kernel: Kernel[Any, Any], args: tuple[Any, ...], in_axes: Any) -> int:
    axes = in_axes if isinstance(in_axes, (tuple, list)) else (in_axes,) * len(args)
    if len(axes) != len(args):
        raise ValueError(
            f"kernel {kernel.full_op_id}: in_axes has {len(axes)} entries for {len(args)} arguments"
        )
    for arg, axis in zip(args, axes, strict=True):
        if isinstance(axis, int):
            for leaf in jax.tree.leaves(arg):
                return int(leaf.shape[axis])
        elif axis is not None:
            for leaf, position in zip(jax.tree.leaves(arg), jax.tree.leaves(axis), strict=False):
                return int(leaf.shape[position])
    raise ValueError(
        f"kernel {kernel.full_op_id}: in_axes={in_axes!r} maps no argument; "
        "at least one axis must be a number"
    )
