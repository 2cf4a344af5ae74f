"""Implementations that declare what they support: who serves a call, and what a refusal says."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops import (
    Kernel,
    NotSupported,
    Supports,
    autotune,
    benchmark,
    vmap_with_config,
)
from ejkernel.ops.config.explain import call_fields


@dataclasses.dataclass(frozen=True)
class Config:
    add: float = 0.0


def even_length(inv):
    """An even length."""
    length = inv.args[0].shape[0]
    return f"x has {length} elements, and only even lengths are supported" if length % 2 else None


class Double(Kernel[Config, jax.Array]):
    """Each implementation leaves a mark on the result, to be told apart."""

    supports = {  # noqa: RUF012
        "cpu": Supports(dtypes=("float32",), without=("bias",), rules=(even_length,)),
        "pallas": Supports(dtypes=("bfloat16",)),
    }

    def __init__(self):
        super().__init__(name="double")

    def run_cpu(self, x, *, cfg, bias=None, scale=2.0):
        return scale * x + 100 + cfg.add

    def run_xla(self, x, *, cfg, bias=None, scale=2.0):
        return scale * x + 200 + cfg.add + (0 if bias is None else bias)

    def run_pallas(self, x, *, cfg, bias=None, scale=2.0):
        raise AssertionError("not on this device")

    def heuristic_cfg_cpu(self, inv):
        return Config(0.25)

    def heuristic_cfg(self, inv):
        return Config(0.5)

    def candidate_cfgs_cpu(self, inv):
        return [Config(0.25), Config(0.125)]

    def fwd_with_residuals_cpu(self, x, *, cfg, bias=None, scale=2.0):
        return self.run_cpu(x, cfg=cfg, scale=scale), None

    def vjp_cpu(self, _, out, dout, x, *, cfg, bias=None, scale=2.0):
        return (1000 * dout,)


ones = jnp.ones(4)


def test_the_first_that_supports_a_call_serves_it_with_its_own_config():
    double = Double()
    assert double(ones)[0] == 102.25
    assert double(jnp.ones(3))[0] == 202.5
    assert double(ones.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    assert double(ones, bias=ones)[0] == 203.5
    assert double.candidates(double.bind(jnp.ones(3))) == [Config(0.5)]
    assert double.candidates(double.bind(ones)) == [Config(0.25), Config(0.125)]


def test_a_request_is_kept_and_never_reaches_the_run_method():
    double = Double()
    assert double(ones, implementation="xla")[0] == 202.5
    assert double(ones, implementation="xla", scale=3.0)[0] == 203.5
    assert jax.jit(lambda x: double(x, implementation="cpu"))(ones)[0] == 102.25
    mapped = vmap_with_config(double)
    assert mapped(jnp.ones((2, 4)), implementation="xla")[0, 0] == 202.5


def test_gradients_are_those_of_the_implementation_that_serves():
    double = Double()
    assert jax.grad(lambda x: double(x).sum())(ones)[0] == 1000
    assert jax.grad(lambda x: double(x, implementation="xla").sum())(ones)[0] == 2


def test_a_request_that_cannot_be_served_gives_every_reason():
    double = Double()
    with pytest.raises(NotSupported) as caught:
        double(jnp.ones(3, jnp.float16), bias=jnp.ones(3), implementation="cpu")
    text = str(caught.value)
    assert "implementation='cpu' does not support double@v1(float16[3]" in text
    assert "arrays of float16 are not supported, only float32" in text
    assert "bias is not supported, and it is given" in text
    assert "x has 3 elements, and only even lengths are supported" in text
    assert "use 'xla'" in text
    with pytest.raises(NotSupported, match="it runs on tpu devices, and this is a cpu"):
        double(ones, implementation="pallas")
    with pytest.raises(ValueError, match=r"implementation='cuda' does not exist; it has .*xla"):
        double(ones, implementation="cuda")


def test_when_nobody_serves_all_are_named():
    class OnlyEven(Kernel[Config, jax.Array]):
        supports = {  # noqa: RUF012
            "cpu": Supports(rules=(even_length,)),
            "xla": Supports(dtypes=("int8",)),
        }

        def run_cpu(self, x, *, cfg):
            return x

        def run_xla(self, x, *, cfg):
            return x

    message = r"(?s)no implementation supports.*cpu: x has 3.*xla: arrays of float32"
    with pytest.raises(NotSupported, match=message):
        OnlyEven()(jnp.ones(3))


def test_configs_are_kept_apart_by_who_serves():
    double = Double()
    free, requested = double.bind(ones), double.bind(ones, implementation="xla")
    assert (free.handled_by, requested.handled_by) == ("cpu", "xla")
    assert free.key != requested.key
    assert call_fields(free)["implementation"] == "cpu"

    class Unavailable(Double):
        supports = {"cpu": Supports(rules=(lambda inv: "there is no compiler",))}  # noqa: RUF012

    assert Unavailable().bind(ones).key != free.key


def test_a_requested_implementation_is_tuned():
    class Alike(Double):
        def run_cpu(self, x, *, cfg):
            return x

    best = autotune(Alike(), ones, implementation="cpu", num_iters=1)
    assert best in (Config(0.25), Config(0.125))


def test_a_reference_and_prepare_do_not_see_the_request():
    seen = []

    class Prepared(Double):
        def prepare(self, x, scale=2.0):
            seen.append(scale)
            return (x,), {"scale": scale}

        def reference(self, x, scale=2.0):
            return scale * x + 200.5

        def make_inputs(self, inv, key):
            return (jnp.ones(inv.args[0].shape),), {"scale": 2.0}

    kernel = Prepared()
    assert kernel(ones, implementation="xla")[0] == 202.5
    assert autotune(kernel, ones, implementation="xla", num_iters=1) == Config(0.5)
    assert seen


def test_a_kernel_without_keywords_takes_a_request_too():
    class Plain(Kernel[Config, jax.Array]):
        def run(self, x, *, cfg):
            return x

        def run_xla(self, x, *, cfg):
            return x + 1

    assert Plain()(ones)[0] == 2
    assert Plain()(ones, implementation="run")[0] == 1


def test_wrong_declarations_are_refused():
    class Wrong(Kernel[Config, jax.Array]):
        supports = {"cuda": Supports()}  # noqa: RUF012

        def run_xla(self, x, *, cfg):
            return x

    with pytest.raises(TypeError, match="supports names cuda, but it has xla"):
        Wrong()
    with pytest.raises(TypeError, match=r"run\(\) takes a keyword 'implementation'"):

        class Reserved(Kernel[Config, jax.Array]):
            def run(self, x, *, cfg, implementation=None):
                return x


def test_the_table_of_operations(capsys):
    from ejkernel.modules import OPERATIONS, support_table, supported

    supported()
    printed = capsys.readouterr().out
    for operation in OPERATIONS:
        assert re.search(rf"^{operation} +xla +cpu, gpu, tpu", printed, re.MULTILINE)
    q = jax.ShapeDtypeStruct((1, 8, 2, 4), jnp.float32)
    supported("flash_attention", q, q, q, causal=True)
    assert re.search(r"^xla +yes$", capsys.readouterr().out, re.MULTILINE)
    assert support_table("flash_attention").rows
    with pytest.raises(ValueError, match="'flush' is none of flash_attention"):
        supported("flush")


def test_benchmark_takes_a_request():
    assert benchmark(Double(), ones, implementation="xla", num_iters=1) > 0
