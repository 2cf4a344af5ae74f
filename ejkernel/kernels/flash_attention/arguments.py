"""What a call of attention may look like: checked, and as implementations take it.

Everything is checked by shape and dtype alone, so errors come while tracing, under any transform.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..arguments import (
    checked_array,
    checked_flag,
    checked_floating,
    checked_integers,
    checked_number,
    checked_soft_cap,
    refuse_empty,
    shown,
)
from ..integers import ids_to_int32, to_int32
from .options import Window

_NAME = "flash_attention"


def checked(
    q: Any, k: Any, v: Any, given: Mapping[str, Any]
) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    """The arguments and keywords of the kernel from those of a user; errors name what is wrong.

    `given` has all keywords of `ejkernel.modules.flash_attention`.
    """
    q, k, v = _checked_arrays(q, k, v)
    (batch, q_len, heads, head_dim), kv_len = q.shape, k.shape[1]
    options: dict[str, Any] = {
        "causal": checked_flag(_NAME, "causal", given["causal"]),
        "softmax_scale": head_dim**-0.5,
    }
    if given["softmax_scale"] is not None:
        advice = "for a learned scale multiply q by it"
        number = checked_number(_NAME, "softmax_scale", given["softmax_scale"], advice=advice)
        options["softmax_scale"] = number
    whole = (q_len, kv_len)  # of all devices
    if given["sequence_axis"] is not None:
        options["sequence_axis"] = given["sequence_axis"]
        devices = _axis_size(given["sequence_axis"])
        whole = (q_len * devices, kv_len * devices)
    for name in ("bias", "mask"):
        if given[name] is not None:
            options[name] = _checked_table(name, given[name], (batch, heads, q_len, whole[1]))
    segments = given["segment_ids"], given["kv_segment_ids"]
    if any(ids is not None for ids in segments):
        options |= _checked_segments(*segments, batch, q_len, kv_len)
    if given["window"] is not None:
        band = checked_window(given["window"], options["causal"], *whole)
        options |= {} if band is None else {"window": band}
    if given["logits_soft_cap"] is not None:
        options["logits_soft_cap"] = checked_soft_cap(_NAME, given["logits_soft_cap"])
    if given["sinks"] is not None:
        options["sinks"] = _checked_sinks(given["sinks"], heads)
    for name, longest in zip(("q_lengths", "kv_lengths"), whole, strict=True):
        if given[name] is not None:
            lengths = _checked_integers_of(name, given[name], (batch,), "(batch,)")
            options[name] = to_int32(lengths, 0, longest)
    rate, key = given["dropout_rate"], given["dropout_key"]
    if key is not None or not isinstance(rate, float) or rate:
        options |= _checked_dropout(rate, key)
    if given["return_lse"] is not False and checked_flag(_NAME, "return_lse", given["return_lse"]):
        options["return_lse"] = True
    return (q, k, v), options


def _checked_arrays(q: Any, k: Any, v: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`q`, `k` and `v`, which fit together."""
    q, k, v = (checked_floating(_NAME, n, x) for n, x in (("q", q), ("k", k), ("v", v)))
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 4:
            raise ValueError(
                f"flash_attention: {name} has shape {array.shape}; it must have four axes, "
                "(batch, sequence, heads, head_dim)"
            )
        refuse_empty(_NAME, name, array)
    _same("batch size", 0, q=q, k=k, v=v)
    _same("length", 1, k=k, v=v)
    _same("number of heads", 2, k=k, v=v)
    _same("head_dim", 3, q=q, k=k)
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"flash_attention: q has {q.shape[2]} heads and k has {k.shape[2]}; the query heads "
            "must be a multiple of the key heads"
        )
    return q, k, v


def _same(what: str, axis: int, **arrays: Any) -> None:
    if len({array.shape[axis] for array in arrays.values()}) > 1:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise ValueError(
            f"flash_attention: {' and '.join(arrays)} differ in {what} (axis {axis}): {shapes}"
        )


