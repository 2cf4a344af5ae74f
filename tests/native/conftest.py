from __future__ import annotations

import pytest

from ejkernel.native import find_compiler


@pytest.fixture
def compiler():
    found = find_compiler()
    if isinstance(found, str):
        pytest.skip(found)
    return found
