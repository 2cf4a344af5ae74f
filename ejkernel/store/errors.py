"""What can go wrong with a store. All of it is an `OSError`: callers go on without the store."""

from __future__ import annotations

from typing import ClassVar


class StoreError(OSError):
    """A store that cannot do what was asked; the message names it and says what to do.

    `trouble` is the kind of it in a word or two: a kind is said to the user once, not once per
    entry.
    """

    trouble: ClassVar[str] = "error"


class StoreUnavailable(StoreError):
    """It cannot be opened or reached: no right to read it, no server that answers."""

    trouble = "unavailable"


class StoreRefused(StoreError):
    """Its folder is one that other users could tamper with."""

    trouble = "refused"


class StoreReadOnly(StoreError):
    """It can be read and not written."""

    trouble = "read-only"


class StoreNewer(StoreReadOnly):
    """A newer ejkernel made it: read as far as possible, never changed."""

    trouble = "newer"


class StoreFull(StoreError):
    """No room to write."""

    trouble = "full"


class StoreBusy(StoreError):
    """Others kept it locked for longer than we are willing to wait."""

    trouble = "busy"


class StoreDamaged(StoreError):
    """Its content is not that of a store."""

    trouble = "damaged"


class StoreLeftOver(StoreError):
    """Beside its file lies the log of another one."""

    trouble = "left over"


class StoreGone(StoreError):
    """Its tables were removed while it was open."""

    trouble = "gone"
