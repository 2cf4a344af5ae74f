"""Options that every command has, and those that several share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from .output import State, write

F = TypeVar("F", bound=Callable[..., Any])


class Group(click.Group):
    """Commands in the order of use. Without one, the answer is the help, and no error."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names, as they were added."""
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """What was typed; with nothing, the help."""
        if not args and not ctx.resilient_parsing:  # so completion asks
            write(f"{ctx.get_help()}\n")
            ctx.exit()
        return super().parse_args(ctx, args)


def _remember(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    if value:
        setattr(context.ensure_object(State), str(parameter.name), value)


def common(command: F) -> F:
    """`--json`, `--verbose` and `--debug`, wherever they stand on the line."""
    shared: dict[str, Any] = {"expose_value": False, "is_eager": True, "callback": _remember}
    for option in (
        click.option(
            "--debug", is_flag=True, help="Show the whole traceback of an error.", **shared
        ),
        click.option(
            "-v",
            "--verbose",
            "verbosity",
            count=True,
            help="Say more of what happens (-vv: everything).",
            **shared,
        ),
        click.option("--json", "as_json", is_flag=True, help="Answer in JSON.", **shared),
    ):
        command = option(command)
    return command


def with_state(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of `common`, and the command's `State` as the first argument."""
    return common(click.pass_obj(function))


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


def filters(command: F) -> F:
    """`--op` and `--device`: which entries of a place are meant."""
    operation = click.option(
        "--op", metavar="NAME", help="Only this operation: matmul, or matmul@v1."
    )
    device = click.option(
        "--device", metavar="TEXT", help="Only devices whose fingerprint has this in it; 'here'."
    )
    return operation(device(command))
