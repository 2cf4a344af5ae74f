"""A store on a database server."""

from __future__ import annotations

import time

from . import schema
from .database import Database, open_server
from .errors import StoreError, StoreGone, StoreUnavailable
from .location import ServerLocation
from .notices import Notices
from .opening import bring_up_to_date, create_or_migrate

REST = 30.0
"""Seconds in which nobody waits again for a server that did not answer."""


class ServerHome:
    """Connects when it is needed; makes its tables on the first write."""

    def __init__(self, location: ServerLocation, notices: Notices) -> None:
        self._location = location
        self._notices = notices
        self._database: Database | None = None
        self._refusal: StoreError | None = None
        self._ready = False
        self._rest_until = 0.0

    def database(self, *, write: bool) -> Database | None:
        """The store. None if it has no tables and none are needed to read."""
        # A write is worth the wait: its result took longer to measure.
        if not write and time.monotonic() < self._rest_until:
            raise StoreUnavailable(f"{self._location.shown} did not answer a moment ago")
        if self._database is None:
            self._database = open_server(self._location)
        if not self._ready:
            found = self._database.read(schema.found)
            if found is None:
                if not write:
                    return None
                self._database.write(create_or_migrate)
            else:
                self._refusal = bring_up_to_date(
                    self._database, self._location.shown, found, self._notices.once
                )
            self._ready = True
        if write and self._refusal is not None:
            raise type(self._refusal)(str(self._refusal))
        return self._database

    def is_current(self) -> bool:
        """Always: there is one server."""
        return True

    def recover(self, error: StoreError) -> bool:
        """After an error: put right what can be. True if another attempt makes sense."""
        if isinstance(error, StoreUnavailable):
            self._rest_until = time.monotonic() + REST
        self.close()
        return isinstance(error, StoreGone)

    def close(self) -> None:
        """Close the connection; what is known about the server is asked again."""
        self._ready = False
        self._refusal = None
        if self._database is not None:
            self._database.close()
            self._database = None
