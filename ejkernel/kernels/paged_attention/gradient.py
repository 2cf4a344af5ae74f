"""The gradient of paged attention: that of its definition, for every implementation.

Nobody trains through a cache of pages in a loop, but gradients through a decoding step are asked
for now and then (sinks, learned prefixes).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ejkernel.ops import Implementation

from ..promotion import usual_promotion
from .arguments import Arguments
from .reference import paged_attention_reference


def implementation(
    attend: Callable[[Arguments, Any], jax.Array], **declared: Any
) -> Implementation[Any, jax.Array]:
    """One implementation: `attend(call, cfg)` gives the output."""

    @usual_promotion
    def forward(*args: jax.Array, cfg: Any, **options: Any) -> jax.Array:
        return attend(Arguments.of(*args, **options), cfg)

    def forward_with_residuals(*args: Any, cfg: Any, **options: Any) -> tuple[jax.Array, None]:
        return forward(*args, cfg=cfg, **options), None

    return Implementation(
        forward=forward,
        forward_with_residuals=forward_with_residuals,
        backward=_backward,
        reads_out=False,
        **declared,
    )


@usual_promotion
def _backward(
    residuals: None, out: None, dout: jax.Array, *args: jax.Array, cfg: Any, **options: Any
) -> tuple[Any, ...]:
    q, k_pages, v_pages, table, lengths = args
    sinks = {name: options.pop(name) for name in ("sinks",) if name in options}

    def definition(q: Any, k_pages: Any, v_pages: Any, sinks: dict[str, Any]) -> jax.Array:
        return paged_attention_reference(q, k_pages, v_pages, table, lengths, **sinks, **options)

    *gradients, by_keyword = jax.vjp(definition, q, k_pages, v_pages, sinks)[1](dout)
    return (*gradients, None, None, *([by_keyword] if by_keyword else []))
