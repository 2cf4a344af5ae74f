"""The Pallas losses, compiled for TPU and CUDA where the compilers are installed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from ejkernel import targets
from ejkernel.kernels.linear_cross_entropy import LinearCrossEntropy
from ejkernel.ops import Implementation, Kernel

USABLE = {entry.target.name for entry in targets.available() if entry.usable}
LOSS = LinearCrossEntropy()


@pytest.fixture(scope="module", autouse=True)
def no_worker_is_left_behind():
    yield
    targets.stop_workers()


def both_passes(item):
    """The implementation with the loss of every row and its gradients as one forward pass."""

    def forward(hidden, weight, labels, dout, *, cfg, **options):
        args, options = (hidden, weight, labels), {**options, "cfg": cfg}
        if item.name == "triton":  # the gradients are XLA's
            return item.forward(*args, **options)
        out, saved = item.forward_with_residuals(*args, **options)
        return out, item.backward(saved, None, dout, *args, **options)

    return Implementation(
        name=item.name,
        devices=item.devices,
        config=item.config,
        heuristic=lambda inv: item.heuristic(_loss_alone(inv)),
        space=lambda inv: list(item.space(_loss_alone(inv)))[:1],
        forward=forward,
    )


def _loss_alone(inv):
    return LOSS.bind(*inv.args[:3], **inv.kwargs)


class Both(Kernel):
    """The loss of every row and its gradients as one program, for the compilers."""

    implementations = tuple(both_passes(item) for item in LOSS.implementations[:2])


@pytest.mark.parametrize(
    ("sizes", "dtype", "options"),
    [
        ((4096, 1024, 32_000), jnp.bfloat16, {}),
        ((1000, 768, 50_257), jnp.float32, {"vocab_first": True, "label_smoothing": 0.1}),
        ((512, 4096, 8_192), jnp.bfloat16, {"logits_soft_cap": 30.0, "z_loss": 1e-4}),
    ],
    ids=str,
)
@pytest.mark.parametrize("target", ["tpu-v5e", "tpu-v6e", "cuda-sm80", "cuda-sm90"])
def test_configs_compile_forward_and_backward(sizes, dtype, options, target):
    if target not in USABLE:
        pytest.skip(f"nothing compiles for {target} here; `make targets` installs what does")
    rows, features, vocab = sizes
    hidden = jax.ShapeDtypeStruct((rows, features), dtype)
    shape = (vocab, features) if options.get("vocab_first") else (features, vocab)
    weight = jax.ShapeDtypeStruct(shape, dtype)
    labels = jax.ShapeDtypeStruct((rows,), jnp.int32)
    dout = jax.ShapeDtypeStruct((rows,), jnp.float32)
    result = targets.check(
        Both(), hidden, weight, labels, dout, target=target, reduction="none", **options
    )
    print(result)
    assert not result.infeasible, str(result)
