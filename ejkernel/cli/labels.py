"""`ejkernel labels`: which operations of ours a program has."""

from __future__ import annotations

from typing import Any

import click

from ..formatting import counted, described, lasting, shortened
from . import options
from .exits import Exit
from .output import State, table
from .programs import read_program
from .stores import open_place


@click.command(short_help="List the operations in the text of a program.")
@click.argument("file", metavar="FILE")
@options.store
@options.with_state
def labels(state: State, file: str, source: str | None) -> int:
    """List the operations in the text of a program, with what is stored for them on this device.

    FILE holds StableHLO or HLO (`jax.jit(f).lower(...).as_text()`); `-` is the standard input.
    Nothing of the program is run or imported. Ends with 1 if there is none.
    """
    text = read_program(file)
    from ..ops import device_fingerprint
    from ..ops.core.specification import describe_specification
    from ..ops.utils.meta import find_stamps_in_text, parse_label

    place = open_place(source, or_nowhere=True)
    stored = {tuple(entry["key"]): entry for entry in place.entries()}
    device = device_fingerprint()
    data: list[dict[str, Any]] = []
    for label, spec in find_stamps_in_text(text):
        op_id, call_key = parse_label(label)
        described_call = {} if spec is None else describe_specification(spec)
        entry = stored.get((device, op_id, call_key))
        data.append(
            {
                "label": label,
                "op_id": op_id,
                "call_key": call_key,
                "kernel": described_call.get("kernel"),
                "signature": described_call.get("signature"),
                "config": entry and entry["config"],
            }
        )
    rows = [
        (
            item["op_id"],
            item["call_key"],
            lasting(item["kernel"] or ""),
            "–" if item["config"] is None else described(item["config"]),
            shortened(item["signature"] or "") or "(only its label)",
        )
        for item in data
    ]
    header = ("operation", "key", "kernel", "stored config", "call")
    known = sum(item["config"] is not None for item in data)
    counts = f"{counted(len(data), 'operation')}, {known} of them stored for {device}"
    state.result({"device": device, "labels": data}, table(header, rows, details=3), counts)
    return Exit.OK if data else Exit.NOT_WELL
