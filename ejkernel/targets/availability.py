"""Which targets can be used on this machine, and what the others lack."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ..ops.utils.display import text_table
from .catalog import TARGETS, Target
from .compiler import compiler_versions, missing, probe


@dataclasses.dataclass(frozen=True)
class Availability:
    """One target: can it be compiled for, and if not, what to do.

    Attributes:
      target: the target.
      usable: True if configs can be compiled for it here.
      lacking: what to install or change; "" if usable.
      compiler: who compiles, with version.
    """

    target: Target
    usable: bool
    lacking: str
    compiler: str


@dataclasses.dataclass(frozen=True)
class Available:
    """All known targets. Prints as a table."""

    entries: tuple[Availability, ...]

    def __iter__(self) -> Iterator[Availability]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, name: str) -> Availability:
        return next(entry for entry in self.entries if entry.target.name == name)

    @property
    def usable(self) -> tuple[Target, ...]:
        """The targets that can be compiled for here."""
        return tuple(entry.target for entry in self.entries if entry.usable)

    def __str__(self) -> str:
        rows = [
            (
                entry.target.name,
                entry.target.device_name or "this machine",
                "yes" if entry.usable else "lower only",
                entry.compiler if entry.usable else entry.lacking,
            )
            for entry in self.entries
        ]
        return text_table(("target", "device", "compiles here", "with, or what it lacks"), rows)


def available(*, ask: bool = False) -> Available:
    """Every target, and whether it can be used here.

    By default this looks at installed packages only. With `ask=True` each compiler is started and
    asked for the device: it takes seconds, and finds a topology that the installed libtpu does not
    know. Any target can be lowered for (`check(..., compile=False)`), whatever is installed.
    """
    entries = []
    for target in TARGETS.values():
        lacking = missing(target.platform)
        if ask and not lacking:
            lacking = probe(target)
        versions = compiler_versions(target.platform)
        named = [name for name in versions if name not in ("jax", "jaxlib")] or ["jaxlib"]
        compiler = ", ".join(f"{name} {versions[name]}" for name in named)
        entries.append(Availability(target, not lacking, lacking, compiler))
    return Available(tuple(entries))
