"""The commands together, and what becomes of their errors."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import click
from click.shell_completion import get_completion_class

from .. import __version__
from . import options
from .bench import bench
from .check import check
from .configs import configs
from .dashboard import dashboard
from .doctor import doctor
from .exits import Exit, Failure, in_one_line, os_reason
from .labels import labels
from .native import native
from .output import State, complain, note
from .report import report
from .tune import tune

NAME = "ejkernel"

_INSTALL = {
    "bash": "echo 'eval \"$(ejkernel completion bash)\"' >> ~/.bashrc",
    "zsh": "echo 'eval \"$(ejkernel completion zsh)\"' >> ~/.zshrc",
    "fish": "ejkernel completion fish > ~/.config/fish/completions/ejkernel.fish",
}

# Errors that no command foresaw. Only a module that is loaded can have raised one of its own, and
# loading it to find out would import JAX.
_KNOWN_ERRORS = (
    ("ejkernel.store.errors", "StoreError", Exit.STORE),
    ("ejkernel.store.bundle", "BundleError", Exit.INPUT),
    ("ejkernel.targets.catalog", "TargetError", Exit.INPUT),
    ("ejkernel.report.plain", "NotARun", Exit.INPUT),
    ("ejkernel.ops.utils.environment", "VariableError", Exit.USAGE),
    ("ejkernel.ops.tuner.isolation.process", "WorkerUnavailable", Exit.INPUT),
)


class _ClosedPipe(Exception):
    """A closed pipe, under a name that Click does not know: it would end with a code of its own."""


@contextlib.contextmanager
def _closed_pipes_named() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise _ClosedPipe from error


class _Group(options.Group):
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
@options.common
def app() -> None:
    """JAX operations that choose their own configuration: tune, look, ship."""


@click.command(
    help="Print the completion script of a shell.\n\n\b\n" + "\n".join(_INSTALL.values())
)
@click.argument("shell", type=click.Choice(list(_INSTALL)))
@options.with_state
def completion(state: State, shell: str) -> None:
    """Print the completion script of a shell."""
    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(app, {}, NAME, "_EJKERNEL_COMPLETE").source()
    state.result({"shell": shell, "script": script, "install": _INSTALL[shell]}, script)


for command in (
    doctor,
    tune,
    bench,
    report,
    dashboard,
    configs,
    check,
    labels,
    native,
    completion,
):
    app.add_command(command)


def main() -> NoReturn:
    """The program: runs the command line and ends the process with its code."""
    code = run(sys.argv[1:])
    # Who presses Ctrl-C again while Python and JAX shut down wants no traceback of that.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


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
        except BrokenPipeError:  # what is left in the buffers must not raise at the exit
            with contextlib.suppress(OSError, ValueError, AttributeError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = Exit.BROKEN_PIPE
    return int(code)


def _run(arguments: list[str], state: State) -> int:
    try:
        code = app.main(arguments, prog_name=NAME, standalone_mode=False, obj=state)
        return code if isinstance(code, int) else Exit.OK
    except click.exceptions.Exit as done:
        return done.exit_code
    except (click.Abort, KeyboardInterrupt) as error:
        if state.debug:
            traceback.print_exception(error)
        note(f"{NAME}: interrupted")
        if state.as_json:
            state.result({"error": "interrupted", "exit_code": int(Exit.INTERRUPTED)})
        return Exit.INTERRUPTED
    except click.UsageError as error:
        # A line that cannot be parsed ends before its flags are read.
        state.as_json |= "--json" in itertools.takewhile("--".__ne__, arguments)
        usage = error.ctx.get_usage() if error.ctx is not None else ""
        hint = f"\nTry '{error.ctx.command_path} --help'." if error.ctx is not None else ""
        return _failed(state, f"{error.format_message()}{hint}", Exit.USAGE, error, usage)
    except click.ClickException as error:
        return _failed(state, error.format_message(), Exit.INPUT, error)
    except SystemExit as done:  # completion ends so
        return done.code if isinstance(done.code, int) else Exit.OK
    except (BrokenPipeError, _ClosedPipe) as error:
        raise BrokenPipeError from error
    except Exception as error:  # noqa: BLE001  the last place where it can become a message
        return _failed(state, *_explained(error), error)


def _failed(state: State, message: str, code: Exit, error: BaseException, before: str = "") -> Exit:
    """Say what went wrong: to a person on the standard error, with `--json` to the program too."""
    if state.debug:
        traceback.print_exception(error)
    if before:
        note(before)
    complain(message)
    if state.as_json:
        state.result({"error": message, "exit_code": int(code)})
    return code


def _explained(error: Exception) -> tuple[str, Exit]:
    """An error as a message, as far as its type tells what it means."""
    if isinstance(error, Failure):
        return str(error), error.code
    for module, name, code in _KNOWN_ERRORS:
        kind: Any = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(error, kind):
            return str(error), code
    if isinstance(error, ImportError):
        return str(error), Exit.MISSING
    if isinstance(error, OSError):
        return os_reason(error), Exit.INPUT
    return (
        f"{in_one_line(error)}\nThis is a bug of ejkernel, or of what it was given. "
        "Run it again with --debug to see where it happened.",
        Exit.INTERNAL,
    )


class _Notes(logging.Handler):
    """Shows log records as notes, where a progress bar puts lines above itself."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self._state = state

    def emit(self, record: logging.LogRecord) -> None:
        least = (logging.WARNING, logging.INFO, logging.DEBUG)[min(self._state.verbosity, 2)]
        if record.levelno >= least:
            try:
                note(self.format(record))
            except Exception:  # noqa: BLE001  as the handlers of `logging` do
                self.handleError(record)


@contextlib.contextmanager
def _logging(state: State) -> Iterator[None]:
    """Show the library's log while a command runs, as much of it as was requested."""
    logger, handler = logging.getLogger("ejkernel"), _Notes(state)
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
