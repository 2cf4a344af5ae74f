"""What fuzz targets are made of: any JSON, valid documents with something changed, any bytes.

A target is a function of one drawn value. It runs with a few fixed examples in `make test`, and
with many random ones in `make test-long`; `EJKERNEL_FUZZ_EXAMPLES` says how many.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ejkernel.ops import Kernel, Limit, Limits

EXAMPLES = int(os.environ.get("EJKERNEL_FUZZ_EXAMPLES", "600"))


def quickly(strategy, examples=60):
    """The target with the same examples every time: `make test`."""
    return _made(strategy, settings(max_examples=examples, derandomize=True, database=None))


def at_length(strategy, share=1.0):
    """The target with many random examples: `make test-long`. What failed is tried again first."""

    def mark(target):
        made = _made(strategy, settings(max_examples=max(1, int(EXAMPLES * share))))(target)
        return pytest.mark.long(made)

    return mark


def _made(strategy, chosen):
    relaxed = settings(chosen, deadline=None, suppress_health_check=list(HealthCheck))

    def make(target):
        def test(drawn):
            target(drawn)

        return relaxed(given(drawn=strategy)(test))

    return make


# --- what is drawn --------------------------------------------------------------------------------

NASTY = [
    *("", "\0", "\x1b[2J", "\u202e", "\ud800", "é", "a" * 3000, "\n", '"', "'", "\\", "{"),
    *("[" * 90, "os:system", "subprocess:Popen", "builtins:object", "ejkernel.ops:Kernel"),
    *("a.b:C.<locals>.D", "$array", "$dtype", "$float", "$tuple", "NaN", "1e999", "int4[]"),
    *("float32[8]", "float32[8]~", "2026-01-01T00:00:00+00:00", "measured", "cpu|x"),
    *("matmul@v1", "0123456789abcdef"),
]
TEXTS = st.sampled_from(NASTY) | st.text(max_size=20)
NUMBERS = (
    st.integers(-3, 70)
    | st.sampled_from([10**30, -(10**30), 2**31, 2**63, -(2**63), 10**400])
    | st.floats()
)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS
TAGS = st.sampled_from(["$array", "$dtype", "$float", "$tuple", "$list", "$dict", "$set", "rows"])
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS | TAGS, inner, max_size=4),
    max_leaves=12,
)


@st.composite
def changed(draw, document):
    """A valid document with a few places that are something else, missing, or there twice."""
    plain = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 4))):
        holder, place = draw(st.sampled_from(places(plain)))
        action = draw(st.sampled_from(["replace", "replace", "remove", "again"]))
        if action == "replace":
            holder[place] = draw(JSON)
        elif action == "remove":
            del holder[place]
        elif isinstance(holder, list):
            holder.append(copy.deepcopy(holder[place]))
        else:
            holder[draw(TEXTS)] = copy.deepcopy(holder[place])
        if not places(plain):
            break
    return plain


def places(plain):
    """Every place of a document, with what it is in; never none."""
    found = []

    def walk(inner):
        items = inner.items() if isinstance(inner, dict) else enumerate(inner)
        for place, value in items:
            found.append((inner, place))
            if isinstance(value, (dict, list)) and value:
                walk(value)

    if isinstance(plain, (dict, list)):
        walk(plain)
    return found or [({0: plain}, 0)]


def as_text(plain):
    """JSON as anybody may write it: with NaN, and with characters as they are where possible."""
    return json.dumps(plain)


@st.composite
def damaged(draw, whole):
    """A text or some bytes with a few pieces overwritten, cut off, or repeated."""
    data = whole
    empty = whole[:0]
    junk = st.binary(max_size=12) if isinstance(whole, bytes) else TEXTS
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(0, len(data)))
        length = draw(st.integers(0, 40))
        kind = draw(st.sampled_from(["overwrite", "insert", "cut", "end", "again"]))
        if kind == "overwrite":
            new = draw(junk)
            data = data[:at] + new + data[at + len(new) :]
        elif kind == "insert":
            data = data[:at] + draw(junk) + data[at:]
        elif kind == "cut":
            data = data[:at] + data[at + length :]
        elif kind == "end":
            data = data[:at]
        else:
            data = data[:at] + data[at : at + length] + data[at:]
    return empty + data


def documents(document):
    """A changed document, any JSON, any text, and the document's own text, damaged."""
    return (
        changed(document).map(as_text)
        | JSON.map(as_text)
        | TEXTS
        | damaged(as_text(document))
        | st.binary(max_size=40)
    )


# --- an operation to serve ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Part:
    size: int = 8
    name: str | None = None


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Some of all that a config may hold; it says when it was made with anything else."""

    rows: int = 4
    scale: float = 1.0
    part: Part = Part()
    sizes: tuple[int, ...] = ()
    implementation: str | None = None


class Fuzzed(Kernel[Blocks, object]):
    limits: ClassVar = {
        "run": Limits({"rows": Limit(minimum=1, maximum=64), "part.size": Limit(minimum=1)})
    }

    def run(self, x, *, cfg):
        return x * cfg.scale

    def candidate_cfgs(self, inv):
        return [Blocks(2), Blocks(4)]


KERNEL = Fuzzed("fuzzed")