def checked_window(
    window: Any, causal: bool, q_len: int | None = None, kv_len: int | None = None
) -> Window | None:
    """`(left, right)` with `None` for a side without limit; None if neither has one beyond causal.

    A side that reaches beyond the sequence has no limit.

    >>> checked_window(4, causal=False), checked_window(4, causal=True)
    ((4, 4), (4, 0))
    >>> checked_window((None, 0), causal=True) is None  # says no more than causal does
    True
    >>> checked_window((2**31 - 1, 4), causal=False, q_len=100, kv_len=100)
    (None, 4)
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
    left, right = _within(left, q_len), _within(right, kv_len)
    if causal:
        return None if left is None else (left, 0)
    return None if left is None and right is None else (left, right)


def _within(side: int | None, length: int | None) -> int | None:
    return None if side is None or (isinstance(length, int) and side >= length - 1) else side


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


def _checked_table(name: str, table: Any, shape: tuple[int, int, int, int]) -> Any:
    """`bias` or `mask` with four axes, of which some may be 1."""
    table = checked_array(_NAME, name, table)
    given, dtype = table.shape, table.dtype
    if name == "mask" and dtype != jnp.bool_:
        raise TypeError(
            f"flash_attention: mask is {dtype}; it must be boolean, True where a query sees a key. "
            "What is to be added to the scores is the bias"
        )
    if name == "bias" and not jnp.issubdtype(dtype, jnp.floating):
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


def _checked_integers_of(name: str, array: Any, shape: tuple[int, ...], meaning: str) -> jax.Array:
    """`segment_ids` or lengths: integers of the shape they must have."""
    integers = checked_integers(_NAME, name, array)
    if integers.shape != shape:
        raise ValueError(
            f"flash_attention: {name} has shape {integers.shape}; it must be {meaning}, here "
            f"{shape}"
        )
    return integers


def _checked_segments(
    segment_ids: Any, kv_segment_ids: Any, batch: int, q_len: int, kv_len: int
) -> dict[str, Any]:
    """The segments of queries and keys as keywords of the kernel."""
    if segment_ids is None:
        given = checked_integers(_NAME, "kv_segment_ids", kv_segment_ids)
        raise ValueError(
            f"flash_attention: kv_segment_ids has shape {given.shape}, but there are no "
            "segment_ids; give those of the queries too"
        )
    segment_ids = _checked_integers_of("segment_ids", segment_ids, (batch, q_len), "(batch, q_len)")
    if kv_segment_ids is None:
        if q_len != kv_len:
            raise ValueError(
                f"flash_attention: segment_ids has shape {segment_ids.shape} and there are "
                f"{kv_len} keys; where the lengths differ, give kv_segment_ids, {(batch, kv_len)}"
            )
        return {"segment_ids": ids_to_int32(segment_ids)[0]}
    kv_segment_ids = _checked_integers_of(
        "kv_segment_ids", kv_segment_ids, (batch, kv_len), "(batch, kv_len)"
    )
    segment_ids, kv_segment_ids = ids_to_int32(segment_ids, kv_segment_ids)
    return {"segment_ids": segment_ids, "kv_segment_ids": kv_segment_ids}


def _checked_sinks(sinks: Any, heads: int) -> jax.Array:
    """One floating number per query head."""
    array = checked_floating(_NAME, "sinks", sinks)
    if array.shape != (heads,):
        raise ValueError(
            f"flash_attention: sinks has shape {array.shape}; it must be one number for each query "
            f"head, here {(heads,)}"
        )
    return array


def _checked_dropout(rate: Any, key: Any) -> dict[str, Any]:
    """Rate and key of dropout as keywords of the kernel: none if nothing is dropped."""
    advice = "for no dropout in some calls pass 0.0"
    number = checked_number(_NAME, "dropout_rate", rate, least=0, below=1, advice=advice)
    if key is not None:
        key = checked_array(_NAME, "dropout_key", key)
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            key = jax.random.key_data(key)
        if key.dtype != jnp.uint32 or key.ndim != 1 or not key.size:
            raise TypeError(
                f"flash_attention: dropout_key is {key.dtype} of shape {key.shape}; it must be one "
                "random key, such as jax.random.key(0)"
            )
    if number == 0:
        return {}
    if key is None:
        raise ValueError(
            f"flash_attention: dropout_rate={rate!r} needs a dropout_key, such as "
            "jax.random.key(0), another one for each step"
        )
    return {"dropout_rate": number, "dropout_key": key}


def _axis_size(name: Any) -> int:
    """The number of devices along the mesh axis that shares out the sequence."""
    if not isinstance(name, str):
        raise TypeError(
            f"flash_attention: sequence_axis must be the name of a mesh axis, got {shown(name)}"
        )
    try:
        return int(lax.axis_size(name))
    except NameError:
        raise ValueError(
            f"flash_attention: there is no mesh axis {name!r} here; sequence_axis is for calls "
            "inside jax.shard_map over that axis"
        ) from None
