"""Times, factors, configs and calls as text: the same on the command line, in tables and reports.

Needs nothing, JAX least of all.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Value = str | int | float | bool | None

_OBJECT = re.compile(r"<(?:function|built-in function|class) '?([\w.]+)'?(?: at 0x\w+)?>")
_TEMPORARY = re.compile(r"[\w.]*<locals>\.| at 0x[0-9a-fA-F]+")
_AROUND = re.compile(r"(\w+)\[([^\]]*)\]\((.*)\)", re.DOTALL)


def is_time(seconds: float) -> bool:
    """True for seconds that a clock can have given; 0 is what it could not tell from nothing.

    >>> is_time(1e-3), is_time(0), is_time(-1.0), is_time(1e-320)
    (True, True, False, False)
    """
    return seconds == 0 or 1e-15 <= seconds <= 1e12


def duration(seconds: float | None) -> str:
    """A time in the unit that fits it.

    >>> duration(0.00123), duration(3.2e-5), duration(75), duration(None)
    ('1.23 ms', '32.0 µs', '1 min 15 s', '–')
    """
    if seconds is None or not is_time(seconds):
        return "–"
    if seconds >= 60:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{three_digits(seconds / size)} {unit}"
    return f"{three_digits(seconds / 1e-9)} ns"


def three_digits(number: float) -> str:
    """A number with three digits: `1.23`, `12.3`, `123`."""
    return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f}"


def times(factor: float) -> str:
    """`1.25×`."""
    return f"{factor:.2f}×" if factor < 9.995 else f"{factor:.0f}×"


def speedup(before: float | None, after: float | None) -> str:
    """`1.25×`, how many times faster the second time is; a dash if one of them is not known."""
    return times(before / after) if before and after else "–"


def counted(number: int, what: str) -> str:
    """`1 entry`, `2 entries`, `3 candidates`."""
    if number != 1:
        what = f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    return f"{number} {what}"


def lasting(text: str) -> str:
    """A text without what means nothing after this run: addresses, and where a class was local.

    >>> lasting("<function main.<locals>.gelu at 0x7f12>"), lasting("f.<locals>.Config(rows=8)")
    ('gelu', 'Config(rows=8)')
    >>> lasting("<function <lambda> at 0x7f12>")
    'lambda'
    """
    if "<" not in text and " at 0x" not in text:
        return text
    return _OBJECT.sub(r"\1", _TEMPORARY.sub("", text.replace("<lambda>", "lambda")))


def shortened(signature: str) -> str:
    """A call as short as it can be understood: what repeats is counted, options say their name.

    >>> shortened("float32[1,512,8,32], float32[1,512,8,32], float32[1,512,8,32], causal=True")
    '3 × float32[1,512,8,32] causal'
    >>> shortened("grad[0, 1](float32[8], float32[8], window=(4, 0), causal=False)")
    'grad(2 × float32[8] window=(4, 0) causal=False)'
    >>> shortened("grad[0](float32[8], int32[8])")
    'grad[0](float32[8], int32[8])'
    """
    around = _AROUND.fullmatch(signature)
    parts = _parts(around[3] if around else signature)
    if around and around[1] not in ("grad", "vmap", "pmap", "batch"):
        parts, around = _parts(signature), None
    named = [part for part in parts if re.match(r"\w+=", part)]
    positional = [part for part in parts if part not in named]
    runs = [(part, len(list(run))) for part, run in itertools.groupby(positional)]
    counted_parts = [part if count == 1 else f"{count} × {part}" for part, count in runs]
    options = [part.removesuffix("=True") for part in named]
    text = " ".join(filter(None, (", ".join(counted_parts), *options)))
    if around is None:
        return text
    inside = shortened(around[3]) if _AROUND.fullmatch(around[3]) else text
    everything = ", ".join(map(str, range(len(positional))))
    of = "" if around[1] == "grad" and around[2] == everything else f"[{around[2]}]"
    return f"{around[1]}{of}({inside})"


def _parts(signature: str) -> list[str]:
    """The arguments of a call, each whole: a comma inside of one does not divide it."""
    parts, depth, begin = [], 0, 0
    for place, character in enumerate(signature):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and signature.startswith(", ", place):
            parts.append(signature[begin:place])
            begin = place + 2
    return [part for part in (*parts, signature[begin:]) if part]


def flat(config: Any) -> dict[str, Value]:
    """A config's fields by their path, without those that are None: of a config, or of its JSON.

    >>> flat({"fwd": {"block": 64, "warps": None}, "dtype": {"$dtype": "bfloat16"}})
    {'fwd.block': 64, 'dtype': 'bfloat16'}
    """
    return {path: value for path, value in _leaves(config, "") if value is not None}


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Value]]:
    tagged = {"$dtype", "$float", "$enum", "$set"}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping) and not tagged.intersection(value):
        for name, item in value.items():
            if name != "$type":
                yield from _leaves(item, f"{path}.{name}" if path else str(name))
        return
    if isinstance(value, Mapping):
        value = str(next(item for name, item in value.items() if name in tagged))
    elif isinstance(value, (list, tuple)):
        value = "×".join(str(item) for item in value)
    elif isinstance(value, enum.Enum):
        value = value.name
    elif isinstance(value, type):
        value = value.__name__
    elif not isinstance(value, (str, int, float, bool, type(None))):
        value = lasting(str(value))
    yield path or "config", value


def described(config: Any, only: Sequence[str] | None = None) -> str:
    """A config in one line; `only` these dimensions, if it has any of them.

    >>> described({"fwd": {"q": 64, "k": 32}, "rows": 8}), described({"rows": 8, "b": 1}, ["rows"])
    ('fwd(q=64 k=32) rows=8', 'rows=8')
    """
    fields = flat(config)
    wanted = {name: value for name, value in fields.items() if only is None or name in only}
    parts = []
    for group, names in itertools.groupby(wanted or fields, lambda name: name.rpartition(".")[0]):
        inside = " ".join(f"{name.rpartition('.')[2]}={fields[name]}" for name in names)
        parts.append(f"{group}({inside})" if group else inside)
    return " ".join(parts) or "default"
