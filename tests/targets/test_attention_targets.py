"""The Pallas kernels of attention for devices that are not here: lowered always, compiled where the
compilers are installed."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from ejkernel import targets
from ejkernel.kernels.flash_attention import FlashAttention
from ejkernel.kernels.paged_attention import PagedAttention, RaggedPagedAttention

USABLE = {entry.target.name for entry in targets.available() if entry.usable}


def needs(name):
    reason = f"nothing compiles for {name} here; `make targets` installs what does"
    return pytest.mark.skipif(name not in USABLE, reason=reason)


NAMES = ("tpu-v5e", "tpu-v6e", "cuda-sm80", "cuda-sm90")
every = pytest.mark.parametrize("name", [pytest.param(name, marks=needs(name)) for name in NAMES])


@pytest.fixture(scope="module", autouse=True)
def no_worker_is_left_behind():
    yield
    targets.stop_workers()


def both_passes(implementation):
    """An implementation whose forward pass is forward and backward: only what runs is compiled."""

    def run(*args, learned=(), **keywords):
        out, lse = implementation.forward_with_residuals(*args, **keywords)
        differentiated = frozenset(learned)
        return implementation.backward(
            lse, out, out, *args, **keywords, differentiated=differentiated
        )

    return dataclasses.replace(
        implementation,
        forward=run,
        forward_with_residuals=None,
        backward=None,
        space=lambda inv: [],
    )


class BothPasses(FlashAttention):
    implementations = tuple(map(both_passes, FlashAttention.implementations))


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def integers(*shape):
    return array(*shape, dtype=jnp.int32)


FLASH = {
    "causal, grouped, 128 wide": ((2, 2048, 8, 2, 128, jnp.bfloat16), {"causal": True}),
    "float32, 64 wide, odd": ((1, 1000, 4, 4, 64, jnp.float32), {"causal": False}),
    "80 wide, window, cap, sinks": (
        (1, 1024, 8, 2, 80, jnp.bfloat16),
        {
            "causal": True,
            "window": (300, 0),
            "logits_soft_cap": 30.0,
            "sinks": array(8, dtype=jnp.float32),
        },
    ),
    "segments, lengths, mask": (
        (2, 1100, 8, 2, 64, jnp.bfloat16),
        {
            "causal": True,
            "segment_ids": integers(2, 1100),
            "q_lengths": integers(2),
            "kv_lengths": integers(2),
            "mask": array(2, 1, 1100, 1100, dtype=jnp.bool_),
        },
    ),
    "learned bias": (
        (1, 512, 4, 4, 64, jnp.bfloat16),
        {"causal": True, "bias": array(1, 4, 512, 512), "learned": ("bias",)},
    ),
    "bias that is given": (
        (1, 512, 4, 4, 64, jnp.bfloat16),
        {"causal": True, "bias": array(1, 4, 512, 512)},
    ),
}


def check_both_passes(name, case, **how):
    (batch, length, heads, kv_heads, head_dim, dtype), options = FLASH[case]
    q = array(batch, length, heads, head_dim, dtype=dtype)
    k = array(batch, length, kv_heads, head_dim, dtype=dtype)
    kernel = BothPasses("both_passes")
    return targets.check(kernel, q, k, k, target=name, softmax_scale=0.1, **options, **how)


def check_paged(name, options, **how):
    cache = array(4096, 16, 8, 128)
    arguments = (array(16, 1, 32, 128), cache, cache, integers(16, 256), integers(16))
    kernel = PagedAttention()
    return targets.check(kernel, *arguments, target=name, softmax_scale=0.1, **options, **how)


def check_ragged(name, dtype, options, **how):
    cache = array(4096, 16, 8, 128, dtype=dtype)
    arguments = (array(512, 32, 128), cache, cache, integers(16, 256), integers(16), integers(17))
    kernel = RaggedPagedAttention()
    return targets.check(kernel, *arguments, target=name, softmax_scale=0.1, **options, **how)


SCALES = {
    name: array(*shape, dtype=jnp.float32)
    for name, shape in (("k_scale", (4096, 16, 8)), ("v_scale", (8,)))
}


# --- lowering: needs nothing ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tpu-v5e", "cuda-sm80"])
@pytest.mark.parametrize("case", FLASH)
def test_flash_attention_lowers_forward_and_backward(name, case):
    result = check_both_passes(name, case, compile=False)
    assert [entry.compiles for entry in result] == [True], str(result)


@pytest.mark.parametrize("name", ["tpu-v5e", "cuda-sm80"])
def test_every_candidate_of_paged_attention_lowers(name):
    options = {"window": 500, "logits_soft_cap": 30.0, "sinks": array(32)}
    result = check_paged(name, options, compile=False)
    assert all(entry.compiles for entry in result), str(result)
    assert len(result) > 2


@pytest.mark.parametrize("name", ["tpu-v5e", "cuda-sm80"])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [(jnp.bfloat16, {"window": 500, "sinks": array(32)}), (jnp.int8, SCALES)],
    ids=["bfloat16", "int8"],
)
def test_every_candidate_of_the_ragged_form_lowers(name, dtype, options):
    result = check_ragged(name, dtype, options, compile=False)
    assert all(entry.compiles for entry in result), str(result)
    assert len(result) > 2


# --- compiling -----------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("case", FLASH)
def test_flash_attention_compiles_forward_and_backward(name, case):
    result = check_both_passes(name, case)
    assert [entry.compiles for entry in result] == [True], str(result)
    assert len(result.entries[0].kernels) >= (1 if case == "learned bias" else 3)


@every
@pytest.mark.parametrize("options", [{}, {"window": 500, "logits_soft_cap": 30.0}], ids=str)
def test_paged_attention_compiles_and_does_not_copy_the_cache(name, options):
    result = check_paged(name, options)
    assert all(entry.compiles for entry in result), str(result)
    assert max(entry.temporary_bytes or 0 for entry in result) < 4096 * 16 * 8 * 128


@every
@pytest.mark.parametrize(("dtype", "options"), [(jnp.bfloat16, {}), (jnp.int8, SCALES)], ids=str)
def test_the_ragged_form_compiles_and_does_not_copy_the_cache(name, dtype, options):
    result = check_ragged(name, dtype, options)
    assert all(entry.compiles for entry in result), str(result)
    assert max(entry.temporary_bytes or 0 for entry in result) < 4096 * 16 * 8 * 128
