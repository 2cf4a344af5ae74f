"""An implementation's own gradient rule as a `jax.custom_vjp`.

What the author returns is checked, because a gradient in the wrong place is the worst kind of bug:
it trains.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from .derivatives import batched_alike, named_when_differentiated, reverse_mode_only
from .invocation import StaticPart, array_owners, split
from .varying import vary_alike

if TYPE_CHECKING:
    from .implementation import Implementation


DIFFERENTIATED = "differentiated"
"""A `vjp` with a parameter of this name is told the keywords whose gradients are needed."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """A gradient rule: `forward(args, kwargs) -> (out, saved)`, and `backward`.

    `backward(saved, dout, args, kwargs, differentiated)` gives the raw gradients; the last argument
    holds the names of the keywords that are differentiated.
    """

    forward: Callable[[tuple[Any, ...], Mapping[str, Any]], tuple[Any, Any]]
    backward: Callable[[Any, Any, tuple[Any, ...], Mapping[str, Any], frozenset[str]], Any]
    name: str


def _rule_of(implementation: Implementation[Any, Any], cfg: Any, op_id: str) -> Rule:
    """The rule that an implementation has; for one without, where others have one, JAX's."""
    forward, backward = implementation.forward_with_residuals, implementation.backward
    if forward is None or backward is None:
        return _rule_by_jax(implementation.forward, cfg, op_id)
    return _residual_rule(forward, backward, cfg, op_id, implementation.reads_out)


def _rule_by_jax(run: Callable[..., Any], cfg: Any, op_id: str) -> Rule:
    """JAX's own gradient, as a rule."""

    def forward(*args: Any, cfg: Any, **kwargs: Any) -> tuple[Any, Any]:
        arrays, rest = split((args, kwargs))

        def compute(*arrays: Any) -> Any:
            args, kwargs = rest.merge(arrays)
            return run(*args, cfg=cfg, **kwargs)

        return jax.vjp(compute, *arrays)

    def backward(
        pull_back: Any, _: None, dout: Any, *args: Any, cfg: Any, differentiated: Any, **kwargs: Any
    ) -> Any:
        positional, by_keyword = split((args, kwargs))[1].merge(pull_back(dout))
        return (*positional, {name: by_keyword[name] for name in differentiated})

    return _residual_rule(forward, backward, cfg, op_id, reads_out=False)


def _residual_rule(
    fwd: Callable[..., Any], vjp: Callable[..., Any], cfg: Any, op_id: str, reads_out: bool
) -> Rule:
    def forward(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        result = fwd(*args, cfg=cfg, **kwargs)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                f"kernel {op_id}: {_name_of(fwd)} must return (out, residuals), "
                f"got {type(result).__name__}"
            )
        out, residuals = result
        return out, (residuals, out if reads_out else None)

    asks = DIFFERENTIATED in inspect.signature(vjp).parameters

    def backward(
        saved: Any,
        dout: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        differentiated: frozenset[str],
    ) -> Any:
        residuals, out = saved
        told = {DIFFERENTIATED: differentiated} if asks else {}
        return vjp(residuals, out, dout, *args, cfg=cfg, **{**told, **kwargs})

    return Rule(forward, backward, _name_of(vjp))


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", "its gradient")


@dataclasses.dataclass(frozen=True)
class Chosen:
    """How a call runs with the config that was chosen for it.

    Attributes:
      implementation: computes it.
      cfg: the config.
      primal: computes the output from the arrays of the call.
      stage: wraps every piece of it and of its gradient, so that all carry the operation's label.
    """

    implementation: Implementation[Any, Any]
    cfg: Any
    primal: Callable[..., Any]
    stage: Callable[[Callable[..., Any]], Callable[..., Any]]


Choose = Callable[..., Chosen]
"""`choose(arrays, differentiated)`: for each array, whether its gradient is needed (none is)."""


CAPACITY_MULTIPLE = 8
"""Capacities are rounded up to a multiple of this, so that most traces of a call fit into one."""


