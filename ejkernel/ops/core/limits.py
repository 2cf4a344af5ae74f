"""What the fields of a config may be, as data, and why a config does not fit a call."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ...store.reading import shown
from ..utils.serialize import field_paths, field_types, is_symbolic, reasons_against_type
from .supports import implementation_for

if TYPE_CHECKING:
    from .implementation import Implementation
    from .invocation import Invocation
    from .kernel import Kernel

ConfigRule = Callable[[Any, "Invocation[Any, Any]"], "str | None"]


@dataclasses.dataclass(frozen=True)
class Limit:
    """What one field of a config may be, in addition to being of its type.

    None is allowed wherever the field's type allows it.

    Args:
      least: the smallest number.
      most: the largest number.
      multiple_of: what the number must be divisible by.
      power_of_two: the number is 1, 2, 4, 8, …
      one_of: the only values.

    >>> Limit(least=16, most=128, power_of_two=True).allowed
    'a power of two from 16 to 128'
    """

    least: float | None = None
    most: float | None = None
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
            and (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
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
        if self.least is not None and self.most is not None:
            return f"{kind} from {self.least} to {self.most}"
        if self.least is not None:
            return f"{kind} of at least {self.least}"
        return kind if self.most is None else f"{kind} of at most {self.most}"

    @property
    def _is_about_numbers(self) -> bool:
        given = (self.least, self.most, self.multiple_of)
        return self.power_of_two or any(bound is not None for bound in given)


class Limits:
    """What an implementation of a kernel needs of a config; a kernel declares it by name::

        limits = {
            "triton": Limits(
                {"block": Limit(least=16, most=256, power_of_two=True)},
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
