"""Bundles on this machine: a team's in `EJKERNEL_CONFIG_PATH`, a library's in its wheel.

A library ships bundles by an entry point of the group `ejkernel.configs`. Its value is a package
of the library that holds `*.json` files (`"mylib.configs"`), or one file in it
(`"mylib.configs:v5e.json"`). The package is looked up, never imported.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import pathlib
import re
from collections.abc import Iterable, Iterator

from .bundle import Bundle, BundleError, Entry

GROUP = "ejkernel.configs"
_VALUE = re.compile(r"\s*([\w.]+)\s*(?::\s*([\w./-]+)\s*)?")


@dataclasses.dataclass(frozen=True)
class Source:
    """A file of configs, and who says that it is one."""

    path: pathlib.Path
    origin: str


@dataclasses.dataclass(frozen=True)
class Trouble:
    """Something that was to be a bundle and cannot be used."""

    what: str
    reason: str

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}"


class Shipped:
    """All bundles found, in order: of those that have a key, the first that can serve answers.

    Args:
      search_path: files and folders, divided as in `PATH`; they come before installed packages.
      packages: look for installed packages that ship configs.
    """

    def __init__(self, search_path: str = "", *, packages: bool = True) -> None:
        self.troubles: list[Trouble] = []
        self.bundles: list[tuple[Source, Bundle]] = []
        for source in [*self._on_path(search_path), *(self._installed() if packages else ())]:
            try:
                self.bundles.append((source, Bundle.load(source.path)))
            except FileNotFoundError:
                reason = "there is no such file or folder"
                self.troubles.append(Trouble(f"{source.path} ({source.origin})", reason))
            except (OSError, BundleError) as error:
                self.troubles.append(Trouble(f"{source.path} ({source.origin})", str(error)))

    def find(self, key: tuple[str, str, str]) -> tuple[Entry, Source] | None:
        """The entry of a key, and where it comes from; one that was measured comes first."""
        return next(iter(self.all_of(key)), None)

    def all_of(self, key: tuple[str, str, str]) -> list[tuple[Entry, Source]]:
        """The entries of a key in all bundles, in order; those that were measured come first."""
        found = [
            (entry, source)
            for source, bundle in self.bundles
            if (entry := bundle.get(key)) is not None
        ]
        return sorted(found, key=lambda pair: bool(pair[0]["about"].get("estimated")))

    def of_operation(self, op_id: str, device: str) -> Iterator[Entry]:
        """All entries of an operation on a device."""
        for _, bundle in self.bundles:
            for entry in bundle:
                if entry["key"][:2] == (device, op_id):
                    yield entry

    def _on_path(self, search_path: str) -> Iterator[Source]:
        for part in filter(None, search_path.split(os.pathsep)):
            try:
                path = pathlib.Path(part).expanduser()
            except RuntimeError as error:  # nobody has this home folder
                self.troubles.append(Trouble(f"{part} (EJKERNEL_CONFIG_PATH)", str(error)))
                continue
            yield from self._files(path, "EJKERNEL_CONFIG_PATH")

    def _installed(self) -> Iterator[Source]:
        for point in sorted(self._entry_points(), key=lambda point: (point.name, point.value)):
            origin = f"entry point {point.name} = {point.value}"
            match = _VALUE.fullmatch(point.value)
            folder = None if match is None else _folder_of(match[1])
            if match is None or folder is None:
                reason = "there is no such package; the value is a package with *.json files"
                self.troubles.append(Trouble(origin, reason))
                continue
            yield from self._files(folder / match[2] if match[2] else folder, origin)

    def _entry_points(self) -> Iterable[importlib.metadata.EntryPoint]:
        try:
            return importlib.metadata.entry_points(group=GROUP)
        except Exception:  # noqa: BLE001  a damaged package, which may have nothing to do with us
            return list(self._entry_points_one_by_one())

    def _entry_points_one_by_one(self) -> Iterator[importlib.metadata.EntryPoint]:
        for package in importlib.metadata.distributions():
            try:
                yield from package.entry_points.select(group=GROUP)
            except Exception as error:  # noqa: BLE001
                what = f"the installed package {getattr(package, '_path', package)}"
                self.troubles.append(Trouble(what, f"its entry points cannot be read: {error}"))

    def _files(self, path: pathlib.Path, origin: str) -> Iterator[Source]:
        try:
            inside = sorted(os.listdir(path)) if path.is_dir() else None
        except OSError as error:
            self.troubles.append(Trouble(f"{path} ({origin})", f"{error.strerror or error}"))
            return
        if inside is None:
            yield Source(path, origin)
            return
        files = [path / name for name in inside if name.endswith(".json")]
        if not files:
            self.troubles.append(Trouble(f"{path} ({origin})", "it has no *.json file"))
        yield from (Source(file, origin) for file in files)


def _folder_of(package: str) -> pathlib.Path | None:
    """The folder of a package. Only the top one is looked up, so that no code of it runs."""
    top, *inside = package.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except Exception:  # noqa: BLE001  whoever looks for modules here may fail in any way
        return None
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        folder = pathlib.Path(location).joinpath(*inside)
        if folder.is_dir():
            return folder
    return None
