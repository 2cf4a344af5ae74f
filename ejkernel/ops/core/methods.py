"""A kernel's methods with suffixes (`run_triton`, `vjp_xla`, …) as `Implementation` objects.

And what is refused when a kernel class is written, and when a kernel is made of it.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import types
import typing
import warnings
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, TypeVar

from ...store.reading import shown
from ..utils.serialize import field_types
from .implementation import Implementation, class_name
from .requirements import IMPLEMENTATION, REFERENCE, Limits, Supports

if TYPE_CHECKING:
    from .kernel import Kernel

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
    """The suffixes that run on a device kind, most specific first."""
    return _ORDER.get(device_kind, (device_kind, "", "xla"))


def method_name(method: str, suffix: str) -> str:
    """`run` and `gpu` make `run_gpu`; an empty suffix leaves the name alone."""
    return f"{method}_{suffix}" if suffix else method


def implementations_of(
    kernel: Kernel[Any, Any], kind: str, everywhere: bool = False
) -> list[Implementation[Any, Any]]:
    """The run methods that run on a device kind, most specific first, as implementations.

    With `everywhere`, all of them: those for other devices than this kind included.
    """
    return [
        _implementation(kernel, suffix, kind)
        for suffix in (("", *SUFFIXES) if everywhere else suffix_order(kind))
        if _written(kernel, "run", suffix) is not None
    ]


def _implementation(kernel: Kernel[Any, Any], suffix: str, kind: str) -> Implementation[Any, Any]:
    name = suffix or "run"
    run = _written(kernel, "run", suffix)
    assert run is not None
    order = _method_order(kernel, suffix, kind)
    heuristic = _find(kernel, "heuristic_cfg", order)
    space = _find(kernel, "candidate_cfgs", order)
    forward, backward, reads_out = _gradient(kernel, run, order)
    others = (k for k in DEVICE_KINDS if suffix in suffix_order(k))
    return Implementation(
        name=name,
        forward=run,
        config=kernel.config_type,
        devices=None if suffix in ("", "xla") else tuple(others),
        heuristic=heuristic[1] if heuristic else kernel.heuristic_cfg,
        space=space[1] if space else None,
        supports=kernel.supports.get(name, _ALL),
        limits=kernel.limits.get(name, _UNLIMITED),
        forward_with_residuals=forward,
        backward=backward,
        reads_out=reads_out,
    )


_ALL, _UNLIMITED = Supports(), Limits()


def _method_order(kernel: Kernel[Any, Any], own: str, kind: str) -> list[str]:
    """The suffixes under which the methods of an implementation are looked for.

    The first run method of a device has all of the device's methods, most specific first. Where
    calls go to several, each has its own and those of less specific suffixes.
    """
    order = suffix_order(kind)
    first = next(s for s in (*order, own) if s == own or _written(kernel, "run", s))
    if own == first and own in order and not kernel.supports:
        return list(order)
    rest = order[order.index(own) + 1 :] if own in order else order
    return list(dict.fromkeys((own, *rest, "")))


def _gradient(
    kernel: Kernel[Any, Any], run: Callable[..., Any], order: list[str]
) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None, bool]:
    """Both documented forms as the two functions of an implementation, and whether `out` is read.

    The more specific form wins; between equals `custom_vjp` does.
    """
    one_piece = _find(kernel, "custom_vjp", order)
    forward = _find(kernel, "fwd_with_residuals", order)
    backward = _find(kernel, "vjp", order)
    if forward is None or backward is None:
        if one_piece is None:
            return None, None, True
    elif one_piece is None or max(forward[0], backward[0]) < one_piece[0]:
        return forward[1], backward[1], True
    custom_vjp = one_piece[1]

    def nothing_kept(*args: Any, cfg: Any, **kwargs: Any) -> tuple[Any, None]:
        return run(*args, cfg=cfg, **kwargs), None

    def from_arguments(_: None, out: Any, dout: Any, *args: Any, cfg: Any, **kwargs: Any) -> Any:
        cotangents = dout if isinstance(dout, tuple) else (dout,)
        return custom_vjp(args, cfg, kwargs, cotangents)

    from_arguments.__name__ = "custom_vjp"  # errors name what the author wrote
    return nothing_kept, from_arguments, False


def _find(
    kernel: Kernel[Any, Any], method: str, order: list[str]
) -> tuple[int, Callable[..., Any]] | None:
    """The first of the variants of a method that the kernel's own classes define, and which."""
    for position, suffix in enumerate(order):
        found = _written(kernel, method, suffix)
        if found is not None:
            return position, found
    return None


