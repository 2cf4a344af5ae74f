"""Labels: how a program says which of its operations are ours.

A label stands in the program as XLA metadata. Of all the ways to name operations it is the one that
survives every transform, lowering and compilation (names are cut at `@`, or lost).
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, overload

import jax

from . import environment
from .fingerprint import abstractify_arguments, tree_signature
from .stable import short_hash

if TYPE_CHECKING:
    from ..config.selection import ConfigSelectorChain

F = TypeVar("F", bound=Callable[..., Any])

LABEL_PREFIXES: tuple[str, ...] = ("ejkernel_ops",)
"""Prefixes that are always recognised, beside that of `EJKERNEL_OPS_PREFIX`."""

LABEL_RE = re.compile(
    r"(?P<prefix>[A-Za-z_][A-Za-z0-9_.-]*)"
    r"#(?P<op_id>[A-Za-z0-9_][A-Za-z0-9_./-]*@v[A-Za-z0-9_.]+)"
    r":(?P<call_key>[0-9a-f]{16})(?![0-9a-f])"
)
"""`ejkernel_ops#matmul@v1:0123456789abcdef`, in groups `prefix`, `op_id` and `call_key`."""

ATTRIBUTE = "ejkernel"
"""The metadata of an operation of ours: its label; on the call of a kernel, a blank and the
specification follow."""

_HASH = re.compile(r"[0-9a-f]{16}")
_OP_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]*@v[A-Za-z0-9_.]+")


@overload
def label(name: str, /) -> Callable[[F], F]: ...
@overload
def label(op_id: str, call_key: str, /, prefix: str | None = None) -> str: ...
def label(op_id: str, call_key: str | None = None, /, prefix: str | None = None) -> Any:
    """The label of an operation's call; or, with a name alone, a decorator that puts it on.

    >>> label("matmul@v1", "0123456789abcdef")
    'ejkernel_ops#matmul@v1:0123456789abcdef'

    As a decorator it names all operations of a function::

        @label("my_attention")
        def attention(q, k, v): ...
    """
    if call_key is None:
        return functools.partial(_labelled, _versioned(op_id), prefix)
    return _format(op_id, call_key, prefix)


def _format(op_id: str, call_key: str, prefix: str | None) -> str:
    if not isinstance(op_id, str) or not _OP_ID.fullmatch(op_id):
        raise ValueError(
            f"label: op_id {op_id!r} is not an operation with its version, like 'matmul@v1'"
        )
    if not isinstance(call_key, str) or not _HASH.fullmatch(call_key):
        raise ValueError(
            f"label: the hash {call_key!r} of {op_id} is not 16 lower-case hexadecimal digits"
        )
    return f"{prefix or environment.PREFIX.read()}#{op_id}:{call_key}"


def _versioned(name: str) -> str:
    op_id = name if "@v" in name else f"{name}@v1"
    if not _OP_ID.fullmatch(op_id):
        raise ValueError(
            f"label: the name {name!r} cannot stand in a label; use letters, digits, '_', '.', '-' "
            "and '/'"
        )
    return op_id


def _labelled(op_id: str, prefix: str | None, function: F) -> F:
    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        call_key = short_hash(tree_signature(abstractify_arguments((args, kwargs))))
        with stamped(_format(op_id, call_key, prefix)):
            return function(*args, **kwargs)

    return named  # type: ignore[return-value]


def parse_label(text: str) -> tuple[str, str]:
    """Operation id and call key of a label."""
    match = LABEL_RE.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is not a label; labels look like 'ejkernel_ops#matmul@v1:0123456789abcdef'"
        )
    return match["op_id"], match["call_key"]


@contextlib.contextmanager
def stamped(label_text: str, spec: str | None = None) -> Iterator[None]:
    """Put a label, and a specification if given, on every operation traced in the block."""
    from jax.experimental.xla_metadata import set_xla_metadata

    op_id, _ = parse_label(label_text)
    # Profilers show scope names; they are cut at '@', so the version stays out of them.
    scope = op_id.partition("@v")[0].replace("/", ".")
    stamp = label_text if spec is None else f"{label_text} {spec}"
    with jax.named_scope(scope), set_xla_metadata(**{ATTRIBUTE: stamp}):
        yield


# --- reading -------------------------------------------------------------------------------------


def extract_labels_from_hlo_text(text: str) -> list[str]:
    """The labels in a program's text (StableHLO or HLO), in order, each once.

    >>> extract_labels_from_hlo_text("… ejkernel_ops#matmul@v1:0123456789abcdef …")
    ['ejkernel_ops#matmul@v1:0123456789abcdef']
    """
    if not isinstance(text, str):
        raise TypeError(
            f"extract_labels_from_hlo_text takes the program's text, got {type(text).__name__}; "
            "for a jax.stages.Lowered use find_labels_in_lowered"
        )
    prefixes = {*LABEL_PREFIXES, environment.PREFIX.read()}
    found = (match for match in LABEL_RE.finditer(text) if match["prefix"] in prefixes)
    return list(dict.fromkeys(match[0] for match in found))


def find_labels_in_lowered(lowered: Any) -> list[str]:
    """The labels in a lowered computation (`jax.jit(f).lower(...)`), in order, each once."""
    return [text for text, _ in find_stamps_in_lowered(lowered)]


def find_stamps_in_lowered(lowered: Any) -> list[tuple[str, str | None]]:
    """Each label of a lowered computation with its specification, where the program has one."""
    return _merge_stamps(_stamps(_stablehlo(lowered).operation))


def find_stamps_in_text(text: str) -> list[tuple[str, str | None]]:
    """The same from a program's text: StableHLO (`lowered.as_text()`) or HLO."""
    labels = [(found, None) for found in extract_labels_from_hlo_text(text)]
    values = re.finditer(rf'\b{ATTRIBUTE} ?= ?"((?:[^"\\]|\\.)*)"', text)
    return _merge_stamps([*labels, *(_parse_stamp(_unescape(value[1])) for value in values)])


