"""What an implementation requires, as data: of a call (`Supports`) and of a config (`Limits`).

Which implementation handles a call follows from it, and why a config does not fit one.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ...store.reading import shown
from ..utils.fingerprint import device_kind, is_array
from ..utils.serialize import field_paths, field_types, is_symbolic, reasons_against_type

if TYPE_CHECKING:
    from .implementation import Implementation
    from .invocation import Invocation
    from .kernel import Kernel

IMPLEMENTATION = "implementation"
"""The keyword of every call that requests an implementation by name."""

REFERENCE = "reference"
"""The name under which a kernel's `reference`, its definition, is requested."""

Rule = Callable[["Invocation[Any, Any]"], "str | None"]
ConfigRule = Callable[[Any, "Invocation[Any, Any]"], "str | None"]


class NotSupported(ValueError):
    """No implementation supports a call, or the requested one does not: all the reasons."""


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


def requested(inv: Invocation[Any, Any], cfg: Any = None) -> str | None:
    """The implementation that a call, or its config, asks for by name."""
    name = inv.kwargs.get(IMPLEMENTATION)
    return name if name is not None else getattr(cfg, IMPLEMENTATION, None)


def without_implementation(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that the kernel's own methods see."""
    return {name: value for name, value in kwargs.items() if name != IMPLEMENTATION}


def implementation_keyword(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword that they do not see, if it is given."""
    return {name: value for name, value in kwargs.items() if name == IMPLEMENTATION}


def has_reference(kernel: Any) -> bool:
    """True for a kernel, or a class of kernels, that says by `reference` what it computes."""
    return callable(getattr(kernel, REFERENCE, None))


def requests_reference(inv: Invocation[Any, Any]) -> bool:
    """True for a call of the definition, which has no config: nothing is chosen, nothing tuned."""
    return inv.kwargs.get(IMPLEMENTATION) == REFERENCE


def refuse_reference(inv: Invocation[Any, Any], given: str = "") -> None:
    """Raise a `ValueError` for whoever wants, or has given, a config for the definition."""
    if requests_reference(inv):
        raise ValueError(
            f"kernel {inv.full_op_id}: {IMPLEMENTATION}={REFERENCE!r} is the definition, which has "
            f"no config: there is nothing to choose and nothing to tune. Leave {IMPLEMENTATION} "
            f"out to have the config of a fast implementation{given}"
        )


def implementation_for(
    kernel: Kernel[Any, Any], inv: Invocation[Any, Any], cfg: Any = None
) -> Implementation[Any, Any]:
    """The implementation that handles a call, or that a config of it is for.

    Raises `NotSupported` with every reason if there is none.
    """
    if (name := requested(inv, cfg)) is not None:
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


# --- configs -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Limit:
    """What one field of a config may be, in addition to being of its type.

    None is allowed wherever the field's type allows it.

    Args:
      minimum: the smallest number.
      maximum: the largest number.
      multiple_of: what the number must be divisible by.
      power_of_two: the number is 1, 2, 4, 8, …
      one_of: the only values.

    >>> Limit(minimum=16, maximum=128, power_of_two=True).allowed
    'a power of two from 16 to 128'
    """

    minimum: float | None = None
    maximum: float | None = None
    multiple_of: int | None = None
    power_of_two: bool = False
    one_of: tuple[Any, ...] | None = None

    def allows(self, value: Any) -> bool:
        """True if a field may have this value."""
        if self.one_of is not None and value not in self.one_of:
            return False
        if not self._is_about_numbers or is_symbolic(value):
            return True
        if not isinstance(value, (int, float, np.integer, np.floating)):
            return False
        if isinstance(value, np.generic):
            value = value.item()  # one of 8 bits cannot be divided by 256
        # An integer is never turned into a float, which it may be too large for; NaN fails `==`.
        return bool(
            value == value
            and (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
            and (self.multiple_of is None or value % self.multiple_of == 0)
            and (not self.power_of_two or _is_power_of_two(value))
        )

    @property
    def allowed(self) -> str:
        """The values that a field may have, in words."""
        if self.one_of is not None:
            return f"one of {', '.join(map(repr, self.one_of))}"
        kind = "a power of two" if self.power_of_two else "a number"
        if self.multiple_of is not None:
            kind = (
                f"{kind} that is a multiple of {self.multiple_of}"
                if self.power_of_two
                else f"a multiple of {self.multiple_of}"
            )
        if self.minimum is not None and self.maximum is not None:
            return f"{kind} from {self.minimum} to {self.maximum}"
        if self.minimum is not None:
            return f"{kind} of at least {self.minimum}"
        return kind if self.maximum is None else f"{kind} of at most {self.maximum}"

    @property
    def _is_about_numbers(self) -> bool:
        given = (self.minimum, self.maximum, self.multiple_of)
        return self.power_of_two or any(bound is not None for bound in given)


class Limits:
    """What an implementation of a kernel needs of a config; a kernel declares it by name::

        limits = {
            "triton": Limits(
                {"block": Limit(minimum=16, maximum=256, power_of_two=True)},
                rules=(block_divides_the_rows,),
            ),
        }

    A config that does not fit is refused where it is written (`cfg=`), and skipped, with the
    reason, where it was stored, shipped or listed as a candidate.

    Args:
      fields: limits by field; `"fwd.q_blocksize"` names a field of a nested dataclass.
      rules: functions of a config and an `Invocation`, each giving one sentence that says why the
        config does not fit the call, or None. They see configs whose fields are within the limits.
    """

    def __init__(
        self, fields: Mapping[str, Limit] | None = None, rules: tuple[ConfigRule, ...] = ()
    ) -> None:
        self.fields = dict(fields or {})
        self.rules = tuple(rules)

    def reasons_against(self, cfg: Any, inv: Invocation[Any, Any]) -> list[str]:
        """Why a config of the right type does not fit a call; empty if it does."""
        if reasons := self.reasons_against_any(cfg):
            return reasons
        return [reason for rule in self.rules if (reason := rule(cfg, inv)) is not None]

    def reasons_against_any(self, cfg: Any) -> list[str]:
        """Why a config of the right type fits no call: the fields beyond their limits."""
        return [
            f"{path}={shown(value)} must be {limit.allowed}"
            for path, limit in self.fields.items()
            if (value := _at(cfg, path)) is not None and not limit.allows(value)
        ]

    def unknown_fields(self, config_type: Any) -> list[str]:
        """The declared fields that configs of a dataclass do not have."""
        known = set(field_paths(config_type))
        return [path for path in self.fields if path not in known]

    def __or__(self, more: Limits) -> Limits:
        return Limits(self.fields | more.fields, (*self.rules, *more.rules))

    def __repr__(self) -> str:
        return f"Limits({self.fields!r}, {len(self.rules)} rules)"


@functools.cache
def declared_limits(config_type: type) -> Limits:
    """What a config class says itself: `Annotated[int, Limit(...)]`, and its method `unfit`.

    The fields of a dataclass inside it are declared there.
    """
    fields: dict[str, Limit] = {}
    for name, hint in field_types(config_type, include_extras=True).items():
        extras = getattr(hint, "__metadata__", ())
        fields.update((name, extra) for extra in extras if isinstance(extra, Limit))
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            inner = declared_limits(hint).fields
            fields |= {f"{name}.{path}": limit for path, limit in inner.items()}
    return Limits(fields, (_unfit,) if callable(getattr(config_type, "unfit", None)) else ())


def _unfit(cfg: Any, inv: Invocation[Any, Any]) -> str | None:
    reason: str | None = cfg.unfit(inv)
    return reason


def field_reasons(cfg: Any) -> list[str]:
    """Which fields of a config do not hold what their annotations say."""
    return reasons_against_type(cfg, type(cfg)) if dataclasses.is_dataclass(cfg) else []


def with_plain_numbers(cfg: Any) -> Any:
    """A config in which the numbers of NumPy are Python's, which neither wrap nor lack methods.

    Where the annotation of a field asks for one of NumPy, it stays.
    """
    if not dataclasses.is_dataclass(cfg) or isinstance(cfg, type):
        return cfg
    hints = field_types(type(cfg))
    changed = {
        field.name: plain
        for field in dataclasses.fields(cfg)
        if (plain := _plain(item := getattr(cfg, field.name, None))) is not item
        and not reasons_against_type(plain, hints.get(field.name, Any))
    }
    if changed:
        cfg = copy.copy(cfg)
        for name, plain in changed.items():
            object.__setattr__(cfg, name, plain)  # it may be frozen
    return cfg


def _plain(value: Any) -> Any:
    if isinstance(value, (np.integer, np.floating, np.bool_)):
        return value.item()
    if type(value) is not tuple:
        return with_plain_numbers(value)
    items = tuple(map(_plain, value))
    return value if all(a is b for a, b in zip(items, value, strict=True)) else items


def reasons_against_config(
    kernel: Kernel[Any, Any], cfg: Any, inv: Invocation[Any, Any]
) -> list[str]:
    """Why a config of the kernel's class does not fit a call: fields, limits, what it says itself.

    A kernel may have a method `not_supported(cfg, inv)` that gives such sentences too.
    """
    if reasons := field_reasons(cfg):
        return reasons
    try:
        chosen = implementation_for(kernel, inv, cfg)
    except ValueError as error:  # what it names does not exist, or does not support the call
        return [str(error)]
    if not chosen.takes(cfg):
        return [f"a {type(cfg).__name__} is no config of {chosen.name}, which handles the call"]
    reasons = limit_reasons(chosen, cfg, inv)
    not_supported = getattr(kernel, "not_supported", None)
    return reasons if not_supported is None else [*reasons, *not_supported(cfg, inv)]


def limit_reasons(
    implementation: Implementation[Any, Any], cfg: Any, inv: Invocation[Any, Any]
) -> list[str]:
    """Why a config of the right type does not fit a call, by the limits of its implementation."""
    reasons = implementation.limits.reasons_against(cfg, inv)
    return [f"{reason}, for {implementation.name}" for reason in reasons]


def _is_power_of_two(value: Any) -> bool:
    return value >= 1 and value % 1 == 0 and int(value) & (int(value) - 1) == 0


def _at(cfg: Any, path: str) -> Any:
    for name in path.split("."):
        if cfg is None:
            return None
        cfg = cfg.get(name) if isinstance(cfg, Mapping) else getattr(cfg, name)
    return cfg
