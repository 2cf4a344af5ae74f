"""Configs in memory, and overlays that stand before every other source for a while."""

from __future__ import annotations

import dataclasses
import difflib
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, overload

from ..core.kernel import operations
from ..core.types import ConfigKey
from ..utils.fingerprint import short_hash, stable_json
from ..utils.meta import parse_label
from . import context

_ABSENT = object()


def as_key(parts: tuple[Any, ...], method: str) -> Any:
    """The cache key from `(key)` or from `(device, op_id, call_key)`."""
    if len(parts) == 1:
        key = parts[0]
        if isinstance(key, tuple) and len(key) == 3 and not isinstance(key, ConfigKey):
            return ConfigKey(*key)
        return key
    if len(parts) == 3:
        return ConfigKey(*parts)
    raise TypeError(
        f"{method} takes a key, or device, op_id and call_key; got {len(parts)} key arguments"
    )


def key_and_config(parts: tuple[Any, ...]) -> tuple[Any, Any]:
    """The key and the config that `put` was given, in either form."""
    if len(parts) not in (2, 4):
        raise TypeError(
            f"put takes (key, cfg) or (device, op_id, call_key, cfg); got {len(parts)} arguments"
        )
    return as_key(parts[:-1], "put"), parts[-1]


MOST_SERVED = 2**16
"""How many traced calls a cache tells apart. Beyond, all calls count as traced: a change of an
entry then makes programs select again that need not."""


class ConfigCache:
    """Configs by key, in memory. Safe to use from many threads.

    Changing or removing an entry that a traced program already uses makes programs select again,
    so the cache never disagrees with what runs.

    >>> cache = ConfigCache()
    >>> cache.put("cpu|x", "matmul@v1", "0123456789abcdef", {"block": 64})
    >>> cache.get("cpu|x", "matmul@v1", "0123456789abcdef")
    {'block': 64}
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._configs: dict[Any, Any] = {}
        self._served: set[Any] | None = set()  # None: all
        self.generation = 0  # how often `install` and `clear` changed it

    @overload
    def put(self, key: Any, cfg: Any, /) -> None: ...
    @overload
    def put(self, device: str, op_id: str, call_key: str, cfg: Any, /) -> None: ...
    def put(self, *parts: Any) -> None:
        """Store a config: `put(key, cfg)` or `put(device, op_id, call_key, cfg)`."""
        key, cfg = key_and_config(parts)
        with self._lock:
            old = self._configs.get(key, _ABSENT)
            self._configs[key] = cfg
            served = self._served is None or key in self._served
            changed = served and (old is _ABSENT or old != cfg)
            if changed and self._served is not None:
                self._served.discard(key)
        if changed:
            context.forget_traces()

    @overload
    def get(self, key: Any, /) -> Any: ...
    @overload
    def get(self, device: str, op_id: str, call_key: str, /) -> Any: ...
    def get(self, *parts: Any) -> Any:
        """The config of `(key)` or `(device, op_id, call_key)`, or None."""
        return self._configs.get(as_key(parts, "get"))

    def install(self, configs: Mapping[Any, Any]) -> None:
        """Put configs in for good; programs that were traced before select again.

        In a job of several processes every process must do so, as with all that changes programs:
        what they agreed on before is settled anew.
        """
        with self._lock:
            self._configs.update((as_key((key,), "install"), cfg) for key, cfg in configs.items())
            self.generation += 1
        context.forget_traces()

    def put_quietly(self, key: Any, cfg: Any) -> None:
        """Like `put`, but programs that were traced before keep the config they have."""
        with self._lock:
            self._configs[key] = cfg

    def mark_served(self, key: Any) -> None:
        """A program is being compiled for this key, with whatever config it got."""
        with self._lock:
            if self._served is not None:
                self._served.add(key)
                if len(self._served) > MOST_SERVED:
                    self._served = None

    def clear(self) -> None:
        """Forget everything; programs that used an entry select again on their next call."""
        with self._lock:
            served = self._served is None or bool(self._served)
            self._configs.clear()
            self._served = set()
            self.generation += 1
        if served:
            context.forget_traces()

    def keys(self) -> list[Any]:
        """The keys, at this moment."""
        with self._lock:
            return list(self._configs)

    def items(self) -> list[tuple[Any, Any]]:
        """Keys and configs, at this moment."""
        with self._lock:
            return list(self._configs.items())

    def __contains__(self, key: object) -> bool:
        return as_key((key,), "in") in self._configs

    def __len__(self) -> int:
        return len(self._configs)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys())

    def __repr__(self) -> str:
        return f"ConfigCache({len(self)} configs)"


@dataclasses.dataclass(frozen=True, eq=False)
class OverlayLayer(context.Layer):
    """A snapshot of an overlay's entries."""

    entries: Mapping[Any, Any]

    @classmethod
    def of(cls, source: Mapping[Any, Any] | ConfigCache) -> OverlayLayer:
        """The layer for a mapping or a cache, as it is at this moment; `None` entries left out."""
        if not isinstance(source, (Mapping, ConfigCache)):
            raise TypeError(
                f"overlay_cache takes a mapping from keys to configs or a ConfigCache, "
                f"got {type(source).__name__}"
            )
        entries = {
            _overlay_key(key): cfg for key, cfg in dict(source.items()).items() if cfg is not None
        }
        content = sorted(f"{stable_json(key)}={stable_json(cfg)}" for key, cfg in entries.items())
        return cls(f"overlay {short_hash(chr(10).join(content), 32)}", entries)

    def find(self, key: ConfigKey) -> Any:
        """This overlay's config for a call: for exactly it, else for the operation at large."""
        name = key.op_id.partition("@v")[0]
        for candidate in (key, (key.op_id, key.call_key), key.op_id, name):
            if candidate in self.entries:
                return self.entries[candidate]
        return None


def _overlay_key(key: Any) -> Any:
    if isinstance(key, str) and "#" in key:
        op_id, call_key = parse_label(key)
        return (op_id, call_key)
    return as_key((key,), "overlay_cache") if isinstance(key, tuple) and len(key) == 3 else key


def overlay_cache(source: Mapping[Any, Any] | ConfigCache) -> AbstractContextManager[None]:
    """Put configs before every cache for a block; the innermost overlay wins.

    Keys are those of `ConfigCache`, or, shorter, a label, an operation with its version
    (`"matmul@v1"`) or an operation's name (`"matmul"`) for all its calls. Functions jitted before
    the block select again inside it and return to their earlier config after it.

    An operation that no kernel of this process has is a warning, not an error: its kernel may be
    made inside the block.
    """
    layer = OverlayLayer.of(source)
    _warn_of_unknown_operations(layer.entries)
    return context.Block(layer)


def _warn_of_unknown_operations(keys: Iterable[Any]) -> None:
    existing = operations()
    names = {*existing, *(op_id.partition("@v")[0] for op_id in existing)}
    for key in keys:
        op_id = key if isinstance(key, str) else key[-2] if isinstance(key, tuple) else None
        if op_id is None or op_id in names:
            continue
        near = difflib.get_close_matches(op_id, sorted(names), n=1, cutoff=0.75)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        warnings.warn(
            f"overlay_cache: no kernel of this process has the operation {op_id!r}, so its config "
            f"is not used{hint}",
            stacklevel=3,
        )
