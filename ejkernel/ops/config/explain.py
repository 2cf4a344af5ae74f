"""Why a look-up is a miss: which field of the nearest entries differs, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax

from ...markup import one_line
from ..core.invocation import Invocation, readable
from ..utils.fingerprint import LEAF_SIGNATURE, leaf_signature

if TYPE_CHECKING:
    from .persistent import PersistentCache

_SHOWN = 2


def call_fields(inv: Invocation[Any, Any]) -> dict[str, Any]:
    """The parts of a call that its key is made of, as plain data: what two calls are compared by.

    Each positional argument is the list of its leaves (`float32[8,8]`), each keyword a text.
    """
    kernel = inv.kernel
    unkeyed = kernel.unkeyed if kernel is not None else ()
    fields: dict[str, Any] = {
        "args": [
            [leaf_signature(leaf) for leaf in jax.tree.leaves(argument)]
            for argument in inv.abstract_args
        ],
        "structure": [str(jax.tree.structure(argument)) for argument in inv.abstract_args],
        "kwargs": {
            name: readable(value) for name, value in inv.kwargs.items() if name not in unkeyed
        },
    }
    if inv.handled_by is not None:
        fields["implementation"] = inv.handled_by
    if inv.batch_axes is not None:
        fields["batch"] = str(inv.batch_axes)
    if inv.differentiated:
        fields["differentiated"] = ", ".join(inv.differentiated)
    return fields


def explain_miss(store: PersistentCache, inv: Invocation[Any, Any]) -> str:
    """What the nearest entries of the operation have that a call has not; empty if it is there."""
    key, name = inv.key, inv.full_op_id.partition("@v")[0]
    if store.entry(key) is not None:
        return ""
    found = {
        entry["key"]: entry
        for entry in (
            *store.related(op_id=key.op_id, call_key=key.call_key),
            *store.related(op_id=key.op_id, device=key.device),
            *store.related(op_id=f"{name}@v*"),
        )
    }
    if not found:
        return f"it holds nothing for {name}, whatever the arguments"
    asked = call_fields(inv)
    nearest = sorted((_differences(entry, key, asked) for entry in found.values()), key=len)
    lines = ["same " + _same(d) + ", " + ", ".join(d.values()) for d in nearest[:_SHOWN]]
    more = f" (and {len(nearest) - _SHOWN} more)" if len(nearest) > _SHOWN else ""
    return one_line("nearest: " + "; ".join(dict.fromkeys(lines)) + more)


def _same(differences: Mapping[str, str]) -> str:
    parts = [part for part in ("operation", "device", "call") if part not in differences]
    if any(part not in ("operation", "device") for part in differences):
        parts.remove("call")
    return " and ".join(parts) if len(parts) < 3 else "operation, device and call"


def _differences(entry: Mapping[str, Any], key: Any, asked: Mapping[str, Any]) -> dict[str, str]:
    """What differs, by field: `{"dtype": "tuned for float32, you asked for bfloat16"}`."""
    differences: dict[str, str] = {}
    device, op_id, call_key = entry["key"]
    if op_id != key.op_id:
        ours = key.op_id.partition("@v")[2]
        differences["version"] = f"tuned for its version {op_id.partition('@v')[2]}, this is {ours}"
    if call_key != key.call_key:
        stored = entry["about"].get("call")
        calls = dict(_call_differences(stored, asked)) if _is_call(stored) else {}
        differences |= calls or {"arguments": "tuned for another call"}
    if device != key.device:
        differences["device"] = f"tuned on {device}, this is {key.device}"
    return differences


def _is_call(stored: Any) -> bool:
    """True if this is what `call_fields` makes: the store may hold anything."""
    return (
        isinstance(stored, dict)
        and isinstance(stored.get("args"), list)
        and all(isinstance(argument, list) for argument in stored["args"])
        and isinstance(stored.get("kwargs"), dict)
    )


def _call_differences(
    stored: Mapping[str, Any], asked: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    then, now = stored["args"], asked["args"]
    if [len(leaves) for leaves in then] != [len(leaves) for leaves in now]:
        shown = ", ".join("+".join(map(str, leaves)) or "no arrays" for leaves in then)
        yield "arguments", f"tuned for other arguments ({shown})"
    elif stored.get("structure") != asked["structure"]:
        yield "structure", "tuned for arguments of another structure"
    else:
        yield from _leaf_differences(then, now)
    for name in sorted({*stored["kwargs"], *asked["kwargs"]}):
        before, after = stored["kwargs"].get(name), asked["kwargs"].get(name)
        if before != after:
            yield (
                f"keyword {name}",
                f"tuned {_with(name, before)}, you asked {_with(name, after)}",
            )
    if stored.get("implementation") != asked.get("implementation"):
        yield (
            "implementation",
            f"tuned for the implementation {stored.get('implementation')}, "
            f"{asked.get('implementation')} handles this call",
        )
    if stored.get("differentiated") != asked.get("differentiated"):
        then, now = (_program(call.get("differentiated")) for call in (stored, asked))
        yield "differentiated", f"tuned for a program that {then}, this one {now}"
    if stored.get("batch") != asked.get("batch"):
        yield (
            "batch",
            f"tuned for {stored.get('batch') or 'no batch'}, you asked for "
            f"{asked.get('batch') or 'no batch'}",
        )


def _program(differentiated: Any) -> str:
    return f"differentiates it in {differentiated}" if differentiated else "runs it forward only"


def _with(name: str, value: Any) -> str:
    return f"without {name}" if value is None else f"with {name}={value}"


def _leaf_differences(then: list[Any], now: list[Any]) -> Iterator[tuple[str, str]]:
    changes: dict[str, dict[str, list[int]]] = {}
    for position, (before, after) in enumerate(zip(then, now, strict=True)):
        for old, new in zip(before, after, strict=True):
            if old == new:
                continue
            parsed = LEAF_SIGNATURE.fullmatch(str(old)), LEAF_SIGNATURE.fullmatch(new)
            for field, text in _fields_that_differ(str(old), new, parsed):
                changes.setdefault(field, {}).setdefault(text, []).append(position)
    for field, texts in changes.items():
        for text, positions in texts.items():
            # One change of all arguments, such as their dtype, needs no list of them.
            everywhere = len(texts) == 1 and len(set(positions)) == len(now)
            where = "" if everywhere else f"argument {', '.join(map(str, sorted(set(positions))))} "
            yield f"{field} {where}", f"{where}{text}"


def _fields_that_differ(old: str, new: str, parsed: tuple[Any, Any]) -> Iterator[tuple[str, str]]:
    before, after = parsed
    if before is None or after is None:
        yield "value", f"tuned for {old}, you asked for {new}"
        return
    for field, form in (("dtype", "{}"), ("shape", "[{}]"), ("sharding", "sharding {}")):
        if before[field] != after[field]:
            texts = [form.format(match[field] or "none") for match in (before, after)]
            yield field, f"tuned for {texts[0]}, you asked for {texts[1]}"
    if before["weak"] != after["weak"]:
        kinds = ["a Python number" if match["weak"] else "an array" for match in (before, after)]
        yield "type", f"tuned for {kinds[0]}, you asked for {kinds[1]}"
