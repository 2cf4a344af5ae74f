"""The commands together, and what becomes of their errors."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import click

from .. import __version__
from ..markup import printable
from .bench import bench
from .check import check
from .completion import completion
from .configs import configs
from .doctor import doctor
from .exits import Exit, Failure, in_one_line
from .labels import labels
from .native import native
from .options import common
from .output import State, note, plain, write
from .report import report
from .tune import tune

NAME = "ejkernel"


class _NobodyReads(Exception):
    """A closed pipe, under a name that Click does not know: it would end with a code of its own."""


@contextlib.contextmanager
def _closed_pipes_named() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise _NobodyReads from error


class _Group(click.Group):
    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _closed_pipes_named():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _closed_pipes_named():
            return super().invoke(ctx)


@click.group(
    NAME,
    cls=_Group,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Every command has --help, --json and --debug. Docs: docs/cli.md",
)
@click.version_option(__version__, prog_name=NAME, message="%(prog)s %(version)s")
@common
def app() -> None:
    """JAX operations that choose their own configuration: tune, look, ship."""


for command in (doctor, tune, bench, report, configs, check, labels, native, completion):
    app.add_command(command)


def main() -> NoReturn:
    """The program: runs the command line and ends the process with its code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run a command line; gives its exit code. An error is one message, not a traceback."""
    state = State()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that lacks a character gets a question mark
            stream.reconfigure(errors="replace")
    with _logging(state):
        try:
            code = _run(list(arguments), state)
            sys.stdout.flush()
        except BrokenPipeError:
            code = Exit.BROKEN_PIPE
    if code is Exit.BROKEN_PIPE:
        _let_go_of_the_output()
    return int(code)


def _run(arguments: list[str], state: State) -> int:
    try:
        code = app.main(arguments, prog_name=NAME, standalone_mode=False, obj=state)
    except click.exceptions.Exit as done:
        return done.exit_code
    except (click.Abort, KeyboardInterrupt) as error:
        return _failed(state, "interrupted", Exit.INTERRUPTED, error)
    except click.UsageError as error:
        usage = f"{error.ctx.get_usage()}\n" if error.ctx is not None else ""
        hint = f"\nTry '{error.ctx.command_path} --help'." if error.ctx is not None else ""
        return _failed(state, f"{error.format_message()}{hint}", Exit.USAGE, error, usage)
    except click.ClickException as error:
        return _failed(state, error.format_message(), Exit.INPUT, error)
    except Failure as error:
        return _failed(state, str(error), error.code, error)
    except SystemExit as done:  # completion ends so
        return done.code if isinstance(done.code, int) else Exit.OK
    except (BrokenPipeError, _NobodyReads) as error:
        raise BrokenPipeError from error
    except Exception as error:  # noqa: BLE001  the last place where it can become a message
        return _failed(state, *_explained(error), error)
    return code if isinstance(code, int) else Exit.OK


def _failed(state: State, message: str, code: Exit, error: BaseException, before: str = "") -> Exit:
    """Say what went wrong: to a person on the standard error, with `--json` to the program too."""
    if state.debug:
        traceback.print_exception(error)
    note(f"{before}{NAME}: {message}")
    if state.as_json:
        import json

        write(json.dumps(plain({"error": message, "exit_code": int(code)}), indent=1) + "\n")
    return code


def _explained(error: Exception) -> tuple[str, Exit]:
    """An error that no command foresaw, as far as its type tells what it means."""
    kinds: list[tuple[str, str, Exit]] = [
        ("ejkernel.store.errors", "StoreError", Exit.STORE),
        ("ejkernel.store.bundle", "BundleError", Exit.INPUT),
        ("ejkernel.targets.catalog", "TargetError", Exit.INPUT),
        ("ejkernel.report.plain", "NotARun", Exit.INPUT),
        ("ejkernel.ops.utils.environment", "VariableError", Exit.USAGE),
        ("ejkernel.ops.tuner.isolation.process", "WorkerUnavailable", Exit.INPUT),
    ]
    for module, name, code in kinds:
        # Only a module that is loaded can have raised it; loading it here would import JAX.
        kind: Any = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(error, kind):
            return str(error), code
    if isinstance(error, ImportError):
        return str(error), Exit.MISSING
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror or error}{where}", Exit.INPUT
    return (
        f"{in_one_line(error)}\nThis is a bug of ejkernel, or of what it was given. "
        "Run it again with --debug to see where it happened.",
        Exit.INTERNAL,
    )


def _let_go_of_the_output() -> None:
    """Nobody reads it: what is left in the buffers must not raise at the exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())


class _Stderr(logging.StreamHandler[Any]):
    """Writes to the standard error of the moment: a progress bar puts lines above itself."""

    def __init__(self, state: State) -> None:
        logging.Handler.__init__(self)
        self._state = state

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None:
        pass

    def emit(self, record: logging.LogRecord) -> None:
        least = (logging.WARNING, logging.INFO, logging.DEBUG)[min(self._state.verbosity, 2)]
        if record.levelno >= least:
            super().emit(record)


class _Printable(logging.Formatter):
    """Whatever names a message holds, the terminal shows them and does not obey them."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), keep="\n\t")


@contextlib.contextmanager
def _logging(state: State) -> Iterator[None]:
    """Show the library's log while a command runs, as much of it as was asked for."""
    logger, handler = logging.getLogger("ejkernel"), _Stderr(state)
    handler.setFormatter(_Printable("%(message)s"))
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
