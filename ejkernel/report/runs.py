"""Records of earlier runs in the cache folder: what `ejkernel report` and the dashboard list."""

from __future__ import annotations

import datetime
import pathlib
import re

from ..store.private import PrivateFolder
from .plain import NotARun
from .record import Run


def runs_folder() -> pathlib.Path:
    """Where records go unless a file is named, and where `ejkernel report` finds the newest."""
    from ..ops.utils import environment  # loads JAX

    return environment.cache_folder("runs")


def save_run(run: Run) -> pathlib.Path:
    """Write the record of a run to a new file in `runs_folder`; an `OSError` if that cannot be."""
    # Names sort by time.
    moment = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S")
    slug = re.sub(r"[^A-Za-z0-9]+", "-", run.title).strip("-")[-60:]
    name = f"{moment}-{slug}.json"
    with PrivateFolder.open(runs_folder(), create=True) as folder:
        folder.write(name, run.dumps().encode())
        return folder.path / name


def record_names() -> list[str]:
    """The records of earlier runs in `runs_folder`, the newest last."""
    try:
        with PrivateFolder.open(runs_folder()) as folder:
            return [name for name in folder.names() if name.endswith(".json")]
    except FileNotFoundError:
        return []


def load_record(name: str) -> Run:
    """One of `record_names`; a `NotARun` error if it is none, or not this user's own."""
    file = runs_folder() / name
    try:
        with PrivateFolder.open(file.parent) as folder:
            data = folder.read(name)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise NotARun(f"{file} cannot be read: {reason}") from error
    return Run.loads(data, str(file))