class Residuals:
    """The residuals of one call, whichever of its arrays are differentiated.

    `jax.custom_vjp` needs residuals of the same structure from every trace of the forward function,
    and it traces once for each set of differentiated arrays. So each trace is padded with empty
    arrays to a fixed number, and what is no array stays here: the shape of one more empty array is
    the number under which it is found.

    `min_capacity` is the number of arrays that always fit: the arguments of the call.
    """

    def __init__(self, min_capacity: int) -> None:
        self._min_capacity = min_capacity
        self._static: dict[int, tuple[int, Any]] = {}
        self._numbers = itertools.count()  # two threads never get the same
        self._capacity: dict[str, int] = {}

    def reserve(self, count: int) -> bool:
        """Whether this many arrays fit: the first trace fixes the capacity of all of them.

        A trace with more packs the arguments instead, and computes the others again in the backward
        function.
        """
        multiples = -(-max(count, self._min_capacity) // CAPACITY_MULTIPLE)
        return count <= self._capacity.setdefault("arrays", multiples * CAPACITY_MULTIPLE)

    def pack(self, arrays: Sequence[Any], static: Any) -> list[Any]:
        """What a forward function returns as its residuals."""
        assert self.reserve(len(arrays))
        number = next(self._numbers)
        self._static[number] = (len(arrays), static)
        unused = self._capacity["arrays"] - len(arrays)
        return [np.zeros((0, number), bool), *arrays, *[np.zeros(0, bool)] * unused]

    def unpack(self, residuals: Sequence[Any]) -> tuple[list[Any], Any]:
        """The arrays that were packed, and what is no array."""
        count, static = self._static[residuals[0].shape[1]]
        return list(residuals[1 : 1 + count]), static


def call_with_rule(
    op_id: str, choose: Choose, arrays: list[Any], rest: StaticPart, advice: str
) -> Any:
    """Call an operation such that differentiating the result uses the rule that `choose` gives.

    `rest` puts the arrays back among the call's other arguments. `advice` ends the error for
    whoever differentiates what the rule does not allow.
    """

    number = len(arrays)  # the rules below outlive this trace: they may not hold its arrays
    packed = Residuals(min_capacity=number)

    @jax.custom_vjp
    def differentiable(arrays: list[Any]) -> Any:
        chosen = choose(arrays)
        return batched_alike(chosen.stage(chosen.primal)(*arrays), arrays)

    def forward(arrays: list[Any]) -> tuple[Any, Any]:
        values = [array.value for array in arrays]
        differentiated = tuple(bool(array.perturbed) for array in arrays)
        chosen = choose(values, differentiated)
        rule = _rule_of(chosen.implementation, chosen.cfg, op_id)
        static: list[StaticPart] = []  # what the residuals hold that is no array

        def compute(*values: Any) -> Any:
            out, saved = rule.forward(*rest.merge(values))
            saved_arrays, rest_of_saved = split(saved)
            static.append(rest_of_saved)
            return out, saved_arrays

        out, saved = chosen.stage(named_when_differentiated(op_id, advice, compute))(*values)
        fixed = static[-1] if packed.reserve(len(values) + len(saved)) else None
        leaves = [*values, *saved] if fixed else values
        about = (fixed, differentiated, rule, chosen.stage)
        return batched_alike(out, values), packed.pack(leaves, about)

    def backward(residuals: Any, dout: Any) -> tuple[list[Any]]:
        leaves, (fixed, differentiated, rule, stage) = packed.unpack(residuals)
        values, saved = leaves[:number], leaves[number:]

        def compute(saved: Any, values: Any, dout: Any) -> list[Any]:
            args, kwargs = rest.merge(values)
            needed = _differentiated_keywords(differentiated, args, kwargs)
            saved = fixed.merge(saved) if fixed else rule.forward(args, kwargs)[1]
            raw = rule.backward(saved, dout, args, kwargs, needed)
            leaves = _gradient_leaves(op_id, rule.name, raw, args, kwargs, needed)
            return [leaves[i] for i in rest.array_positions]

        named = named_when_differentiated(op_id, advice, compute)
        return (stage(named)(saved, values, vary_alike(materialised(dout), values)),)

    differentiable.defvjp(forward, backward, symbolic_zeros=True)
    # An author's rule gives the gradient of one device's work. Inside `shard_map` that of an
    # argument that all devices share is the sum over devices, which JAX adds where the argument is
    # made to vary.
    return differentiable(reverse_mode_only(op_id, advice, vary_alike(arrays)))


def materialised(cotangent: Any) -> Any:
    """Turn JAX's symbolic zeros into arrays: kernel authors receive arrays, always."""
    zero = jax.custom_derivatives.SymbolicZero

    def concrete(leaf: Any) -> Any:
        return jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, zero) else leaf

    return jax.tree.map(concrete, cotangent, is_leaf=lambda leaf: isinstance(leaf, zero))


