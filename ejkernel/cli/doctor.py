"""`ejkernel doctor`: what is here, what is missing, and how to get it."""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
import platform
from collections.abc import Iterator

import click

from .. import __version__
from . import options
from .exits import Exit, Failure, in_one_line
from .output import State, counted, styled, table

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
)


@dataclasses.dataclass(frozen=True)
class Health:
    """One thing that was looked at.

    Attributes:
      area: what it belongs to.
      name: the thing.
      status: `ok`, `missing` (and not needed), `warning` or `error`.
      text: what was found.
      advice: what to do about it.
    """

    area: str
    name: str
    status: str
    text: str
    advice: str = ""


@click.command()
@options.store
@options.common
@options.with_state
def doctor(state: State, source: str | None) -> int:
    """Look at this installation: device, versions, store, targets, what is missing.

    Ends with 1 if something is broken; what is merely not installed is no error.
    """
    findings = [*_versions(), *_device(), *_settings(), *_store(source), *_bundles()]
    findings += [*_extras(), *_targets(), *_native(), *_crashes()]
    rows = []
    area = ""
    for finding in findings:
        mark, style = _MARKS[finding.status]
        text = f"{finding.text}; {finding.advice}" if finding.advice else finding.text
        head = finding.area if finding.area != area else ""
        area = finding.area
        rows.append((head, finding.name, styled(mark, style), text))
    errors = sum(finding.status == "error" for finding in findings)
    warnings = sum(finding.status == "warning" for finding in findings)
    verdict = (
        f"{counted(errors, 'error')}, {counted(warnings, 'warning')}"
        if errors or warnings
        else "all is well"
    )
    data = {
        "ok": not errors,
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }
    state.result(data, table(("", "", "", ""), rows), verdict)
    return Exit.NOT_WELL if errors else Exit.OK


def _versions() -> Iterator[Health]:
    import importlib.metadata

    yield Health("versions", "ejkernel", "ok", __version__)
    python = f"{platform.python_version()} on {platform.platform(terse=True)}"
    yield Health("versions", "python", "ok", python)
    for package in ("jax", "jaxlib"):
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield Health("versions", package, "error", "not installed", "pip install 'jax>=0.10'")
            continue
        old = tuple(int(n) for n in found.split(".")[:2] if n.isdecimal()) < (0, 10)
        advice = "ejkernel needs 0.10 or newer: pip install -U jax" if old else ""
        yield Health("versions", package, "error" if old else "ok", found, advice)


def _device() -> Iterator[Health]:
    try:
        import jax

        devices = jax.devices()
    except Exception as error:  # noqa: BLE001  a plugin may fail in any way: that is the finding
        yield Health(
            "device",
            "jax",
            "error",
            f"JAX does not start: {in_one_line(error)}",
            "set JAX_PLATFORMS=cpu to go on without the device",
        )
        return
    from ..ops import device_fingerprint, device_kind

    first = devices[0]
    count = f"{len(devices)} × " if len(devices) > 1 else ""
    yield Health("device", device_kind(), "ok", f"{count}{first.device_kind} ({first.platform})")
    yield Health("device", "fingerprint", "ok", device_fingerprint())
    if first.platform == "cpu" and _looks_like_a_gpu():
        yield Health(
            "device",
            "gpu",
            "warning",
            "there is an NVIDIA device, but JAX does not use it",
            "pip install 'jax[cuda13]'",
        )


def _looks_like_a_gpu() -> bool:
    return pathlib.Path("/dev/nvidia0").exists()


def _settings() -> Iterator[Health]:
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
            yield Health("settings", variable.name, "error", str(error))
            continue
        yield Health("settings", variable.name, "ok", value)


def _store(source: str | None) -> Iterator[Health]:
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
            yield Health("store", place.shown, "ok", counted(len(place.entries()), "entry"))
            return
        location = locate(given)
        assert isinstance(location, FolderLocation)
        name = location.shown
        count = count_entries(location)
    except (StoreError, BundleError, Failure, OSError) as error:
        yield Health("store", name, "error", str(error))
    except click.ClickException as error:
        yield Health("store", name, "error", error.format_message())
    else:
        reason = why_not_writable(location.folder)
        text = "nothing was tuned yet" if count is None else counted(count, "entry")
        if reason is not None:
            advice = "EJKERNEL_CACHE_DIR names another folder"
            text = f"{text}, and nothing can be stored: {reason}"
            yield Health("store", name, "warning", text, advice)
        elif count is None:
            yield Health("store", name, "ok", f"{text}; it is made when the first config is stored")
        else:
            yield Health("store", name, "ok", text)


def _bundles() -> Iterator[Health]:
    from ..ops.utils import environment
    from ..store.bundle import Shipped

    shipped = Shipped(environment.CONFIG_PATH.read())
    for source, bundle in shipped.bundles:
        text = f"{counted(len(bundle), 'entry')} ({source.origin})"
        yield Health("bundles", str(source.path), "ok", text)
    for problem in shipped.problems:
        yield Health("bundles", problem.what, "error", problem.reason)


def _extras() -> Iterator[Health]:
    import importlib.metadata

    for extra, module, package, use in _EXTRAS:
        if importlib.util.find_spec(module) is None:
            advice = f"pip install 'ejkernel[{extra}]'"
            yield Health("extras", extra, "missing", f"not installed: {use}", advice)
        else:
            yield Health("extras", extra, "ok", f"{package} {importlib.metadata.version(package)}")


def _targets() -> Iterator[Health]:
    from ..targets import available

    groups: dict[tuple[bool, str], list[str]] = {}
    for entry in available():
        what = entry.compiler if entry.usable else entry.lacking
        groups.setdefault((entry.usable, what), []).append(entry.target.name)
    for (usable, what), names in groups.items():
        text = f"compiles with {what}" if usable else "lowers only"
        advice = "" if usable else f"to compile, {what}"
        yield Health("targets", ", ".join(names), "ok" if usable else "missing", text, advice)


def _native() -> Iterator[Health]:
    if importlib.util.find_spec("ejkernel.native") is None:
        return
    from .native import native_module

    found = native_module().status()
    advice = "" if found.built else "ejkernel native build makes them now"
    status = "ok" if found.available else "missing"
    yield Health("native", "C++ kernels", status, found.reason, advice if status == "ok" else "")


def _crashes() -> Iterator[Health]:
    from ..ops.tuner.isolation.journal import Journal
    from ..ops.utils.environment import NoHomeFolder

    try:
        crashed = Journal().crash_files()
    except NoHomeFolder:  # the store's finding says so
        return
    if crashed:
        yield Health(
            "journal",
            "crashes",
            "warning",
            f"{len(crashed)} candidates killed the process that tuned them and are left out",
            f"delete files in {crashed[0].parent} to try them again",
        )
