"""What selection may do when it has no config yet, and how to change that for a while."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ..utils import environment
from ..utils.stable import stable_json
from .context import Block, Layer, layers_in_force

if TYPE_CHECKING:
    from ..core.invocation import Invocation
    from .selection import ConfigSelectorChain

C = TypeVar("C")
O = TypeVar("O")  # noqa: E741

Fallback = Literal["autotune", "heuristics"]


@dataclasses.dataclass(frozen=True)
class AutotunePolicy:
    """What may happen on a miss, and in which order.

    Attributes:
      allow_autotune: measure the candidates.
      allow_heuristics: use the kernel's default config.
      cache_miss_fallback: which of the two comes first; the other follows if allowed.
      validate_backward: choose and tune every call forward plus backward, gradients compared too.
        Without it that is done for the calls that a program differentiates, and only for those.
      near_shapes: before the heuristics, use the config of the nearest tuned shape: True for every
        kernel, False for none, None for those that declare it (`Kernel.near_shapes`).
      strict: a call without a stored config is an error: nothing is tuned, lent or guessed
        while a program runs. None: as `EJKERNEL_STRICT` says.
    """

    allow_autotune: bool = True
    allow_heuristics: bool = True
    cache_miss_fallback: Fallback = "autotune"
    validate_backward: bool = False
    near_shapes: bool | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        if self.cache_miss_fallback not in ("autotune", "heuristics"):
            raise ValueError(
                f"AutotunePolicy: cache_miss_fallback={self.cache_miss_fallback!r} is not known; "
                'it is "autotune" or "heuristics"'
            )
        for name in ("allow_autotune", "allow_heuristics", "validate_backward"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(
                    f"AutotunePolicy: {name}={getattr(self, name)!r} must be True or False"
                )
        for name in ("near_shapes", "strict"):
            if not isinstance(getattr(self, name), bool | None):
                raise TypeError(
                    f"AutotunePolicy: {name}={getattr(self, name)!r} must be True, False or None"
                )

    @property
    def tunes_first(self) -> bool:
        """On a miss, tuning comes before anything else."""
        return (
            self.allow_autotune
            and not self.strict
            and (self.cache_miss_fallback == "autotune" or not self.allow_heuristics)
        )

    @classmethod
    def tuning(cls, autotune: bool) -> AutotunePolicy:
        """The policy behind the shorthand `autotune=True` or `autotune=False`."""
        return cls(**_expand({"autotune": autotune}, "AutotunePolicy.tuning"))


@dataclasses.dataclass(frozen=True, eq=False)
class _PolicyLayer(Layer):
    selector_id: str | None  # None: every selector
    changes: dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class _ForwardOnlyLayer(Layer):
    pass


def policy_override(
    selector: ConfigSelectorChain | None = None, **changes: Any
) -> AbstractContextManager[None]:
    """Change the policy for a block: of one selector, or of every selector in this context.

    `autotune=True/False` is a shorthand for `allow_autotune` with the fitting fallback. It holds
    for this thread or asyncio task only, is undone on leaving, also by an exception, and functions
    jitted before select again.

    >>> from ejkernel.ops import policy_override
    >>> with policy_override(autotune=False):
    ...     pass  # nothing is tuned here
    """
    fields = _expand(changes, "policy_override")
    AutotunePolicy(**fields)  # refuse wrong values here, where the caller sees it
    selector_id = None if selector is None else selector.selector_id
    content = f"policy {selector_id} {stable_json(fields)}"
    return Block(_PolicyLayer(content, selector_id, fields))


def forward_autotune_only() -> AbstractContextManager[None]:
    """While active, configs are chosen by what was measured forward, and only that is measured.

    Also for calls that a program differentiates, and with `validate_backward=True`.
    """
    return Block(_ForwardOnlyLayer("forward only"))


def asked_call(inv: Invocation[C, O], policy: AutotunePolicy) -> Invocation[C, O]:
    """The call that a config is looked for: with its gradient if the program needs that.

    `validate_backward` asks as if the program did, `forward_autotune_only` as if it did not.
    """
    if any(True for _ in layers_in_force(_ForwardOnlyLayer)):
        return inv.forward()
    return inv.differentiate() if policy.validate_backward and not inv.differentiated else inv


def effective_policy(policy: AutotunePolicy, selector_id: str) -> AutotunePolicy:
    """A selector's policy with every override in force applied, innermost last.

    What the policy leaves to the environment is settled here, so that the answer is a whole policy:
    it is part of the question that the processes of a job agree on.
    """
    changes: dict[str, Any] = {}
    for layer in layers_in_force(_PolicyLayer):
        if layer.selector_id in (None, selector_id):
            changes = {**layer.changes, **changes}
    if changes:
        policy = dataclasses.replace(policy, **changes)
    if policy.strict is None:
        policy = dataclasses.replace(policy, strict=environment.STRICT.enabled())
    return policy


def _expand(changes: dict[str, Any], caller: str) -> dict[str, Any]:
    known = {field.name for field in dataclasses.fields(AutotunePolicy)}
    unknown = sorted(set(changes) - known - {"autotune"})
    if unknown:
        raise TypeError(
            f"{caller}: the policy has no field {', '.join(map(repr, unknown))}; "
            f"its fields are {', '.join(sorted(known))} (and the shorthand autotune)"
        )
    fields = dict(changes)
    if "autotune" in fields:
        tune = fields.pop("autotune")
        if not isinstance(tune, bool):
            raise TypeError(f"{caller}: autotune={tune!r} must be True or False")
        fields.setdefault("allow_autotune", tune)
        fields.setdefault("cache_miss_fallback", "autotune" if tune else "heuristics")
    return fields
