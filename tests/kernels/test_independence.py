"""What does not belong together does not meet, whatever the numbers are.

One segment, batch entry, head, group or padded row is filled with NaN, with infinities, with
numbers that overflow or with ones that are 10,000 times larger. Results and gradients of all others
stay what they were.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.gated_linear_attention import (
    GatedLinearAttentionGpuConfig,
    GatedLinearAttentionTpuConfig,
    GatedLinearAttentionXlaConfig,
    pallas_gpu,
    pallas_tpu,
)
from ejkernel.kernels.gated_linear_attention.arguments import decay_with_starts
from ejkernel.kernels.linear_cross_entropy import LinearCrossEntropyXlaConfig
from ejkernel.modules import gated_linear_attention, grouped_matmul, linear_cross_entropy

POISON = {"nan": np.nan, "inf": np.inf, "overflows": 1e30, "larger": 1e4}

# Tokens of the segments, of which one is poisoned; chunks of 8 begin and end inside of segments.
SEGMENTS = (5, 9, 1, 6)


def poisoned(array: np.ndarray, where: Any, kind: str) -> np.ndarray:
    array = array.copy()
    array[where] = array[where] * 1e4 if kind == "larger" else POISON[kind]
    return array


def same(found: Any, expected: Any, untouched: Any, name: str) -> None:
    found, expected = (np.asarray(x, np.float64)[untouched] for x in (found, expected))
    assert np.isfinite(expected).all(), name
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7, err_msg=name)


# --- gated linear attention ----------------------------------------------------------------------

CONFIGS = {
    "steps": None,
    "rows": GatedLinearAttentionXlaConfig(block_m=1, backward_block_m=1),
    "chunks": GatedLinearAttentionXlaConfig(chunk_size=8, backward_chunk_size=8),
}


def tokens(decay: str) -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(0)
    shape = (2, sum(SEGMENTS), 2, 8)
    made = {name: numbers.normal(size=shape) for name in ("q", "k", "v")}
    if decay != "none":
        made["g"] = -np.abs(numbers.normal(size=shape if decay == "channel" else shape[:3]))
    made["initial_state"] = numbers.normal(size=(2, 2, 8, 8))
    return {name: x.astype(np.float32) for name, x in made.items()}


PALLAS = {
    "tpu": (pallas_tpu.PALLAS_TPU, GatedLinearAttentionTpuConfig(chunk_size=8)),
    "gpu": (pallas_gpu.PALLAS_GPU, GatedLinearAttentionGpuConfig(chunk_size=8, block_v=8)),
}


def interpreted(how: str) -> Any:
    """The operation by the passes of an implementation, in the interpreter."""
    passes, cfg = PALLAS[how]
    options: dict[str, Any] = {"cfg": cfg, "scale": 0.5, "return_state": True, "segments": True}

    @jax.custom_vjp
    def run(*arrays: Any) -> Any:
        return forward(*arrays)[0]

    def forward(*arrays: Any) -> Any:
        *tokens, state = arrays
        results, states = passes.forward_with_residuals(*tokens, initial_state=state, **options)
        return results, (arrays, states)

    def backward(saved: Any, cotangents: Any) -> Any:
        (*tokens, state), states = saved
        *gradients, last = passes.backward(
            states, None, cotangents, *tokens, initial_state=state, **options
        )
        return *gradients, last["initial_state"]

    run.defvjp(forward, backward)

    def call(q: Any, k: Any, v: Any, g: Any = None, *, initial_state: Any, segment_ids: Any) -> Any:
        return run(q, k, v, decay_with_starts(q, g, segment_ids), initial_state)

    return call


def linear_attention(how: str) -> Any:
    if how in PALLAS:
        return interpreted(how)
    return partial(gated_linear_attention, scale=0.5, return_state=True, cfg=CONFIGS[how])


@pytest.mark.usefixtures("interpreted_pallas")
@pytest.mark.parametrize("decay", ["channel", "head", "none"])
@pytest.mark.parametrize("how", [*CONFIGS, *PALLAS])
def test_segments_of_linear_attention(how: str, decay: str) -> None:
    operation = linear_attention(how)
    arrays = tokens(decay)
    ids = np.repeat(np.arange(len(SEGMENTS)), SEGMENTS)[None].repeat(2, 0)
    weights = np.random.default_rng(1).normal(size=arrays["v"].shape).astype(np.float32)

    @jax.jit
    def everything(arrays: Any, dout: Any) -> Any:
        def run(arrays: Any) -> Any:
            return operation(**arrays, segment_ids=jnp.asarray(ids))

        (out, state), pull_back = jax.vjp(run, arrays)
        return out, state, pull_back((dout, jnp.ones_like(state)))[0]

    out, state, gradients = everything(arrays, weights)
    last = len(SEGMENTS) - 1
    for segment in range(len(SEGMENTS)):
        mine = ids == segment
        for kind in POISON:
            # In one batch entry only: the other one is as independent as other segments are.
            mine[1] = False
            bad = {
                name: x if name in ("g", "initial_state") else poisoned(x, mine, kind)
                for name, x in arrays.items()
            }
            if "g" in bad and kind == "nan":
                bad["g"] = poisoned(bad["g"], mine, kind)
            new_out, new_state, new_gradients = everything(bad, poisoned(weights, mine, kind))
            label = f"{kind} in segment {segment}"
            same(new_out, out, ~mine, label)
            same(new_state, state, [1] if segment == last else [0, 1], f"state, {label}")
            for name, gradient in gradients.items():
                if name == "initial_state":
                    entries = [1] if segment == 0 else [0, 1]
                    same(new_gradients[name], gradient, entries, f"d{name}, {label}")
                else:
                    same(new_gradients[name], gradient, ~mine, f"d{name}, {label}")
            if kind in ("nan", "inf"):  # and what is poisoned says so
                assert not np.isfinite(np.asarray(new_out)[mine]).any(), label
                assert not np.isfinite(np.asarray(new_gradients["k"])[mine]).any(), label


@pytest.mark.parametrize("how", CONFIGS)
def test_heads_and_batch_entries_of_linear_attention(how: str) -> None:
    operation, arrays = linear_attention(how), tokens("channel")

    @jax.jit
    def everything(arrays: Any) -> Any:
        results, pull_back = jax.vjp(lambda arrays: operation(**arrays), arrays)
        return results[0], pull_back(jax.tree.map(jnp.ones_like, results))[0]

    out, gradients = everything(arrays)
    for kind in POISON:
        bad = {
            name: x if name == "initial_state" else poisoned(x, np.s_[0, :, 1], kind)
            for name, x in arrays.items()
        }
        bad["g"] = arrays["g"]
        new_out, new_gradients = everything(bad)
        for where in (np.s_[1], np.s_[:, :, 0]):
            same(new_out, out, where, kind)
            for name in ("q", "k", "v", "g"):
                same(new_gradients[name], gradients[name], where, f"d{name} {kind}")


@pytest.mark.parametrize("how", ["steps", "chunks"])
def test_forgetting_everything_forgets_how_large_it_was(how: str) -> None:
    """Without segments, but with a decay of -inf: gradients of the decays before it."""
    arrays = tokens("head")
    arrays["g"][:, 9] = -np.inf
    operation = linear_attention(how)

    @jax.jit
    def decay_gradient(arrays: Any, dout: Any) -> Any:
        _, pull_back = jax.vjp(lambda arrays: operation(**arrays)[0], arrays)
        return pull_back(dout)[0]["g"]

    later = np.s_[:, 9:]
    ones = np.ones_like(arrays["v"])
    expected = decay_gradient(arrays, ones)
    bad = {
        n: x if n in ("g", "initial_state") else poisoned(x, later, "larger")
        for n, x in arrays.items()
    }
    same(decay_gradient(bad, poisoned(ones, later, "larger")), expected, np.s_[:, :9], "dg")


# --- grouped matmul ------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [24, 100])
@pytest.mark.parametrize("groups", [1, 4])
def test_groups_and_rows_of_no_group(groups: int, rows: int) -> None:
    numbers = np.random.default_rng(0)
    lhs = numbers.normal(size=(rows, 8)).astype(np.float32)
    rhs = numbers.normal(size=(groups, 8, 12)).astype(np.float32)
    dout = numbers.normal(size=(rows, 12)).astype(np.float32)
    sizes = np.array([3, 0, 9, 5] if rows == 24 else [30, 0, 41, 9])[:groups]
    ends = np.cumsum(sizes)

    @jax.jit
    def everything(lhs: Any, rhs: Any, dout: Any) -> Any:
        out, pull_back = jax.vjp(lambda *a: grouped_matmul(*a, jnp.asarray(sizes)), lhs, rhs)
        return out, *pull_back(dout)

    expected = everything(lhs, rhs, dout)
    spans = [(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    for kind in POISON:
        for group, (start, end) in enumerate([*spans, (ends[-1], rows)]):
            mine = np.s_[start:end]
            matrices = poisoned(rhs, group, kind) if group < groups else rhs
            found = everything(poisoned(lhs, mine, kind), matrices, poisoned(dout, mine, kind))
            others = np.ones(rows, bool)
            # Rows that no matrix is for give zeros whatever they are.
            others[mine] = group == groups
            other_groups = np.arange(groups) != group
            label = f"{kind} in group {group}"
            same(found[0], expected[0], others, label)
            same(found[1], expected[1], others, f"dlhs, {label}")
            same(found[2], expected[2], other_groups, f"drhs, {label}")


# --- the loss ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("cfg", [None, (4, 8, 16), (7, 7, 64)], ids=str)
def test_rows_that_count_for_nothing(cfg: Any, reduction: str) -> None:
    numbers = np.random.default_rng(0)
    n, features, vocab = 30, 8, 50
    hidden = numbers.normal(size=(n, features)).astype(np.float32)
    weight = numbers.normal(size=(features, vocab)).astype(np.float32)
    bias = numbers.normal(size=vocab).astype(np.float32)
    labels = numbers.integers(0, vocab, n)
    ignored = np.arange(n) % 3 == 1
    labels[ignored] = -100
    blocks = cfg and LinearCrossEntropyXlaConfig(*cfg)

    @jax.jit
    def everything(hidden: Any) -> Any:
        def run(*arrays: Any) -> Any:
            return linear_cross_entropy(
                *arrays[:2],
                jnp.asarray(labels),
                bias=arrays[2],
                reduction=reduction,
                z_loss=0.01,
                label_smoothing=0.1,
                cfg=blocks,
            )

        loss, pull_back = jax.vjp(run, hidden, weight, bias)
        return loss, *pull_back(jnp.ones_like(loss))

    expected = everything(hidden)
    for kind in POISON:
        found = everything(poisoned(hidden, ignored, kind))
        for name, a, b in zip(
            ("loss", "dhidden", "dweight", "dbias"), found, expected, strict=True
        ):
            same(a, b, (), f"{name}, {kind}")
    if reduction != "none":
        return
    one = everything(poisoned(hidden, 3, "nan"))  # a row that counts
    others = np.arange(n) != 3
    same(one[0], expected[0], others, "losses of other rows")
    same(one[1], expected[1], others, "dhidden of other rows")
