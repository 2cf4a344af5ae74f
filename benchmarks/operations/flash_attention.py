"""Flash attention beside `jax.nn.dot_product_attention` and torch, and a grid for its heuristic."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.side_by_side import Bound, Call, Comparison, outside_jax
from ejkernel.kernels.flash_attention import FlashAttention
from ejkernel.kernels.flash_attention.native import LIBRARY
from ejkernel.modules import flash_attention
from ejkernel.native import why_not

KERNEL = FlashAttention()


# The largest ratios that are promised at lengths of 1024 to 4096: (forward, forward and backward).
PROMISED = {
    ("xla", "jax.nn"): (0.35, 1.0),
    ("xla", "torch"): (1.25, 1.2),
    ("cpu", "torch"): (0.9, 0.95),
}
PROMISED_IF_CAUSAL = {("cpu", "torch"): (0.8, 0.95)}
TRACED = 1.5  # tracing, beside `jax.nn`


def _implementations() -> list[str]:
    return ["xla"] if why_not(LIBRARY) else ["cpu", "xla"]


def comparisons() -> Iterator[Comparison]:
    """8 heads of 64, float32: the sizes of the promise; short, long and many sequences; tables."""
    names = _implementations()
    for name, length, causal in itertools.product(
        names, (1024, 2048, 4096, 256, 512), (False, True)
    ):
        promised = length >= 1024
        yield _comparison(name, 1, length, causal, backward=False, promised=promised)
        yield _comparison(name, 1, length, causal, backward=True, promised=promised)
    for name, (batch, length) in itertools.product(names, ((8, 256), (4, 1024))):
        yield _comparison(name, batch, length, True, backward=False, promised=False)
        yield _comparison(name, batch, length, True, backward=True, promised=False)
    for name, kind, backward in itertools.product(names, TABLES, (False, True)):
        yield _comparison(name, 4, 1024, False, backward=backward, promised=False, table=kind)


Table = dict[str, np.ndarray[Any, Any]]  # the keyword that it is given as


def _padded(batch: int, length: int) -> Table:
    """The ends of sequences of different lengths, hidden."""
    lengths = np.linspace(length // 2, length, batch).astype(int)
    return {"mask": (np.arange(length) < lengths[:, None])[:, None, None, :]}


def _random(batch: int, length: int) -> Table:
    """Half of everything, hidden."""
    return {"mask": np.random.default_rng(0).random((1, 1, length, length)) < 0.5}


def _alibi(batch: int, length: int) -> Table:
    """A bias by distance, another factor for each of 8 heads; it is not learned."""
    distance = np.abs(np.arange(length)[:, None] - np.arange(length))
    slopes = -np.exp2(-np.arange(1.0, 9.0))[:, None, None]
    return {"bias": (slopes * distance)[None].astype(np.float32)}


TABLES: dict[str, Callable[[int, int], Table]] = {
    "padded": _padded,
    "random mask": _random,
    "ALiBi": _alibi,
}


def _comparison(
    implementation: str,
    batch: int,
    length: int,
    causal: bool,
    *,
    backward: bool,
    promised: bool,
    table: str | None = None,
) -> Comparison:
    given = TABLES[table](batch, length) if table else {}

    def arguments() -> tuple[jax.Array, ...]:
        shape = (batch, length, 8, 64)
        return tuple(
            jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(0), 4)
        )

    def of(attention: Callable[..., jax.Array]) -> Callable[..., Any]:
        def forward(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
            return attention(q, k, v)

        def both(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
            out, pull_back = jax.vjp(attention, q, k, v)
            return (out, *pull_back(dout))

        return both if backward else forward

    peers = {"jax.nn": of(partial(jax.nn.dot_product_attention, is_causal=causal, **given))}
    if importlib.util.find_spec("torch"):
        peers["torch"] = outside_jax(_torch(causal, given, backward=backward))
    promises = PROMISED | PROMISED_IF_CAUSAL if causal else PROMISED
    limits = {
        peer: promises[implementation, peer][backward]
        for peer in peers
        if promised and (implementation, peer) in promises
    }
    direction = "forward+backward" if backward else "forward"
    return Comparison(
        name=f"{direction} batch {batch} length {length} "
        f"{table or ('causal' if causal else 'full')}, "
        f"{'C++' if implementation == 'cpu' else 'XLA'}",
        ours=of(partial(flash_attention, causal=causal, implementation=implementation, **given)),
        peers=peers,
        arguments=arguments,
        limits=limits,
        tolerance=1e-3,
        trace_limit={"jax.nn": TRACED} if promised else {},
    )


def bounds() -> Iterator[Bound]:
    """Memory of forward and backward, 8 heads of 64; and 32,768 positions, causal, are run."""
    names = _implementations()
    for name, causal in itertools.product(names, (False, True)):
        for length, mib in ((8192, 128.0), (32768, None)):
            yield Bound(
                name=f"forward+backward batch 1 length {length} {'causal' if causal else 'full'}, "
                f"{'C++' if name == 'cpu' else 'XLA'}",
                function=partial(_loss_gradients, causal=causal, implementation=name),
                arguments=partial(_long, length),
                mib=mib,
                check=_check_last if causal and length == 32768 else None,
                compiler_knows=name != "cpu",
            )


def _long(length: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(jax.random.normal(key, (1, length, 8, 64)) for key in keys)


def _loss_gradients(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> Any:
    out, pull_back = jax.vjp(partial(flash_attention, **options), q, k, v)
    return out, pull_back(out)


def _check_last(result: Any, q: jax.Array, k: jax.Array, v: jax.Array, queries: int = 128) -> None:
    """Compare the last queries of a causal call, and their gradients, with the plain formula."""
    length = k.shape[1]
    visible = jnp.arange(length) <= jnp.arange(length - queries, length)[:, None]

    def plain(q: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, mask=visible[None, None])

    expected, pull_back = jax.vjp(plain, q[:, -queries:])
    out, (dq, dk, dv) = result
    np.testing.assert_allclose(out[:, -queries:], expected, atol=1e-4)
    np.testing.assert_allclose(dq[:, -queries:], pull_back(expected)[0], atol=1e-4)
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in (dk, dv))


def _torch(causal: bool, given: Table, *, backward: bool) -> Callable[..., Any]:
    """torch's attention on `(batch, length, heads, dim)` arrays, with as many threads as XLA."""
    import torch

    table = next((torch.from_numpy(x) for x in given.values()), None)  # a mask or a bias

    def run(*arrays: Any) -> Any:
        q, k, v, dout = (torch.from_dlpack(x).transpose(1, 2) for x in arrays)
        if not backward:
            with torch.no_grad():
                return _as_ours(_attention(q, k, v))
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out = _attention(*inputs)
        gradients = torch.autograd.grad(out, inputs, dout)
        return tuple(_as_ours(x.detach()) for x in (out, *gradients))

    def _attention(q: Any, k: Any, v: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=table, is_causal=causal
        )

    def _as_ours(x: Any) -> Any:
        return x.transpose(1, 2).numpy()  # a view, no copy

    return run


