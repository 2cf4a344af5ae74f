"""What made a tuned config: the source of its kernel, and the versions of what compiled it.

The hash covers what decides how a candidate performs and whether it is right: the kernel's methods
with those of its base classes up to `Kernel`, the passes of its implementations, and the functions
and constants of the same package that they use by name. It leaves out comments, docstrings and
layout, and the functions that only list or pick candidates or count work: a candidate that is added
must not make the others measured again. What a function imports in its body, and functions of other
packages, are not followed.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import enum
import functools
import linecache
import os
import platform
import sys
import time
import types
import weakref
from collections.abc import Iterator
from typing import Any

from .fingerprint import code_hash, current_device, short_hash, stable_json
from .serialize import is_dtype_like

_LISTING = ("candidate_cfgs", "config_space", "heuristic_cfg")
_LISTING_OF_CONFIG_CLASSES = ("heuristic", "space")
_PASSES = ("forward", "forward_with_residuals", "backward")
_FRAMEWORK = ("ejkernel.ops", "ejkernel.store", "ejkernel.decorator")
_STANDARD = frozenset(sys.stdlib_module_names) - {"__main__"}
_LOADED = time.time()

_hashes: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()


# --- versions ------------------------------------------------------------------------------------


def versions(device: Any = None) -> dict[str, str]:
    """The versions of everything between a kernel and its running program."""
    return dict(_versions((device or current_device()).client))


@functools.lru_cache(maxsize=64)
def _versions(client: Any) -> dict[str, str]:
    import jax
    from jaxlib.version import __version__ as jaxlib_version

    from ejkernel import __version__

    return {
        "ejkernel": __version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib_version,
        "backend": f"{client.platform} {client.platform_version}",
        "python": platform.python_version(),
    }


# --- source --------------------------------------------------------------------------------------


def source_hash(kernel: Any) -> str:
    """A hash of a kernel's source (a kernel or its class), the same in every process.

    Where the source cannot be read, or was edited after it was loaded, it is of the bytecode: that
    is what runs.
    """
    cls = kernel if isinstance(kernel, type) else type(kernel)
    found = _hashes.get(cls)
    if found is None:
        parts = list(_Reader(cls).parts())
        found = _hashes[cls] = short_hash("\n".join(parts), 32)
    return found


class _Reader:
    """Walks from a kernel's methods to what they use, each thing once."""

    def __init__(self, cls: type) -> None:
        self._classes = [c for c in cls.__mro__ if not _is_framework(c.__module__)]
        self._packages = {_package(c.__module__) for c in self._classes}
        self._seen: set[int] = set()

    def parts(self) -> Iterator[str]:
        for cls in self._classes:
            self._is_new(cls)  # a method that says `super()` holds its own class
            yield from self._class(cls)

    def _class(self, cls: type) -> Iterator[str]:
        for name, value in sorted(vars(cls).items()):
            listing = any(name == m or name.startswith(f"{m}_") for m in _LISTING)
            if name in _LISTING_OF_CONFIG_CLASSES:
                listing = isinstance(value, classmethod)  # else something that `run` may use
            if listing or name in ("config_type", "work"):
                continue
            if name.startswith("__") and not self._is_written(_unwrapped(value)):
                continue  # `__module__`, and what `dataclass` and others generate
            yield from self._value(name, value)

    def _value(self, name: str, value: Any) -> Iterator[str]:
        """The text of something that a name stands for: code, or a constant."""
        inner = _unwrapped(value)
        held = value.__func__ if isinstance(value, staticmethod) else value
        if isinstance(held, functools.partial):
            with contextlib.suppress(TypeError):  # what has no stable form is left out
                yield f"{name}: {stable_json([held.args, held.keywords])}"
        if isinstance(inner, types.FunctionType):
            yield from self._function(name, inner)
            if inner is not value:  # `jax.custom_vjp` holds its rules, for one
                for attribute, held in sorted(getattr(value, "__dict__", {}).items()):
                    if isinstance(held, types.FunctionType):
                        yield from self._function(f"{name}.{attribute}", held)
        elif isinstance(inner, type):
            if self._is_new(inner) and self._is_near(inner.__module__):
                yield f"{name}: class"
                yield from self._class(inner)
        elif isinstance(inner, (tuple, list)) and any(map(dataclasses.is_dataclass, inner)):
            for item in inner:  # implementations
                for attribute in _PASSES:
                    yield from self._value(attribute, getattr(item, attribute, None))
        elif _is_constant(inner):
            with contextlib.suppress(TypeError):  # what has no stable form is left out
                yield f"{name}: {stable_json(inner)}"

    def _function(self, name: str, function: types.FunctionType) -> Iterator[str]:
        if not self._is_new(function) or not self._is_near(function.__module__):
            return
        yield f"{name}: {_text(function)}"
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            yield from self._value("default", default)
        for used, value in _used_by(function):
            if isinstance(value, types.ModuleType):
                if self._is_near(value.__name__):  # as in `xla.forward(...)`
                    for attribute in _names(function.__code__):
                        if attribute in vars(value):
                            yield from self._value(attribute, vars(value)[attribute])
            else:
                yield from self._value(used, value)

    def _is_written(self, value: Any) -> bool:
        """True for a function that someone wrote, and whose text is there."""
        is_function = isinstance(value, types.FunctionType) and self._is_near(value.__module__)
        return is_function and _node(value) is not None

    def _is_near(self, module: str | None) -> bool:
        return _package(module or "") in self._packages and not _is_framework(module or "")

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen:  # all of them stay alive meanwhile: the class holds them
            return False
        self._seen.add(id(value))
        return True


