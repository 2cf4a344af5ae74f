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
    """The command was typed wrong: an unknown option, target or key."""
    INPUT = 3
    """What was given cannot be used: a module, a function, a file."""
    STORE = 4
    """The store cannot be opened, read or written."""
    MISSING = 5
    """Something is not installed; the message says what to install."""
    INTERNAL = 70
    """A bug of ejkernel."""
    INTERRUPTED = 130
    """Ctrl-C; what was learned is kept."""
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


def raised_at(error: BaseException) -> str:
    """` (model.py:12)`: where the user's code raised an error; empty if it was not in a file."""
    ours = pathlib.Path(__file__).parent.parent
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [
        frame
        for frame in frames
        if pathlib.Path(frame.filename).is_file()
        and ours not in pathlib.Path(frame.filename).parents
        and "site-packages" not in frame.filename
        and "/lib/python" not in frame.filename
    ]
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    return f" ({theirs[-1].filename}:{theirs[-1].lineno})" if theirs else ""
