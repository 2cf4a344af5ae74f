"""How a command ends: exit codes, and errors as one message for a person."""

from __future__ import annotations

import enum
import pathlib
import traceback


class Exit(enum.IntEnum):
    """The exit codes. They are part of the interface: `docs/cli.md` lists them."""

    OK = 0
    NOT_WELL = 1
    """It worked, and the answer is bad: a problem was found, something could not be tuned."""
    USAGE = 2
    """A usage error: an unknown option, target or key."""
    INPUT = 3
    """What was given cannot be used: a module, a function, a file."""
    STORE = 4
    """The store cannot be opened, read or written."""
    MISSING = 5
    """Something is not installed; the message says what to install."""
    INTERNAL = 70
    """A bug of ejkernel."""
    INTERRUPTED = 130
    """Ctrl-C; what was learned is stored."""
    BROKEN_PIPE = 141
    """Nobody reads the output any more."""


class Failure(Exception):
    """A command cannot go on. The message is all that a person sees, unless `--debug` is given."""

    def __init__(self, message: str, code: Exit = Exit.INPUT) -> None:
        super().__init__(message)
        self.code = code


def in_one_line(error: BaseException) -> str:
    """`ValueError: the first line of its text`."""
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    name = type(error).__name__
    return f"{name}: {first.strip()}" if first else name


def os_reason(error: OSError) -> str:
    """`Permission denied: the/file`."""
    return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"


def raised_at(error: BaseException) -> str:
    """` (model.py:12)`: where the user's code raised an error; empty if it was not in a file."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    ours = pathlib.Path(__file__).parent.parent
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = pathlib.Path(frame.filename)
        foreign = "site-packages" in frame.filename or "/lib/python" in frame.filename
        if file.is_file() and ours not in file.parents and not foreign:
            return f" ({file}:{frame.lineno})"
    return ""
