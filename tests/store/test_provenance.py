"""The hash of a kernel's source changes when its programs may, and not otherwise."""

from __future__ import annotations

import importlib
import os
import pathlib
import platform
import subprocess
import sys
import textwrap
import uuid

import jax
import pytest

from ejkernel.ops.utils.provenance import source_hash, versions

ROOT = pathlib.Path(__file__).resolve().parents[2]

KERNEL = '''
import dataclasses
import functools
import logging

import jax
from ejkernel.ops import Kernel
from . import impl
from .impl import helper as other_name

BLOCK = 8
logger = logging.getLogger(__name__)
registry = {}


@dataclasses.dataclass(frozen=True)
class Config:
    size: int = 1


def outer(x):
    return inner(x) + BLOCK


def inner(x):
    return x * 1


def unused(x):
    return x


@jax.custom_vjp
def ruled(x):
    return x


def forward(x):
    return x, None


def backward(residuals, g):
    return (g * 1,)


ruled.defvjp(forward, backward)


def closing(factor):
    def closed(self, x):
        return x * factor
    return closed


class Base(Kernel[Config, jax.Array]):
    def shared(self, x):
        return x + 100

    def run(self, x, *, cfg):
        raise NotImplementedError


class Mine(Base):
    """A kernel."""

    scale = 3
    method = closing(11)

    def __init__(self):
        super().__init__("mine")

    def run(self, x, *, cfg):
        """Run it."""
        # how it works
        logger.debug("run")
        registry["runs"] = 1
        return outer(x) + self.scale + self.shared(x) + impl.deep(x) + other_name(x) + ruled(x)

    def run_gpu(self, x, *, cfg, rows=64):
        return [y + 1 for y in (lambda z: inner(z))(x)]

    def heuristic_cfg(self, inv):
        return Config(1)

    def candidate_cfgs(self, inv):
        return [Config(1), Config(2)]

    @staticmethod
    def reference(x):
        return x
'''
IMPL = """
def deep(x):
    return deeper(x)


def deeper(x):
    return x - 5


def helper(x):
    return x - 6
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """A function that imports the kernel from a package of its own, with texts replaced."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def loaded(*changes, old=True):
        kernel, impl = KERNEL, IMPL
        for before, after in changes:
            assert before in kernel + impl, before
            kernel, impl = kernel.replace(before, after), impl.replace(before, after)
        package = tmp_path / f"kernels_{uuid.uuid4().hex}"
        package.mkdir()
        for name, text in (("__init__", ""), ("impl", impl), ("mine", kernel)):
            file = package / f"{name}.py"
            file.write_text(text)
            if old:
                os.utime(file, (10**9, 10**9))
        importlib.invalidate_caches()
        return importlib.import_module(f"{package.name}.mine")

    return loaded