def _gradient_leaves(
    op_id: str,
    rule: str,
    raw: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    needed: frozenset[str],
) -> list[Any]:
    """The author's gradients, checked: one for each leaf of the arguments, None without one.

    A keyword array that is differentiated (`needed`) must have a gradient: silence would mean zero.
    For a positional argument the author said `None` and meant it; keywords they may not have
    thought of at all.
    """
    if not isinstance(raw, (tuple, list)):
        raise TypeError(
            f"kernel {op_id}: {rule} must return a tuple with one gradient per argument, "
            f"got {type(raw).__name__}"
        )
    gradients = tuple(raw)
    by_keyword: dict[str, Any] = {}
    if len(gradients) == len(args) + 1 and isinstance(gradients[-1], dict):
        by_keyword = gradients[-1]
        gradients = gradients[:-1]
        unknown = sorted(set(by_keyword) - set(kwargs))
        if unknown:
            raise TypeError(
                f"kernel {op_id}: {rule} returned gradients for keywords that the call "
                f"does not have: {', '.join(unknown)}; it has {', '.join(kwargs) or 'none'}"
            )
    if len(gradients) != len(args):
        raise TypeError(
            f"kernel {op_id}: {rule} returned {len(gradients)} gradients for "
            f"{len(args)} arguments; return one per argument, None where there is none"
        )
    named = [
        *((f"argument {i}", gradients[i], arg) for i, arg in enumerate(args)),
        *((f"keyword {name!r}", by_keyword.get(name), kwargs[name]) for name in sorted(kwargs)),
    ]
    leaves = [leaf for item in named for leaf in _leaves_of_gradient(op_id, rule, *item)]
    for name in sorted(needed - set(by_keyword)):
        raise TypeError(
            f"kernel {op_id}: the keyword {name!r} is being differentiated, but {rule} "
            f"returns no gradient for it; pass it by position, return a dict "
            f"{{{name!r}: gradient}} after the positional gradients ({{{name!r}: None}} for "
            "a zero one), or wrap it in jax.lax.stop_gradient"
        )
    return leaves


def _leaves_of_gradient(
    op_id: str, rule: str, where: str, gradient: Any, primal: Any
) -> Iterator[Any]:
    """One argument's gradient, by the argument's leaves, with their shapes and dtypes."""
    leaves, structure = jax.tree.flatten(primal)
    try:
        parts: list[Any] = [None] * len(leaves)
        if gradient is not None:
            parts = structure.flatten_up_to(gradient)  # type: ignore[attr-defined]
    except (ValueError, TypeError) as error:
        raise TypeError(
            f"kernel {op_id}: {rule} returned a gradient for {where} whose structure "
            f"differs from the argument's: {error}"
        ) from error
    for part, leaf in zip(parts, leaves, strict=True):
        if part is None or not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            yield None
            continue
        if jnp.shape(part) != jnp.shape(leaf):
            raise ValueError(
                f"kernel {op_id}: {rule} returned a gradient of shape {jnp.shape(part)} "
                f"for {where}, whose shape is {jnp.shape(leaf)}"
            )
        # A rule that accumulates in float32 may return float32 for a bfloat16 argument.
        yield jnp.asarray(part, dtype=leaf.dtype)


def _differentiated_keywords(
    differentiated: tuple[bool, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> frozenset[str]:
    """The keywords any of whose arrays is differentiated; flags are in the order of the arrays."""
    owners = zip(array_owners(args, kwargs), differentiated, strict=True)
    return frozenset(name for (name, _), wanted in owners if wanted and name in kwargs)
