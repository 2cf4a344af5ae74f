"""Warnings that are said once."""

from __future__ import annotations

import logging

from ..markup import one_line

logger = logging.getLogger("ejkernel.store")


MOST = 1000
"""How many troubles of one store are told apart."""


class Notices:
    """Logs each trouble of one store a single time, however many entries it concerns."""

    def __init__(self) -> None:
        self._said: dict[str, object] = {}

    def once(self, trouble: str, message: str) -> None:
        """Warn, unless this trouble was named before."""
        if len(self._said) >= MOST:
            trouble, message = "more", f"there were {MOST} troubles; no more of them are said"
        mark = object()
        if self._said.setdefault(trouble, mark) is mark:  # atomic: no lock that a fork could keep
            logger.warning("ejkernel store: %s", one_line(message))
