"""What tests of kernels share."""

from __future__ import annotations

import os
import pathlib
import tempfile
from functools import partial

import pytest
from jax import lax
from jax.experimental import pallas as pl

from ejkernel import native
from ejkernel.kernels.gated_linear_attention import pallas_gpu

# One for all tests and all runs: building is safe when several begin at once, and a library is
# found again only if nothing has changed.
BUILT = pathlib.Path(tempfile.gettempdir()) / f"ejkernel-tests-{os.getuid()}"


@pytest.fixture
def native_library(monkeypatch):
    """The kernels in C++, which other tests do without."""
    if isinstance(found := native.find_compiler(), str):
        pytest.skip(found)
    own = os.environ["EJKERNEL_CACHE_DIR"]
    monkeypatch.setenv("EJKERNEL_NATIVE", "auto")
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(BUILT))
    for library in native.declared_libraries():
        assert native.why_not(library) is None
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", own)


@pytest.fixture
def interpreted_pallas(monkeypatch):
    """Pallas kernels run here, by its interpreter, which has no products in parts of TF32."""
    monkeypatch.setattr(pl, "pallas_call", partial(pl.pallas_call, interpret=True))
    monkeypatch.setattr(pallas_gpu, "EXACT", lax.Precision.HIGHEST)
