"""The command line: `ejkernel`, or `python -m ejkernel`.

Nothing here imports JAX before a command needs it, so that `ejkernel --help` answers at once.
`docs/cli.md` has every command with an example.
"""

from .app import main, run

__all__ = ["main", "run"]
