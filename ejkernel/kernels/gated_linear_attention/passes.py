"""The passes of an implementation, from functions of `Arguments`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from .arguments import Arguments, Gradients


def passes_of(
    run: Callable[[Arguments, Any], tuple[jax.Array, jax.Array, Any]],
    run_backward: Callable[[Arguments, Any, Any, jax.Array, jax.Array | None], Gradients],
) -> dict[str, Any]:
    """What an `Implementation` wants to know about its passes.

    Args:
      run: `run(call, cfg)` gives the outputs, the last state and residuals.
      run_backward: `run_backward(call, cfg, residuals, dout, dstate)` gives the gradients; `dstate`
        is None if the state was not returned.
    """

    def forward_with_residuals(*args: jax.Array, cfg: Any, **options: Any) -> tuple[Any, Any]:
        call = Arguments(*args, **options)
        out, state, residuals = run(call, cfg)
        return ((out, state) if call.return_state else out), residuals

    def forward(*args: jax.Array, cfg: Any, **options: Any) -> Any:
        return forward_with_residuals(*args, cfg=cfg, **options)[0]

    def backward(
        residuals: Any, out: None, dout: Any, *args: jax.Array, cfg: Any, **options: Any
    ) -> tuple[Any, ...]:
        call = Arguments(*args, **options)
        dout, dstate = dout if call.return_state else (dout, None)
        *gradients, dinitial = run_backward(call, cfg, residuals, dout, dstate)
        by_keyword = () if call.initial_state is None else ({"initial_state": dinitial},)
        return *gradients[: len(args)], *by_keyword

    return {
        "forward": forward,
        "forward_with_residuals": forward_with_residuals,
        "backward": backward,
        "reads_out": False,
    }
