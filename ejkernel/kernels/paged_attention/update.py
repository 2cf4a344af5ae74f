"""New tokens into the pages of their sequences: a scatter, which XLA does in place where it may."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..arguments import check_axes, checked_floating
from ..dtypes import accumulation_dtype
from ..promotion import usual_promotion
from .arguments import (
    SHORT_TYPES,
    check_pages,
    checked_pages,
    checked_scale,
    checked_starts,
    checked_table,
    places,
    rising,
)

_NAME = "update_pages"


@usual_promotion
def update(
    pages: jax.Array, new: jax.Array, scale: jax.Array | None, slots: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """The pages with new tokens in some slots, and the scales that they are read with.

    A slot is a place of a token, counted through all pages; tokens beyond the last are dropped.
    """
    shape, per_token = pages.shape, scale is not None and scale.ndim == 3
    if scale is not None:
        new = new.astype(accumulation_dtype(new.dtype))
        limit = 127.0
        if pages.dtype != jnp.int8:
            limit = float(jnp.finfo(pages.dtype).max)  # type: ignore[no-untyped-call]
        if per_token:
            largest = jnp.max(jnp.abs(new), axis=-1)
            factor = jnp.where(largest > 0, largest / limit, 1.0).astype(scale.dtype)
            flat = scale.reshape(-1, shape[2]).at[slots].set(factor, mode="drop")
            scale = flat.reshape(scale.shape)
        else:
            factor = scale if scale.ndim == 1 else scale[slots // shape[1]]
        new = jnp.clip(new / factor.astype(new.dtype)[..., None], -limit, limit)
        if pages.dtype == jnp.int8:
            new = jnp.round(new)
    flat = pages.reshape(-1, *shape[2:]).at[slots].set(new.astype(pages.dtype), mode="drop")
    return flat.reshape(shape), scale


@usual_promotion
def slots_of(
    rows: int, pages: Any, page_table: jax.Array, lengths: jax.Array, query_starts: jax.Array
) -> jax.Array:
    """The slot of every row; one beyond the pages if it belongs to nobody, or nowhere."""
    count, page_size = pages.shape[:2]
    sequence, position = places(rising(query_starts, rows), lengths, rows)
    inside = (position >= 0) & (position < page_table.shape[1] * page_size)
    page = page_table[sequence, jnp.where(inside, position // page_size, 0)]
    inside &= (page >= 0) & (page < count)
    return jnp.where(inside, page * page_size + position % page_size, count * page_size)


def checked_update(
    k_pages: Any,
    v_pages: Any,
    k: Any,
    v: Any,
    page_table: Any,
    lengths: Any,
    query_starts: Any,
    k_scale: Any,
    v_scale: Any,
) -> tuple[Any, ...]:
    """The arguments of a user; errors name what is wrong."""
    k_pages, v_pages = checked_pages(_NAME, k_pages, v_pages)
    k, v = checked_floating(_NAME, "k", k), checked_floating(_NAME, "v", v)
    check_pages(_NAME, k_pages, v_pages, {})
    axes = {
        "k_pages": (k_pages, "pages page_size kv_heads head_dim"),
        "v_pages": (v_pages, "pages page_size kv_heads value_dim"),
        "k": (k, "tokens kv_heads head_dim"),
        "v": (v, "tokens kv_heads value_dim"),
    }
    check_axes(_NAME, axes)
    page_table, lengths = checked_table(_NAME, page_table, lengths, k_pages, clamp=False)
    query_starts = checked_starts(_NAME, query_starts, lengths, k.shape[0])
    scales = []
    for name, pages, scale in (("k_scale", k_pages, k_scale), ("v_scale", v_pages, v_scale)):
        short = pages.dtype.name in SHORT_TYPES
        if short != (scale is not None):
            needed = "they need a scale" if short else "only int8 and float8 have a scale"
            raise ValueError(
                f"{_NAME}: {name} is {'not ' if short else ''}given, and {name[0]}_pages are "
                f"{pages.dtype}; {needed}"
            )
        scales.append(None if scale is None else checked_scale(_NAME, name, scale, k_pages))
    return k_pages, v_pages, k, v, page_table, lengths, query_starts, *scales
