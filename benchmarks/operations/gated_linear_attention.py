"""`gated_linear_attention` beside the recurrence as one would write it, and as a parallel scan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.side_by_side import Call, Comparison
from ejkernel.modules import gated_linear_attention
from ejkernel.modules.supported import kernel_of

# (batch, length, heads, key_dim, value_dim): one token, a prompt, and what training steps have.
SIZES = (
    (1, 1, 8, 64, 64),
    (16, 1, 8, 64, 64),
    (1, 64, 4, 32, 32),
    (1, 256, 8, 64, 64),
    (4, 256, 4, 64, 64),
    (1, 1024, 2, 64, 64),
    (1, 1024, 8, 64, 64),
    (4, 512, 8, 64, 64),
    (1, 512, 16, 128, 128),
    (1, 2048, 4, 64, 128),
)
# The parallel scan holds a state per step: 16 MiB for 1024 steps of one head of 64 x 64.
LARGEST_SCAN = 2**22


def recurrence(q: Any, k: Any, v: Any, g: Any) -> jax.Array:
    """`lax.scan` over the steps."""

    def step(state: Any, token: Any) -> Any:
        q_t, k_t, v_t, g_t = token
        state = jnp.exp(g_t)[..., None] * state + k_t[..., :, None] * v_t[..., None, :]
        return state, jnp.einsum("bhk,bhkv->bhv", q_t, state)

    batch, _, heads, key_dim = q.shape
    start = jnp.zeros((batch, heads, key_dim, v.shape[-1]), q.dtype)
    _, out = jax.lax.scan(step, start, tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, _wide(g, k))))
    return key_dim**-0.5 * jnp.moveaxis(out, 0, 1)


def parallel_scan(q: Any, k: Any, v: Any, g: Any) -> jax.Array:
    """`lax.associative_scan` over pairs of a decay and a state."""

    def combine(early: Any, late: Any) -> Any:
        return early[0] * late[0], late[0] * early[1] + late[1]

    decays = jnp.exp(_wide(g, k))[..., None]
    _, states = jax.lax.associative_scan(combine, (decays, k[..., None] * v[..., None, :]), axis=1)
    return q.shape[-1] ** -0.5 * jnp.einsum("blhk,blhkv->blhv", q, states)


def _wide(g: Any, k: Any) -> Any:
    return g if g.ndim == 4 else jnp.broadcast_to(g[..., None], k.shape)


def arrays(
    batch: int, length: int, heads: int, key_dim: int, value_dim: int, decay: str
) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (batch, length, heads, key_dim)
    q, k = (jax.random.normal(key, shape) for key in keys[:2])
    v = jax.random.normal(keys[2], (batch, length, heads, value_dim))
    g = jax.random.normal(keys[3], shape if decay == "channel" else shape[:3])
    return q, k, v, jax.nn.log_sigmoid(g) / 4


def forward_and_backward(function: Callable[..., Any], *inputs: Any) -> Any:
    out, pull_back = jax.vjp(function, *inputs)
    return out, pull_back(out)


def comparisons() -> Iterator[Comparison]:
    """Both passes over all sizes, with both kinds of decay."""
    for decay in ("channel", "head"):
        for size in SIZES:
            batch, length, heads, key_dim, value_dim = size
            peers = {"lax.scan": recurrence}
            if batch * length * heads * key_dim * value_dim <= LARGEST_SCAN:
                peers["associative_scan"] = parallel_scan
            for backward in (False, True):
                name = f"{'x'.join(map(str, size))} decay per {decay}"
                yield Comparison(
                    name=f"forward+backward {name}" if backward else f"forward {name}",
                    ours=_timed(gated_linear_attention, backward),
                    peers={peer: _timed(plain, backward) for peer, plain in peers.items()},
                    arguments=partial(arrays, *size, decay),
                    limits=dict.fromkeys(peers, 1.0),
                )


def _timed(function: Callable[..., Any], backward: bool) -> Callable[..., Any]:
    return partial(forward_and_backward, function) if backward else function


def grid() -> Iterator[Call]:
    """Calls over lengths, rows and sizes of the state."""
    kernel = kernel_of("gated_linear_attention")
    for dims in ((32, 32), (64, 64), (128, 128)):
        for batch, heads in ((1, 2), (1, 8), (4, 8), (2, 16)):
            for length in (64, 256, 512):
                shape = (batch, length, heads, dims[0])
                q, g = (jax.ShapeDtypeStruct(shape, jnp.float32) for _ in range(2))
                v = jax.ShapeDtypeStruct((*shape[:3], dims[1]), jnp.float32)
                name = f"{batch}x{length}x{heads}x{dims[0]}x{dims[1]}"
                yield Call(name, kernel, (q, q, v, g), {"scale": dims[0] ** -0.5})
