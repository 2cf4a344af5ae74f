"""verify and prune: which entries are still good, and away with the others."""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Callable
from typing import Any

import click

from .. import options
from ..exits import Exit
from ..loading import import_modules
from ..output import State, brief, counted, table
from ..stores import Entry, open_place
from .show import as_data

_AGE = re.compile(r"(\d+)\s*(d|days?|w|weeks?)?")


@click.command()
@options.store
@options.imports
@options.operation
@options.device
@options.common
@options.with_state
def verify(
    state: State,
    source: str | None,
    modules: tuple[str, ...],
    op: str | None,
    device: str | None,
) -> int:
    """Check every entry: does it fit its kernel, did the kernel or the compiler change?

    Kernels of your own have to be loaded for that: --import MODULE. Ends with 1 if there are
    problems.
    """
    place = open_place(source, or_nowhere=True)
    import_modules(modules)
    entries = place.entries(op, device)
    found = [(entry, reason) for entry in entries if (reason := _problem(entry))]
    data = {
        "place": place.shown,
        "entries": len(entries),
        "problems": [{**as_data(entry), "problem": reason} for entry, reason in found],
    }
    rows = [(e["key"][1], e["key"][2], reason, e["key"][0]) for e, reason in found]
    count = f"{counted(len(entries), 'entry')} in {place.shown}, {len(found)} with a problem"
    header = ("operation", "key", "problem", "device")
    state.result(data, *([table(header, rows)] if rows else []), count)
    return Exit.NOT_WELL if found else Exit.OK


def _problem(entry: Entry) -> str:
    from ...ops import verify_bundle
    from ...store import Bundle

    problems = verify_bundle(Bundle([entry]))
    return problems[0].reason if problems else ""


@click.command()
@options.store
@click.option("--stale", is_flag=True, help="Whose kernel changed since (see --import).")
@click.option("--suspect", is_flag=True, help="Measured with another compiler.")
@click.option("--incomplete", is_flag=True, help="Whose tuning was interrupted.")
@click.option("--estimated", is_flag=True, help="Ranked by a compiler, never measured.")
@click.option("--older-than", metavar="AGE", help="Stored before: 90d, 12w, or a date 2026-01-31.")
@click.option("--all", "everything", is_flag=True, help="All of them (with --op and --device).")
@options.operation
@options.device
@options.imports
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@options.common
@options.with_state
def prune(
    state: State,
    source: str | None,
    stale: bool,
    suspect: bool,
    incomplete: bool,
    estimated: bool,
    older_than: str | None,
    everything: bool,
    op: str | None,
    device: str | None,
    modules: tuple[str, ...],
    dry_run: bool,
    yes: bool,
) -> None:
    """Remove entries that fit one of the reasons given."""
    reasons: list[Callable[[Entry], str]] = []
    if stale or suspect:
        import_modules(modules)
        reasons.append(lambda entry: _not_fresh(entry, stale, suspect))
    if incomplete:
        reasons.append(lambda entry: "interrupted" if entry["about"].get("incomplete") else "")
    if estimated:
        reasons.append(lambda entry: "estimate" if entry["about"].get("estimated") else "")
    if older_than is not None:
        limit = _moment(older_than)
        reasons.append(lambda entry: _older(entry, limit))
    if everything:
        reasons.append(lambda entry: "asked for")
    if not reasons:
        raise click.UsageError(
            "say which: --stale, --suspect, --incomplete, --estimated, --older-than or --all"
        )
    place = open_place(source, or_nowhere=True)
    found = [
        (entry, why)
        for entry in place.entries(op, device)
        if (why := next(filter(None, (reason(entry) for reason in reasons)), ""))
    ]
    rows = [(e["key"][1], e["key"][2], brief(e["config"]), why, e["key"][0]) for e, why in found]
    shown = [table(("operation", "key", "config", "reason", "device"), rows)] if rows else []
    if found and not dry_run and not yes:
        _confirm(state, len(found), place.shown, shown)
        shown = []
    removed = bool(found) and not dry_run
    if removed:
        place.remove([entry for entry, _ in found])
    data: dict[str, Any] = {
        "place": place.shown,
        "removed": removed,
        "entries": [{**as_data(entry), "reason": why} for entry, why in found],
    }
    verb = "removed from" if removed else "would be removed from" if found else "to remove in"
    state.result(data, *shown, f"{counted(len(found), 'entry')} {verb} {place.shown}")


def _confirm(state: State, count: int, shown: str, listed: list[Any]) -> None:
    if state.as_json or not sys.stdin.isatty():
        raise click.UsageError("nobody can be asked here: add --yes, or --dry-run to look first")
    from ..output import rendered, write

    write(rendered(*listed))
    click.confirm(f"Remove {counted(count, 'entry')} from {shown}?", abort=True, err=True)


def _not_fresh(entry: Entry, stale: bool, suspect: bool) -> str:
    from ...ops.config.freshness import EntryState as Freshness
    from ...ops.config.freshness import judge
    from ...ops.core.kernel import kernel_named
    from ...ops.core.types import ConfigKey

    kernel = kernel_named(entry["key"][1])
    if kernel is None:
        return ""  # nothing can be said about it
    found = judge(entry["about"], kernel, ConfigKey(*entry["key"]))
    wanted = {Freshness.STALE: stale, Freshness.SUSPECT: suspect}
    return found.reason if wanted.get(found.state) else ""


def _older(entry: Entry, limit: str) -> str:
    when = str(entry["about"].get("when") or "")
    return f"stored {when}" if when and when < limit else ""


def _moment(text: str) -> str:
    """A date, or so many days ago, as entries write it."""
    match = _AGE.fullmatch(text.strip())
    try:
        if match is None:
            return datetime.date.fromisoformat(text).isoformat()
        days = int(match[1]) * (7 if (match[2] or "d").startswith("w") else 1)
        moment = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=days)
        return moment.isoformat(timespec="seconds")
    except (ValueError, OverflowError):  # so long ago that there is no such day
        raise click.UsageError(
            f"--older-than {text!r} is no age; write 90d, 12w, or a date such as 2026-01-31"
        ) from None
