"""Between stores and bundles: export, import, and what is wrong with an entry."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from ...markup import one_line
from ...store.bundle import Bundle, Conflict, quality, why_better
from ..core.kernel import Kernel, kernel_named
from ..core.types import ConfigKey
from .freshness import EntryState, judge
from .persistent import PersistentCache


def export_bundle(
    store: PersistentCache,
    path: str | os.PathLike[str] | None = None,
    *,
    op_id: str | None = None,
    device: str | None = None,
) -> Bundle:
    """The entries of a store as a bundle, written to `path` if one is given.

    Args:
      store: what to export.
      path: a file, written whole or not at all.
      op_id: only of this operation, `matmul@v1`; or of any version, `matmul`.
      device: only for this device.
    """
    entries = []
    for key in store.keys():  # noqa: SIM118  a store, not a dictionary
        if not isinstance(key, ConfigKey) or (device is not None and key.device != device):
            continue
        if op_id is not None and op_id not in (key.op_id, key.op_id.partition("@v")[0]):
            continue
        entry = store.entry(key)
        if entry is not None:
            entries.append(_counted(store, entry))
    bundle = Bundle(entries)
    if path is not None:
        bundle.save(path)
    return bundle


def _counted(store: PersistentCache, entry: dict[str, Any]) -> dict[str, Any]:
    """An entry of a store as a bundle has it: with the number of its trials, if it has them."""
    tried = len(store.trials(entry["key"]))
    return {**entry, "about": {**entry["about"], **({"tried": tried} if tried else {})}}


@dataclasses.dataclass(frozen=True)
class Imported:
    """What an import did.

    Attributes:
      added: keys that the store did not have.
      replaced: keys whose entry in the store was measured worse.
      kept: keys whose entry in the store was as good or better.
      conflicts: where the two had different configs.
    """

    added: tuple[ConfigKey, ...]
    replaced: tuple[ConfigKey, ...]
    kept: tuple[ConfigKey, ...]
    conflicts: tuple[Conflict, ...]

    def __str__(self) -> str:
        counts = f"{len(self.added)} added, {len(self.replaced)} replaced, {len(self.kept)} kept"
        return "\n".join([counts, *(f"conflict: {conflict}" for conflict in self.conflicts)])


def import_bundle(store: PersistentCache, bundle: Bundle | str | os.PathLike[str]) -> Imported:
    """Put the entries of a bundle (or of the file of one) into a store.

    Where both have an entry the better measured one wins; different configs are reported.
    """
    given = bundle if isinstance(bundle, Bundle) else Bundle.load(bundle)
    added: list[ConfigKey] = []
    replaced: list[ConfigKey] = []
    kept: list[ConfigKey] = []
    conflicts: list[Conflict] = []
    for entry in given:
        key = ConfigKey(*entry["key"])
        held = store.entry(key)
        if held is None:
            added.append(key)
        else:
            held = _counted(store, held)
            wins = quality(entry) > quality(held)
            (replaced if wins else kept).append(key)
            if entry["config"] != held["config"]:
                pair = (entry, held) if wins else (held, entry)
                conflicts.append(Conflict(entry["key"], *pair, why_better(*pair)))
            if not wins:
                continue
        store.put_plain(key, entry["config"], entry["config_type"], about=entry["about"])
    return Imported(tuple(added), tuple(replaced), tuple(kept), tuple(conflicts))


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something about an entry that a person should know."""

    key: ConfigKey
    reason: str

    def __str__(self) -> str:
        return f"{self.key}: {self.reason}"


def verify_bundle(bundle: Bundle | str | os.PathLike[str]) -> list[Problem]:
    """What is wrong with the entries of a bundle, as far as this process can tell.

    Kernels have to be loaded to be compared with: import their modules first. An entry of an
    operation that is not loaded is a problem too, for nothing can be said about it.
    """
    given = bundle if isinstance(bundle, Bundle) else Bundle.load(bundle)
    problems = []
    for entry in given:
        key = ConfigKey(*entry["key"])
        reason = _problem(key, entry)
        if reason is not None:
            problems.append(Problem(key, reason))
    return problems


def _problem(key: ConfigKey, entry: Any) -> str | None:
    kernel = kernel_named(key.op_id)
    if kernel is None:
        return "no kernel of this name and version is loaded"
    try:
        cfg = kernel.config_from_plain(entry["config"], entry["config_type"])
        kernel.check_config(cfg, "the bundle holds")
    except Exception as error:  # noqa: BLE001  a class may check its fields as it likes
        return f"its config does not fit {type(kernel).__name__}: {error}"
    if reasons := _reasons_against_any_call(kernel, cfg):
        return f"its config does not fit {type(kernel).__name__}: {'; '.join(reasons)}"
    freshness = judge(entry["about"], kernel, key)
    if freshness.state is not EntryState.FRESH:
        return freshness.reason
    if entry["about"].get("incomplete"):
        return f"its tuning was interrupted: {one_line(entry['about']['incomplete'])}"
    return None


def _reasons_against_any_call(kernel: Kernel[Any, Any], cfg: Any) -> list[str]:
    """Why no implementation would ever take a config; empty if one might, for some call."""
    found = []
    for item in kernel.all_implementations():
        reasons = item.limits.reasons_against_any(cfg) if item.takes(cfg) else ["is not its"]
        if not reasons:
            return []
        found += [f"{reason}, for {item.name}" for reason in reasons]
    return found
