"""Programs and their operations: texts of other runs, labels, and what is stored for them."""

from __future__ import annotations

import os
import pathlib
import re
import stat
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Union

from .exits import Failure

if TYPE_CHECKING:
    from ..ops import AutotuningResult, ConfigSelectorChain, Invocation
    from ..ops.execution.results import Skipped

# Each string is looked at once, also one that is never closed; so is each run of blanks.
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+("?)', re.DOTALL)
_STABLEHLO = re.compile(r"^[ \t]*+(builtin\.)?module\b", re.MULTILINE)
_HLO = re.compile(r"^[ \t]*+HloModule\b", re.MULTILINE)
_ENTRY = re.compile(r"^[ \t]*+ENTRY\b", re.MULTILINE)
_PAIRS = (("{", "}"), ("(", ")"))


def read_program(name: str) -> str:
    """The text of a program in a file (`-`: the standard input), whole or refused."""
    try:
        data = sys.stdin.buffer.read() if name == "-" else _read(name)
    except OSError as error:
        raise Failure(f"{name} cannot be read: {error.strerror or error}") from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Failure(
            f"{name} is no text ({error.reason} at byte {error.start}); write a program with "
            "jax.jit(f).lower(...).as_text()"
        ) from error
    if reason := not_whole(text):
        raise Failure(f"{name} is not the whole text of a program: {reason}")
    return text


def _read(name: str) -> bytes:
    """The bytes of a file, or of a pipe as shells make them: `--hlo <(command)`."""
    kind = os.stat(name).st_mode
    if stat.S_ISCHR(kind) or stat.S_ISBLK(kind):
        raise Failure(f"{name} cannot be read: it is a device, not a file")
    return pathlib.Path(name).read_bytes()


def not_whole(text: str) -> str:
    """Why a text is no StableHLO or HLO program, or only a part of one; "" if it is whole.

    >>> not_whole("module @jit_f { func.func public @main() { return } }")
    ''
    >>> not_whole("module @jit_f { func.func public @main() {")
    'it ends in the middle (2 "{" are not closed); was it cut off?'
    """
    if not text.strip():
        return "it is empty"
    stablehlo, hlo = _STABLEHLO.search(text), _HLO.search(text)
    if not stablehlo and not hlo:
        return (
            "it has neither a `module` (StableHLO) nor an `HloModule` (HLO); write a program with "
            "jax.jit(f).lower(...).as_text()"
        )
    bare = _STRING.sub(lambda string: "" if string[1] else '"', text)
    if '"' in bare:
        return "it ends in the middle of a string; was it cut off?"
    for opening, closing in _PAIRS:
        left = bare.count(opening) - bare.count(closing)
        if left > 0:
            return f'it ends in the middle ({left} "{opening}" are not closed); was it cut off?'
    if "{" not in bare or (stablehlo and "func.func" not in bare):
        return "it ends after its first line; was it cut off?"
    if hlo and not stablehlo and not _ENTRY.search(text):
        return "it has no ENTRY computation; was it cut off?"
    return ""


Labelled = Union["Invocation[Any, Any]", "Skipped"]


def operations_of(program: Any, name: str) -> list[Labelled]:
    """The distinct labelled calls of a program, each with an invocation or why it has none."""
    from ..ops import device_fingerprint
    from ..ops.execution.offline import labelled_invocations
    from ..ops.utils import environment

    found = list(labelled_invocations(program, device_fingerprint()))
    if not found:
        why = (
            "EJKERNEL_OPS_STAMP=none leaves its labels out"
            if environment.STAMP.read() == "none" and not isinstance(program, str)
            else "it calls none, or was traced with EJKERNEL_OPS_STAMP=none"
        )
        raise Failure(f"{name}: there is no operation of ejkernel in the program; {why}")
    return found


def invocations_of(labelled: Iterable[Labelled]) -> list[Invocation[Any, Any]]:
    """The invocations of the calls that have one."""
    from ..ops import Invocation

    return [call for call in labelled if isinstance(call, Invocation)]


def skipped_of(labelled: Iterable[Labelled]) -> list[Skipped]:
    """Those that have none, with the reason."""
    from ..ops.execution.results import Skipped

    return [call for call in labelled if isinstance(call, Skipped)]


def stored_result(
    selector: ConfigSelectorChain, invocations: Iterable[Invocation[Any, Any]]
) -> AutotuningResult:
    """What a strict call would run with, for each call; those with nothing stored are skipped."""
    from ..ops import AutotuningResult, Entry, StrictMiss, label, policy_override
    from ..ops.execution.results import Skipped
    from ..ops.utils.fingerprint import device_fingerprint

    entries, skipped = [], []
    for inv in invocations:
        key = inv.key
        assert inv.kernel is not None
        try:
            with policy_override(selector, strict=True):
                decision = selector.decide(inv, inv.kernel)
        except StrictMiss:
            skipped.append(Skipped(label(key.op_id, key.call_key), "nothing is stored for it"))
            continue
        about = decision.about if isinstance(decision.about, dict) else {}
        entries.append(Entry.of(key, decision.cfg, inv.signature, about, decision.reason))
    return AutotuningResult(device_fingerprint(), entries, skipped)
