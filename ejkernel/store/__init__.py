"""Where tuned configs live: an SQLite file by default, a server database by URL.

`Store` holds plain data by key. `ejkernel.ops.PersistentCache` is what programs use: it turns
configs into plain data and back.
"""

from .bundle import Bundle, BundleError, Conflict
from .errors import (
    StoreBusy,
    StoreDamaged,
    StoreError,
    StoreFull,
    StoreNewer,
    StoreReadOnly,
    StoreRefused,
    StoreUnavailable,
)
from .location import FolderLocation, Location, ServerLocation, locate
from .store import Store

__all__ = [
    "Bundle",
    "BundleError",
    "Conflict",
    "FolderLocation",
    "Location",
    "ServerLocation",
    "Store",
    "StoreBusy",
    "StoreDamaged",
    "StoreError",
    "StoreFull",
    "StoreNewer",
    "StoreReadOnly",
    "StoreRefused",
    "StoreUnavailable",
    "locate",
]