def _written(kernel: Kernel[Any, Any], method: str, suffix: str) -> Callable[..., Any] | None:
    name = method_name(method, suffix)
    return getattr(kernel, name) if is_written(type(kernel), name) else None


_HOOKS = ("prepare", "reference", "make_inputs", "default_keywords", "entries_are_independent")
_CLOSE = 0.8  # `heuristic` and `heuristic_cfg`; `run` and `prune` are further apart


def check_near_misses(cls: type, known: Collection[str]) -> None:
    """Refuse a class with a method that is nearly one of ours: `candidate_configs` is never called.

    `known` are the names that `Kernel` has: whoever writes one of those means it.
    """
    ours = [method_name(method, suffix) for method in METHODS for suffix in ("", *SUFFIXES)]
    for name, value in vars(cls).items():
        if name.startswith("_") or name in known or name in ours or name in _HOOKS:
            continue
        if not isinstance(value, (types.FunctionType, staticmethod, classmethod)):
            continue
        near = difflib.get_close_matches(name, (*ours, *_HOOKS), n=1, cutoff=_CLOSE)
        if name == "forward" and not written_methods(cls, "run"):
            near = ["run"]
        if near:
            raise TypeError(
                f"kernel class {cls.__name__} defines {name}(), which nothing would call; did you "
                f"mean {near[0]}? (Start helper methods with an underscore.)"
            )


def written_methods(cls: type, method: str) -> list[str]:
    """The variants of `method` that a kernel class implements."""
    names = [method_name(method, suffix) for suffix in ("", *SUFFIXES)]
    return [name for name in names if is_written(cls, name)]


def is_written(cls: type, name: str) -> bool:
    """Whether a kernel class has a method that is not the default of `Kernel`."""
    method = getattr(cls, name, None)
    return method is not None and not getattr(method, "is_default", False)


F = TypeVar("F", bound=Callable[..., Any])


def default(method: F) -> F:
    """Mark a method of `Kernel` as what stands in for one that a kernel does not write."""
    method.is_default = True  # type: ignore[attr-defined]
    return method


# --- what is refused -----------------------------------------------------------------------------

_OP_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]*")
_VERSION = re.compile(r"[A-Za-z0-9_.]+")


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


def check_implementations(cls: type[Kernel[Any, Any]]) -> None:
    """Refuse a class whose `implementations` are no list of complete ones."""
    if not isinstance(cls.implementations, (tuple, list)):
        raise TypeError(
            f"kernel class {cls.__name__}: implementations must be a list or a tuple, got "
            f"{shown(cls.implementations)}"
        )
    for item in cls.implementations:
        if not isinstance(item, Implementation):
            raise TypeError(
                f"kernel class {cls.__name__}: implementations holds {shown(item)}, which is "
                "no Implementation"
            )
        if item.config is None:
            raise TypeError(
                f"kernel class {cls.__name__}: implementation {item.name!r} needs the class of "
                "its configs: config=…, a frozen dataclass, which may be empty"
            )
        check_config_type(cls, item.config)


def check_kernel(kernel: Kernel[Any, Any]) -> None:
    """Raise for a kernel that could not be called, or whose name could not stand in a label."""
    cls = type(kernel)
    if kernel.implementations:
        _check_listed(kernel)
    else:
        _check_methods(kernel)
    for label, value, pattern in (
        ("name", kernel.op_id, _OP_ID),
        ("version", kernel.version, _VERSION),
    ):
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise ValueError(
                f"kernel {cls.__name__}: {label} {value!r} cannot stand in a label; use "
                "letters, digits, '_', '.', '-' and '/'"
            )


