"""`ejkernel completion`: completion of commands and options in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from . import options
from .output import State

_WHERE = {
    "bash": "echo 'eval \"$(ejkernel completion bash)\"' >> ~/.bashrc",
    "zsh": "echo 'eval \"$(ejkernel completion zsh)\"' >> ~/.zshrc",
    "fish": "ejkernel completion fish > ~/.config/fish/completions/ejkernel.fish",
}


@click.command(help="Print the completion script of a shell.\n\n\b\n" + "\n".join(_WHERE.values()))
@click.argument("shell", type=click.Choice(list(_WHERE)))
@options.common
@options.with_state
def completion(state: State, shell: str) -> None:
    """Print the completion script of a shell."""
    root = click.get_current_context().find_root().command
    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(root, {}, "ejkernel", "_EJKERNEL_COMPLETE").source()
    state.result({"shell": shell, "script": script, "install": _WHERE[shell]}, script)