def grid() -> Iterator[Call]:
    """Batches, heads, groups, lengths, what is seen, and head dimensions: one thing at a time."""
    for length, causal in itertools.product((64, 128, 256, 512, 1024, 2048), (False, True)):
        yield _call(1, length, 8, 8, 64, causal=causal)
    for batch, length in ((4, 128), (16, 128), (4, 512), (8, 256), (32, 64), (2, 1024)):
        for causal in (False, True):
            yield _call(batch, length, 8, 8, 64, causal=causal)
    for heads, kv_heads in ((8, 1), (8, 2), (32, 8), (1, 1)):
        yield _call(1, 512, heads, kv_heads, 64, causal=True)
    for head_dim in (32, 128, 256):
        yield _call(1, 512, 8, 8, head_dim, causal=True)
    for window in (64, 256):
        yield _call(1, 1024, 8, 8, 64, causal=True, window=(window, 0))
        yield _call(1, 1024, 8, 8, 64, causal=False, window=(window, window))
    yield _call(1, 64, 8, 8, 64, causal=False, kv_length=1024)
    yield _call(8, 1, 8, 8, 64, causal=False, kv_length=2048)


def _call(
    batch: int,
    length: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    causal: bool,
    window: tuple[int, int] | None = None,
    kv_length: int | None = None,
) -> Call:
    keys = (batch, kv_length or length, kv_heads, head_dim)
    seen = f"window {window[0]}" if window else "all"
    name = (
        f"{batch}x{length}x{heads}x{head_dim}, {kv_heads} key heads, {keys[1]} keys, "
        f"{'causal' if causal else 'full'}, {seen}"
    )
    keywords: dict[str, Any] = {"causal": causal, "softmax_scale": head_dim**-0.5}
    if window:
        keywords["window"] = window
    shapes = ((batch, length, heads, head_dim), keys, keys)
    arguments = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    return Call(name, KERNEL, arguments, keywords)
