"""The arguments of attention, checked and brought into the form that kernels take.

Everything is checked by shape and dtype alone, so errors come while tracing, under any transform.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .options import Window


def check_arrays(q: Any, k: Any, v: Any) -> None:
    """Raise unless `q`, `k` and `v` fit together."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        shape, dtype = jnp.shape(array), jnp.result_type(array)
        if len(shape) != 4:
            raise ValueError(
                f"flash_attention: {name} has shape {shape}; it must have four axes, "
                "(batch, sequence, heads, head_dim)"
            )
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"flash_attention: {name} is {dtype}; it must be a floating type, such as float32 "
                "or bfloat16"
            )
        if 0 in shape:
            raise ValueError(f"flash_attention: {name} has shape {shape}; no axis may be empty")
    _same("batch size", 0, q=q, k=k, v=v)
    _same("length", 1, k=k, v=v)
    _same("number of heads", 2, k=k, v=v)
    _same("head_dim", 3, q=q, k=k)
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"flash_attention: q has {q.shape[2]} heads and k has {k.shape[2]}; the query heads "
            "must be a multiple of the key heads"
        )


def _same(what: str, axis: int, **arrays: Any) -> None:
    if len({array.shape[axis] for array in arrays.values()}) > 1:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise ValueError(
            f"flash_attention: {' and '.join(arrays)} differ in {what} (axis {axis}): {shapes}"
        )


def checked_flag(name: str, value: Any) -> bool:
    """A `bool` that is known while tracing."""
    if isinstance(value, jax.core.Tracer) or np.ndim(value) or value not in (True, False):
        raise TypeError(f"flash_attention: {name} must be True or False, got {value!r}")
    return bool(value)


