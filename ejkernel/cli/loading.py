"""`module:function`: from what a person types to a function with its example arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import importlib
import inspect
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click

from .exits import Failure, in_one_line, raised_at

if TYPE_CHECKING:
    from ..ops import AutotuningResult
    from ..ops.execution.whole_function import WholeFunction
    from ..report import BeforeAfter

HOW = (
    "it has to return the function to tune with a tuple of its example arguments, (function, (x, "
    "y)); with keywords, (function, (x, y), {'causal': True}); or a lowered computation, "
    "jax.jit(function).lower(x, y)"
)


@dataclasses.dataclass(frozen=True)
class Subject:
    """What was named on the command line.

    Attributes:
      name: as it was typed.
      function: what to tune; None if it was lowered by the user.
      arguments: its example arguments.
      keywords: its example keywords.
      lowered: what the user lowered.
    """

    name: str
    function: Callable[..., Any] | None = None
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = dataclasses.field(default_factory=dict)
    lowered: Any = None

    @functools.cached_property
    def whole(self) -> WholeFunction | None:
        """The function with its arguments, to be lowered and run; None if it was lowered."""
        from ..ops.execution.whole_function import WholeFunction

        if self.function is None:
            return None
        return WholeFunction(self.function, self.arguments, self.keywords, self.name)

    def lower(self) -> Any:
        """The program, traced with what is stored and else with heuristics: nothing is tuned."""
        if self.whole is None:
            return self.lowered
        with theirs(f"{self.name}: lowering its function with its example arguments"):
            return self.whole.lowered

    def compare(self, result: AutotuningResult, **limits: Any) -> BeforeAfter:
        """Run it with heuristic configs and with a result's; shapes become random numbers."""
        from ..report import before_and_after

        if self.function is None:
            raise Failure(
                f"{self.name} returns a lowered computation, which cannot be run with two sets of "
                "configs; return (function, arguments) instead"
            )
        with theirs(f"{self.name}: running it"):
            return before_and_after(
                self.function,
                self.arguments,
                self.keywords,
                result=result,
                what=self.name,
                **limits,
            )


def load(name: str) -> Subject:
    """What `module:function` (or `file.py:function`) gives when it is called."""
    module_name, colon, path = name.rpartition(":")
    if not colon or not module_name or not path:
        raise click.UsageError(
            f"{name!r} names no function; write module:function or file.py:function, where {HOW}"
        )
    module = import_module(module_name)
    found: Any = module
    for part in path.split("."):
        if not hasattr(found, part):
            raise Failure(_no_attribute(name, module, path))
        found = getattr(found, part)
    if not callable(found):
        raise Failure(f"{name} is no function but {_described(found)}")
    return subject_of(name, _called(name, found))


def _called(name: str, function: Callable[..., Any]) -> Any:
    with contextlib.suppress(TypeError, ValueError):  # no signature: the call will tell
        needed = [
            parameter.name
            for parameter in inspect.signature(function).parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.POSITIONAL_ONLY)
        ]
        if needed:
            raise Failure(
                f"{name} needs arguments ({', '.join(needed)}), but is called without any: {HOW}. "
                "If it is the function to tune itself, write a small one that returns it with its "
                "example arguments"
            )
    with theirs(name):
        return function()


def subject_of(name: str, made: Any) -> Subject:
    """What a user's function returned, checked."""
    if hasattr(made, "compiler_ir"):
        return Subject(name, lowered=made)
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise Failure(f"{name} returned {_described(made)}; {HOW}")
    function, arguments, keywords = (*made, {}) if len(made) == 2 else made
    if not callable(function):
        raise Failure(f"{name} returned {_described(function)} first, which is no function; {HOW}")
    if not isinstance(arguments, (tuple, list)):
        raise Failure(
            f"{name} returned {_described(arguments)} as the arguments; a single one is written "
            f"(x,): {HOW}"
        )
    if not isinstance(keywords, dict) or not all(isinstance(key, str) for key in keywords):
        raise Failure(f"{name} returned {_described(keywords)} as the keywords; {HOW}")
    return Subject(name, function, tuple(arguments), keywords)


def import_modules(names: Iterable[str]) -> None:
    """Import what holds the kernels; those of `ejkernel.modules` always."""
    importlib.import_module("ejkernel.modules")
    for name in names:
        import_module(name)


def import_module(name: str) -> ModuleType:
    """A module by its name, also from the current folder; or by its file."""
    if name.endswith(".py") or "/" in name:
        return _import_file(pathlib.Path(name))
    if not name or name.startswith(".") or ".." in name:
        raise Failure(f"{name!r} is no name of a module")
    here = str(pathlib.Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does
    with theirs(f"module {name}"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{name}.".startswith(f"{error.name}."):
                raise Failure(
                    f"there is no module {name!r}; looked in the current folder ({here}) and in "
                    "what is installed. A file is named with its ending: folder/model.py:function"
                ) from error
            raise


def _import_file(file: pathlib.Path) -> ModuleType:
    if not file.is_file():
        raise Failure(f"there is no file {str(file)!r}")
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as running the file does
    with theirs(str(file)):
        module = importlib.import_module(file.stem)
    loaded = getattr(module, "__file__", None)
    if loaded is None or pathlib.Path(loaded).resolve() != file.resolve():
        raise Failure(
            f"{file} cannot be loaded: another module is called {file.stem!r} ({loaded}); rename "
            "the file"
        )
    return module


@contextlib.contextmanager
def theirs(what: str) -> Iterator[None]:
    """Run the user's code: what it prints is no answer of ours, what it raises is a message."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (Failure, click.ClickException, BrokenPipeError):
        raise
    except SystemExit as error:
        raise Failure(
            f"{what}: it ended the process (exit {error.code}) while it was loaded; put what a "
            'script does under `if __name__ == "__main__":`'
        ) from error
    except Exception as error:
        environment = sys.modules.get("ejkernel.ops.utils.environment")
        if environment is not None and isinstance(error, environment.VariableError):
            raise  # not the doing of their code
        raise Failure(f"{what} raised {in_one_line(error)}{raised_at(error)}") from error


def _no_attribute(name: str, module: ModuleType, path: str) -> str:
    functions = [
        key
        for key, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
    hint = f"; it has {', '.join(functions[:8])}" if functions else ""
    if near := difflib.get_close_matches(path, functions, n=1):
        hint = f"; did you mean {near[0]}?"
    return f"{name}: the module {module.__name__!r} has no {path!r}{hint}"


def _described(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array ({value.dtype}{list(value.shape)})"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)} ({', '.join(type(item).__name__ for item in value)})"
    return "None" if value is None else f"{value!r:.60} ({type(value).__name__})"
