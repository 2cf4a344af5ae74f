"""`ejkernel bench`: the stored configs of a function against its heuristic ones or plain JAX."""

from __future__ import annotations

import dataclasses
import statistics

import click

from ..formatting import described, duration, shortened, times
from ..report.formatting import interval
from . import options
from .bench_plain import against_plain
from .exits import Exit, Failure
from .loading import import_modules, load
from .output import State, fields_of, table, working
from .programs import invocations_of, operations_of
from .stores import open_place


@click.command(short_help="Compare a function with heuristic and with stored configs.")
@click.argument("name", metavar="MODULE:FUNCTION")
@options.store
@click.option("--rounds", type=int, default=15, show_default=True, help="Most runs of each.")
@click.option(
    "--seconds", type=float, default=60.0, show_default=True, help="Begin no round after this time."
)
@click.option(
    "--against",
    type=click.Choice(["heuristic", "plain"]),
    default="heuristic",
    show_default=True,
    help="Compare with the heuristic configs (the whole function), or with plain JAX (each call).",
)
@options.imports
@options.with_state
def bench(
    state: State,
    name: str,
    source: str | None,
    rounds: int,
    seconds: float,
    against: str,
    modules: tuple[str, ...],
) -> int:
    """Run a function with heuristic configs and with the stored ones, interleaved, and compare.

    MODULE:FUNCTION is what `ejkernel tune` takes. With `--against plain`, each of its operations
    runs by itself: in plain JAX, with its heuristic config and with the stored one. Nothing is
    tuned and nothing is stored. Ends with 1 if nothing is stored for any of its operations.
    """
    if rounds < 1:
        raise click.UsageError(f"--rounds {rounds} must be 1 or more")
    with working(f"loading {name}"):
        place = open_place(source)
        if place.store is None:
            raise click.UsageError(
                "--store: give a folder or a URL; a bundle is named in EJKERNEL_CONFIG_PATH"
            )
        import_modules(modules)
        subject = load(name)
        found = operations_of(subject.lower(), name)

        from ..ops import ConfigCache, ConfigSelectorChain
        from ..ops.execution.tuning import stored_result
        from ..ops.utils.serialize import to_plain
    selector = ConfigSelectorChain(ConfigCache(), persistent=place.store)
    invocations = invocations_of(found)
    result = stored_result(selector, invocations)
    if not result.entries:
        raise Failure(
            f"nothing is stored for the operations of {name} in {place.shown}, so there is nothing "
            f"to compare; run `ejkernel tune {name}` first",
            Exit.NOT_WELL,
        )
    if against == "plain":
        with working(f"running the operations of {name} and plain JAX"):
            against_plain(state, place.shown, result, invocations, rounds, seconds)
        return Exit.OK
    with working(f"running {name} with heuristic and with stored configs"):
        compared = subject.compare(result, rounds=rounds, seconds=seconds)
    before, after = (statistics.median(samples) for samples in (compared.before, compared.after))
    gain = compared.gain
    operations = [
        {
            "op_id": entry.op_id,
            "call_key": entry.call_key,
            "signature": entry.signature,
            "config": to_plain(entry.cfg),
        }
        for entry in result
    ]
    rows = [
        (entry["op_id"], described(entry["config"]), shortened(entry["signature"]))
        for entry in operations
    ]
    lines = [f"without: {skip.label}: {skip.reason}" for skip in result.skipped]
    lines += [f"note: {remark}" for remark in compared.notes]
    lines += [
        f"heuristic configs  {duration(before)} (median of {len(compared.before)})",
        f"stored configs     {duration(before / gain.times)}",
        f"speedup            {times(gain.times)}, between {interval(gain, 'and')}",
    ]
    if compared.difference is not None:
        lines.append(
            f"outputs            differ by {compared.difference:.2g} of their size at most"
        )
    data = {
        "store": place.shown,
        **dataclasses.asdict(compared),
        "median_before": before,
        "median_after": after,
        "operations": operations,
        "not_stored": fields_of(result.skipped, "label", "reason"),
    }
    state.result(data, table(("operation", "stored config", "call"), rows, details=2), *lines)
    return Exit.OK