def checked_number(name: str, value: Any, advice: str) -> float:
    """A `float` that is known while tracing."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"flash_attention: {name} must be a number known while tracing, got {value!r}; {advice}"
        )
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"flash_attention: {name} must be a number, got {value!r}") from None


def checked_window(window: Any, causal: bool) -> Window | None:
    """`(left, right)` with `None` for a side without limit; None if neither has one beyond causal.

    >>> checked_window(4, causal=False), checked_window(4, causal=True)
    ((4, 4), (4, 0))
    >>> checked_window((None, 0), causal=True) is None  # says no more than causal does
    True
    """
    allowed = (
        "it must be a whole number of 0 or more, or (left, right) with None for a side without "
        "limit"
    )
    if isinstance(window, (tuple, list)):
        if len(window) != 2:
            raise ValueError(f"flash_attention: window={window!r} has not two sides; {allowed}")
        left, right = (_side(window, side, allowed) for side in window)
        if causal and right:
            raise ValueError(
                f"flash_attention: window={window!r} looks {right} keys ahead, which causal=True "
                f"forbids; use window=({left}, 0) or causal=False"
            )
    else:
        left = _side(window, window, allowed)
        right = left
    if causal:
        return None if left is None else (left, 0)
    return None if left is None and right is None else (left, right)


def _side(window: Any, side: Any, allowed: str) -> int | None:
    if side is None:
        return None
    if isinstance(side, jax.core.Tracer):
        raise TypeError(
            f"flash_attention: window must be known while tracing, got {window!r}; for a window "
            "that is computed use mask"
        )
    try:
        size = -1 if isinstance(side, (bool, np.bool_)) else operator.index(side)
    except TypeError:
        raise TypeError(f"flash_attention: window={window!r}: {allowed}") from None
    if size < 0:
        raise ValueError(f"flash_attention: window={window!r}: {allowed}")
    return size


def checked_table(name: str, table: Any, shape: tuple[int, int, int, int], boolean: bool) -> Any:
    """`bias` or `mask` with four axes, of which some may be 1."""
    given, dtype = jnp.shape(table), jnp.result_type(table)
    if boolean and dtype != jnp.bool_:
        raise TypeError(
            f"flash_attention: mask is {dtype}; it must be boolean, True where a query sees a key. "
            "What is to be added to the scores is the bias"
        )
    if not boolean and not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"flash_attention: bias is {dtype}; it must be a floating type"
            + (". A boolean array is a mask" if dtype == jnp.bool_ else "")
        )
    fits = len(given) <= 4 and all(
        size in (1, whole) for size, whole in zip(given[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"flash_attention: {name} has shape {given}; it must broadcast to (batch, heads, "
            f"q_len, kv_len), here {shape}: each axis 1 or that size"
        )
    if len(given) < 4:
        return jnp.reshape(table, (1,) * (4 - len(given)) + given)
    return table


def check_integers(name: str, array: Any, shape: tuple[int, ...], meaning: str) -> None:
    """Raise unless `segment_ids` or lengths are integers of the shape they must have."""
    given, dtype = jnp.shape(array), jnp.result_type(array)
    if not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"flash_attention: {name} is {dtype}; it must be an integer type")
    if given != shape:
        raise ValueError(
            f"flash_attention: {name} has shape {given}; it must be {meaning}, here {shape}"
        )


def checked_segments(
    segment_ids: Any, kv_segment_ids: Any, batch: int, q_len: int, kv_len: int
) -> dict[str, Any]:
    """The segments of queries and keys as keywords of the kernel."""
    if segment_ids is None:
        raise ValueError(
            f"flash_attention: kv_segment_ids has shape {jnp.shape(kv_segment_ids)}, but there are "
            "no segment_ids; give those of the queries too"
        )
    check_integers("segment_ids", segment_ids, (batch, q_len), "(batch, q_len)")
    if kv_segment_ids is None:
        if q_len != kv_len:
            raise ValueError(
                f"flash_attention: segment_ids has shape {jnp.shape(segment_ids)} and there are "
                f"{kv_len} keys; where the lengths differ, give kv_segment_ids, {(batch, kv_len)}"
            )
        return {"segment_ids": segment_ids}
    check_integers("kv_segment_ids", kv_segment_ids, (batch, kv_len), "(batch, kv_len)")
    return {"segment_ids": segment_ids, "kv_segment_ids": kv_segment_ids}


def check_sinks(sinks: Any, heads: int) -> None:
    """Raise unless there is one floating number per query head."""
    given, dtype = jnp.shape(sinks), jnp.result_type(sinks)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"flash_attention: sinks is {dtype}; it must be a floating type")
    if given != (heads,):
        raise ValueError(
            f"flash_attention: sinks has shape {given}; it must be one number for each query head, "
            f"here {(heads,)}"
        )


def checked_soft_cap(cap: Any) -> float:
    """A positive number."""
    number = checked_number("logits_soft_cap", cap, "it is a constant of the model")
    if not 0 < number < math.inf:
        raise ValueError(f"flash_attention: logits_soft_cap={cap!r} must be positive and finite")
    return number


def checked_dropout(rate: Any, key: Any) -> dict[str, Any]:
    """Rate and key of dropout as keywords of the kernel: none if nothing is dropped."""
    number = checked_number("dropout_rate", rate, "for no dropout in some calls pass 0.0")
    if not 0 <= number < 1:
        raise ValueError(f"flash_attention: dropout_rate={rate!r} must be at least 0 and below 1")
    if number == 0:
        return {}
    if key is None:
        raise ValueError(
            f"flash_attention: dropout_rate={rate!r} needs a dropout_key, such as "
            "jax.random.key(0), another one for each step"
        )
    if jnp.issubdtype(jnp.result_type(key), jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    if jnp.result_type(key) != jnp.uint32 or jnp.ndim(key) != 1:
        raise TypeError(
            f"flash_attention: dropout_key is {jnp.result_type(key)} of shape {jnp.shape(key)}; "
            "it must be one random key, such as jax.random.key(0)"
        )
    return {"dropout_rate": number, "dropout_key": key}


def axis_size(name: Any) -> int:
    """The number of devices along the mesh axis that shares out the sequence."""
    if not isinstance(name, str):
        raise TypeError(
            f"flash_attention: sequence_axis must be the name of a mesh axis, got {name!r}"
        )
    try:
        return int(lax.axis_size(name))
    except NameError:
        raise ValueError(
            f"flash_attention: there is no mesh axis {name!r} here; sequence_axis is for calls "
            "inside jax.shard_map over that axis"
        ) from None
