from __future__ import annotations

import jax
import pytest


@pytest.fixture(autouse=True)
def programs_are_dropped():
    """Programs of many devices are large, and there are hundreds of them."""
    yield
    jax.clear_caches()