SAME = {
    "nothing": ("BLOCK = 8", "BLOCK = 8"),
    "a comment": ("# how it works", "# it works in another way"),
    "no comment": ("        # how it works\n", ""),
    "a docstring": ('"""Run it."""', '"""Run it, quickly."""'),
    "no docstring": ('        """Run it."""\n', ""),
    "a class docstring": ('"""A kernel."""', '"""My kernel."""'),
    "lines before": ("BLOCK = 8", "\n\n\nBLOCK = 8"),
    "a function that is not used": ("def unused(x):\n    return x", "def unused(x):\n    return 9"),
    "the heuristic": ("return Config(1)\n", "return Config(2)\n"),
    "a new candidate": ("[Config(1), Config(2)]", "[Config(1), Config(2), Config(3)]"),
    "an import": ("import functools\n", ""),
}
LAST_LINE = "outer(x) + self.scale + self.shared(x) + impl.deep(x) + other_name(x) + ruled(x)"
SAME["layout"] = (LAST_LINE, f"({LAST_LINE.replace(' + ', ' +' + chr(10) + '  ')})")
OTHER = {
    "run": ("outer(x) + self.scale", "outer(x) - self.scale"),
    "another platform": ("return [y + 1", "return [y + 2"),
    "a default": ("rows=64", "rows=32"),
    "an attribute": ("scale = 3", "scale = 4"),
    "an attribute that is named like a space": ("scale = 3", "scale = 3\n    space_before = 4"),
    "a method that is named like a heuristic": (
        "    def heuristic_cfg",
        "    def heuristic(self): ...\n\n    def heuristic_cfg",
    ),
    "a function that it uses": ("return inner(x) + BLOCK", "return inner(x) - BLOCK"),
    "a function that this one uses": ("return x * 1\n", "return x * 2\n"),
    "a constant": ("BLOCK = 8", "BLOCK = 16"),
    "another module": ("return deeper(x)", "return deeper(x) + 1"),
    "a function of another module": ("return x - 5", "return x - 7"),
    "an imported function": ("return x - 6", "return x - 7"),
    "a base class": ("return x + 100", "return x + 101"),
    "the reference": (
        "def reference(x):\n        return x",
        "def reference(x):\n        return -x",
    ),
    "a gradient rule": ("return (g * 1,)", "return (g * 2,)"),
    "a value that is enclosed": ("closing(11)", "closing(12)"),
    "a new method": ("    def heuristic_cfg", "    def vjp(self): ...\n\n    def heuristic_cfg"),
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_what_does_not_change_the_program_does_not_change_the_hash(load, change):
    assert source_hash(load(change).Mine) == source_hash(load().Mine)


@pytest.mark.parametrize("change", OTHER.values(), ids=OTHER)
def test_what_changes_the_program_changes_the_hash(load, change):
    assert source_hash(load(change).Mine) != source_hash(load().Mine)


def test_what_a_program_does_meanwhile_does_not_change_the_hash(load):
    first, second = load(), load()
    second.registry["a"] = 1
    second.logger.setLevel("ERROR")
    kernel = second.Mine()
    kernel.tiles = 7
    assert source_hash(kernel) == source_hash(first.Mine) == source_hash(second.Mine)


def test_source_that_was_edited_after_it_was_loaded_is_not_trusted(load):
    """Its text says one thing, the running code another: what runs counts."""
    module = load(old=False)
    edited = load(old=False)
    change = ("return inner(x) + BLOCK", "return inner(x) - BLOCK")
    file = pathlib.Path(edited.__file__)
    file.write_text(file.read_text().replace(*change))
    assert source_hash(edited.Mine) == source_hash(module.Mine)
    assert source_hash(load(change, old=False).Mine) != source_hash(module.Mine)


def kernel_without_a_file(operator):
    space = {"__name__": "typed_in"}
    source = f"""
        import jax
        from ejkernel.ops import Kernel

        class Typed(Kernel):
            def run(self, x, *, cfg):
                return x {operator} 1
    """
    exec(textwrap.dedent(source), space)
    return space["Typed"]


def test_without_source_the_bytecode_counts():
    assert source_hash(kernel_without_a_file("+")) == source_hash(kernel_without_a_file("+"))
    assert source_hash(kernel_without_a_file("+")) != source_hash(kernel_without_a_file("-"))


def test_the_hash_is_the_same_in_another_process():
    code = (
        "from ejkernel.kernels.flash_attention.kernel import FlashAttention as F;"
        "from ejkernel.ops.utils.provenance import source_hash; print(source_hash(F))"
    )
    from ejkernel.kernels.flash_attention.kernel import FlashAttention

    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "17"},
    )
    assert done.stdout.strip() == source_hash(FlashAttention)


def test_versions_name_everything_between_a_kernel_and_its_program():
    found = versions()
    assert found["jax"] == jax.__version__
    assert found["python"] == platform.python_version()
    assert set(found) == {"ejkernel", "jax", "jaxlib", "backend", "python"}
    assert found["backend"].startswith("cpu")
    assert all(isinstance(version, str) and version for version in found.values())
    found["jax"] = "changed"
    assert versions()["jax"] == jax.__version__
