"""Gated linear attention as a kernel: its config, its implementations, its gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, TypeAlias

import jax

from ejkernel.ops import (
    Dimension,
    Invocation,
    Kernel,
    Limit,
    Limits,
    NearShapes,
    Partitioning,
    Supports,
    device_kind,
)

from ..limits import COUNT, TRITON_SIDE, WARPS
from . import xla
from .reference import gated_linear_attention_reference
from .segments import NotFinite

Result: TypeAlias = jax.Array | tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class GatedLinearAttentionConfig:
    """How the recurrence is cut.

    Args:
      chunk_size: tokens that are worked on together, a power of two; 1: step by step (XLA only).
      bwd_chunk_size: the same for the backward pass. The Pallas implementations keep the states
        between chunks for it and use `chunk_size` in both.
      rows: step by step, at most so many pairs of a batch entry and a head at a time.
      bwd_rows: the same for the backward pass.
      value_block: on a GPU, value channels per program; None: all.
      num_warps: on a GPU, warps per program.
    """

    chunk_size: int = 1
    bwd_chunk_size: int = 1
    rows: int = 8
    bwd_rows: int = 8
    value_block: int | None = None
    num_warps: int | None = None


def _dims_fit_a_tpu(inv: Invocation[Any, Any]) -> str | None:
    """key_dim and value_dim are multiples of 8, at most 256."""
    for name, array in (("key_dim", inv.args[0]), ("value_dim", inv.args[2])):
        size = array.shape[3]
        if size % 8 or size > 256:
            return f"{name} is {size}; it must be a multiple of 8 and at most 256"
    return None


def _dims_fit_a_gpu(inv: Invocation[Any, Any]) -> str | None:
    """key_dim and value_dim are powers of two from 16, key_dim at most 128."""
    for name, array, most in (("key_dim", inv.args[0], 128), ("value_dim", inv.args[2], 1024)):
        size = array.shape[3]
        if size < 16 or size & (size - 1) or size > most:
            return f"{name} is {size}; it must be a power of two from 16 to {most}"
    return None


def _value_blocks_are_whole(
    cfg: GatedLinearAttentionConfig, inv: Invocation[Any, Any]
) -> str | None:
    value_dim = inv.args[2].shape[3]
    if cfg.value_block is None or value_dim % cfg.value_block == 0:
        return None
    return f"value_block={cfg.value_block} must divide value_dim, which is {value_dim}"


_MOST_TOKENS = 1024  # of a chunk: the products of its tokens with each other are all in memory

LIMITS = {
    # A chunk is halved until single tokens are left.
    "xla": Limits(
        {
            "chunk_size": Limit(least=1, most=_MOST_TOKENS, power_of_two=True),
            "bwd_chunk_size": Limit(least=1, most=_MOST_TOKENS, power_of_two=True),
            "rows": COUNT,
            "bwd_rows": COUNT,
        }
    ),
    "pallas": Limits({"chunk_size": Limit(least=8, most=_MOST_TOKENS, power_of_two=True)}),
    "triton": Limits(
        {"chunk_size": TRITON_SIDE, "value_block": TRITON_SIDE, "num_warps": WARPS},
        rules=(_value_blocks_are_whole,),
    ),
}


class GatedLinearAttention(Kernel[GatedLinearAttentionConfig, Any]):
    """`S_t = diag(exp(g_t)) S_{t-1} + k_tᵀ v_t`, `o_t = scale · q_t S_t`.

    Arguments are `q, k, v` as `(batch, length, heads, features)`, and `g` if there is a decay;
    keywords `scale`, and `initial_state`, `return_state` and `segments` (there are starts of
    segments in `g`) where they are wanted. Use
    `ejkernel.modules.gated_linear_attention`, which checks them.
    """

    version = "1"
    near_shapes = NearShapes(
        Dimension(axis=0, rounding="nearest"), Dimension(axis=1, rounding="nearest"), within=4.0
    )
    limits: ClassVar[Mapping[str, Limits]] = LIMITS
    supports: ClassVar[Mapping[str, Supports]] = {
        "pallas": Supports(dtypes=("float32", "bfloat16"), rules=(_dims_fit_a_tpu,)),
        "triton": Supports(dtypes=("float32", "bfloat16", "float16"), rules=(_dims_fit_a_gpu,)),
    }

    def __init__(self) -> None:
        super().__init__(name="gated_linear_attention")

    def partitioning(self, inv: Invocation[Any, Any]) -> Partitioning:
        decay = ""
        if len(inv.args) == 4:
            decay = ", b t h d" if len(inv.args[3].shape) == 4 else ", b t h"
        state = ", b h d e" if inv.kwargs.get("return_state") else ""
        return Partitioning(
            f"b t h d, b t h d, b t h e{decay} -> b t h e{state}",
            keywords={"initial_state": "b h d e"},
            independent="b h",
        )

    # --- configs ----------------------------------------------------------------------------------

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> GatedLinearAttentionConfig:
        if device_kind() == "cpu":
            return GatedLinearAttentionConfig(
                rows=xla.default_rows(*_sizes(inv), backward=False),
                bwd_rows=xla.default_rows(*_sizes(inv), backward=True),
            )
        return GatedLinearAttentionConfig(chunk_size=64, bwd_chunk_size=64)

    def heuristic_cfg_pallas(self, inv: Invocation[Any, Any]) -> GatedLinearAttentionConfig:
        # From the compiler's schedules for a v5e: with a decay per channel the levels of a larger
        # chunk eat up what it saves, without them 128 takes 0.83 times as long.
        per_channel = len(inv.args) == 4 and len(inv.args[3].shape) == 4
        size = 64 if per_channel else 128
        return GatedLinearAttentionConfig(chunk_size=size, bwd_chunk_size=size)

    def heuristic_cfg_triton(self, inv: Invocation[Any, Any]) -> GatedLinearAttentionConfig:
        # The least by the compiler's schedules for an A100 and an H100, of those that compile in
        # less than a minute; larger blocks spill.
        return _triton_config(chunk_size=32, value_block=32, num_warps=8, inv=inv)

    def candidate_cfgs(self, inv: Invocation[Any, Any]) -> list[GatedLinearAttentionConfig]:
        total, key_dim, value_dim = _sizes(inv)
        good = xla.default_rows(total, key_dim, value_dim, backward=True)
        # Half of what is good, twice that, and so on; the passes do not share anything, so each is
        # varied while the other stays as it is.
        sizes = sorted({min(max(1, good * factor // 2), total) for factor in (1, 2, 4, 8)})
        steps = self.heuristic_cfg(inv)
        return [
            *(dataclasses.replace(steps, chunk_size=1, rows=rows) for rows in sizes),
            *(dataclasses.replace(steps, bwd_chunk_size=1, bwd_rows=rows) for rows in sizes),
            *(GatedLinearAttentionConfig(size, size) for size in (32, 64, 128)),
        ]

    def candidate_cfgs_pallas(self, inv: Invocation[Any, Any]) -> list[GatedLinearAttentionConfig]:
        return [GatedLinearAttentionConfig(size, size) for size in (16, 32, 64, 128)]

    def candidate_cfgs_triton(self, inv: Invocation[Any, Any]) -> list[GatedLinearAttentionConfig]:
        return [
            _triton_config(chunk_size=size, value_block=block, num_warps=warps, inv=inv)
            for size in (16, 32, 64)
            for block in (16, 32, 64)
            for warps in (2, 4, 8)
        ]

    def make_inputs(self, inv: Invocation[Any, Any], key: jax.Array) -> tuple[Any, Any]:
        """Random numbers, but decays that decay: with growth nothing would stay finite."""

        def fill(index: int, like: Any) -> jax.Array:
            return jax.random.normal(jax.random.fold_in(key, index), like.shape, like.dtype)

        arrays = [fill(index, like) for index, like in enumerate(inv.args)]
        if len(arrays) == 4:
            arrays[3] = jax.nn.log_sigmoid(arrays[3])
        keywords = dict(inv.kwargs)
        if "initial_state" in keywords:
            keywords["initial_state"] = fill(4, keywords["initial_state"])
        return tuple(arrays), keywords

    # --- any device -------------------------------------------------------------------------------

    def run_xla(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        g: jax.Array | None = None,
        *,
        cfg: GatedLinearAttentionConfig,
        scale: float,
        initial_state: jax.Array | None = None,
        return_state: bool = False,
        segments: bool = False,
    ) -> Result:
        forward: Callable[..., Any] = partial(
            xla.forward, scale=scale, chunk_size=cfg.chunk_size, rows=cfg.rows, segments=segments
        )
        if segments and cfg.chunk_size > 1:
            forward = _segments_apart(forward)
        out, state = forward(q, k, v, g, initial_state)
        return (out, state) if return_state else out

    def custom_vjp_xla(
        self,
        primals: tuple[jax.Array, ...],
        cfg: GatedLinearAttentionConfig,
        kwargs: Mapping[str, Any],
        cotangents: tuple[jax.Array, ...],
    ) -> tuple[Any, ...]:
        q, k, v, *g = primals
        segments = kwargs.get("segments", False)
        backward: Callable[..., xla.Gradients] = partial(
            xla.backward,
            scale=kwargs["scale"],
            chunk_size=cfg.bwd_chunk_size,
            rows=cfg.bwd_rows,
            segments=segments,
        )
        if segments and cfg.bwd_chunk_size > 1:
            backward = _gradients_apart(backward, kwargs.get("initial_state"))
        found = backward(
            q,
            k,
            v,
            g[0] if g else None,
            kwargs.get("initial_state"),
            cotangents[0],
            cotangents[1] if len(cotangents) == 2 else None,
        )
        return _gradients(found, kwargs)

    # --- TPU --------------------------------------------------------------------------------------

    def run_pallas(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        g: jax.Array | None = None,
        *,
        cfg: GatedLinearAttentionConfig,
        **kwargs: Any,
    ) -> Result:
        return self.fwd_with_residuals_pallas(q, k, v, g, cfg=cfg, **kwargs)[0]

    def fwd_with_residuals_pallas(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        g: jax.Array | None = None,
        *,
        cfg: GatedLinearAttentionConfig,
        scale: float,
        initial_state: jax.Array | None = None,
        return_state: bool = False,
        segments: bool = False,
    ) -> tuple[Result, jax.Array]:
        from . import pallas_tpu

        forward: Callable[..., Any] = partial(
            pallas_tpu.forward, scale=scale, chunk_size=cfg.chunk_size
        )
        forward = _segments_apart(forward) if segments else forward
        out, state, states = forward(q, k, v, g, initial_state)
        return ((out, state) if return_state else out), states

    def vjp_pallas(
        self,
        states: jax.Array,
        out: Result,
        dout: Any,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        g: jax.Array | None = None,
        *,
        cfg: GatedLinearAttentionConfig,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        from . import pallas_tpu

        dout, dstate = dout if isinstance(dout, tuple) else (dout, None)
        backward: Callable[..., xla.Gradients] = partial(
            pallas_tpu.backward, scale=kwargs["scale"], chunk_size=cfg.chunk_size
        )
        if kwargs.get("segments"):
            backward = _gradients_apart(backward, kwargs.get("initial_state"))
        found = backward(q, k, v, g, states, dout, dstate)
        return _gradients(found, kwargs)

    # --- GPU --------------------------------------------------------------------------------------

    def run_triton(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        g: jax.Array | None = None,
        *,
        cfg: GatedLinearAttentionConfig,
        **kwargs: Any,
    ) -> Result:
        return self.fwd_with_residuals_triton(q, k, v, g, cfg=cfg, **kwargs)[0]

    def fwd_with_residuals_triton(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        g: jax.Array | None = None,
        *,
        cfg: GatedLinearAttentionConfig,
        scale: float,
        initial_state: jax.Array | None = None,
        return_state: bool = False,
        segments: bool = False,
    ) -> tuple[Result, jax.Array]:
        from . import pallas_gpu

        forward: Callable[..., Any] = partial(
            pallas_gpu.forward, scale=scale, **_triton_options(cfg, v)
        )
        forward = _segments_apart(forward) if segments else forward
        out, state, states = forward(q, k, v, g, initial_state)
        return ((out, state) if return_state else out), states

    def vjp_triton(
        self,
        states: jax.Array,
        out: Result,
        dout: Any,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        g: jax.Array | None = None,
        *,
        cfg: GatedLinearAttentionConfig,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        from . import pallas_gpu

        dout, dstate = dout if isinstance(dout, tuple) else (dout, None)
        backward: Callable[..., xla.Gradients] = partial(
            pallas_gpu.backward, scale=kwargs["scale"], **_triton_options(cfg, v)
        )
        if kwargs.get("segments"):
            backward = _gradients_apart(backward, kwargs.get("initial_state"))
        found = backward(q, k, v, g, states, dout, dstate)
        return _gradients(found, kwargs)

    def entries_are_independent(self, *args: Any, **options: Any) -> bool:
        return True

    reference = staticmethod(gated_linear_attention_reference)


def _segments_apart(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward pass in chunks, without anything of one segment in another; see `segments`."""

    def run(q: Any, k: Any, v: Any, g: Any, initial_state: Any) -> Any:
        found = NotFinite(g, q, k, v, first=initial_state)
        state = found.hidden_state(initial_state, 0)
        out, last, *states = forward(*found.hidden(q, k, v), found.hidden_decay(g), state)
        return found.shown(out), found.shown_state(last, -1), *states

    return run


