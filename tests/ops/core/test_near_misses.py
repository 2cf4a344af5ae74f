"""What was meant as a method of a kernel, a config or an operation, and is not quite one."""

from __future__ import annotations

import dataclasses
import types
import warnings

import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops import Implementation, Invocation, Kernel, overlay_cache


@dataclasses.dataclass(frozen=True)
class Config:
    rows: int = 8


def kernel_class(**methods):
    body = {"run": lambda self, x, *, cfg: x * cfg.rows, **methods}
    return types.new_class(
        "Scaled", (Kernel[Config, jax.Array],), exec_body=lambda n: n.update(body)
    )


def method(self, inv):
    return None


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("candidate_configs", "candidate_cfgs"),
        ("heuristic_config", "heuristic_cfg"),
        ("config_spaces", "config_space"),
        ("heuristic_config_gpu", "heuristic_cfg_gpu"),
        ("runs", "run"),
        ("references", "reference"),
        ("make_input", "make_inputs"),
        ("fwd_with_residual", "fwd_with_residuals"),
    ],
)
def test_a_method_that_is_nearly_ours(written, meant):
    with pytest.raises(TypeError, match=rf"defines {written}\(\).*did you mean {meant}\?"):
        kernel_class(**{written: method})


def test_forward_without_run():
    with pytest.raises(TypeError, match=r"defines forward\(\).*did you mean run\?"):

        class Scaled(Kernel[Config, jax.Array]):
            def forward(self, x):
                return x


@pytest.mark.parametrize(
    "written", ["forward", "_candidate_configs", "helper", "blocks", "prune", "cost", "make_inputs"]
)
def test_helpers_are_nobodys_business(written):
    kernel_class(**{written: method})


@pytest.mark.parametrize("name", ["run", "run_gpu"])
def test_a_run_method_without_cfg(name):
    def run(self, x):
        return x

    with pytest.raises(TypeError, match=rf"{name}\(self, x\) takes no cfg"):
        kernel_class(**{name: run})


def test_a_run_method_that_takes_everything_takes_cfg():
    def run(self, *args, **kwargs):
        return args[0] * kwargs["cfg"].rows

    assert kernel_class(run=run)()(jnp.ones(2)).tolist() == [8.0, 8.0]


@dataclasses.dataclass
class Unfrozen:
    rows: int = 8


@dataclasses.dataclass(frozen=True)
class WithList:
    rows: list[int] | None = None


@pytest.mark.parametrize(
    ("config", "message"),
    [(Unfrozen, "can be changed after it was chosen"), (WithList, "'rows' that cannot be hashed")],
)
def test_a_config_that_is_no_value(config, message):
    with pytest.warns(UserWarning, match=message) as caught:

        class Scaled(Kernel[config, jax.Array]):
            def run(self, x, *, cfg):
                return x

    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=message):

        class Listed(Kernel[object, jax.Array]):
            implementations = (Implementation(name="xla", config=config, forward=lambda x, cfg: x),)


# --- overlays ------------------------------------------------------------------------------------


def test_an_overlay_for_an_operation_that_does_not_exist():
    kernel = kernel_class()(name="overlaid_sum")
    with (
        pytest.warns(UserWarning, match=r"'overlaid_sun'.*did you mean 'overlaid_sum'\?") as caught,
        overlay_cache({"overlaid_sun": Config(2)}),
    ):
        assert kernel(jnp.ones(1)).tolist() == [8.0]
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="'overlaid_sum@v2'"):
        overlay_cache({"overlaid_sum@v2": Config(2)})


@pytest.mark.parametrize("form", ["name", "id", "label", "key"])
def test_an_overlay_for_one_that_does(form):
    kernel = kernel_class()(name="overlaid_product")
    key = kernel.bind(jnp.ones(1)).key
    keys = {"name": "overlaid_product", "id": "overlaid_product@v1", "key": key}
    keys["label"] = f"ejkernel_ops#overlaid_product@v1:{key.call_key}"
    with warnings.catch_warnings(), overlay_cache({keys[form]: Config(2)}):
        warnings.simplefilter("error")
        assert kernel(jnp.ones(1)).tolist() == [2.0]


# --- calls in words ------------------------------------------------------------------------------


def test_keywords_with_their_defaults_are_left_out():
    class Named(Kernel[Config, jax.Array]):
        def run(self, x, *, cfg, scale, causal):
            return x

        def default_keywords(self, *args):
            return {"scale": args[0].shape[0] ** -0.5, "causal": False}

    def signature(**keywords):
        return Invocation(kernel=Named(), args=(jnp.ones(4),), kwargs=keywords).signature

    assert signature(scale=0.5, causal=False) == "float32[4]"
    assert signature(scale=0.25, causal=True) == "float32[4], scale=0.25, causal=True"
    assert signature(scale=jnp.ones(()), causal=0) == "float32[4], scale=float32[], causal=0"


def test_the_scale_of_attention_is_left_out_where_it_is_the_default():
    from ejkernel.kernels.flash_attention.kernel import FlashAttention

    q = jax.ShapeDtypeStruct((1, 8, 2, 16), jnp.float32)
    call = FlashAttention().bind(q, q, q, causal=True, softmax_scale=0.25)
    assert call.signature == ", ".join(["float32[1,8,2,16]"] * 3) + ", causal=True"
