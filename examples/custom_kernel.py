"""A kernel from scratch: an operation, its configs, its gradient, tuned and explained.

    python examples/custom_kernel.py

The operation is a causal convolution along a sequence, `out[t] = sum_k weight[k] * x[t - k]`, as
state-space models use it. How many steps are computed at a time is its config.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops import Invocation, Kernel, autotune, default_executor


@dataclasses.dataclass(frozen=True)
class ConvolutionConfig:
    steps: int = 256  # of the sequence that are computed at a time


class CausalConvolution(Kernel[ConvolutionConfig, jax.Array]):
    """`x` is (length, channels), `weight` is (taps, channels)."""

    def __init__(self) -> None:
        super().__init__(name="causal_convolution")

    def run(self, x, weight, *, cfg):
        taps, length = weight.shape[0], x.shape[0]
        padded = jnp.pad(x, ((taps - 1, 0), (0, 0)))

        def chunk(start):
            rows = jax.lax.dynamic_slice_in_dim(padded, start, cfg.steps + taps - 1)
            parts = (weight[k] * rows[taps - 1 - k :][: cfg.steps] for k in range(taps))
            return sum(parts, jnp.zeros((cfg.steps, x.shape[1]), x.dtype))

        starts = jnp.arange(0, length, cfg.steps)
        return jax.lax.map(chunk, starts).reshape(length, -1)

    def reference(self, x, weight):
        """The truth that candidates are compared with: one product per tap."""
        taps, length = weight.shape[0], x.shape[0]
        padded = jnp.pad(x, ((taps - 1, 0), (0, 0)))
        return sum(weight[k] * padded[taps - 1 - k :][:length] for k in range(taps))

    def heuristic_cfg(self, inv: Invocation):
        return ConvolutionConfig(steps=min(256, inv.args[0].shape[0]))

    def candidate_cfgs(self, inv: Invocation):
        length = inv.args[0].shape[0]
        return [ConvolutionConfig(n) for n in (64, 256, 1024, 4096) if length % n == 0]

    # Without these two, JAX differentiates `run`. Written by hand, the gradient of `x` is a
    # convolution too, in reversed time, with the same blocks.
    def fwd_with_residuals(self, x, weight, *, cfg):
        return self.run(x, weight, cfg=cfg), None

    def vjp(self, _, out, dout, x, weight, *, cfg):
        dx = self.run(dout[::-1], weight, cfg=cfg)[::-1]
        taps, length = weight.shape[0], x.shape[0]
        padded = jnp.pad(x, ((taps - 1, 0), (0, 0)))
        dweight = jnp.stack(
            [jnp.sum(dout * padded[taps - 1 - k :][:length], 0) for k in range(taps)]
        )
        return dx, dweight


convolution = CausalConvolution()


def convolution_layer(x, weight):
    """A piece of a model that uses the kernel like any other function."""
    return jax.nn.silu(convolution(x, weight))


def main() -> None:
    x = jax.random.normal(jax.random.key(0), (4096, 64))
    weight = jax.random.normal(jax.random.key(1), (4, 64))

    print("1. Call it: nothing is stored, so the heuristic config serves.")
    out = convolution(x, weight)
    np.testing.assert_allclose(out, convolution.reference(x, weight), rtol=1e-5, atol=1e-5)

    print("2. Differentiate it: the gradient of the kernel is that of the reference.")
    ours = jax.grad(lambda *a: jnp.sum(convolution(*a) ** 2), (0, 1))(x, weight)
    truth = jax.grad(lambda *a: jnp.sum(convolution.reference(*a) ** 2), (0, 1))(x, weight)
    for mine, other in zip(ours, truth, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-3)

    print("3. Tune it: every candidate is checked against the reference, then they race.\n")
    result = autotune(convolution_layer, x, weight)
    print(result.explain("causal_convolution"))

    print("\n4. Run with what was found, and ask why this config.\n")
    with result:
        tuned = jax.jit(convolution_layer)(x, weight)
        print(default_executor().explain(convolution, x, weight))
    np.testing.assert_allclose(tuned, convolution_layer(x, weight), rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    main()