def _gradients_apart(
    backward: Callable[..., xla.Gradients], initial_state: jax.Array | None
) -> Callable[..., xla.Gradients]:
    """The backward pass likewise."""

    def run(q: Any, k: Any, v: Any, g: Any, states: Any, dout: Any, dstate: Any) -> xla.Gradients:
        found = NotFinite(g, q, k, v, dout, first=initial_state, last=dstate)
        q, k, v, dout = found.hidden(q, k, v, dout)
        dstate = found.hidden_state(dstate, -1)
        if states is initial_state:  # else they are those before the chunks
            states = found.hidden_state(states, 0)
        made = backward(q, k, v, found.hidden_decay(g), states, dout, dstate)
        return xla.Gradients(
            found.shown_gradient(made.q),
            found.shown_gradient(made.k),
            found.shown_gradient(made.v),
            None if made.g is None else found.shown_gradient(made.g),
            found.shown_state(made.state, 0),
        )

    return run


def _gradients(found: xla.Gradients, kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """One gradient per argument, and that of the keyword that has one."""
    positional = (found.q, found.k, found.v) if found.g is None else found[:4]
    return (
        (*positional, {"initial_state": found.state}) if "initial_state" in kwargs else positional
    )


def _sizes(inv: Invocation[Any, Any]) -> tuple[int, int, int]:
    q, _, v = inv.args[:3]
    return q.shape[0] * q.shape[2], q.shape[3], v.shape[3]


def _triton_config(
    *, chunk_size: int, value_block: int, num_warps: int, inv: Invocation[Any, Any]
) -> GatedLinearAttentionConfig:
    return GatedLinearAttentionConfig(
        chunk_size,
        chunk_size,
        value_block=min(value_block, inv.args[2].shape[3]),
        num_warps=num_warps,
    )


def _triton_options(cfg: GatedLinearAttentionConfig, v: jax.Array) -> dict[str, Any]:
    return {
        "chunk_size": cfg.chunk_size,
        "value_block": cfg.value_block or v.shape[3],
        "num_warps": cfg.num_warps or 8,
    }
