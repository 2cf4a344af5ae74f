"""export, import, merge: from one place to another."""

from __future__ import annotations

import pathlib

import click

from ...formatting import counted
from .. import options
from ..output import State, write
from ..stores import open_place, open_store


@click.command()
@click.argument("file", metavar="FILE.json")
@options.store
@options.filters
@options.with_state
def export(state: State, file: str, source: str | None, op: str | None, device: str | None) -> None:
    """Write the entries of a store into a bundle file (`-`: the standard output).

    A bundle is plain, sorted JSON: put it into git, ship it in a wheel (docs/sharing.md).
    """
    if file != "-":
        _bundle_file(file)
    place = open_place(source)
    bundle = place.as_bundle(op, device)
    if not len(bundle):
        raise click.UsageError(f"{place.shown} has no such entry; nothing was written")
    if file == "-":
        write(bundle.dumps())
        return
    bundle.save(file)
    state.result(
        {"file": file, "entries": len(bundle), "from": place.shown},
        f"{counted(len(bundle), 'entry')} of {place.shown} written to {file}",
    )


@click.command("import")
@click.argument("files", metavar="FILE.json...", nargs=-1, required=True)
@options.store
@options.with_state
def import_(state: State, files: tuple[str, ...], source: str | None) -> None:
    """Put the entries of bundles into a store.

    Where both have one for a call, the better measured one stays.
    """
    from ...ops import import_bundle

    bundles = [(file, open_place(_bundle_file(file)).as_bundle()) for file in files]
    store = open_store(source)
    data, shown = [], []
    for file, bundle in bundles:
        done = import_bundle(store, bundle)
        counts = {name: len(getattr(done, name)) for name in ("added", "replaced", "kept")}
        data.append({"file": file, **counts, "conflicts": [str(c) for c in done.conflicts]})
        shown.append(f"{file}: {done}")
    state.result({"store": str(store.path), "imported": data}, *shown)


@click.command()
@click.argument("places", metavar="PLACE...", nargs=-1, required=True)
@click.option("--output", "-o", required=True, metavar="FILE.json", help="The bundle to write.")
@options.filters
@options.with_state
def merge(
    state: State, places: tuple[str, ...], output: str, op: str | None, device: str | None
) -> None:
    """Merge stores and bundles into one bundle.

    Of two entries for one call the better measured one is taken; different configs are reported.
    """
    opened = [open_place(name) for name in places]
    first, *others = (place.as_bundle(op, device) for place in opened)
    merged, conflicts = first.merge(*others)
    if output == "-":
        write(merged.dumps())
        return
    merged.save(_bundle_file(output))
    data = [
        {
            "key": list(conflict.key),
            "kept": conflict.kept["config"],
            "dropped": conflict.dropped["config"],
            "reason": conflict.reason,
        }
        for conflict in conflicts
    ]
    written = f"{counted(len(merged), 'entry')} written to {output}"
    state.result(
        {"file": output, "entries": len(merged), "conflicts": data},
        *(f"conflict: {conflict}" for conflict in conflicts),
        f"{written}, {counted(len(conflicts), 'conflict')}",
    )


def _bundle_file(name: str) -> str:
    if pathlib.Path(name).suffix != ".json":
        raise click.UsageError(f"{name!r} is no name of a bundle: it ends with .json")
    return name
