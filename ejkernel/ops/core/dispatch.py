"""Which of a kernel's methods serves a device: `run_triton`, `run_gpu`, `run`, …"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PLATFORMS = ("triton", "pallas", "xla")
DEVICE_KINDS = ("gpu", "tpu", "cpu")
SUFFIXES = PLATFORMS + DEVICE_KINDS

METHODS = (
    "run",
    "heuristic_cfg",
    "candidate_cfgs",
    "config_space",
    "custom_vjp",
    "fwd_with_residuals",
    "vjp",
)

# Most specific first; "" is the method without a suffix. On CPU `run_xla` is the implementation
# for this very platform and comes before `run`; on an accelerator it is the last resort.
_ORDER = {
    "gpu": ("triton", "gpu", "", "xla"),
    "tpu": ("pallas", "tpu", "", "xla"),
    "cpu": ("cpu", "xla", ""),
}


def suffix_order(device_kind: str) -> tuple[str, ...]:
    """The suffixes that may serve a device kind, most specific first."""
    return _ORDER.get(device_kind, (device_kind, "", "xla"))


def method_name(method: str, suffix: str) -> str:
    """`run` and `gpu` make `run_gpu`; an empty suffix leaves the name alone."""
    return f"{method}_{suffix}" if suffix else method


def method_order(device_kind: str, implementation: str | None) -> tuple[str, ...]:
    """The suffixes under which a method is looked for, most specific first.

    What belongs to an implementation that does not serve the call must not be taken, so with an
    `implementation` its own suffix comes first and those before it in the device's order are out.
    """
    order = suffix_order(device_kind)
    if implementation is None:
        return order
    first = "" if implementation == "run" else implementation
    rest = order[order.index(first) + 1 :] if first in order else order
    return tuple(dict.fromkeys((first, *rest, "")))


def find_method(
    kernel: Any, method: str, device_kind: str, base: type, implementation: str | None = None
) -> Callable[..., Any] | None:
    """The most specific implementation of a method that the kernel's own classes define."""
    found = find_with_suffix(kernel, method, device_kind, base, implementation)
    return None if found is None else found[1]


def find_with_suffix(
    kernel: Any, method: str, device_kind: str, base: type, implementation: str | None = None
) -> tuple[int, Callable[..., Any]] | None:
    """The same, with how specific it is: the position of its suffix, 0 for the most specific."""
    for position, suffix in enumerate(method_order(device_kind, implementation)):
        name = method_name(method, suffix)
        defined = getattr(type(kernel), name, None)
        if defined is not None and defined is not getattr(base, name, None):
            return position, getattr(kernel, name)
    return None


def check_method_names(cls: type) -> None:
    """Refuse a class that defines `run_cuda` or the like: it would never be called."""
    for name, value in vars(cls).items():
        if not callable(value):
            continue
        for method in METHODS:
            suffix = name.removeprefix(f"{method}_")
            if suffix != name and name not in METHODS and suffix not in SUFFIXES:
                raise TypeError(
                    f"kernel class {cls.__name__} defines {name}(), but {suffix!r} is not a "
                    f"platform or device kind, so it would never run; known suffixes of {method}_ "
                    f"are {', '.join(SUFFIXES)} (start helper methods with an underscore)"
                )


def defined_methods(cls: type, method: str, base: type) -> list[str]:
    """The variants of `method` that a kernel class implements, for messages and tables."""
    names = [method_name(method, suffix) for suffix in ("", *SUFFIXES)]
    return [
        name
        for name in names
        if getattr(cls, name, None) is not None
        and getattr(cls, name) is not getattr(base, name, None)
    ]
