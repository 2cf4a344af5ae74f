"""The command line: `ejkernel`, or `python -m ejkernel`.

Nothing here imports JAX before a command needs it, so that `ejkernel --help` answers at once.
`docs/cli.md` has every command with an example.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["main", "run"]


def run(arguments: Sequence[str]) -> int:
    """Run a command line; gives its exit code. An error is one message, not a traceback."""
    from .app import run as run_commands

    return run_commands(arguments)


def main() -> NoReturn:
    """The program: runs the command line and ends the process with its code."""
    try:
        from .app import main as program
    except KeyboardInterrupt:  # while the commands are imported
        sys.stderr.write("\nejkernel: interrupted\n")
        sys.exit(130)
    program()
