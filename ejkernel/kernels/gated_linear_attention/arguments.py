"""What a call of gated linear attention may look like: checked, and as implementations read it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ejkernel.ops import Implementation
from ejkernel.ops.core.varying import vary_alike

from ..arguments import (
    checked_flag,
    checked_floating,
    checked_integers,
    checked_number,
    refuse_empty,
)
from ..dtypes import accumulation_dtype

_NAME = "gated_linear_attention"

FORGET = -1e30
"""A decay from which nothing is left: exp of it is zero, and sums of many of it are still finite,
unlike those of -inf, of which a product with a zero is NaN."""

START = 2 * FORGET
"""The same at the first token of a segment, so that it can be told from decays that users give."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """One call, as the kernel is given it."""

    q: jax.Array  # (batch, length, heads, key_dim)
    k: jax.Array  # likewise
    v: jax.Array  # (batch, length, heads, value_dim)
    g: jax.Array | None = None  # of k's shape, or (batch, length, heads)
    _: dataclasses.KW_ONLY
    scale: float
    initial_state: jax.Array | None = None  # (batch, heads, key_dim, value_dim)
    return_state: bool = False
    segments: bool = False  # whether `g` is START where segments begin

    @property
    def tokens(self) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """What there is for every token."""
        return self.q, self.k, self.v, self.g

    def state_rows(self, state: jax.Array | None) -> jax.Array:
        """A state ``(batch, heads, key_dim, value_dim)`` as ``(rows, …)``; zeros if there is none.

        A row is one pair of a batch entry and a head: every row is a recurrence of its own. In
        float32, or in float64 for float64.
        """
        batch, _, heads, key_dim = self.q.shape
        dtype = accumulation_dtype(self.q.dtype)
        shape = (batch, heads, key_dim, self.v.shape[3])
        if state is None:
            # Made from an input, to inherit how it is sharded.
            row = jnp.zeros_like(self.q[:, 0, :, :1, None], dtype)
            state = vary_alike(jnp.broadcast_to(row, shape), self.q, self.v)
        return state.astype(dtype).reshape(batch * heads, *shape[2:])

    def state_by_batch(self, state: jax.Array) -> jax.Array:
        """The inverse of `state_rows`."""
        return state.reshape(self.q.shape[0], self.q.shape[2], *state.shape[1:])


Gradients = tuple[Any, ...]
"""Those of q, k, v, g and the state that goes into a recurrence; None for g if it was."""


def with_features(x: jax.Array) -> jax.Array:
    """What there is for every token with an axis of features, if only of one."""
    return x if x.ndim == 4 else x[..., None]


def like_given(x: jax.Array, given: jax.Array) -> jax.Array:
    """The inverse of `with_features`, in the dtype of what was given."""
    return (x[..., 0] if given.ndim == 3 else x).astype(given.dtype)


def implementation(
    run: Callable[[Arguments, Any], tuple[jax.Array, jax.Array, Any]],
    run_backward: Callable[[Arguments, Any, Any, jax.Array, jax.Array | None], Gradients],
    **declared: Any,
) -> Implementation[Any, Any]:
    """One implementation, around what it does with a call.

    Args:
      run: `run(call, cfg)` gives the outputs, the last state and residuals.
      run_backward: `run_backward(call, cfg, residuals, dout, dstate)` gives the gradients; `dstate`
        is None if the state was not returned.
      declared: the other fields.
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

    return Implementation(
        forward=forward,
        forward_with_residuals=forward_with_residuals,
        backward=backward,
        reads_out=False,
        **declared,
    )


def checked(
    q: Any, k: Any, v: Any, g: Any, scale: Any, state: Any, segment_ids: Any, return_state: Any
) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    """The arguments and keywords of the kernel from those of a user; errors name what is wrong."""
    arrays = {"q": q, "k": k, "v": v}
    arrays |= {n: x for n, x in (("g", g), ("initial_state", state)) if x is not None}
    arrays = {name: checked_floating(_NAME, name, x) for name, x in arrays.items()}
    if segment_ids is not None:
        segment_ids = arrays["segment_ids"] = checked_integers(_NAME, "segment_ids", segment_ids)
    _check_shapes(**arrays)
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    options: dict[str, Any] = {"scale": q.shape[3] ** -0.5}
    if scale is not None:
        advice = "for a learned scale multiply q by it"
        options["scale"] = checked_number(_NAME, "scale", scale, advice=advice)
    if state is not None:
        options["initial_state"] = arrays["initial_state"]
    if checked_flag(_NAME, "return_state", return_state):
        options["return_state"] = True
    if segment_ids is not None:
        options["segments"] = True
    decay = decay_with_starts(q, arrays.get("g"), segment_ids)
    return (q, k, v) if decay is None else (q, k, v, decay), options


def decay_with_starts(
    q: jax.Array, g: jax.Array | None, segment_ids: jax.Array | None
) -> jax.Array | None:
    """The decay with segments in it: at the first token of a segment everything is forgotten."""
    dtype = accumulation_dtype(q.dtype)
    if g is not None:
        # Finite, so that sums of decays stay numbers. Half precision cannot hold it.
        g = jnp.maximum(g.astype(dtype), FORGET)
    if segment_ids is None:
        return g
    segment_ids = _whole_sequences(segment_ids, q if g is None else g)
    if g is None:
        g = jnp.zeros(q.shape[:3], dtype)
    first = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    return jnp.where(first.reshape(*first.shape, *(1,) * (g.ndim - 2)), START, g)


def _whole_sequences(segment_ids: jax.Array, like: jax.Array) -> jax.Array:
    """Segments that are sharded over explicit axes as the entries of another array, and no more.

    A token is compared with the one before it, which JAX refuses where another device has it.
    """
    sharding = jax.typeof(segment_ids).sharding
    if all(entry is None for entry in sharding.spec):
        return segment_ids
    entries = PartitionSpec(*jax.typeof(like).sharding.spec[:1])
    whole: jax.Array = jax.sharding.reshard(segment_ids, NamedSharding(sharding.mesh, entries))
    return whole


def _check_shapes(q: jax.Array, k: jax.Array, v: jax.Array, **others: jax.Array) -> None:
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 4:
            raise ValueError(
                f"{_NAME}: {name} has shape {array.shape}; it must have four axes, "
                "(batch, length, heads, features)"
            )
        refuse_empty(_NAME, name, array)
    batch, length, heads, key_dim = q.shape
    state = (batch, heads, key_dim, v.shape[3])
    allowed: dict[str, dict[str, tuple[int, ...]]] = {
        "k": {"that of q": q.shape},
        "v": {"(batch, length, heads, any) as in q": (batch, length, heads, v.shape[3])},
        "g": {"per key channel": q.shape, "per head": q.shape[:3]},
        "initial_state": {"(batch, heads, key_dim, value_dim)": state},
        "segment_ids": {"(batch, length)": (batch, length)},
    }
    for name, array in {"k": k, "v": v, **others}.items():
        if array.shape not in allowed[name].values():
            said = " or ".join(f"{shape}, {what}" for what, shape in allowed[name].items())
            raise ValueError(f"{_NAME}: {name} has shape {array.shape}; it must be {said}")
