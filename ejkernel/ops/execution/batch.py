"""A kernel over a batch, or over devices, with one config for all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ..core.batching import axes_per_argument, batch_size
from ..core.invocation import BatchAxes
from ..core.kernel import Kernel
from ..utils.fingerprint import stable_json
from .executor import Executor, default_executor
from .jitted import MAX_JITTED, JittedCall, holds_arrays, refuse_unhashable


def vmap_with_config(
    *executor_and_kernel: Any, in_axes: Any = 0, out_axes: Any = 0
) -> Callable[..., Any]:
    """A kernel vectorised by `jax.vmap`: `vmap_with_config(kernel, in_axes=(0, 0))(a, b)`.

    One config is selected for the whole batch, under a key of its own: the best block for sixteen
    matrices need not be the best for one. An executor may come before the kernel. Keywords, and
    `cfg=`, are passed on and not mapped.
    """
    executor, kernel = _executor_and_kernel(executor_and_kernel, "vmap_with_config")
    return _JittedVmap(kernel, executor, in_axes, out_axes).call


def pmap_with_config(
    *executor_and_kernel: Any, axis_name: str = "devices", in_axes: Any = 0, out_axes: Any = 0
) -> Callable[..., Any]:
    """A kernel over devices by `jax.pmap`: `pmap_with_config(kernel, axis_name="devices")(a, b)`.

    One config is selected for all devices, for the shapes that one device sees. Keywords, and
    `cfg=`, are passed on and not mapped.
    """
    executor, kernel = _executor_and_kernel(executor_and_kernel, "pmap_with_config")
    mapped: dict[Any, Any] = {}  # by static keywords: pmap caches by the function it is given

    def call(*args: Any, **kwargs: Any) -> Any:
        batch = _batch_axes("pmap", kernel, args, in_axes)
        arrays = {name: value for name, value in kwargs.items() if holds_arrays(value)}
        static = {name: value for name, value in kwargs.items() if name not in arrays}
        refuse_unhashable(kernel, static)

        def one(arrays: dict[str, Any], *args: Any) -> Any:
            keywords = {**static, **arrays}
            cfg = keywords.pop("cfg", None)
            chosen = executor or default_executor()
            return chosen.run(kernel, args, keywords, cfg=cfg, batch_axes=batch)

        key = (stable_json(batch), tuple(sorted(static.items(), key=lambda item: item[0])))
        if key not in mapped:
            if len(mapped) >= MAX_JITTED:
                mapped.clear()
            mapped[key] = jax.pmap(
                one, axis_name=axis_name, in_axes=(None, *batch.in_axes), out_axes=out_axes
            )
        return mapped[key](arrays, *args)

    return call


class _JittedVmap(JittedCall):
    """The way into a kernel that is mapped over a batch."""

    __slots__ = ("_in_axes", "_out_axes")

    def __init__(
        self, kernel: Kernel[Any, Any], executor: Executor | None, in_axes: Any, out_axes: Any
    ) -> None:
        super().__init__(kernel, lambda: executor or default_executor())
        self._in_axes = in_axes
        self._out_axes = out_axes

    def run(
        self, executor: Executor, args: tuple[Any, ...], kwargs: dict[str, Any], cfg: Any
    ) -> Any:
        batch = _batch_axes("vmap", self.kernel, args, self._in_axes)

        def one(*args: Any) -> Any:
            # Inside the transform every argument has the shape of one example.
            return executor.run(self.kernel, args, kwargs, cfg=cfg, batch_axes=batch)

        return jax.vmap(one, in_axes=batch.in_axes, out_axes=self._out_axes)(*args)


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


def _batch_axes(
    transform: str, kernel: Kernel[Any, Any], args: tuple[Any, ...], in_axes: Any
) -> BatchAxes:
    """The axes of a call, one per argument, however they were written."""
    try:
        size = batch_size(args, in_axes)
        return BatchAxes(transform, axes_per_argument(args, in_axes), size)
    except (TypeError, ValueError) as error:
        raise type(error)(f"kernel {kernel.full_op_id}: {error}") from error
