"""`ejkernel report`: a page about a tuning run."""

from __future__ import annotations

import pathlib

import click

from ..formatting import counted
from ..markup import one_line
from ..report import FORMATS, Diff, NotARun, Run, render
from ..report import write as write_report
from ..report.runs import load_record, record_names, runs_folder
from . import options
from .exits import Failure
from .output import State, table, write
from .stores import open_place


@click.command(short_help="Write a page about a tuning run.")
@click.argument("record", metavar="[RECORD]", required=False)
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    help="[default: what the name of the output ends with, else html]",
)
@click.option(
    "--output",
    "-o",
    metavar="FILE",
    help="Where to write it; '-' is the standard output.  [default: ejkernel-report.html; "
    "for md and json the standard output]",
)
@click.option(
    "--diff",
    type=(str, str),
    metavar="A B",
    help="Compare two runs instead: record B with record A.",
)
@click.option("--from-store", is_flag=True, help="About all that a store holds for this device.")
@options.store
@click.option("--list", "listing", is_flag=True, help="List the records of earlier runs.")
@click.option("--open", "opens", is_flag=True, help="Show it in the browser.")
@options.with_state
def report(
    state: State,
    record: str | None,
    form: str | None,
    output: str | None,
    diff: tuple[str, str] | None,
    from_store: bool,
    source: str | None,
    listing: bool,
    opens: bool,
) -> None:
    """Write a report of a tuning run: RECORD, or else the newest one.

    `ejkernel tune` writes the records, `ejkernel report --list` lists them.
    """
    if listing:
        _list(state)
        return
    if record is not None and from_store:
        raise click.UsageError("give a RECORD or --from-store, not both")
    if diff is not None and (record is not None or from_store or source is not None):
        raise click.UsageError("--diff A B compares two records; give no other RECORD and no store")
    run: Run | Diff
    if diff is not None:
        run = Diff.of(*map(Run.load, diff))
    else:
        run = _of_store(source) if from_store or source is not None else _of_record(record)
    if form is None:
        ending = pathlib.Path(output or "").suffix.lower().lstrip(".")
        form = ending if ending in FORMATS else "html"
    if state.as_json and output is None:
        form, output = "json", "-"
    if output is None:
        name = "ejkernel-report.html" if diff is None else "ejkernel-diff.html"
        output = name if form == "html" else "-"
    if output == "-":
        write(render(run, form) + "\n")  # type: ignore[arg-type]
        return
    file = write_report(run, output, form)  # type: ignore[arg-type]
    if opens:
        import webbrowser

        webbrowser.open(file.resolve().as_uri())
    data = {"report": str(file), "format": form, "title": run.title}
    state.result(data, f"{one_line(_summary(run))}: {file}")


def _summary(run: Run | Diff) -> str:
    if isinstance(run, Diff):
        top = run.headline()
        return f"{top.title} ({top.finding.word}). {top.sentence} The comparison"
    return f"report of {run.title}, {counted(len(run.operations), 'operation')}"


def _of_store(source: str | None) -> Run:
    place = open_place(source)
    if place.store is None:
        raise click.UsageError("--store: a report is of a store (a folder or a URL) or a record")
    return Run.of_store(place.store)


def _of_record(record: str | None) -> Run:
    if record is not None:
        return Run.load(record)
    records = record_names()
    if not records:
        raise Failure(
            f"there is no record of a run in {runs_folder()}; `ejkernel tune` writes one. "
            "--from-store makes a report of all that is stored"
        )
    return load_record(records[-1])


def _list(state: State) -> None:
    rows, data = [], []
    for name in record_names():
        file = str(runs_folder() / name)
        try:
            run = load_record(name)
        except NotARun as error:
            rows.append((file, "", "", str(error)))
            continue
        rows.append((file, run.created, counted(len(run.operations), "operation"), run.title))
        data.append({"record": file, "created": run.created, "title": run.title})
    nothing = None if rows else f"no records in {runs_folder()}; `ejkernel tune` writes them"
    state.result(data, table(("record", "made", "tuned", "of"), rows), nothing)
