"""Every environment variable that ejkernel reads, in one table.

A variable is read when it is needed, never at import, so that a program may set it in its first
lines. Nothing else in the package touches `os.environ`.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import pathlib
import re
from collections.abc import Mapping


class VariableError(ValueError):
    """An environment variable has a value that is not understood."""


@dataclasses.dataclass(frozen=True)
class Variable:
    """One environment variable: its name, what it is when unset, and what it does."""

    name: str
    default: str
    meaning: str
    choices: tuple[str, ...] | None = None
    pattern: str = ""  # what the whole value matches; `form` says it in words
    form: str = ""

    def read(self) -> str:
        """The current value, or the default when the variable is unset or empty."""
        value = os.environ.get(self.name) or self.default
        if self.choices is not None and value not in self.choices:
            raise VariableError(
                f"environment variable {self.name}={value!r} is not understood; "
                f"allowed: {', '.join(self.choices)}"
            )
        if self.pattern and not re.fullmatch(self.pattern, value):
            raise VariableError(
                f"environment variable {self.name}={value!r} is not understood; {self.form}"
            )
        return value

    def enabled(self) -> bool:
        """The value as a switch: 1/true/yes/on or 0/false/no/off."""
        value = self.read().strip().lower()
        if value in ("1", "true", "yes", "on"):
            return True
        if value in ("", "0", "false", "no", "off"):
            return False
        raise VariableError(
            f"environment variable {self.name}={value!r} is not a switch; set it to 1 or 0"
        )

    def seconds(self) -> float:
        """The value as a time in seconds, 0 or more."""
        value = self.read()
        try:
            seconds = float(value)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < float("inf"):
            raise VariableError(
                f"environment variable {self.name}={value!r} is not a time; set it to a number of "
                "seconds, 0 or more"
            )
        return seconds


class NoHomeFolder(OSError):
    """The user has no home folder, and nothing says where else to store things."""


def cache_folder(*inside: str) -> pathlib.Path:
    """The folder of everything stored on disk, or one inside of it. Nothing is made.

    A container may run as a user that nobody knows: then this is a `NoHomeFolder` error.
    """
    given = CACHE_DIR.read()
    try:
        return pathlib.Path(given).expanduser().joinpath(*inside)
    except RuntimeError:
        raise NoHomeFolder(
            f"there is no home folder to store things in ({given}); set EJKERNEL_CACHE_DIR to a "
            "folder that you may write"
        ) from None


def is_set(name: str) -> bool:
    """True if a variable of another program has a value."""
    return bool(os.environ.get(name))


def preset(name: str, value: str) -> None:
    """Set a variable of another program that is started from here, unless the user has set it."""
    os.environ.setdefault(name, value)


def for_child(changes: Mapping[str, str], programs: str = "") -> dict[str, str]:
    """The environment of a process that is started from here: this one's, with these changes.

    `programs` is a folder where it looks for programs before all others.
    """
    path = os.pathsep.join(filter(None, (programs, os.environ.get("PATH", os.defpath))))
    return {**os.environ, "PATH": path, **changes}


CACHE_DIR = Variable(
    "EJKERNEL_CACHE_DIR",
    "~/.cache/ejkernel",
    "folder of everything stored on disk; tuned configs live in its subfolder `configs`",
)
CONFIG_PATH = Variable(
    "EJKERNEL_CONFIG_PATH",
    "",
    "bundles of tuned configs: files and folders, divided as in `PATH`; read-only",
)
AUTOTUNE = Variable(
    "EJKERNEL_AUTOTUNE",
    "0",
    "1: the default executor tunes an operation that has no stored config (else: heuristics)",
)
STRICT = Variable(
    "EJKERNEL_STRICT",
    "0",
    "1: a call that has no stored config is an error that says what to run (see docs/strict.md)",
)
STAMP = Variable(
    "EJKERNEL_OPS_STAMP",
    "hash",
    "what is written into programs: `hash` (label and specification), "
    "`json` (also the chosen config, on every operation), `none`",
    choices=("hash", "json", "none"),
)
PREFIX = Variable(
    "EJKERNEL_OPS_PREFIX",
    "ejkernel_ops#",
    "what the labels in programs begin with: a name and `#`",
    pattern="[A-Za-z_][A-Za-z0-9_.-]*+#",
    form="a prefix of labels has letters, digits, '_', '.' and '-', begins with a letter or '_' "
    "and ends in '#', like 'ejkernel_ops#'",
)
RECORD = Variable(
    "EJKERNEL_OPS_RECORD",
    "auto",
    "invocations recorded while tracing: `auto` (the most recent 4096 distinct ones), "
    "`1` (all of them), `0` (none)",
    choices=("auto", "1", "0"),
)
AGREEMENT_SECONDS = Variable(
    "EJKERNEL_AGREEMENT_SECONDS",
    "600",
    "in a job of several processes: how long one waits for the config that another one decides; "
    "`0`: each process decides for itself",
)
NATIVE = Variable(
    "EJKERNEL_NATIVE",
    "auto",
    "kernels in C++: `auto` (compiled on first use if there is a compiler, then stored), `built` "
    "(used if `ejkernel native build` has made them), `off`",
    choices=("auto", "built", "off"),
)
CXX = Variable("CXX", "", "the C++ compiler of native kernels; else c++, g++ or clang++")

_TESTS = ("EJKERNEL_TEST_", "EJKERNEL_FUZZ_")  # of the project's own tests

VARIABLES = tuple(value for value in tuple(globals().values()) if isinstance(value, Variable))
"""All of them, in this order."""


def unknown() -> dict[str, str | None]:
    """Variables that look like ours and that nothing reads, each with the one that may be meant."""
    names = [variable.name for variable in VARIABLES]
    found = sorted(
        name
        for name in os.environ
        if name.upper().startswith("EJ") and name not in names and not name.startswith(_TESTS)
    )
    near = {name: difflib.get_close_matches(name.upper(), names, n=1, cutoff=0.7) for name in found}
    return {
        name: matches[0] if matches else None
        for name, matches in near.items()
        if matches or name.upper().startswith("EJKERNEL")
    }
