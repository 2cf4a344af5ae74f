"""Implementations whose passes read the arguments of a call as one value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ejkernel.ops import Implementation

Call = TypeVar("Call")


def implementation_of(
    arguments: Callable[..., Call],
    run: Callable[[Call, Any, bool], tuple[Any, Any]],
    backward: Callable[[Call, Any, Any, Any], tuple[Any, ...]],
    **about: Any,
) -> Implementation[Any, Any]:
    """The implementation that two functions of a call make.

    Args:
      arguments: gives the call, from the arguments and keywords of the kernel.
      run: `run(call, cfg, save)` gives the output, and with `save` the residuals: what `backward`
        needs more than the call.
      backward: `backward(call, cfg, residuals, dout)` gives the gradients.
      about: the other fields of the `Implementation`, such as its name.
    """

    def forward(*args: Any, cfg: Any, **options: Any) -> Any:
        return run(arguments(*args, **options), cfg, False)[0]

    def forward_with_residuals(*args: Any, cfg: Any, **options: Any) -> tuple[Any, Any]:
        return run(arguments(*args, **options), cfg, True)

    def gradients(
        residuals: Any, out: None, dout: Any, *args: Any, cfg: Any, **options: Any
    ) -> tuple[Any, ...]:
        return backward(arguments(*args, **options), cfg, residuals, dout)

    return Implementation(
        forward=forward,
        forward_with_residuals=forward_with_residuals,
        backward=gradients,
        reads_out=False,
        **about,
    )
