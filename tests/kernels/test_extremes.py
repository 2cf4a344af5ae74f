"""Options and numbers at the ends of what is allowed, beside the definition in float64."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from config_calls import CALLS

from ejkernel import modules
from ejkernel.kernels.gated_linear_attention import GatedLinearAttentionXlaConfig
from ejkernel.kernels.linear_cross_entropy import LinearCrossEntropyXlaConfig
from ejkernel.kernels.norm import (
    NormGpuConfig,
    NormTpuConfig,
    NormXlaConfig,
    pallas_gpu,
    pallas_tpu,
)
from ejkernel.kernels.norm.arguments import Arguments
from ejkernel.modules import (
    gated_linear_attention,
    gated_linear_unit,
    grouped_matmul,
    layer_norm,
    linear_cross_entropy,
    rms_norm,
)

quick = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def compare(
    operation: Any,
    arrays: dict[str, np.ndarray],
    tolerance: float,
    floor: float = 1e-30,
    **options: Any,
) -> None:
    """Results and gradients, each relative to its largest number, or to `floor`."""

    def both(arrays: dict[str, Any], **options: Any) -> Any:
        results, pull_back = jax.vjp(lambda arrays: operation(**arrays, **options), arrays)
        return results, pull_back(jax.tree.map(lambda x: jnp.cos(2 * x / (1 + abs(x))), results))

    arrays = {name: x.astype(np.float32) for name, x in arrays.items()}
    found = quick(partial(both, **options))(arrays)
    with jax.enable_x64(True):
        exact = {name: jnp.asarray(x, jnp.float64) for name, x in arrays.items()}
        rest = {name: x for name, x in options.items() if name != "cfg"}
        expected = quick(partial(both, **rest, implementation="reference"))(exact)
    for (path, a), b in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.isfinite(b).all(), path
        limit = tolerance * max(np.abs(b).max(), floor)
        np.testing.assert_allclose(a, b, rtol=0, atol=limit, err_msg=str(path))


SIGNED = ("scale", "softmax_scale", "weight_offset")


def numbers_of(operation: str) -> list[str]:
    """The options of an operation that are floating numbers."""
    parameters = inspect.signature(getattr(modules, operation)).parameters.values()
    return [p.name for p in parameters if "float" in str(p.annotation)]


@pytest.mark.parametrize("value", [1e-30, 1e30, -1e-30, -1e30])
@pytest.mark.parametrize(
    ("operation", "option"),
    [
        (operation, option)
        for operation in modules.OPERATIONS
        if operation != "flash_attention"  # it has walks of its own
        for option in numbers_of(operation)
    ],
)
def test_numbers_far_out(operation: str, option: str, value: float) -> None:
    args, options, differentiated = CALLS[operation]()
    function = partial(getattr(modules, operation), **options, **{option: value})
    if (value < 0 and option not in SIGNED) or (option == "label_smoothing" and value >= 1):
        with pytest.raises(ValueError, match=option):
            function(*args)
        return

    def both(args: tuple[Any, ...], **how: Any) -> Any:
        free = [args[i] for i in differentiated]

        def run(*free: Any) -> Any:
            given = dict(zip(differentiated, free, strict=True))
            return function(*(given.get(i, x) for i, x in enumerate(args)), **how)

        out, pull_back = jax.vjp(run, *free)
        return out, pull_back(jnp.cos(2 * out / (1 + abs(out))))

    # Not `quick`: it is the optimiser who fuses a product and a difference.
    found = jax.jit(both)(args)
    with jax.enable_x64(True):
        exact = tuple(x.astype(jnp.float64) if x.dtype == jnp.float32 else x for x in args)
        expected = quick(partial(both, implementation="reference"))(exact)
    for (path, a), b in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        b = np.asarray(b)
        assert np.abs(b).max() < np.finfo(np.float32).max, path
        # A gradient of x is what is left of numbers as large as the weight.
        limit = 1e-4 * max(np.abs(b).max(), 1e-36, abs(value) if option == "weight_offset" else 0)
        np.testing.assert_allclose(a, b, rtol=0, atol=limit, err_msg=str(path))


@pytest.mark.parametrize("operation", ["paged_attention", "linear_cross_entropy"])
def test_a_cap_that_leaves_no_digits_of_a_score(operation: str) -> None:
    args, options, _ = CALLS[operation]()
    for cap in (3e38, 1e-39):
        with pytest.raises(ValueError, match=r"logits_soft_cap.*scores are divided by it"):
            getattr(modules, operation)(*args, **options, logits_soft_cap=cap)


@pytest.mark.parametrize("operation", [rms_norm, layer_norm])
@pytest.mark.parametrize("size", [1e-17, 1e-8, 1.0, 1e8, 1e17])
@pytest.mark.parametrize("eps", [0.0, 1e-35])
def test_norms_of_small_and_large_rows(operation: Any, size: float, eps: float) -> None:
    arrays = {"x": size * random(6, 8), "weight": random(8, seed=1)}
    compare(operation, arrays, 2e-5, eps=eps)
    compare(operation, arrays, 2e-5, eps=eps, cfg=NormXlaConfig(backward_block_m=4))


@pytest.mark.usefixtures("interpreted_pallas")
@pytest.mark.parametrize("size", [1e-17, 1e17])
@pytest.mark.parametrize(
    ("module", "cfg"), [(pallas_gpu, NormGpuConfig()), (pallas_tpu, NormTpuConfig())]
)
def test_norms_of_small_and_large_rows_in_pallas(module: Any, cfg: Any, size: float) -> None:
    x, dout = size * random(8, 128), random(8, 128, seed=1)
    call = Arguments(jnp.asarray(x, jnp.float32), eps=0.0, centered=False)
    dout = jnp.asarray(dout, jnp.float32)
    found = module.differentiate(call, None, (dout, None), cfg)
    rstd = np.mean(x**2, 1, keepdims=True) ** -0.5
    expected = rstd * dout - x * rstd**3 * np.mean(x * dout, 1, keepdims=True)
    np.testing.assert_allclose(found[0] / rstd, expected / rstd, rtol=1e-4, atol=1e-4)


def test_a_row_of_zeros() -> None:
    for operation in (rms_norm, layer_norm):
        compare(operation, {"x": np.zeros((3, 8)), "weight": random(8)}, 1e-5, eps=1e-30)


BLOCKS = LinearCrossEntropyXlaConfig(3, 3, 4)
LOSS_OPTIONS: dict[str, dict[str, Any]] = {
    "large scale": {"softmax_scale": 1e4},
    "small scale": {"softmax_scale": 1e-6},
    "negative scale": {"softmax_scale": -3.0},
    "small cap": {"logits_soft_cap": 1e-3},
    "large cap": {"logits_soft_cap": 1e6},
    "z": {"z_loss": 100.0},
    "smooth": {"label_smoothing": 0.999},
    "all": {"softmax_scale": 50.0, "logits_soft_cap": 30.0, "z_loss": 1.0, "label_smoothing": 0.5},
}


@pytest.mark.parametrize("name", LOSS_OPTIONS)
def test_options_of_the_loss(name: str) -> None:
    labels = jnp.asarray([1, -100, 3, 10, 0])
    arrays = {"hidden": random(5, 4), "weight": random(4, 11, seed=1), "bias": random(11, seed=2)}
    operation = partial(linear_cross_entropy, labels=labels, **LOSS_OPTIONS[name])
    for reduction in ("mean", "none"):
        compare(
            operation, arrays, 5e-4 if "scale" in name else 3e-5, reduction=reduction, cfg=BLOCKS
        )


def test_losses_of_one_row_one_word_and_none_that_count() -> None:
    one = {"hidden": random(1, 1), "weight": random(1, 1, seed=1)}
    compare(partial(linear_cross_entropy, labels=jnp.asarray([0])), one, 1e-6)
    none = {"hidden": random(2, 3), "weight": random(3, 4, seed=1)}
    compare(partial(linear_cross_entropy, labels=jnp.asarray([-100, -100])), none, 1e-6)


@pytest.mark.parametrize("chunk_size", [1, 8])
@pytest.mark.parametrize("decay", [0.0, -1e-6, -50.0, -200.0, "mixed", "some"])
def test_decays(decay: Any, chunk_size: int) -> None:
    shape = (1, 21, 2, 4)
    if decay == "mixed":
        g = -np.abs(random(*shape, seed=3)) * 10.0 ** np.random.default_rng(4).integers(
            -6, 4, shape
        )
    elif decay == "some":
        g = np.where(random(*shape, seed=3) > 0, -50.0, 0.0)
    else:
        g = np.full(shape, decay)
    arrays = {"q": random(*shape), "k": random(*shape, seed=1), "v": random(1, 21, 2, 3, seed=2)}
    cfg = GatedLinearAttentionXlaConfig(chunk_size=chunk_size, backward_chunk_size=chunk_size)
    for scale in (1.0, 1e-6, -1e4):

        def scaled(scale: float = scale, **arrays: Any) -> Any:
            options = {"cfg": cfg} if "implementation" not in arrays else {}
            return gated_linear_attention(**arrays, scale=scale, return_state=True, **options)

        # Step by step, the gradient of a decay is a sum of numbers as large as the outputs.
        compare(
            scaled,
            arrays | {"g": g},
            2e-5,
            floor=max(1.0, abs(scale)) if chunk_size == 1 else 1e-30,
        )


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "sigmoid"])
def test_activations_far_out(activation: str) -> None:
    x = np.array([[-1e4], [-90.0], [-20.0], [-1e-6], [0.0], [1e-6], [20.0], [90.0], [1e4]])
    arrays = {"x": x, "w_gate": np.ones((1, 1)), "w_up": np.full((1, 1), 1e-3)}
    for recompute in (False, True):
        compare(
            partial(gated_linear_unit, activation=activation),
            arrays,
            1e-5,
            floor=1e-3,
            recompute=recompute,
        )


@pytest.mark.parametrize("sizes", [[0, 0, 0], [0, 0, 40], [40, 0, 0], [1, 1, 1], [0, 1, 0]])
def test_groups_that_are_empty(sizes: list[int]) -> None:
    arrays = {"lhs": random(40, 4), "rhs": random(3, 4, 5, seed=1)}
    compare(partial(grouped_matmul, group_sizes=jnp.asarray(sizes)), arrays, 1e-5)
    few = arrays | {"lhs": random(max(1, sum(sizes)), 4)}
    compare(partial(grouped_matmul, group_sizes=jnp.asarray(sizes)), few, 1e-5)
