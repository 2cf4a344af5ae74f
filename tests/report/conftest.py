from __future__ import annotations

import warnings

import pytest
from browser import Browser, find_browser


@pytest.fixture(scope="session")
def browser():
    program = find_browser()
    if program is None:
        message = (
            "NOT TESTED: the report in a browser. No chromium was found on the PATH; on Debian: "
            "apt-get install chromium"
        )
        warnings.warn(message, stacklevel=1)
        pytest.skip(message)
    running = Browser(program)
    yield running
    running.close()
