"""The C++ compiler of this machine, and the processor it compiles for."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
from typing import Any

from .libraries import environment

COMPILERS = ("c++", "g++", "clang++")
SECONDS = 600.0
"""How long a compiler may take: a loaded machine needs a minute at most."""

FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-pthread"),
    *("-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
    # Multiply and add in one instruction; nobody looks at errno or at the floating-point flags.
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
)


@dataclasses.dataclass(frozen=True)
class Compiler:
    """A C++ compiler: the command that starts it, and what it says it is."""

    command: tuple[str, ...]
    version: str

    def compile(
        self, source: pathlib.Path, include: tuple[pathlib.Path, ...], output: str, where: str
    ) -> str | None:
        """Compile a shared library, the file `output` in the folder `where`.

        None if that went well, else what the compiler said.
        """
        folders = [f"-I{folder}" for folder in include]
        command = [*self.command, *FLAGS, *folders, str(source), "-o", output]
        private: dict[str, Any] = {"umask": 0o077} if os.name == "posix" else {}
        try:
            done = _run(command, SECONDS, cwd=where, **private)
        except subprocess.TimeoutExpired:
            return f"it was not done after {SECONDS:.0f} s"
        except OSError as error:
            return f"it cannot be started: {error.strerror}"
        if done.returncode == 0:
            return None
        said = (done.stderr or done.stdout).strip().splitlines()
        return "\n".join(said[:20]) or f"it ended with code {done.returncode}"


def _run(command: list[str], seconds: float, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=seconds, **more
    )


def find_commands() -> list[tuple[str, ...]] | str:
    """The commands that may start a compiler, the first choice first, or why there is none.

    That named by `CXX`, else those of c++, g++, clang++ that are on the `PATH`. None is started.
    """
    asked = environment().CXX.read()
    if asked:
        try:
            command = shlex.split(asked)
        except ValueError:
            command = []
        if not command or not (path := shutil.which(command[0])):
            return f"CXX={asked!r} is not a program that can be started"
        return [(os.path.abspath(path), *command[1:])]
    paths = [path for name in COMPILERS if (path := shutil.which(name))]
    return [(os.path.abspath(path),) for path in paths] or _NONE_FOUND


_NONE_FOUND = f"no C++ compiler was found ({', '.join(COMPILERS)}); install one or set CXX"


def find_compiler() -> Compiler | str:
    """The first of these commands that says what it is, or why there is no compiler."""
    commands = find_commands()
    if isinstance(commands, str):
        return commands
    for command in commands:
        if (version := _version(command[0])) is not None:
            return Compiler(command, version)
    asked = environment().CXX.read()
    if asked:
        return f"CXX={asked!r} does not answer to --version, so it is no usable compiler"
    return _NONE_FOUND


def _version(path: str) -> str | None:
    """The first line of `--version`, asked anew only if the program is another one."""
    real = os.path.realpath(path)
    try:
        status = os.stat(real)
    except OSError:
        return None
    return _ask_version(path, real, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=16)
def _ask_version(path: str, real: str, changed: int, size: int) -> str | None:
    try:
        done = _run([path, "--version"], 30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else None


@functools.cache
def processor() -> str:
    """The processor's model and everything it says it can do: what `-march=native` looks at."""
    lines: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip().lower() in _TELLING:
                    lines.setdefault(name.strip().lower(), value.strip())
                if not line.strip() and lines:
                    break  # the first core speaks for all
    except OSError:  # not Linux
        pass
    # Python may start a program to know the processor's name: not where /proc tells all.
    name = "" if lines else platform.processor()
    return f"{platform.machine()} {name} {sorted(lines.items())}"


_TELLING = ("model name", "cpu family", "model", "flags", "features", "cpu part", "isa")
