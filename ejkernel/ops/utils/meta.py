"""Marks in programs: labels, which say whose an operation is, and primitives that do nothing else.

A label stands in the program as XLA metadata. Of all the ways to name operations it is the one that
survives every transform, lowering and compilation (names are cut at `@`, or lost). The primitives
are for what must be decided when JAX differentiates or lowers a program.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, overload

import jax
from jax.interpreters import batching, mlir

from . import environment
from .fingerprint import abstractify_arguments, short_hash, tree_signature

if TYPE_CHECKING:
    from ..config.selection import ConfigSelectorChain

F = TypeVar("F", bound=Callable[..., Any])

LABEL_PREFIXES: tuple[str, ...] = (environment.PREFIX.default,)
"""Prefixes that are always recognised, in addition to that of `EJKERNEL_OPS_PREFIX`."""

# Time is linear in a text, whatever it is: a run of characters is never given back (`*+`), and
# none is looked at again from its middle (the lookbehinds).
_BEFORE = "[A-Za-z0-9_.-]"
_PREFIX = environment.PREFIX.pattern
_OP_ID = "[A-Za-z0-9_][A-Za-z0-9_./-]*+@v[A-Za-z0-9_.]++"
_REST = f"(?P<op_id>{_OP_ID}):(?P<call_key>[0-9a-f]{{16}})(?![0-9a-f])"

LABEL_RE = re.compile(f"(?<!{_BEFORE})(?P<prefix>{_PREFIX}){_REST}")
"""`ejkernel_ops#matmul@v1:0123456789abcdef`, in groups `prefix` (with its `#`), `op_id` and
`call_key`."""

ATTRIBUTE = "ejkernel"
"""The metadata of an operation of ours: its label; on the call of a kernel, a blank and the
specification follow."""

_STAMP = re.compile(rf'{ATTRIBUTE}(?<!\w{ATTRIBUTE}) ?= ?"([^"\\]*+(?:\\.[^"\\]*+)*+)"', re.DOTALL)
_PARTITIONED = "partitioned"
_MOST_PARTITIONED = 4096
_labels_of_partitioned: dict[str, dict[str, None]] = {}
_partitioning = threading.local()
_collecting_lock = threading.Lock()

_HASH = re.compile(r"[0-9a-f]{16}")


@overload
def label(name: str, /) -> Callable[[F], F]: ...
@overload
def label(op_id: str, call_key: str, /, prefix: str | None = None) -> str: ...
def label(op_id: str, call_key: str | None = None, /, prefix: str | None = None) -> Any:
    """The label of an operation's call; or, with a name alone, a decorator that puts it on.

    The prefix, its `#` included, is that of `EJKERNEL_OPS_PREFIX` unless it is given.

    >>> label("matmul@v1", "0123456789abcdef")
    'ejkernel_ops#matmul@v1:0123456789abcdef'
    >>> label("matmul@v1", "0123456789abcdef", prefix="mine#")
    'mine#matmul@v1:0123456789abcdef'

    As a decorator it names all operations of a function::

        @label("my_attention")
        def attention(q, k, v): ...
    """
    if call_key is None:
        if prefix is not None:
            _checked_prefix(prefix)
        return functools.partial(_labelled, _versioned(op_id), prefix)
    return _format(op_id, call_key, prefix)


def _format(op_id: str, call_key: str, prefix: str | None) -> str:
    if not isinstance(op_id, str) or not re.fullmatch(_OP_ID, op_id):
        raise ValueError(
            f"label: op_id {op_id!r} is not an operation with its version, like 'matmul@v1'"
        )
    if not isinstance(call_key, str) or not _HASH.fullmatch(call_key):
        raise ValueError(
            f"label: the hash {call_key!r} of {op_id} is not 16 lower-case hexadecimal digits"
        )
    return f"{_checked_prefix(prefix)}{op_id}:{call_key}"


def _checked_prefix(given: str | None = None) -> str:
    """The prefix of labels: as given, else of the environment; always one that is found again."""
    if given is None:
        return environment.PREFIX.read()
    if isinstance(given, str) and re.fullmatch(_PREFIX, given):
        return given
    raise ValueError(
        f"label: the prefix {given!r} cannot stand before a label; {environment.PREFIX.form}"
    )


def _versioned(name: str) -> str:
    op_id = name if "@v" in name else f"{name}@v1"
    if not re.fullmatch(_OP_ID, op_id):
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


@contextlib.contextmanager
def marking_partitioned(name: str) -> Iterator[None]:
    """Mark a call that the compiler partitions, under a name of its own.

    What runs on a device is known when the program is compiled, and its labels do not survive in
    it: they are noted then, see `collecting_labels`.
    """
    from jax.experimental.xla_metadata import set_xla_metadata

    with set_xla_metadata(**{ATTRIBUTE: f"{_PARTITIONED} {name}"}):
        yield


@contextlib.contextmanager
def collecting_labels(name: str) -> Iterator[None]:
    """Inside the block `collect_label` collects labels for the partitioned call with this name."""
    before = getattr(_partitioning, "name", None)
    _partitioning.name = name
    try:
        yield
    finally:
        _partitioning.name = before


def collect_label(label_text: str) -> None:
    """Remember the label of what a device runs of the call that is being partitioned, if any."""
    name = getattr(_partitioning, "name", None)
    if name is None:
        return
    with _collecting_lock:
        _labels_of_partitioned[name] = {**_labels_of_partitioned.pop(name, {}), label_text: None}
        while len(_labels_of_partitioned) > _MOST_PARTITIONED:
            del _labels_of_partitioned[next(iter(_labels_of_partitioned))]


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
    return list(dict.fromkeys(match[0] for match in _recognised(text)))


def _recognised(text: str) -> list[re.Match[str]]:
    """Where labels with a prefix that we know stand in a text, in order."""
    prefixes = {*LABEL_PREFIXES, _checked_prefix()}
    found = [match for prefix in prefixes for match in _reader(prefix).finditer(text)]
    return sorted(found, key=lambda match: match.start())


@functools.lru_cache(maxsize=16)
def _reader(prefix: str) -> re.Pattern[str]:
    # It begins with a literal, which `re` searches for much faster than for a set of characters.
    literal = re.escape(prefix)
    return re.compile(f"{literal}(?<!{_BEFORE}{literal}){_REST}")


def find_labels_in_lowered(lowered: Any) -> list[str]:
    """The labels in a lowered computation (`jax.jit(f).lower(...)`), in order, each once."""
    return [text for text, _ in find_stamps_in_lowered(lowered)]


def find_stamps_in_lowered(lowered: Any) -> list[tuple[str, str | None]]:
    """Each label of a lowered computation with its specification, where the program has one.

    Calls that the compiler partitions are known by their local shapes only when it has compiled
    the program, so a program that has such calls is compiled.
    """
    stamps: list[tuple[str, str | None]] = []
    compiled = False
    for text, spec in _stamps(_stablehlo(lowered).operation):
        if text != _PARTITIONED or spec is None:
            stamps.append((text, spec))
            continue
        if spec not in _labels_of_partitioned and not compiled:
            lowered.compile()
            compiled = True
        stamps += [(found, None) for found in _labels_of_partitioned.get(spec, ())]
    return _merge_stamps(stamps)


def find_stamps_in_text(text: str) -> list[tuple[str, str | None]]:
    """The same from a program's text: StableHLO (`lowered.as_text()`) or HLO."""
    labels = [(found, None) for found in extract_labels_from_hlo_text(text)]
    values = dict.fromkeys(match[1] for match in _STAMP.finditer(text))
    return _merge_stamps([*labels, *map(_parse_stamp, values)], _unescape)