def _parse_stamp(stamp: str) -> tuple[str, str | None]:
    text, _, spec = stamp.partition(" ")
    return text, spec or None


def _merge_stamps(stamps: Iterable[tuple[str, str | None]]) -> list[tuple[str, str | None]]:
    """Each recognised label once, in order of appearance, with its specification if any has it."""
    merged: dict[str, str | None] = {}
    for text, spec in stamps:
        if extract_labels_from_hlo_text(text) == [text]:
            merged[text] = merged.get(text) or spec
    return list(merged.items())


def _unescape(text: str) -> str:
    # MLIR writes `\22` and `\\`; HLO writes `\"` and `\'`.
    def character(match: re.Match[str]) -> str:
        code = match[1]
        return chr(int(code, 16)) if len(code) == 2 else code

    return re.sub(r"\\([0-9A-Fa-f]{2}|.)", character, text)


def _stablehlo(lowered: Any) -> Any:
    if not hasattr(lowered, "compiler_ir"):
        raise TypeError(
            f"expected a lowered computation (jax.jit(f).lower(...)), got {type(lowered).__name__}"
        )
    return lowered.compiler_ir("stablehlo")


def _stamps(operation: Any) -> Iterator[tuple[str, str | None]]:
    """Walk a module, function by function, yielding the stamp of each operation that has one."""
    if "mhlo.frontend_attributes" in operation.attributes:
        attributes = operation.attributes["mhlo.frontend_attributes"]
        if ATTRIBUTE in attributes:
            yield _parse_stamp(str(attributes[ATTRIBUTE].value))
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _stamps(inner.operation)


def labels_to_configs(
    source: Any, selector: ConfigSelectorChain | None = None
) -> list[tuple[str, Any]]:
    """Each label with the config that its operation would run with, or None.

    `source` is a lowered computation or a list of labels; without a selector the default
    executor's is asked. Nothing is tuned: overlays, memory and disk are looked at, no more.
    """
    if selector is None:
        from ..execution.executor import default_executor

        selector = default_executor().selector
    if isinstance(source, str):
        raise TypeError(
            "labels_to_configs takes a lowered computation or a list of labels, not one string; "
            "use extract_labels_from_hlo_text for a program's text"
        )
    labels = list(source) if isinstance(source, (list, tuple)) else find_labels_in_lowered(source)
    return [(text, selector.known_config(*parse_label(text))) for text in labels]