def _package(module: str) -> str:
    return module.partition(".")[0]


def _is_framework(module: str) -> bool:
    return module.startswith(_FRAMEWORK) or _package(module) in _STANDARD


def _is_constant(value: Any) -> bool:
    """True for values that do not change while a program runs."""
    if isinstance(value, (tuple, frozenset)):
        return all(_is_constant(item) for item in value)
    return isinstance(value, (int, float, complex, str, bytes, enum.Enum)) or is_dtype_like(value)


def _unwrapped(value: Any) -> Any:
    """The function inside `staticmethod`, `property`, `functools.partial`, `jax.jit` and others."""
    for _ in range(20):
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, functools.partial):
            value = value.func
        elif not isinstance(value, type) and callable(getattr(value, "__wrapped__", None)):
            value = value.__wrapped__
        else:
            break
    return value


def _used_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function takes from outside: globals, and variables of the functions around it."""
    for name in _names(function.__code__):
        if name in function.__globals__ and not name.startswith("__"):
            yield name, function.__globals__[name]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not bound yet
            yield name, cell.cell_contents


def _names(code: types.CodeType) -> list[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(_names(constant))
    return sorted(names)


# --- text ----------------------------------------------------------------------------------------


def _text(function: types.FunctionType) -> str:
    node = _node(function)
    if node is None:
        return f"bytecode {code_hash(function.__code__)}"
    return ast.unparse(_WithoutDocstrings().visit(node))


def _node(function: types.FunctionType) -> ast.AST | None:
    """The syntax tree of a function, if its text can be read and is what was loaded."""
    code = function.__code__
    with contextlib.suppress(OSError):  # no file: a cell of a notebook, which `linecache` has
        if os.stat(code.co_filename).st_mtime > _LOADED:
            return None
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename, function.__globals__)
    return _functions("".join(lines)).get((code.co_name, code.co_firstlineno))


@functools.lru_cache(maxsize=32)
def _functions(text: str) -> dict[tuple[str, int], ast.AST]:
    """The functions of a file by name and first line, as their code objects call them."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # a page with code in it, for one
        return {}
    found: dict[tuple[str, int], ast.AST] = {}
    waiting: list[ast.AST] = [tree]
    while waiting:  # statements only: expressions are many, and hold no `def`
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.decorator_list[0] if node.decorator_list else node
            found[node.name, first.lineno] = node
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, block, ())
            waiting.extend(inner if isinstance(inner, list) else ())
    return found


class _WithoutDocstrings(ast.NodeTransformer):
    def _strip(self, node: Any) -> Any:
        self.generic_visit(node)
        # What `@tunable(…)` lists is a space: one more value changes nothing about the others.
        node.decorator_list = [
            item
            for item in node.decorator_list
            if ast.unparse(getattr(item, "func", item)).rpartition(".")[2] != "tunable"
        ]
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            node.body = node.body[1:] or [ast.Pass()]
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _strip
