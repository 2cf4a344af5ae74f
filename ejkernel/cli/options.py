"""Options that every command has, and those that several share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

from .output import State

F = TypeVar("F", bound=Callable[..., Any])


def _remember(name: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def callback(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        state = context.find_root().ensure_object(State)
        if value:
            setattr(state, name, value)

    return callback


def common(command: F) -> F:
    """`--json`, `--verbose` and `--debug`, wherever they stand on the line."""
    for names, field, text in (
        (("--debug",), "debug", "Show the whole traceback of an error."),
        (("-v", "--verbose"), "verbosity", "Say more of what happens (-vv: everything)."),
        (("--json",), "as_json", "Answer in JSON."),
    ):
        command = click.option(
            *names,
            expose_value=False,
            is_eager=True,
            callback=_remember(field),
            help=text,
            is_flag=field != "verbosity",
            count=field == "verbosity",
        )(command)
    return command


def with_state(function: F) -> F:
    """Give a command its `State` as the first argument."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        context = click.get_current_context()
        return function(context.find_root().ensure_object(State), *args, **kwargs)

    return call  # type: ignore[return-value]


store = click.option(
    "--store",
    "-s",
    "source",
    metavar="PLACE",
    help="A folder, the URL of a database, or a bundle file.  [default: the store of this user]",
)

imports = click.option(
    "--import",
    "modules",
    metavar="MODULE",
    multiple=True,
    help="Import this module first, so that its kernels are known (may be repeated).",
)

operation = click.option("--op", metavar="NAME", help="Only this operation: matmul, or matmul@v1.")
device = click.option(
    "--device", metavar="TEXT", help="Only devices whose fingerprint has this in it; 'here'."
)
