"""What an implementation can do, as data, and which one handles a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ..utils.fingerprint import device_kind, is_array

if TYPE_CHECKING:
    from .implementation import Implementation
    from .invocation import Invocation
    from .kernel import Kernel

IMPLEMENTATION = "implementation"
"""The keyword of every call that demands an implementation by name."""

REFERENCE = "reference"
"""The name under which a kernel's `reference`, its definition, is demanded."""

Rule = Callable[["Invocation[Any, Any]"], "str | None"]


class NotSupported(ValueError):
    """No implementation supports a call, or the one that was demanded does not: all the reasons."""


@dataclasses.dataclass(frozen=True)
class Supports:
    """What one implementation of a kernel supports; a kernel declares it by name::

        supports = {"pallas": Supports(dtypes=("float32", "bfloat16"), without=("bias",))}

    A call goes to the first implementation of the device's order that supports it. One that is
    not declared supports everything.

    Args:
      dtypes: of floating arrays; None allows any.
      without: keywords that it does not support when they are given (not None, False or 0).
      rules: functions of an `Invocation`, each giving one sentence that says why not, or None. The
        first line of its docstring is the requirement, as `ejkernel.modules.supported` prints it.
    """

    dtypes: tuple[str, ...] | None = None
    without: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()

    def reasons_against(self, inv: Invocation[Any, Any]) -> list[str]:
        """Why a call is not supported, in sentences; empty if it is."""
        return [
            *self._dtype_reasons(inv),
            *(
                f"{name} is not supported, and it is given"
                for name in self.without
                if _is_given(inv.kwargs.get(name))
            ),
            *(reason for rule in self.rules if (reason := rule(inv)) is not None),
        ]

    def _dtype_reasons(self, inv: Invocation[Any, Any]) -> Iterator[str]:
        if self.dtypes is None:
            return
        floating = {
            str(leaf.dtype)
            for leaf in jax.tree.leaves((inv.args, dict(inv.kwargs)))
            if is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)
        }
        for dtype in sorted(floating - set(self.dtypes)):
            yield f"arrays of {dtype} are not supported, only {', '.join(self.dtypes)}"


def demanded(inv: Invocation[Any, Any], cfg: Any = None) -> str | None:
    """The implementation that a call, or its config, asks for by name."""
    name = inv.kwargs.get(IMPLEMENTATION)
    return name if name is not None else getattr(cfg, IMPLEMENTATION, None)


def without_demand(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that the kernel's own methods see."""
    return {name: value for name, value in kwargs.items() if name != IMPLEMENTATION}


def demand_of(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword that they do not see, if it is given."""
    return {name: value for name, value in kwargs.items() if name == IMPLEMENTATION}


def has_reference(kernel: Any) -> bool:
    """True for a kernel, or a class of kernels, that says by `reference` what it computes."""
    return callable(getattr(kernel, REFERENCE, None))


def demands_reference(inv: Invocation[Any, Any]) -> bool:
    """True for a call of the definition, which has no config: nothing is chosen, nothing tuned."""
    return inv.kwargs.get(IMPLEMENTATION) == REFERENCE


def no_config_message(inv: Invocation[Any, Any]) -> str:
    """What to say to whoever wants a config for the definition."""
    return (
        f"kernel {inv.full_op_id}: {IMPLEMENTATION}={REFERENCE!r} is the definition, which has no "
        f"config: there is nothing to choose and nothing to tune. Leave {IMPLEMENTATION} out to "
        "have the config of a fast implementation"
    )


def implementation_for(
    kernel: Kernel[Any, Any], inv: Invocation[Any, Any], cfg: Any = None
) -> Implementation[Any, Any]:
    """The implementation that handles a call, or that a config of it is for.

    Raises `NotSupported` with every reason if there is none.
    """
    if (name := demanded(inv, cfg)) is not None:
        chosen = kernel.implementation(name)
        if reasons := chosen.unsupported(inv):
            raise NotSupported(_refusal(kernel, inv, chosen, reasons))
        return chosen
    here = kernel.implementations_here()
    owners = here if cfg is None else [item for item in here if item.takes(cfg)]
    owners = [item for item in owners if item.config is type(cfg)] or owners
    for implementation in owners:
        if not implementation.unsupported(inv):
            return implementation
    if cfg is not None and len(kernel.config_types) > 1:
        owners = owners or [item for item in kernel.all_implementations() if item.takes(cfg)]
        if owners:  # its class says for which one it is, and that one cannot
            raise NotSupported(_refusal(kernel, inv, owners[0], owners[0].unsupported(inv)))
    if not here:
        kind, have = device_kind(), ", ".join(i.name for i in kernel.all_implementations())
        advice = f"add run_{kind}, or run for any device"
        if kernel.implementations:
            advice = f"add an Implementation that runs on a {kind}"
        raise NotImplementedError(
            f"kernel {kernel.full_op_id} has no implementation for {kind}: it has {have}; {advice}"
        )
    raise NotSupported(_refusal(kernel, inv, None, []))


def _refusal(
    kernel: Kernel[Any, Any],
    inv: Invocation[Any, Any],
    chosen: Implementation[Any, Any] | None,
    reasons: list[str],
) -> str:
    call = f"{kernel.full_op_id}({inv.signature})"
    able = [kernel.implementation(REFERENCE)] if has_reference(kernel) else []
    others = {
        i.name: i.unsupported(inv)
        for i in [*kernel.implementations_here(), *able]
        if chosen is None or i.name != chosen.name
    }
    if chosen is None:
        last = others.pop(REFERENCE, ["there is none"])
        lines = [f"no implementation supports {call} on this {device_kind()}:"]
        lines += [f"  {name}: {'; '.join(r)}" for name, r in others.items()]
        if not last:
            lines.append(f"{IMPLEMENTATION}={REFERENCE!r} can: it is the definition, and slow.")
        return "\n".join(lines)
    lines = [
        f"implementation={chosen.name!r} does not support {call}:",
        *(f"  {r}" for r in reasons),
    ]
    lines += [f"  {name!r} cannot either: {'; '.join(r)}" for name, r in others.items() if r]
    names = [repr(name) for name, r in others.items() if not r]
    if names:
        lines.append(f"Leave implementation out, or use {' or '.join(names)}.")
    return "\n".join(lines)


def _is_given(value: Any) -> bool:
    return is_array(value) or bool(jax.tree.leaves(value) and value)
