"""Flash attention for TPU; `kernels` has the Pallas kernels, imported when one is traced."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from ejkernel.ops import Implementation, Invocation, Limit, Limits, Supports

from .. import options as call_options
from ..passes import Gradients, Options, Results, Sizes, each_pass_varied, passes_of
from ..xla import differentiate_with_bias


@dataclasses.dataclass(frozen=True)
class FlashAttentionTpuConfig:
    """Most queries and keys in a tile of each pass, rounded up to multiples of 128.

    None leaves one to the heuristic.
    """

    block_q: int | None = None
    block_k: int | None = None
    backward_block_q: int | None = None
    backward_block_k: int | None = None


def heuristic_config(q: Any, k: Any, v: Any, **options: Any) -> FlashAttentionTpuConfig:
    """By the schedules of libtpu (docs/operations/flash_attention.md); no hardware confirmed it."""
    return FlashAttentionTpuConfig(512, 1024, 512, 1024)


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, sizes: Sizes, options: Options
) -> tuple[jax.Array, jax.Array]:
    """The output and the log-sum-exp."""
    from . import kernels

    return kernels.forward(q, k, v, call_options.Options(**options), **sizes)


def differentiate(results: Results, sizes: Sizes, options: Options) -> Gradients:
    """The gradients of `q`, `k`, `v` and `sinks`."""
    from . import kernels

    return kernels.backward(*results, call_options.Options(**options), **sizes)


_FORWARD = ((256, 512), (512, 512), (1024, 512), (1024, 1024), (512, 2048))
_BACKWARD = ((256, 512), (512, 512), (1024, 512), (1024, 1024), (256, 256))


def _heuristic(inv: Invocation[Any, Any]) -> FlashAttentionTpuConfig:
    return heuristic_config(*inv.args)


def _space(inv: Invocation[Any, Any]) -> list[FlashAttentionTpuConfig]:
    return each_pass_varied(_heuristic(inv), _FORWARD, _BACKWARD)


PALLAS_TPU: Implementation[FlashAttentionTpuConfig, Any] = Implementation(
    name="pallas",
    devices=("tpu",),
    config=FlashAttentionTpuConfig,
    heuristic=_heuristic,
    space=_space,
    supports=Supports(
        dtypes=("float32", "bfloat16"), without=("dropout_rate", "dropout_key", "sequence_axis")
    ),
    limits=Limits(
        {
            field.name: Limit(least=1, most=2**15)
            for field in dataclasses.fields(FlashAttentionTpuConfig)
        }
    ),
    **passes_of(heuristic_config, attend, differentiate, differentiate_with_bias)._asdict(),
)
