"""Options of attention combined at random, as far as each implementation declares to serve them.

Every run draws other combinations; EJKERNEL_TEST_EXAMPLES says how many.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from attention_cases import BATCH, BLOCKS, DIM, KEY, agree, arrays, integers, normal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ejkernel.kernels.flash_attention import FlashAttention, pallas_gpu, pallas_tpu
from ejkernel.kernels.flash_attention.arguments import checked_window
from ejkernel.modules import FlashAttentionConfig, flash_attention
from ejkernel.ops import BwdParams, FwdParams, Supports

EXAMPLES = int(os.environ.get("EJKERNEL_TEST_EXAMPLES", "4"))
KERNEL = FlashAttention()

OPTIONS: Mapping[str, st.SearchStrategy[Any]] = {
    "causal": st.just(True),
    "window": st.tuples(st.none() | st.integers(0, 9), st.just(0)),
    "softmax_scale": st.sampled_from([0.7, -0.4]),
    "bias": st.tuples(*[st.booleans()] * 4),  # which axes are not 1
    "mask": st.tuples(*[st.booleans()] * 4),
    "segment_ids": st.booleans(),  # in order
    "logits_soft_cap": st.just(1.5),
    "sinks": st.just(True),
    "q_lengths": st.just(True),
    "kv_lengths": st.just(True),
    "dropout_rate": st.just(0.4),
    "return_lse": st.just(True),
}


@st.composite
def calls(draw: st.DrawFn, supports: Supports) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Arrays, options and their dtype."""
    served = [name for name in OPTIONS if name not in supports.without]
    chosen = draw(st.sets(st.sampled_from(served), min_size=min(4, len(served))))
    options = {name: draw(OPTIONS[name]) for name in sorted(chosen)}
    lengths = draw(st.tuples(*[st.integers(1, 21) | st.sampled_from([64, 131])] * 2))
    heads, kv_heads = draw(st.sampled_from([(1, 1), (4, 1), (4, 2), (3, 3)]))
    # Bias and sinks are float32, whatever the rest is.
    dtype = draw(st.sampled_from(("float32", *(supports.dtypes or ("bfloat16", "float16")))))
    table = (BATCH, heads, *lengths)
    for name in {"bias", "mask"} & chosen:
        whole = zip(table, options[name], strict=True)
        drawn = normal(*(size if kept else 1 for size, kept in whole))
        options[name] = drawn if name == "bias" else drawn > -0.5
    if "segment_ids" in chosen:
        ordered = options["segment_ids"]
        options["segment_ids"] = integers(0, 3, BATCH, lengths[0], ordered=ordered)
        options["kv_segment_ids"] = integers(0, 3, BATCH, lengths[1], ordered=ordered)
    for name, length in zip(("q_lengths", "kv_lengths"), lengths, strict=True):
        if name in chosen:
            options[name] = integers(0, length + 1, BATCH)
    if "sinks" in chosen:
        options["sinks"] = normal(heads)
    if "dropout_rate" in chosen:
        options["dropout_key"] = KEY
    inputs = arrays(*lengths, heads=heads, kv_heads=kv_heads, value_dim=3, dtype=dtype)
    return inputs, options, dtype


def interpreted(implementation: str, cfg: FlashAttentionConfig) -> Any:
    """An implementation for a device that is not here, with its gradient, as users call it."""
    ahead = getattr(KERNEL, f"fwd_with_residuals_{implementation}")
    back = getattr(KERNEL, f"vjp_{implementation}")

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> Any:
        names = [name for name, x in options.items() if isinstance(x, jax.core.Tracer)]
        learned = {name: options.pop(name) for name in names}
        options.setdefault("causal", False)
        options.setdefault("softmax_scale", DIM**-0.5)
        if "window" in options:
            options["window"] = checked_window(options["window"], options["causal"])

        @jax.custom_vjp
        def run(q: jax.Array, k: jax.Array, v: jax.Array, learned: dict[str, jax.Array]) -> Any:
            return ahead(q, k, v, cfg=cfg, **options, **learned)[0]

        def save(q: jax.Array, k: jax.Array, v: jax.Array, learned: dict[str, jax.Array]) -> Any:
            out, rest = ahead(q, k, v, cfg=cfg, **options, **learned)
            return out, (rest, out, q, k, v, learned)

        def pull_back(saved: Any, dout: Any) -> Any:
            rest, out, q, k, v, learned = saved
            told = {"cfg": cfg, "differentiated": frozenset(learned)}
            *gradients, named = back(rest, out, dout, q, k, v, **told, **options, **learned)
            return (*gradients, {name: named[name] for name in learned})

        run.defvjp(save, pull_back)
        return run(q, k, v, learned)

    return attention


TPU = FlashAttentionConfig(
    FwdParams(q_blocksize=128, kv_blocksize=128), BwdParams(q_blocksize=128, kv_blocksize=128)
)
GPU = FlashAttentionConfig(
    FwdParams(q_blocksize=32, kv_blocksize=16, num_warps=4, num_stages=1),
    BwdParams(q_blocksize=16, kv_blocksize=32, num_warps=4, num_stages=1),
)
ATTENTIONS = {
    "xla": partial(flash_attention, implementation="xla", cfg=BLOCKS),
    "cpu": partial(flash_attention, implementation="cpu", cfg=BLOCKS),
    "pallas": interpreted("pallas", TPU),
    "triton": interpreted("triton", GPU),
}


@pytest.fixture(params=ATTENTIONS)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu":
        request.getfixturevalue("native_library")
    for module in (pallas_tpu, pallas_gpu):
        for name in ("forward", "backward"):
            monkeypatch.setattr(module, name, partial(getattr(module, name), interpret=True))
    return str(request.param)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_combined_options_equal_the_definition(implementation: str, data: st.DataObject) -> None:
    supports = KERNEL.supports.get(implementation, Supports())
    inputs, options, dtype = data.draw(calls(supports))
    constant = data.draw(st.sets(st.sampled_from(["bias", "sinks"])))
    # In half precision the flash gradients see `out` already rounded.
    tolerance = max(3e-5, 8 * float(jnp.finfo(dtype).eps))
    attention = ATTENTIONS[implementation]
    agree(inputs, options, attention=attention, tolerance=tolerance, constant=constant)
