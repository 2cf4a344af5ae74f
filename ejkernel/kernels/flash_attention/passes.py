"""What surrounds the two passes of every implementation, and what their configs have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Self

import jax

from ejkernel.ops import Implementation, Invocation

from .options import Options

_BACKWARD = "backward_"


class Gradients(NamedTuple):
    """Gradients of the arrays of a call; those of keywords by name."""

    dq: jax.Array
    dk: jax.Array
    dv: jax.Array
    by_keyword: dict[str, jax.Array]


class Results(NamedTuple):
    """What a backward pass starts from: arguments, results, and the gradients of the results."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    out: jax.Array
    lse: jax.Array
    dout: jax.Array
    dlse: jax.Array | None  # None: zero


Choices = Iterable[tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class PassesConfig:
    """Fields for the forward pass, and the same for the backward pass with `backward_` in front.

    None leaves a field to the heuristic.
    """

    @classmethod
    def of(cls, q: Any, k: Any, v: Any, options: Options) -> Self:
        """The heuristic config of a call."""
        raise NotImplementedError

    @classmethod
    def choices(cls, q: Any, k: Any, v: Any) -> tuple[Choices, Choices]:
        """Values worth trying for the fields of the forward and of the backward pass."""
        raise NotImplementedError

    @classmethod
    def heuristic(cls, inv: Invocation[Any, Any]) -> Self:
        """A config that is good without measuring."""
        keywords = {"causal": False, "softmax_scale": 1.0, **inv.kwargs}
        names = {field.name for field in dataclasses.fields(Options)}
        q, k, v = inv.args
        return cls.of(q, k, v, Options(**{n: x for n, x in keywords.items() if n in names}))

    @classmethod
    def space(cls, inv: Invocation[Any, Any]) -> list[Self]:
        """Configs with other values for one pass, and the heuristic ones for the other.

        The passes do not share anything, so there is no need to combine them.
        """
        if "sequence_axis" in inv.kwargs:
            return []  # a tuner measures outside of the mesh, where there is no ring
        names = [field.name for field in dataclasses.fields(cls)]
        half = len(names) // 2
        return [
            dataclasses.replace(cls.heuristic(inv), **dict(zip(fields, values, strict=True)))
            for fields, choices in zip(
                (names[:half], names[half:]), cls.choices(*inv.args), strict=True
            )
            for values in choices
        ]

    def sizes(self, given: PassesConfig | None = None, *, backward: bool) -> dict[str, Any]:
        """The fields of one pass, under the names of the forward pass; `given` ones go first."""
        values = {n: x for n, x in vars(given or self).items() if x is not None}
        return {
            name.removeprefix(_BACKWARD): value
            for name, value in (vars(self) | values).items()
            if name.startswith(_BACKWARD) == backward
        }


def implementation(
    *,
    attend: Callable[..., tuple[jax.Array, jax.Array]],
    differentiate: Callable[..., Gradients],
    differentiate_with_bias: Callable[..., Gradients],
    config: type[PassesConfig],
    **fields: Any,
) -> Implementation[Any, Any]:
    """An implementation around its two passes.

    Args:
      attend: `attend(q, k, v, options, **sizes)` gives the output and the log-sum-exp.
      differentiate: `differentiate(results, options, **sizes)` gives the gradients of `q`, `k`, `v`
        and `sinks`.
      differentiate_with_bias: gives these, and that of the bias.
      config: the class of its configs.
      **fields: the other arguments of `Implementation`.
    """

    def forward_with_residuals(
        q: Any, k: Any, v: Any, *, cfg: Any, return_lse: bool = False, **keywords: Any
    ) -> tuple[Any, jax.Array]:
        options = Options(**keywords)
        sizes = config.of(q, k, v, options).sizes(cfg, backward=False)
        out, lse = attend(q, k, v, options, **sizes)
        return ((out, lse) if return_lse else out), lse

    def forward(*arrays: jax.Array, **keywords: Any) -> Any:
        return forward_with_residuals(*arrays, **keywords)[0]

    def backward(
        lse: jax.Array,
        out: Any,
        dout: Any,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        cfg: Any,
        differentiated: frozenset[str],
        return_lse: bool = False,
        **keywords: Any,
    ) -> Gradients:
        dlse = None
        if return_lse:
            (out, _), (dout, dlse) = out, dout
        options = Options(**keywords)
        sizes = config.of(q, k, v, options).sizes(cfg, backward=True)
        run = differentiate_with_bias if "bias" in differentiated else differentiate
        return run(Results(q, k, v, out, lse, dout, dlse), options, **sizes)

    return Implementation(
        config=config,
        forward=forward,
        forward_with_residuals=forward_with_residuals,
        backward=backward,
        **fields,
    )
