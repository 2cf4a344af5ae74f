"""Ring attention: the sequence shared out over a mesh axis gives what one device gives."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import KEY, QUICK, arrays, integers, naive, normal
from jax.sharding import PartitionSpec as P

from ejkernel.kernels.flash_attention import FlashAttentionConfig
from ejkernel.modules import flash_attention
from ejkernel.ops import BwdParams, FwdParams

DEVICES = 4
SMALL = FlashAttentionConfig(
    FwdParams(q_blocksize=4, kv_blocksize=3), BwdParams(q_blocksize=3, kv_blocksize=4)
)
ROWS = P(None, "ring")
# How the arrays among the options are shared out.
SPECS = {
    "segment_ids": ROWS,
    "kv_segment_ids": ROWS,
    "bias": P(None, None, "ring"),
    "mask": P(None, None, "ring"),
}


def gradients(attention: Any, inputs: dict[str, jax.Array]) -> Any:
    def loss(inputs: dict[str, jax.Array]) -> Any:
        out, lse = attention(inputs)
        seen = jnp.where(jnp.isneginf(lse), 0.0, lse)
        return (out * normal(*out.shape)).sum() + (seen * normal(*lse.shape)).sum(), (out, lse)

    return jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)(inputs)


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
    static = {name: x for name, x in fixed.items() if not isinstance(x, jax.Array)}
    others = {name: x for name, x in fixed.items() if isinstance(x, jax.Array)}
    inputs |= learned
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

    (_, got), got_gradients = gradients(ring, inputs)
    (_, wanted), wanted_gradients = gradients(
        lambda inputs: naive(**inputs, **fixed, return_lse=True), inputs
    )
    for mine, truth in zip(got, wanted, strict=True):
        np.testing.assert_allclose(mine, truth, rtol=3e-5, atol=3e-5)
    for name in wanted_gradients:
        np.testing.assert_allclose(
            got_gradients[name], wanted_gradients[name], rtol=1e-4, atol=1e-4, err_msg=name
        )


def test_an_axis_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"no mesh axis 'ring'.*shard_map"):
        flash_attention(**arrays(), sequence_axis="ring")
