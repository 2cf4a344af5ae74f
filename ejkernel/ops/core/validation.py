"""What is refused when a kernel class is written, and when a kernel is made of it."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
import warnings
from typing import TYPE_CHECKING, Any

from ...store.reading import shown
from ..utils.serialize import field_types
from .implementation import Implementation, class_name
from .methods import METHODS, written_methods
from .supports import IMPLEMENTATION, REFERENCE

if TYPE_CHECKING:
    from .kernel import Kernel

_OP_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]*")
_VERSION = re.compile(r"[A-Za-z0-9_.]+")


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
                "which every call has already: it demands a run method by name; rename yours"
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
