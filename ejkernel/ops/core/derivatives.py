"""What stands around a kernel's own gradient rule: errors that say what cannot be done, and `vmap`.

A rule is made for one thing, reverse mode, once. JAX differentiates it further where it can: the
pieces of a rule that are plain JAX have derivatives of their own. Where it cannot (forward mode; a
rule that calls C++, Pallas, or a loop without a transpose), its own errors speak of what is inside.
Here they are given the operation's name and the way out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from ..utils.meta import identity_primitive, new_primitive
from .requirements import IMPLEMENTATION, REFERENCE, has_reference

if TYPE_CHECKING:
    from .kernel import Kernel

Function = Callable[..., Any]

# What JAX says of a loop whose length is not known, and of the second reverse pass through
# `flash_attention` on XLA, where it finds a cotangent of another shape than it expects.
_NO_TRANSPOSE = ("Reverse-mode differentiation does not work", "Expected cotangent type")


def way_out(kernel: Kernel[Any, Any]) -> str:
    """What to do where a rule cannot be differentiated further."""
    if has_reference(kernel):
        return (
            f"Use {IMPLEMENTATION}={REFERENCE!r}: the definition, which JAX differentiates in "
            "every mode and any number of times."
        )
    return (
        f"Write `{REFERENCE}(*args, **kwargs)`, the definition in plain JAX, on the kernel and "
        f"call it with {IMPLEMENTATION}={REFERENCE!r}."
    )


def reverse_mode_only(op_id: str, advice: str, arrays: list[Any]) -> list[Any]:
    """The same arrays; forward-mode differentiation through them raises an error with the name.

    The tangents of `jax.grad` are only ever transposed, those of `jax.jvp` are computed: that is
    when the error is raised, be it while calling, batching or lowering.
    """
    message = (
        f"{op_id} has a gradient rule of its own, which is for reverse mode (jax.grad, jax.vjp, "
        "jax.jacrev) and cannot be differentiated in forward mode (jax.jvp, jax.linearize, "
        f"jax.jacfwd). {advice}"
    )
    return [
        _watched.bind(x, message=message) if jnp.issubdtype(x.dtype, jnp.inexact) else x
        for x in map(jnp.asarray, arrays)
    ]


def named_when_differentiated(op_id: str, advice: str, piece: Function) -> Function:
    """A function of a gradient rule; differentiating it where JAX cannot names the operation."""

    def refusal() -> TypeError:
        return TypeError(
            f"{op_id}: its gradient cannot be differentiated once more, because what computes it "
            f"here has no derivative that JAX knows. {advice}"
        )

    @jax.custom_jvp
    def named(*arrays: Any) -> Any:
        return piece(*arrays)

    @named.defjvp
    def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        try:
            out, out_tangents = jax.jvp(piece, primals, tangents)
        except Exception as error:  # whatever C++ or Pallas calls raise when differentiated
            raise refusal() from error
        types = jax.tree.map(jax.typeof, (primals, out_tangents))

        def check() -> None:
            try:
                jax.eval_shape(lambda p, t: jax.vjp(piece, *p)[1](t), *types)
            except ValueError as error:
                # Anything else is no verdict about the piece: JAX goes on, and says it itself.
                if any(words in str(error) for words in _NO_TRANSPOSE):
                    raise refusal() from error

        return out, jax.tree.map(lambda t: _checked_when_transposed(t, check), out_tangents)

    return named


def _checked_when_transposed(tangent: Any, check: Callable[[], None]) -> Any:
    if not jnp.issubdtype(tangent.dtype, jnp.inexact):
        return tangent
    return _transposed.bind(tangent, check=check)


# --- forward mode --------------------------------------------------------------------------------

# `_watched` stands before every argument of a rule. The tangent of such an argument goes through
# `_tangent`, which can be transposed, as reverse mode does, and raises when it is computed,
# batched, lowered or differentiated, as forward mode does. It takes the argument too, because
# tangents may be constants: then it is the argument that forward mode differentiates once more.
_watched = identity_primitive("ejkernel_watched")
_tangent = new_primitive("ejkernel_tangent")


def _watched_jvp(primals: tuple[Any], tangents: tuple[Any], *, message: str) -> tuple[Any, Any]:
    (tangent,) = tangents
    if not isinstance(tangent, ad.Zero):
        tangent = _tangent.bind(tangent, primals[0], message=message)
    # What is left of the primal may be differentiated again: by then the rule has been applied, and
    # its pieces speak for themselves (`jax.hessian` is forward mode over a gradient).
    return primals[0], tangent


def _refuse(*_: Any, message: str, **__: Any) -> Any:
    raise TypeError(message)


ad.primitive_jvps[_watched] = _watched_jvp
_tangent.def_impl(_refuse)
_tangent.def_abstract_eval(lambda tangent, _, **__: tangent)
mlir.register_lowering(_tangent, _refuse)
batching.primitive_batchers[_tangent] = _refuse
ad.primitive_jvps[_tangent] = _refuse
ad.primitive_transposes[_tangent] = lambda cotangent, *_, **__: [cotangent, None]


# --- reverse mode, once more ---------------------------------------------------------------------

# Stands behind the tangents of a function of a rule: reverse mode over the rule's own gradient
# transposes it, and so runs `check` before it transposes the function itself.
_transposed = identity_primitive("ejkernel_transposed")


def _transpose(cotangent: Any, _: Any, *, check: Callable[[], None]) -> list[Any]:
    check()
    return [cotangent]


ad.deflinear2(_transposed, _transpose)


# --- vmap ----------------------------------------------------------------------------------------


def batched_alike(outputs: Any, arrays: Any) -> Any:
    """The outputs; under a `vmap` over any of the arrays each has a copy for every example.

    JAX gives each example's backward pass the whole cotangent of an output that is the same for
    all of them, and adds up what comes of it: so it would count once per example. With a copy for
    each example every copy has its own cotangent.
    """
    leaves, structure = jax.tree.flatten(outputs)
    tied = _tied.bind(*leaves, *jax.tree.leaves(arrays), count=len(leaves))
    return jax.tree.unflatten(structure, tied)


# The first `count` operands, which depend on the others as far as batching is concerned.
_tied = new_primitive("ejkernel_batched_alike", multiple_results=True)


def _first(*operands: Any, count: int) -> list[Any]:
    return list(operands[:count])


_tied.def_impl(_first)
_tied.def_abstract_eval(_first)
mlir.register_lowering(_tied, lambda ctx, *operands, count: list(operands[:count]))


def _jvp(primals: Any, tangents: Any, *, count: int) -> tuple[Any, Any]:
    return _tied.bind(*primals, count=count), list(tangents[:count])


def _batch(operands: Any, dims: Any, *, count: int) -> tuple[Any, Any]:
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    copies = [
        jnp.broadcast_to(x, (size, *jnp.shape(x))) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(operands[:count], dims[:count], strict=True)
    ]
    # Tied again, for the `vmap` around this one.
    return _tied.bind(*copies, *operands[count:], count=count), [0] * count


ad.primitive_jvps[_tied] = _jvp
batching.primitive_batchers[_tied] = _batch
