"""The two passes of an implementation, as `Implementation` takes them, around what differs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax

Options = Mapping[str, Any]
"""The keywords of a call, without `return_lse`."""

Sizes = dict[str, Any]
"""The fields of a config that are for one pass: `block_q`, `block_k`, and what else it has."""


class Gradients(NamedTuple):
    """Gradients of the arrays of a call; those of keywords by name."""

    dq: jax.Array
    dk: jax.Array
    dv: jax.Array
    by_keyword: dict[str, jax.Array]


class Results(NamedTuple):
    """What a backward pass starts from: arguments, results, and the gradients of the results."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    out: jax.Array
    lse: jax.Array
    dout: jax.Array
    dlse: jax.Array | None  # None: zero


class Passes(NamedTuple):
    """The functions of the same names that an `Implementation` has."""

    forward: Callable[..., Any]
    forward_with_residuals: Callable[..., tuple[Any, jax.Array]]
    backward: Callable[..., Gradients]


def passes_of(
    heuristic: Callable[..., Any],
    attend: Callable[..., tuple[jax.Array, jax.Array]],
    differentiate: Callable[[Results, Sizes, Options], Gradients],
    differentiate_with_bias: Callable[[Results, Sizes, Options], Gradients],
) -> Passes:
    """The passes of an implementation.

    Args:
      heuristic: `heuristic(q, k, v, **options)` gives the config of a call, from which the fields
        come that a given config leaves open.
      attend: `attend(q, k, v, sizes, options)` gives the output and the log-sum-exp.
      differentiate: gives the gradients of `q`, `k`, `v` and `sinks`.
      differentiate_with_bias: gives these, and that of the bias.
    """

    def forward_with_residuals(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        cfg: Any,
        return_lse: bool = False,
        **options: Any,
    ) -> tuple[Any, jax.Array]:
        sizes = forward_sizes(completed(cfg, heuristic(q, k, v, **options)))
        out, lse = attend(q, k, v, sizes, options)
        return ((out, lse) if return_lse else out), lse

    def forward(*arrays: jax.Array, **keywords: Any) -> Any:
        return forward_with_residuals(*arrays, **keywords)[0]

    def backward(
        lse: jax.Array,
        out: Any,
        dout: Any,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        cfg: Any,
        differentiated: frozenset[str],
        return_lse: bool = False,
        **options: Any,
    ) -> Gradients:
        dlse = None
        if return_lse:
            (out, _), (dout, dlse) = out, dout
        sizes = backward_sizes(completed(cfg, heuristic(q, k, v, **options)))
        run = differentiate_with_bias if "bias" in differentiated else differentiate
        return run(Results(q, k, v, out, lse, dout, dlse), sizes, options)

    return Passes(forward, forward_with_residuals, backward)


def completed(cfg: Any, heuristic: Any) -> Any:
    """The config, with the values of the heuristic one for fields that are None."""
    given = {name: value for name, value in vars(cfg).items() if value is not None}
    return dataclasses.replace(heuristic, **given)


_BACKWARD = "backward_"


def forward_sizes(cfg: Any) -> Sizes:
    """The fields of a config that are for the forward pass."""
    return {name: value for name, value in vars(cfg).items() if not name.startswith(_BACKWARD)}


def backward_sizes(cfg: Any) -> Sizes:
    """The fields for the backward pass, under the names of those of the forward pass."""
    of_backward = {n: value for n, value in vars(cfg).items() if n.startswith(_BACKWARD)}
    return {n.removeprefix(_BACKWARD): value for n, value in of_backward.items()}


def each_pass_varied(
    heuristic: Any, forward: Iterable[tuple[int, ...]], backward: Iterable[tuple[int, ...]]
) -> list[Any]:
    """Configs with other values for the fields of one pass, and the heuristic ones of the other.

    The passes do not share anything, so there is no need to combine them.
    """
    ahead = list(forward_sizes(heuristic))
    back = [_BACKWARD + name for name in backward_sizes(heuristic)]
    return [
        dataclasses.replace(heuristic, **dict(zip(fields, values, strict=True)))
        for fields, choices in ((ahead, forward), (back, backward))
        for values in choices
    ]
