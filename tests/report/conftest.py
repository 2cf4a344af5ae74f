from __future__ import annotations

import pytest
from browser import running_browser


@pytest.fixture(scope="session")
def browser():
    with running_browser() as running:
        yield running
