"""Warnings that are said once."""

from __future__ import annotations

import logging

logger = logging.getLogger("ejkernel.store")


class Notices:
    """Logs each trouble of one store a single time, however many entries it concerns."""

    def __init__(self) -> None:
        self._said: dict[str, object] = {}

    def once(self, trouble: str, message: str) -> None:
        """Warn, unless this trouble was named before."""
        mark = object()
        if self._said.setdefault(trouble, mark) is mark:  # atomic: no lock that a fork could keep
            logger.warning("ejkernel store: %s", message)
