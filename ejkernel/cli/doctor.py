"""`ejkernel doctor`: what is here, what is missing, and how to get it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pathlib
import platform
from collections.abc import Callable, Iterator
from typing import NamedTuple

import click

from .. import __version__
from ..formatting import counted
from ..installation import foreign_distributions, how_to_install
from . import options
from .exits import Exit, Failure, in_one_line
from .output import State, styled, table

_MARKS = {
    "ok": ("ok", "green"),
    "missing": ("-", "dim"),
    "warning": ("!", "yellow"),
    "error": ("ERROR", "bold red"),
}

_EXTRAS = (
    ("search", "sklearn", "scikit-learn", "learns which candidates of a large space to try"),
    ("postgres", "psycopg", "psycopg", "a store on a PostgreSQL server"),
    ("ray", "ray", "ray", "tuning on a Ray cluster"),
    ("dashboard", "uvicorn", "uvicorn", "runs under way in the browser (ejkernel dashboard)"),
)


class Finding(NamedTuple):
    """One thing that was looked at.

    Attributes:
      name: the thing.
      status: `ok`, `missing` (and not needed), `warning` or `error`.
      text: what is known of it.
      advice: what to do about it.
    """

    name: str
    status: str
    text: str
    advice: str = ""


@click.command(short_help="Look at this installation: what is here, what is missing.")
@options.store
@options.with_state
def doctor(state: State, source: str | None) -> int:
    """Look at this installation: device, versions, store, targets, what is missing.

    Ends with 1 if something is broken; what is merely not installed is no error.
    """
    areas: dict[str, Callable[[], Iterator[Finding]]] = {
        "versions": _versions,
        "device": _device,
        "settings": _settings,
        "store": lambda: _store(source),
        "bundles": _bundles,
        "extras": _extras,
        "targets": _targets,
        "native": _native,
        "journal": _crashes,
    }
    rows, findings = [], []
    for area, find in areas.items():
        for number, (name, status, text, advice) in enumerate(found := list(find())):
            shown = f"{text}; {advice}" if advice else text
            rows.append((area if number == 0 else "", name, styled(*_MARKS[status]), shown))
        findings += [{"area": area, **finding._asdict()} for finding in found]
    errors, warnings = (
        sum(finding["status"] == kind for finding in findings) for kind in ("error", "warning")
    )
    verdict = f"{counted(errors, 'error')}, {counted(warnings, 'warning')}"
    state.result(
        {"ok": not errors, "findings": findings},
        table(("", "", "", ""), rows),
        verdict if errors or warnings else "all is well",
    )
    return Exit.NOT_WELL if errors else Exit.OK


def _versions() -> Iterator[Finding]:
    yield Finding("ejkernel", "ok", __version__)
    for other in foreign_distributions():
        yield Finding(
            "ejkernel",
            "warning",
            f"another distribution of this name is installed: {other}",
            f"pip uninstall ejkernel, then {how_to_install()}",
        )
    python = f"{platform.python_version()} on {platform.platform(terse=True)}"
    yield Finding("python", "ok", python)
    for package in ("jax", "jaxlib"):
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(package, "error", "not installed", "pip install 'jax>=0.10'")
            continue
        old = tuple(int(n) for n in found.split(".")[:2] if n.isdecimal()) < (0, 10)
        advice = "ejkernel needs 0.10 or newer: pip install -U jax" if old else ""
        yield Finding(package, "error" if old else "ok", found, advice)


def _device() -> Iterator[Finding]:
    try:
        import jax

        devices = jax.devices()
    except Exception as error:  # noqa: BLE001  a plugin may fail in any way: that is the finding
        yield Finding(
            "jax",
            "error",
            f"JAX does not start: {in_one_line(error)}",
            "set JAX_PLATFORMS=cpu to go on without the device",
        )
        return
    from ..ops import device_fingerprint, device_kind

    first = devices[0]
    count = f"{len(devices)} × " if len(devices) > 1 else ""
    yield Finding(device_kind(), "ok", f"{count}{first.device_kind} ({first.platform})")
    yield Finding("fingerprint", "ok", device_fingerprint())
    if first.platform == "cpu" and pathlib.Path("/dev/nvidia0").exists():
        yield Finding(
            "gpu",
            "warning",
            "there is an NVIDIA device, but JAX does not use it",
            "pip install 'jax[cuda13]'",
        )


def _settings() -> Iterator[Finding]:
    from ..ops.utils import environment

    for variable in environment.VARIABLES:
        if not environment.is_set(variable.name):
            continue
        try:
            value = variable.read()
            if variable.default in ("0", "1") and variable.choices is None:
                variable.enabled()
            if variable is environment.AGREEMENT_SECONDS:
                variable.seconds()
        except environment.VariableError as error:
            yield Finding(variable.name, "error", str(error))
            continue
        yield Finding(variable.name, "ok", value)
    for name, near in environment.unknown().items():
        advice = f"did you mean {near}?" if near else "docs/environment.md has them all"
        yield Finding(name, "warning", "is set, but nothing reads it", advice)


def _store(source: str | None) -> Iterator[Finding]:
    from ..ops.config.persistent import default_path
    from ..store import BundleError, FolderLocation, StoreError, locate
    from ..store.private import why_not_writable
    from ..store.sqlite_file import count_entries
    from .stores import open_place

    name = "default" if source is None or "://" in source else source
    try:
        given = default_path() if source is None else source
        if "://" in str(given):
            name = locate(given).shown  # without its password
        if str(given).endswith(".json") or "://" in str(given):
            place = open_place(str(given))
            yield Finding(place.shown, "ok", counted(len(place.entries()), "entry"))
            return
        location = locate(given)
        assert isinstance(location, FolderLocation)
        name = location.shown
        count = count_entries(location)
    except (StoreError, BundleError, Failure, OSError) as error:
        yield Finding(name, "error", str(error))
    except click.ClickException as error:
        yield Finding(name, "error", error.format_message())
    else:
        reason = why_not_writable(location.folder)
        text = "nothing was tuned yet" if count is None else counted(count, "entry")
        if reason is not None:
            text = f"{text}, and nothing can be stored: {reason}"
            yield Finding(name, "warning", text, "EJKERNEL_CACHE_DIR names another folder")
        else:
            made = "it is made when the first config is stored" if count is None else ""
            yield Finding(name, "ok", text, made)


def _bundles() -> Iterator[Finding]:
    from ..ops.utils import environment
    from ..store.bundle import Shipped

    shipped = Shipped(environment.CONFIG_PATH.read())
    for source, bundle in shipped.bundles:
        count = counted(len(bundle), "entry")
        yield Finding(str(source.path), "ok", f"{count} ({source.origin})")
    for problem in shipped.problems:
        yield Finding(problem.what, "error", problem.reason)


def _extras() -> Iterator[Finding]:
    for extra, module, package, use in _EXTRAS:
        if importlib.util.find_spec(module) is None:
            yield Finding(extra, "missing", f"not installed: {use}", how_to_install(extra))
        else:
            yield Finding(extra, "ok", f"{package} {importlib.metadata.version(package)}")


def _targets() -> Iterator[Finding]:
    from ..targets import available

    groups: dict[tuple[bool, str], list[str]] = {}
    for entry in available():
        what = entry.compiler if entry.usable else entry.lacking
        groups.setdefault((entry.usable, what), []).append(entry.target.name)
    for (usable, what), names in groups.items():
        text = f"compiles with {what}" if usable else "lowers only"
        advice = "" if usable else f"to compile, {what}"
        yield Finding(", ".join(names), "ok" if usable else "missing", text, advice)


def _native() -> Iterator[Finding]:
    from .native import native_module

    found = native_module().status()
    advice = "ejkernel native build makes them now" if found.available and not found.built else ""
    status = "ok" if found.available else "missing"
    yield Finding("C++ kernels", status, found.reason, advice)


def _crashes() -> Iterator[Finding]:
    from ..ops.tuner.isolation.journal import Journal
    from ..ops.utils.environment import NoHomeFolder

    try:
        crashed = Journal().crash_files()
    except NoHomeFolder:  # the store's finding says so
        return
    if crashed:
        yield Finding(
            "crashes",
            "warning",
            f"{len(crashed)} candidates killed the process that tuned them and are left out",
            f"delete files in {crashed[0].parent} to try them again",
        )
