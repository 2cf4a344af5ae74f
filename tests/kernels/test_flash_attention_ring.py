"""Ring attention: the sequence shared out over a mesh axis gives what one device gives."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import KEY, QUICK, arrays, integers, naive, normal
from attention_float64 import attention64
from jax.sharding import PartitionSpec as P

from ejkernel.kernels.flash_attention import FlashAttentionXlaConfig
from ejkernel.modules import flash_attention

DEVICES = 4
SMALL = FlashAttentionXlaConfig(block_q=4, block_k=3, backward_block_q=3, backward_block_k=4)
ROWS = P(None, "ring")
# How the arrays among the options are shared out.
SPECS = {
    "segment_ids": ROWS,
    "kv_segment_ids": ROWS,
    "bias": P(None, None, "ring"),
    "mask": P(None, None, "ring"),
}


def over_a_ring(fixed: dict[str, Any], *, check_vma: bool = True) -> Any:
    """Attention as a function of whole arrays, which are shared out; `fixed` are its options."""
    static = {name: x for name, x in fixed.items() if not isinstance(x, jax.Array)}
    others = {name: x for name, x in fixed.items() if isinstance(x, jax.Array)}
    mesh = jax.make_mesh((DEVICES,), ("ring",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(inputs: dict[str, jax.Array], others: dict[str, jax.Array]) -> Any:
        attention = partial(flash_attention, sequence_axis="ring", return_lse=True, cfg=SMALL)
        return attention(**inputs, **others, **static)

    def ring(inputs: dict[str, jax.Array]) -> Any:
        specs = {name: SPECS.get(name, P()) for name in (*inputs, *others)}
        specs |= {"q": ROWS, "k": ROWS, "v": ROWS}
        mapped = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=({n: specs[n] for n in inputs}, {n: specs[n] for n in others}),
            out_specs=(ROWS, P(None, None, "ring")),
            check_vma=check_vma,
        )
        return mapped(inputs, others)

    return ring


def differentiated(attention: Any) -> Any:
    def loss(inputs: dict[str, jax.Array]) -> Any:
        out, lse = attention(inputs)
        seen = jnp.where(jnp.isneginf(lse), 0.0, lse)
        return (out * normal(*out.shape)).sum() + (seen * normal(*lse.shape)).sum(), (out, lse)

    return jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)


@pytest.mark.parametrize(
    ("options", "check_vma"),
    [
        ({"causal": True}, True),
        ({}, False),
        (
            {
                "causal": True,
                "window": 9,
                "sinks": normal(4),
                "bias": normal(2, 4, 20, 20),
                "dropout_rate": 0.3,
                "dropout_key": KEY,
                "kv_lengths": jnp.array([20, 13]),
                "logits_soft_cap": 2.0,
            },
            True,
        ),
        (
            {
                "segment_ids": integers(0, 4, 2, 20, ordered=True),
                "q_lengths": jnp.array([7, 18]),
                "mask": normal(1, 1, 20, 20) > -1,
            },
            True,
        ),
    ],
    ids=["causal", "full", "many options", "segments"],
)
def test_ring_attention(options: dict[str, Any], check_vma: bool) -> None:
    inputs = arrays(20, 20)
    learned = {name: options[name] for name in ("bias", "sinks") if name in options}
    fixed = {name: x for name, x in options.items() if name not in learned}
    inputs |= learned
    ring = over_a_ring(fixed, check_vma=check_vma)
    (_, got), got_gradients = differentiated(ring)(inputs)
    (_, wanted), wanted_gradients = differentiated(
        lambda inputs: naive(**inputs, **fixed, return_lse=True)
    )(inputs)
    for mine, truth in zip(got, wanted, strict=True):
        np.testing.assert_allclose(mine, truth, rtol=3e-5, atol=3e-5)
    for name in wanted_gradients:
        np.testing.assert_allclose(
            got_gradients[name], wanted_gradients[name], rtol=1e-4, atol=1e-4, err_msg=name
        )


@pytest.mark.parametrize("value", [-1e9, float(np.finfo(np.float32).min)])
def test_large_scores(value: float) -> None:
    """Rows that a bias hides from all keys, of several shares, and scores of 1e5 in the others."""
    inputs = arrays(20, 20)
    inputs["q"] *= 1e5
    inputs["k"] = jnp.round(inputs["k"] * 4) / 4  # far apart, whatever rounding does
    bias = jnp.full((2, 4, 20, 20), value).at[:, :2].set(0.0)
    inputs["q"] = inputs["q"].at[:, :, 2:].set(0.0)
    (_, (out, _)), found = differentiated(over_a_ring({"bias": bias}))(inputs)
    wanted = attention64(
        *(np.asarray(inputs[n]) for n in "qkv"),
        bias=np.asarray(bias),
        dout=np.asarray(normal(*out.shape)),
        dlse=np.asarray(normal(2, 4, 20)),
    )
    for name, mine in {"out": out, **found}.items():
        truth = wanted[name]
        np.testing.assert_allclose(
            np.asarray(mine), truth, atol=2e-3 * max(np.abs(truth).max(), 0.1), err_msg=name
        )


def test_what_does_not_exist_reaches_nobody() -> None:
    lengths = jnp.array([13, 20])
    ring = over_a_ring({"q_lengths": lengths, "kv_lengths": lengths, "causal": True})
    run = differentiated(ring)
    real = (jnp.arange(20) < lengths[:, None])[:, :, None, None]
    for size in (1.0, 1e3):
        clean = arrays(20, 20)
        clean["q"] *= size
        (_, wanted), wanted_gradients = run(clean)
        for poison in (np.nan, np.inf, 1e30):
            dirty = {name: jnp.where(real, x, poison) for name, x in clean.items()}
            (_, found), found_gradients = run(dirty)
            for mine, truth in zip(found, wanted, strict=True):
                np.testing.assert_allclose(mine, truth, rtol=1e-5, atol=1e-5)
            for name, truth in wanted_gradients.items():
                np.testing.assert_allclose(
                    found_gradients[name], truth, rtol=1e-5, atol=1e-5, err_msg=name
                )


def test_an_axis_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"no mesh axis 'ring'.*shard_map"):
        flash_attention(**arrays(), sequence_axis="ring")
