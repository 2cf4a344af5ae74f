"""Tune a whole lowered computation by the labels in its program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..config.selection import ConfigSelectorChain
from ..core.invocation import Invocation
from ..core.specification import SpecificationError, read_specification
from ..registry import find_invocation
from ..utils.fingerprint import device_fingerprint
from ..utils.meta import find_stamps_in_lowered, find_stamps_in_text, parse_label
from .results import AutotuningResult, Skipped
from .tuning import tune_invocations


def autotune_lowered(selector: ConfigSelectorChain, lowered: Any) -> AutotuningResult:
    """Tune each distinct labelled operation of a lowered computation and store the result.

    ::

        lowered = jax.jit(my_function).lower(example_args)
        result = autotune_lowered(selector, lowered)
        with result:
            out = jax.jit(my_function)(real_args)

    `lowered` may also be the program's text (`lowered.as_text()`), of this process or of another
    one: calls that were not recorded here are rebuilt from the specification in the program.
    Operations that the selector's caches know already are not measured again. Those that cannot be
    tuned are in `result.skipped` with the reason.
    """
    if not isinstance(selector, ConfigSelectorChain):
        raise TypeError(
            f"autotune_lowered takes (selector, lowered); the first is {selector!r} "
            f"({type(selector).__name__})"
        )
    device = device_fingerprint()
    return tune_invocations(selector, device, labelled_invocations(lowered, device))


def labelled_invocations(lowered: Any, device: str) -> Iterator[Invocation[Any, Any] | Skipped]:
    """The labelled calls of a program, each as an invocation, or with why it cannot be one."""
    stamps = (
        find_stamps_in_text(lowered)
        if isinstance(lowered, str)
        else find_stamps_in_lowered(lowered)
    )
    for text, spec in stamps:
        op_id, call_key = parse_label(text)
        inv = find_invocation(op_id, call_key, device)
        if inv is not None:
            yield inv
            continue
        try:
            if spec is None:
                raise SpecificationError(
                    "not called in this process, and the program has no specification of it"
                )
            inv = read_specification(spec)
            if (inv.key.op_id, inv.key.call_key) != (op_id, call_key):
                raise SpecificationError(f"its specification describes another call ({inv.key})")
            yield inv
        except SpecificationError as error:
            yield Skipped(text, str(error))
