"""What was running when a process died: for tuning in the process itself.

A candidate that crashes takes the whole program with it, and would do so again at every start. So
a note is written before a candidate runs and removed afterwards. A note whose process is gone
names a culprit; it moves to a permanent list, and later processes leave that candidate out.

    journal/running/   one file per candidate that runs now
    journal/crashed/   one readable file per candidate that crashed; delete it to try it again
    journal/damaged/   notes that cannot be read

The folders are this user's own, and are worked in by descriptor (`ejkernel.store.private`): a link
that somebody put in the place of one is refused, and nothing of theirs is moved.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import json
import os
import pathlib
import time
import uuid
import warnings
from collections.abc import Iterator

from ....markup import one_line
from ....store.private import PrivateFolder
from ....store.reading import parse_json
from ...utils import environment
from ...utils.fingerprint import short_hash
from ...utils.processes import ProcessIdentity

# No candidate runs this long. Whether a process of another machine (or container) lives cannot be
# seen from here, so its notes are left alone for this time.
_ELSEWHERE_SECONDS = 24 * 3600.0
_ABANDONED_WRITE_SECONDS = 3600.0


def default_folder() -> pathlib.Path:
    """`journal` in the cache folder; `NoHomeFolder` if there is no such place."""
    return environment.cache_folder("journal")


@dataclasses.dataclass(frozen=True)
class Note:
    """A candidate that runs, or that was running when its process died."""

    key: str
    config: str
    when: str
    host: str
    pid: int
    started: str = ""  # these three as in `ProcessIdentity`
    boot: str = ""
    namespace: str = ""

    @staticmethod
    def loads(data: bytes) -> Note:
        """Raises `ValueError` if it is damaged."""
        plain = parse_json(data)
        names = [field.name for field in dataclasses.fields(Note)]
        if not isinstance(plain, dict) or not all(
            isinstance(plain.get(name), int if name == "pid" else str) for name in names
        ):
            raise ValueError("it is not a note of a journal")
        _moment(plain["when"])
        return Note(**{name: plain[name] for name in names})


class Journal:
    """Notes of what runs, and the list of what crashed, in a folder that many processes share.

    Args:
      folder: where they are; default: `default_folder()`.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = default_folder() if folder is None else pathlib.Path(folder)
        self._inside = functools.partial(PrivateFolder.open_inner, self.folder)
        self._said = False

    @contextlib.contextmanager
    def about_to_run(self, key_text: str, config_text: str) -> Iterator[None]:
        """Have a note on disk while the block runs; an exception is not a crash."""
        name = f"{os.getpid()}-{uuid.uuid4().hex}.json"
        note = Note(
            key_text,
            config_text,
            datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **dataclasses.asdict(ProcessIdentity.here()),
        )
        with contextlib.ExitStack() as stack:
            try:
                running = stack.enter_context(self._inside("running", create=True))
                running.write(name, f"{json.dumps(dataclasses.asdict(note), indent=1)}\n".encode())
            except OSError as error:
                self._warn(
                    f"the journal {self.folder} cannot be written, so a candidate that crashes "
                    f"will not be remembered: {error}"
                )
                yield
                return
            try:
                yield
            finally:
                running.remove(name)
                running.flush()

    def culprits(self) -> list[Note]:
        """What dead processes left behind; moves it to the permanent list.

        Of several processes that ask at once, one is told.
        """
        culprits: list[Note] = []
        try:
            with self._inside("running") as running:
                for name in self._notes(running):
                    if (note := self._dead(running, name)) is not None:
                        culprits.append(note)
        except (FileNotFoundError, NotADirectoryError):
            pass  # nothing was ever noted
        except OSError as error:
            self._warn(f"the journal {self.folder} cannot be read: {error}")
        return culprits

    def _dead(self, running: PrivateFolder, name: str) -> Note | None:
        """A note whose process is gone; it is then moved to the list."""
        try:
            note = Note.loads(running.read(name))
        except FileNotFoundError:
            return None  # it ended, or someone else was faster
        except (ValueError, OSError) as error:
            self._set_aside(running, name, error)
            return None
        if not _alive(note):
            with (
                contextlib.suppress(FileNotFoundError),  # someone else was faster, and tells it
                self._inside("crashed", create=True) as crashed,
            ):
                running.move(name, crashed, _crash_name(note.key, note.config))
                return note
        return None

    def crashed(self, key_text: str, config_text: str) -> str | None:
        """When and where a candidate crashed, or None if it never did."""
        name = _crash_name(key_text, config_text)
        try:
            with self._inside("crashed") as crashed:
                data = crashed.read(name)
        except ValueError:
            data = b""
        except OSError:  # not there, or not to be trusted: then it is nobody's word
            return None
        file = self.folder / "crashed" / name
        try:
            plain = parse_json(data)
            when, host, pid = plain["when"], plain["host"], plain["pid"]
        except (ValueError, TypeError, KeyError):
            # Its name alone says that it crashed.
            return f"it ended its process before (delete {file} to try it again)"
        return one_line(
            f"it ended its process {pid} on {host} at {when}, or was running when that was killed "
            f"(delete {file} to try it again)"
        )

    def crash_files(self) -> list[pathlib.Path]:
        """The files of the candidates that crashed: delete one to try its candidate again."""
        try:
            with self._inside("crashed") as crashed:
                return [crashed.path / name for name in crashed.names() if name.endswith(".json")]
        except OSError:
            return []

    def _notes(self, running: PrivateFolder) -> list[str]:
        """The notes; removes what was never finished."""
        names = running.names()
        for unfinished in (name for name in names if name.startswith(".writing-")):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - running.status(unfinished).st_mtime > _ABANDONED_WRITE_SECONDS:
                    running.remove(unfinished)
        return [name for name in names if name.endswith(".json")]

    def _set_aside(self, running: PrivateFolder, name: str, error: Exception) -> None:
        with contextlib.suppress(FileNotFoundError):  # someone else was faster, and warns
            with self._inside("damaged", create=True) as damaged:
                running.move(name, damaged, name)
            warnings.warn(
                one_line(
                    "a damaged note of the journal was moved to "
                    f"{self.folder / 'damaged' / name}: {error}"
                ),
                RuntimeWarning,
                stacklevel=4,
            )

    def _warn(self, message: str) -> None:
        if not self._said:
            self._said = True
            warnings.warn(one_line(message), RuntimeWarning, stacklevel=4)


def _crash_name(key_text: str, config_text: str) -> str:
    return f"{short_hash([key_text, config_text], 32)}.json"


# --- processes -----------------------------------------------------------------------------------


def _alive(note: Note) -> bool:
    """Does the process that wrote a note still run, as far as one can tell?"""
    process = ProcessIdentity(note.host, note.pid, note.started, note.boot, note.namespace)
    running = process.is_running()
    if running is not None:
        return running
    age = datetime.datetime.now(datetime.UTC) - _moment(note.when)
    return age.total_seconds() < _ELSEWHERE_SECONDS


def _moment(text: str) -> datetime.datetime:
    try:
        return datetime.datetime.fromisoformat(text).astimezone(datetime.UTC)
    except OverflowError:  # a moment before the first one that there is
        raise ValueError(f"{text!r} is no moment") from None
