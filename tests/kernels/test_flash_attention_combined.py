"""Options of attention combined at random, as far as each implementation declares to serve them.

Every run draws other combinations; EJKERNEL_TEST_EXAMPLES says how many.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
import pytest
from attention_cases import BATCH, BLOCKS, KEY, agree, arrays, integers, normal
from attention_interpreted import KERNEL, interpret, interpreted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ejkernel.kernels.flash_attention import FlashAttentionCppConfig
from ejkernel.modules import flash_attention
from ejkernel.ops import Supports

EXAMPLES = int(os.environ.get("EJKERNEL_TEST_EXAMPLES", "4"))

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


ATTENTIONS = {
    "xla": partial(flash_attention, implementation="xla", cfg=BLOCKS),
    "cpu": partial(flash_attention, implementation="cpu", cfg=FlashAttentionCppConfig(8, 4, 4, 8)),
    "pallas": interpreted("pallas"),
    "triton": interpreted("triton"),
}


@pytest.fixture(params=ATTENTIONS)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu":
        request.getfixturevalue("native_library")
    interpret(monkeypatch)
    return str(request.param)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_combined_options_equal_the_definition(implementation: str, data: st.DataObject) -> None:
    supports = KERNEL.implementation(implementation).supports
    inputs, options, dtype = data.draw(calls(supports))
    constant = data.draw(st.sets(st.sampled_from(["bias", "sinks"])))
    # In half precision the flash gradients see `out` already rounded.
    tolerance = max(3e-5, 8 * float(jnp.finfo(dtype).eps))
    attention = ATTENTIONS[implementation]
    agree(inputs, options, attention=attention, tolerance=tolerance, constant=constant)