def _check_listed(kernel: Kernel[Any, Any]) -> None:
    where, given = f"kernel {kernel.op_id!r} ({type(kernel).__name__})", kernel.implementations
    names = [item.name for item in given]
    if len(set(names)) < len(names) or REFERENCE in names:
        raise TypeError(
            f"{where}: its implementations are called {', '.join(names)}; each needs a name "
            f"of its own, and {REFERENCE!r} is taken"
        )
    shared = [i.config for i in given if [j.config for j in given].count(i.config) > 1]
    unmarked = [c for c in shared if IMPLEMENTATION not in field_types(c)]
    if kernel.tune_implementations and unmarked:
        raise TypeError(
            f"{where}: tune_implementations needs configs that say for which implementation "
            f"they are: give {class_name(unmarked[0])} a field `implementation: str | None = "
            "None`, or each implementation a class of its own"
        )
    methods = [m for method in METHODS for m in written_methods(type(kernel), method)]
    if methods or kernel.supports or kernel.limits:
        said = ", ".join(methods) or "supports or limits"
        raise TypeError(
            f"{where} has implementations and also {said}; an implementation has all of "
            "these itself"
        )


def _check_methods(kernel: Kernel[Any, Any]) -> None:
    cls = type(kernel)
    runs = written_methods(cls, "run")
    if not runs:
        raise TypeError(
            f"kernel {kernel.op_id!r} ({cls.__name__}) has no run method; write "
            "run(self, *args, cfg, **kwargs) or one of run_triton, run_pallas, run_xla, "
            "run_gpu, run_tpu, run_cpu; or give it implementations"
        )
    forward, backward = (bool(written_methods(cls, m)) for m in ("fwd_with_residuals", "vjp"))
    if forward != backward:
        have, lack = ("fwd_with_residuals", "vjp") if forward else ("vjp", "fwd_with_residuals")
        raise TypeError(
            f"kernel {kernel.op_id!r} ({cls.__name__}) defines {have} without {lack}; a gradient "
            "needs both (or custom_vjp alone)"
        )
    names = [method.removeprefix("run_") for method in runs]
    for attribute in ("supports", "limits"):
        if unknown := sorted(set(getattr(kernel, attribute)) - set(names)):
            raise TypeError(
                f"kernel {kernel.op_id!r} ({cls.__name__}): {attribute} names "
                f"{', '.join(unknown)}, but it has {', '.join(names)}"
            )
    for name, limits in kernel.limits.items():
        if dataclasses.is_dataclass(kernel.config_type) and (
            unknown := limits.unknown_fields(kernel.config_type)
        ):
            raise TypeError(
                f"kernel {kernel.op_id!r} ({cls.__name__}): limits[{name!r}] names "
                f"{', '.join(unknown)}, which {class_name(kernel.config_type)} does not have"
            )


def check_run_methods(cls: type) -> None:
    """Refuse a run method that takes no `cfg`, or an `implementation`, which it would never get."""
    for name in written_methods(cls, "run"):
        method = vars(cls).get(name)
        method = method.__func__ if isinstance(method, staticmethod) else method
        if not isinstance(method, types.FunctionType):
            continue
        parameters = inspect.signature(method).parameters
        if IMPLEMENTATION in parameters:
            raise TypeError(
                f"kernel class {cls.__name__}: {name}() takes a keyword {IMPLEMENTATION!r}, "
                "which every call has already: it requests a run method by name; rename yours"
            )
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if "cfg" not in parameters and not takes_any:
            raise TypeError(
                f"kernel class {cls.__name__}: {name}{inspect.signature(method)} takes no cfg, and "
                f"so no config; write {name}(self, *args, cfg, **kwargs)"
            )


def check_config_type(cls: type, config: Any) -> None:
    """Warn of a config class whose objects can be changed, or cannot be hashed.

    They work as far as nobody changes them or puts them into a set; what was meant is a frozen one.
    """
    if not dataclasses.is_dataclass(config) or not isinstance(config, type):
        return
    problem = ""
    if not config.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        problem = "can be changed after it was chosen; make it @dataclasses.dataclass(frozen=True)"
    elif config.__hash__ is None:
        problem = "cannot be hashed; leave out its __eq__"
    for name, kind in {} if problem else field_types(config).items():
        for option in (kind, *typing.get_args(kind)):
            if (typing.get_origin(option) or option) in _MUTABLE:
                problem = f"has a field {name!r} that cannot be hashed; make it a tuple"
    if problem:
        where = f"kernel class {cls.__name__}: its config class {config.__name__}"
        warnings.warn(f"{where} {problem}", stacklevel=3)


_MUTABLE = (list, dict, set)