def _parse_stamp(stamp: str) -> tuple[str, str | None]:
    text, _, spec = stamp.partition(" ")
    return text, spec or None


def _merge_stamps(
    stamps: Iterable[tuple[str, str | None]], read: Callable[[str], str] = str
) -> list[tuple[str, str | None]]:
    """Each recognised label once, in order of appearance, with its specification if any has it."""
    merged: dict[str, str | None] = {}
    for text, spec in stamps:
        if text not in merged and [match[0] for match in _recognised(text)] != [text]:
            continue
        if merged.get(text) is None:
            merged[text] = None if spec is None else read(spec)
    return list(merged.items())


def _unescape(text: str) -> str:
    # MLIR writes `\22` and `\\`; HLO writes `\"` and `\'`.
    def character(match: re.Match[str]) -> str:
        code = match[1]
        return chr(int(code, 16)) if len(code) == 2 else code

    return re.sub(r"\\([0-9A-Fa-f]{2}|.)", character, text, flags=re.DOTALL)


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


_default_selector: Callable[[], ConfigSelectorChain] | None = None


def provide_default_selector(selector: Callable[[], ConfigSelectorChain]) -> None:
    """Say who knows the configs of labels where nobody is named."""
    global _default_selector
    _default_selector = selector


def labels_to_configs(
    source: Any, selector: ConfigSelectorChain | None = None
) -> list[tuple[str, Any]]:
    """Each label with the config that its operation would run with, or None.

    `source` is a lowered computation or a list of labels; without a selector the default
    executor's is asked. Nothing is tuned: overlays, memory and disk are looked at, no more.
    """
    if selector is None:
        assert _default_selector is not None  # `ejkernel.ops` provides it when it is imported
        selector = _default_selector()
    if isinstance(source, str):
        raise TypeError(
            "labels_to_configs takes a lowered computation or a list of labels, not one string; "
            "use extract_labels_from_hlo_text for a program's text"
        )
    labels = list(source) if isinstance(source, (list, tuple)) else find_labels_in_lowered(source)
    return [(text, selector.known_config(*parse_label(text))) for text in labels]


# --- primitives ----------------------------------------------------------------------------------


def new_primitive(name: str, *, multiple_results: bool = False) -> Any:
    """A primitive without any rules yet.

    As `jax.extend.core.Primitive(name)`, whose import takes 0.15 s more than that of JAX, because
    `jax.extend` brings Pallas along.
    """
    primitive: Any = type(jax.lax.add_p)(name)
    primitive.multiple_results = multiple_results
    return primitive


def identity_primitive(name: str, lower: Callable[..., None] = lambda **_: None) -> Any:
    """A primitive that gives what it gets, under every transform.

    `lower(**params)` is called when it is lowered, or run without `jit`.
    """
    primitive = new_primitive(name)
    primitive.def_abstract_eval(lambda x, **_: x)

    def run(x: Any, **params: Any) -> Any:
        lower(**params)
        return x

    def lowering(ctx: Any, x: Any, **params: Any) -> list[Any]:
        lower(**params)
        return [x]

    primitive.def_impl(run)
    mlir.register_lowering(primitive, lowering)
    batching.primitive_batchers[primitive] = lambda args, axes, **params: (
        primitive.bind(args[0], **params),
        axes[0],
    )
    return primitive


_lowered = identity_primitive("ejkernel_lowered", lambda notify: notify())


def when_lowered(outputs: Any, notify: Callable[[], None]) -> Any:
    """The same outputs; `notify()` is called when a program that computes them is lowered.

    Not everything that is traced becomes part of a program: JAX traces a function forward before it
    asks for its gradient.
    """
    leaves, structure = jax.tree.flatten(outputs)
    if not leaves:
        notify()
        return outputs
    leaves[0] = _lowered.bind(leaves[0], notify=notify)
    return jax.tree.unflatten(structure, leaves)
