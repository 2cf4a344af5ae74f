"""Tuned configs as Python text, to be pasted into a program."""

from __future__ import annotations

import dataclasses
import enum
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from ..formatting import duration, shortened, speedup
from ..ops.core.kernel import Kernel, kernel_named
from ..ops.execution.results import Entry
from ..ops.utils.meta import label


def as_code(device: str, entries: Iterable[Entry]) -> str:
    """An `overlay_cache` with the configs of these entries, and the imports that it needs.

    Above each config stands how to give it to a single call instead.
    """
    imports = {"from ejkernel.ops import overlay_cache"}
    lines: list[str] = []
    for entry in entries:
        name = entry.op_id.partition("@v")[0]
        kernel = kernel_named(entry.op_id)
        config = _source(entry.cfg, imports, kernel)
        faster = speedup(entry.heuristic_seconds, entry.seconds)
        gain = f", {faster} the heuristic's speed" if faster != "–" else ""
        time = f": {duration(entry.seconds)}{gain}" if entry.seconds is not None else ""
        lines += [
            f"    # {name}({shortened(entry.signature)}){time}",
            f"    # in a single call: {name}(..., {_keywords(entry.cfg, config, kernel)})",
            f"    {label(entry.op_id, entry.call_key)!r}: {config},",
        ]
    return "\n".join(
        [
            f"# Tuned on {device}.",
            *sorted(imports),
            "",
            "TUNED = {",
            *lines,
            "}",
            "",
            "with overlay_cache(TUNED):",
            "    ...  # the calls",
            "",
        ]
    )


def _keywords(cfg: Any, source: str, kernel: Kernel[Any, Any] | None) -> str:
    """How a config is given to a call: the parameters of a decorated function are keywords."""
    names = getattr(kernel, "config_keywords", ())
    if names:
        return ", ".join(f"{name}={_source(getattr(cfg, name), set(), None)}" for name in names)
    return f"cfg={source}"


def _source(value: Any, imports: set[str], kernel: Kernel[Any, Any] | None) -> str:
    """An expression that gives the value; what it needs is added to the imports."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ", ".join(
            f"{f.name}={_source(getattr(value, f.name), imports, None)}"
            for f in dataclasses.fields(value)
            if f.init
        )
        return f"{_class_source(type(value), imports, kernel)}({fields})"
    if isinstance(value, enum.Enum):
        return f"{_imported(type(value), imports)}.{value.name}"
    if isinstance(value, Mapping):
        items = (
            f"{_source(k, imports, None)}: {_source(v, imports, None)}" for k, v in value.items()
        )
        return f"{{{', '.join(items)}}}"
    if isinstance(value, tuple):
        inside = ", ".join(_source(item, imports, None) for item in value)
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if isinstance(value, (bool, int, str, type(None))):
        return repr(value)
    if isinstance(value, float):
        return repr(value) if value - value == 0 else f"float({str(value)!r})"
    return _dtype_source(value, imports)


def _dtype_source(value: Any, imports: set[str]) -> str:
    import jax.numpy as jnp

    try:
        name = jnp.dtype(value).name
    except TypeError:
        return repr(value)
    imports.add("import jax.numpy as jnp")
    return f"jnp.dtype({name!r})"


def _class_source(cls: type, imports: set[str], kernel: Kernel[Any, Any] | None) -> str:
    if getattr(kernel, "Config", None) is cls:  # made by `tunable`: reached through its function
        return f"{_decorated(kernel, imports)}.Config"
    return _imported(cls, imports)


def _decorated(kernel: Any, imports: set[str]) -> str:
    """The name of a decorated function.

    Where its own name is that of something else (`attend = tunable(flash_attention, …)`), it is
    that of the variable that holds it.
    """
    own = sys.modules.get(kernel.__module__)
    if _has_config_of(kernel, own, getattr(kernel, "__qualname__", "")):
        return _imported(kernel, imports)
    for home, module in sorted(sys.modules.items(), key=lambda item: item[0] != "__main__"):
        if module is None or not isinstance(getattr(module, "__dict__", None), dict):
            continue
        for name, value in list(vars(module).items()):
            if value is kernel and name.isidentifier():
                if home != "__main__":
                    imports.add(f"from {home} import {name}")
                return name
    # Of a function within a function there is only the name that it has there.
    name = str(getattr(kernel, "__qualname__", "")).rpartition(".<locals>.")[2]
    return name if name.replace(".", "_").isidentifier() else re.sub(r"\W", "_", kernel.op_id)


def _has_config_of(kernel: Any, module: Any, path: str) -> bool:
    found = module
    for name in path.split("."):
        found = getattr(found, name, None)
    return getattr(found, "Config", None) is kernel.Config


def _imported(what: Any, imports: set[str]) -> str:
    """The name of a class or of a decorated function, imported from the shortest path it has."""
    home, name = what.__module__, getattr(what, "__qualname__", type(what).__qualname__)
    outer = name.partition(".")[0]
    top = getattr(sys.modules.get(home), outer, None)
    parts = home.split(".")
    for length in range(1, len(parts) + 1):
        module = ".".join(parts[:length])
        if top is not None and vars(sys.modules.get(module, object)).get(outer) is top:
            if module != "__main__":  # the script that it is pasted into
                imports.add(f"from {module} import {outer}")
            break
    return str(name).rpartition(".<locals>.")[2]  # what is local has no other name
