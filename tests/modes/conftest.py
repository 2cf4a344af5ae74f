"""What tests of modes share."""

from __future__ import annotations

import os
import pathlib
import tempfile

import pytest

from ejkernel import native

# One for all tests and all runs: building is safe when several begin at once, and a library is
# found again only if nothing has changed.
BUILT = pathlib.Path(tempfile.gettempdir()) / f"ejkernel-tests-{os.getuid()}"


@pytest.fixture
def native_library(isolated, monkeypatch):
    """The kernels in C++, which other tests do without; gives the folder they are built in."""
    if isinstance(found := native.find_compiler(), str):
        pytest.skip(found)
    own = os.environ["EJKERNEL_CACHE_DIR"]
    monkeypatch.setenv("EJKERNEL_NATIVE", "auto")
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(BUILT))
    for library in native.declared_libraries():
        assert native.why_not(library) is None
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", own)
    return BUILT
