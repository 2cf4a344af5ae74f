"""What was running when a process died: for tuning in the process itself.

A candidate that crashes takes the whole program with it, and would do so again at every start. So
a note is written before a candidate runs and removed afterwards. A note whose process is gone
names a culprit; it moves to a permanent list, and later processes leave that candidate out.

    journal/running/   one file per candidate that runs now
    journal/crashed/   one readable file per candidate that crashed; delete it to try it again
    journal/damaged/   notes that cannot be read
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import socket
import time
import uuid
import warnings
from collections.abc import Iterator

from ...store.durable import flush_folder, write_whole
from ..utils import environment
from ..utils.stable import short_hash

# No candidate runs this long. Whether a process of another machine (or container) lives cannot be
# seen from here, so its notes are left alone for this time.
_ELSEWHERE_SECONDS = 24 * 3600.0
_ABANDONED_WRITE_SECONDS = 3600.0


def default_folder() -> pathlib.Path:
    """`journal` in the cache folder."""
    return pathlib.Path(environment.CACHE_DIR.read()).expanduser() / "journal"


@dataclasses.dataclass(frozen=True)
class Culprit:
    """A candidate that was running when its process died."""

    key: str
    config: str
    when: str
    host: str
    pid: int


@dataclasses.dataclass(frozen=True)
class _Note:
    """What is written down before a candidate runs."""

    key: str
    config: str
    when: str
    host: str
    pid: int
    started: str  # when the process began: process ids are used again
    boot: str
    namespace: str  # process ids of another container mean nothing here

    @staticmethod
    def read(file: pathlib.Path) -> _Note:
        """Raises `ValueError` if it is damaged, `OSError` if it is not there."""
        found = json.loads(file.read_text(encoding="utf-8"))
        types = {field.name: int if field.name == "pid" else str for field in _NOTE_FIELDS}
        if not isinstance(found, dict) or any(
            not isinstance(found.get(name), kind) for name, kind in types.items()
        ):
            raise ValueError("it is not a note of a journal")
        datetime.datetime.fromisoformat(found["when"])
        return _Note(**{name: found[name] for name in types})


_NOTE_FIELDS = dataclasses.fields(_Note)


class Journal:
    """Notes of what runs, and the list of what crashed, in a folder that many processes share.

    Args:
      folder: where to keep them; default: `default_folder()`.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = default_folder() if folder is None else pathlib.Path(folder)
        self._running = self.folder / "running"
        self._crashed = self.folder / "crashed"
        self._damaged = self.folder / "damaged"

    @contextlib.contextmanager
    def about_to_run(self, key_text: str, config_text: str) -> Iterator[None]:
        """Keep a note on disk while the block runs; an exception is not a crash."""
        file = self._running / f"{os.getpid()}-{uuid.uuid4().hex}.json"
        note = _Note(
            key_text,
            config_text,
            datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            socket.gethostname(),
            os.getpid(),
            _started(os.getpid()) or "",
            _boot(),
            _namespace(),
        )
        try:
            write_whole(file, _text(note))
        except OSError as error:
            warnings.warn(
                f"the journal {self.folder} cannot be written, so a candidate that crashes will "
                f"not be remembered: {error}",
                RuntimeWarning,
                stacklevel=3,
            )
            yield
            return
        try:
            yield
        finally:
            file.unlink(missing_ok=True)
            flush_folder(file.parent)

    def culprits(self) -> list[Culprit]:
        """What dead processes left behind; moves it to the permanent list.

        Of several processes that ask at once, one is told.
        """
        found = []
        for file in self._notes():
            try:
                note = _Note.read(file)
            except FileNotFoundError:
                continue  # it ended, or someone else was faster
            except ValueError as error:
                self._set_aside(file, error)
                continue
            if _alive(note):
                continue
            culprit = Culprit(note.key, note.config, note.when, note.host, note.pid)
            write_whole(self._crash_file(note.key, note.config), _text(culprit))
            try:
                file.unlink()  # only now: whatever happens, one of the two files is there
            except FileNotFoundError:
                continue
            found.append(culprit)
        return found

    def crashed(self, key_text: str, config_text: str) -> str | None:
        """When and where a candidate crashed, or None if it never did."""
        file = self._crash_file(key_text, config_text)
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            when, host, pid = found["when"], found["host"], found["pid"]
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, TypeError, KeyError):
            # Its name alone says that it crashed.
            return f"it ended its process before (delete {file} to try it again)"
        return (
            f"it ended its process {pid} on {host} at {when}, or was running when that was killed "
            f"(delete {file} to try it again)"
        )

    def _crash_file(self, key_text: str, config_text: str) -> pathlib.Path:
        return self._crashed / f"{short_hash([key_text, config_text], 32)}.json"

    def _notes(self) -> list[pathlib.Path]:
        """The notes; removes what was never finished."""
        if not self._running.is_dir():
            return []
        for unfinished in self._running.glob(".writing-*"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - unfinished.stat().st_mtime > _ABANDONED_WRITE_SECONDS:
                    unfinished.unlink()
        return sorted(self._running.glob("*.json"))

    def _set_aside(self, file: pathlib.Path, error: ValueError) -> None:
        self._damaged.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # someone else was faster, and warns
            os.replace(file, self._damaged / file.name)
            warnings.warn(
                f"a damaged note of the journal was moved to {self._damaged / file.name}: {error}",
                RuntimeWarning,
                stacklevel=3,
            )


def _text(record: _Note | Culprit) -> str:
    return json.dumps(dataclasses.asdict(record), indent=1) + "\n"


# --- processes -----------------------------------------------------------------------------------


def _alive(note: _Note) -> bool:
    """Does the process that wrote a note still run, as far as one can tell?"""
    here = note.host == socket.gethostname()
    if here and note.boot != _boot():
        return False
    if not here or note.namespace != _namespace():
        written = datetime.datetime.fromisoformat(note.when)
        age = datetime.datetime.now(datetime.UTC) - written.astimezone(datetime.UTC)
        return age.total_seconds() < _ELSEWHERE_SECONDS
    started = _started(note.pid)
    return started is not None and started == note.started


def _started(pid: int) -> str | None:
    """When a process began, in the system's own terms; None if there is none, "" if nobody says."""
    if not pathlib.Path("/proc/self/stat").exists():
        return "" if _exists(pid) else None
    try:
        line = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # After the name, which stands in parentheses and may hold anything: state, then 18 fields more.
    fields = line.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _boot() -> str:
    """Which start of this machine this is; empty if nobody says."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _namespace() -> str:
    """Which set of process ids is seen here; empty if there is only one."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
