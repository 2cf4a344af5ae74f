"""One small call of every operation, with its dimensions by name: what the matrix is made of.

An operation that is added to `ejkernel.modules.OPERATIONS` needs an example here; all settings,
transforms and shardings then follow from it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ejkernel import modules


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
    """A call: `arrays` have dimensions by name, `sizes` says how large these are.

    `shardable` are the dimensions along which the operation must stay sharded; `local` those of
    them whose parts are calls of their own, as inside a `shard_map`.
    """

    operation: str
    arrays: Mapping[str, str]
    outputs: tuple[str, ...]
    sizes: Mapping[str, int]
    shardable: tuple[str, ...]
    local: tuple[str, ...]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fill: Mapping[str, Callable[[jax.Array, tuple[int, ...]], jax.Array]] = dataclasses.field(
        default_factory=dict
    )
    name: str = ""

    def __str__(self) -> str:
        return self.name or self.operation

    def __call__(self, **arrays: Any) -> Any:
        """The outputs, always as a list."""
        function = getattr(modules, self.operation)
        return jax.tree.leaves(function(**arrays, **self.options))

    def by_definition(self) -> Example:
        """The same call of the operation's definition, in plain JAX."""
        options = {**self.options, "implementation": "reference"}
        return dataclasses.replace(self, options=options)

    def shape(self, array: str) -> tuple[int, ...]:
        return tuple(self.sizes[name] for name in self.arrays[array].split())

    def inputs(self, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
        made = {}
        for number, name in enumerate(self.arrays):
            key, shape = jax.random.fold_in(jax.random.key(0), number), self.shape(name)
            if name in self.fill:
                made[name] = self.fill[name](key, shape)
            else:
                made[name] = jax.random.normal(key, shape, dtype)
            if jnp.issubdtype(made[name].dtype, jnp.floating):
                made[name] = made[name].astype(dtype)
        return made

    def spec(self, dims: str, axes: Mapping[str, Any]) -> PartitionSpec:
        return PartitionSpec(*(axes.get(name) for name in dims.split()))

    def specs(self, axes: Mapping[str, Any]) -> dict[str, PartitionSpec]:
        """How each array is sharded if these dimensions are, over these mesh axes."""
        return {name: self.spec(dims, axes) for name, dims in self.arrays.items()}

    def loss(self, arrays: Mapping[str, Any]) -> jax.Array:
        """A number that every output counts in, with weights that are all different."""
        total = jnp.float32(0)
        for out in self(**arrays):
            out = out.astype(jnp.float64 if out.dtype == jnp.float64 else jnp.float32)
            size = math.prod(out.shape)
            weights = jnp.cos(jnp.arange(size, dtype=out.dtype)).reshape(out.shape)
            weights = _like(weights, out)
            total = total + jnp.sum(jnp.sin(out) * weights).astype(jnp.float32)
        return total

    def gradients(self, arrays: Mapping[str, Any]) -> dict[str, jax.Array]:
        """The gradient of `loss` in every array that can have one."""
        fixed = {n: a for n, a in arrays.items() if not jnp.issubdtype(a.dtype, jnp.inexact)}
        free = {n: a for n, a in arrays.items() if n not in fixed}
        return jax.grad(lambda free: self.loss({**free, **fixed}))(free)


def _like(weights: jax.Array, out: jax.Array) -> jax.Array:
    """Weights with the sharding of an output, where JAX wants both to be equal."""
    sharding = jax.typeof(out).sharding
    explicit = jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
    return jax.sharding.reshard(weights, sharding) if explicit else weights


def _integers(high: int) -> Callable[[jax.Array, tuple[int, ...]], jax.Array]:
    return lambda key, shape: jax.random.randint(key, shape, 0, high)


def _decays(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.nn.log_sigmoid(jax.random.normal(key, shape))


def _small(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Weights whose products are of the size of one."""
    return jax.random.normal(key, shape) * shape[0] ** -0.5


_ATTENTION = {"q": "b s h d", "k": "b t k d", "v": "b t k e"}
_ATTENTION_SIZES = {"b": 4, "s": 32, "t": 32, "h": 8, "k": 4, "d": 16, "e": 16}

EXAMPLES = (
    Example(
        "flash_attention",
        _ATTENTION,
        ("b s h e",),
        _ATTENTION_SIZES,
        shardable=("b", "h k"),
        local=("b", "h k"),
        options={"causal": True},
    ),
    Example(
        "flash_attention",
        {
            **_ATTENTION,
            "bias": "b h s t",
            "segment_ids": "b s",
            "sinks": "h",
            "kv_lengths": "b",
        },
        ("b s h e", "b h s"),
        _ATTENTION_SIZES,
        shardable=("b", "h k"),
        local=("b", "h k"),
        options={"window": 9, "return_lse": True},
        fill={
            "segment_ids": lambda key, shape: jnp.arange(math.prod(shape)).reshape(shape) // 12,
            "kv_lengths": lambda key, shape: 32 - jnp.arange(math.prod(shape)).reshape(shape),
        },
        name="flash_attention_options",
    ),
    Example(
        "flash_attention",
        _ATTENTION,
        ("b s h e",),
        _ATTENTION_SIZES,
        shardable=("b", "h k"),
        local=(),  # parts that know nothing of each other drop the same weights
        options={"dropout_rate": 0.5, "dropout_key": jax.random.PRNGKey(3)},
        name="flash_attention_dropout",
    ),
    Example(
        "flash_attention",
        _ATTENTION,
        ("b s h e",),
        {**_ATTENTION_SIZES, "k": 1},
        shardable=("b", "h"),
        local=("b", "h"),
        name="flash_attention_one_key_head",
    ),
    Example(
        "paged_attention",
        {
            "q": "b h d",
            "k_pages": "n p k d",
            "v_pages": "n p k e",
            "page_table": "b m",
            "lengths": "b",
        },
        ("b h e",),
        {"b": 4, "h": 8, "k": 4, "d": 16, "e": 16, "n": 12, "p": 8, "m": 3},
        shardable=("b", "h k"),
        local=("b", "h k"),
        fill={
            "page_table": _integers(12),
            "lengths": lambda key, shape: 5 + 6 * jnp.arange(math.prod(shape)).reshape(shape),
        },
    ),
    Example(
        "ragged_paged_attention",
        {
            "q": "t h d",
            "k_pages": "n p k d",
            "v_pages": "n p k e",
            "page_table": "s m",
            "lengths": "s",
            "query_starts": "starts",
            "k_scale": "n p k",
            "v_scale": "k",
        },
        ("t h e",),
        {
            **{"t": 12, "h": 8, "k": 4, "d": 16, "e": 16, "n": 12, "p": 8, "m": 3},
            **{"s": 4, "starts": 5},
        },
        shardable=("h k",),
        local=("h k",),
        fill={
            "page_table": _integers(12),
            "lengths": lambda key, shape: jnp.broadcast_to(5 + 6 * jnp.arange(4), shape),
            "query_starts": lambda key, shape: jnp.broadcast_to(jnp.array([0, 1, 6, 6, 11]), shape),
        },
    ),
    Example(
        "grouped_matmul",
        {"lhs": "m k", "rhs": "g k n", "group_sizes": "c"},
        ("m n",),
        {"m": 64, "k": 16, "g": 4, "c": 4, "n": 32},
        shardable=("m", "n", "g", "k"),
        local=("n",),
        fill={"group_sizes": lambda key, shape: jnp.array([20, 0, 31, 9], jnp.int32)},
    ),
    *(
        Example(
            operation,
            {"x": "b t d", "weight": "d", **more, **residual},
            ("b t d", "b t d") if residual else ("b t d",),
            {"b": 4, "t": 8, "d": 32},
            shardable=("b", "t", "d"),
            local=("b", "t"),
            name=operation + ("_residual" if residual else ""),
        )
        for operation, more in (("rms_norm", {}), ("layer_norm", {"bias": "d"}))
        for residual in ({}, {"residual": "b t d"})
        if operation == "rms_norm" or not residual
    ),
    *(
        Example(
            "linear_cross_entropy",
            {"hidden": "b t d", "weight": "d v", "labels": "b t", "bias": "v"},
            ("b t",) if reduction == "none" else ("",),
            {"b": 4, "t": 8, "d": 16, "v": 64},
            shardable=("b", "t", "v"),
            local=("b", "t") if reduction == "none" else (),
            options={"reduction": reduction, "z_loss": 0.01, "label_smoothing": 0.1},
            fill={"labels": lambda key, shape: _integers(64)(key, shape).at[0, :3].set(-100)},
            name=f"linear_cross_entropy_{reduction}",
        )
        for reduction in ("mean", "sum", "none")
    ),
    Example(
        "gated_linear_attention",
        {
            "q": "b t h d",
            "k": "b t h d",
            "v": "b t h e",
            "g": "b t h d",
            "initial_state": "b h d e",
            "segment_ids": "b t",
        },
        ("b t h e", "b h d e"),
        {"b": 4, "t": 32, "h": 4, "d": 16, "e": 16},
        shardable=("b", "h"),
        local=("b", "h"),
        options={"return_state": True},
        fill={
            "g": _decays,
            "segment_ids": lambda key, shape: jnp.broadcast_to(jnp.arange(32) // 13, shape),
        },
    ),
    Example(
        "gated_linear_unit",
        {"x": "b t k", "w_gate": "k n", "w_up": "k n", "b_gate": "n"},
        ("b t n",),
        {"b": 4, "t": 8, "k": 16, "n": 32},
        shardable=("b", "t", "n"),
        local=("b", "t", "n"),
        fill={"w_gate": _small, "w_up": _small},
    ),
    Example(
        "gated_linear_unit",
        {"x": "b t k", "w_gate": "k two n"},
        ("b t n",),
        {"b": 4, "t": 8, "k": 16, "two": 2, "n": 32},
        shardable=("b", "t", "n"),
        local=("b", "t", "n"),
        fill={"w_gate": _small},
        name="gated_linear_unit_stacked",
    ),
)
