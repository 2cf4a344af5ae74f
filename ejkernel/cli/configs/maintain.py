"""verify and prune: check entries, and remove those that are no longer wanted."""

from __future__ import annotations

import datetime
import re
import sys
from typing import Any

import click

from ...formatting import counted, described
from .. import options
from ..exits import Exit
from ..loading import import_modules
from ..output import State, rendered, table, write
from ..stores import Entry, open_place
from .show import as_data

_AGE = re.compile(r"(\d+)\s*(d|days?|w|weeks?)?")


@click.command()
@options.store
@options.imports
@options.filters
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
    from ...ops import verify_bundle
    from ...store import Bundle

    found = [
        (entry, wrong[0].reason) for entry in entries if (wrong := verify_bundle(Bundle([entry])))
    ]
    problems = [{**as_data(entry), "problem": reason} for entry, reason in found]
    count = f"{counted(len(entries), 'entry')} in {place.shown}, {len(found)} with a problem"
    data = {"place": place.shown, "entries": len(entries), "problems": problems}
    state.result(data, _table(found, "problem"), count)
    return Exit.NOT_WELL if found else Exit.OK


def _table(found: list[tuple[Entry, str]], title: str) -> Any:
    """Entries, each with its problem or reason."""
    rows = [
        (e["key"][1], e["key"][2], described(e["config"]), why, e["key"][0]) for e, why in found
    ]
    return table(("operation", "key", "config", title, "device"), rows)


@click.command()
@options.store
@click.option("--stale", is_flag=True, help="Whose kernel changed since (see --import).")
@click.option("--suspect", is_flag=True, help="Measured with another compiler.")
@click.option("--incomplete", is_flag=True, help="Whose tuning was interrupted.")
@click.option("--estimated", is_flag=True, help="Ranked by a compiler, never measured.")
@click.option("--older-than", metavar="AGE", help="Stored before: 90d, 12w, or a date 2026-01-31.")
@click.option("--all", "everything", is_flag=True, help="All of them (with --op and --device).")
@options.filters
@options.imports
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
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
    if not (stale or suspect or incomplete or estimated or older_than is not None or everything):
        raise click.UsageError(
            "say which: --stale, --suspect, --incomplete, --estimated, --older-than or --all"
        )
    limit = "" if older_than is None else _moment(older_than)
    if stale or suspect:
        import_modules(modules)

    def reason(entry: Entry) -> str:
        about = entry["about"]
        when = str(about.get("when") or "")
        why = _not_fresh(entry, stale, suspect) if stale or suspect else ""
        if why:
            return why
        if incomplete and about.get("incomplete"):
            return "interrupted"
        if estimated and about.get("estimated"):
            return "estimate"
        if when and when < limit:
            return f"stored {when}"
        return "requested" if everything else ""

    place = open_place(source, or_nowhere=True)
    found = [(entry, why) for entry in place.entries(op, device) if (why := reason(entry))]
    shown = _table(found, "reason")
    if found and not dry_run and not yes:
        if state.as_json or not sys.stdin.isatty():
            raise click.UsageError(
                "nobody can be asked here: add --yes, or --dry-run to look first"
            )
        write(rendered(shown))
        question = f"Remove {counted(len(found), 'entry')} from {place.shown}?"
        click.confirm(question, abort=True, err=True)
        shown = None
    removed = bool(found) and not dry_run
    if removed:
        place.remove([entry for entry, _ in found])
    data = {
        "place": place.shown,
        "removed": removed,
        "entries": [{**as_data(entry), "reason": why} for entry, why in found],
    }
    verb = "removed from" if removed else "would be removed from" if found else "to remove in"
    state.result(data, shown, f"{counted(len(found), 'entry')} {verb} {place.shown}")


def _not_fresh(entry: Entry, stale: bool, suspect: bool) -> str:
    from ...ops.config.freshness import EntryState, judge
    from ...ops.core.kernel import kernel_named
    from ...ops.core.types import ConfigKey

    kernel = kernel_named(entry["key"][1])
    if kernel is None:
        return ""  # whether its source changed is not known
    freshness = judge(entry["about"], kernel, ConfigKey(*entry["key"]))
    wanted = {EntryState.STALE: stale, EntryState.SUSPECT: suspect}
    return freshness.reason if wanted.get(freshness.state) else ""


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
