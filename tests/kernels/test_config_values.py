"""Any value in any field of a config: refused by name, or the result is right.

Never a crash, a hang or a NaN; so what runs in C++ runs in a process of its own.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel.modules import OPERATIONS
from ejkernel.ops.core.space import _replaced
from ejkernel.ops.utils.serialize import field_paths

TESTS = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(TESTS))

from config_calls import kernel_of, values_and_gradients  # noqa: E402

EXAMPLES = int(os.environ.get("EJKERNEL_TEST_EXAMPLES", "8"))

VALUES = st.one_of(
    st.sampled_from([-(2**63), -(2**31), -7, -1, 0, 2**31, 2**63, True, 2.5, "8", None]),
    st.sampled_from([1, 2, 3, 5, 7, 12, 16, 33, 64, 1000, 1024, 1025, 2**20, 2**31 - 1]),
    st.integers(-5, 100),
)


@functools.cache
def expected(name):
    return values_and_gradients(name)


def xla_of(name):
    return kernel_of(name).implementation("xla")


def check(name, path, value, **more):
    """True if the config was taken."""
    implementation = kernel_of(name).implementation(more.get("implementation", "xla"))
    cfg = _replaced(implementation.config(), path.split("."), value)
    try:
        found = values_and_gradients(name, cfg=cfg, **more)
    except (TypeError, ValueError) as error:
        if f"{path}=" in str(error) and name in str(error):
            return False
        raise
    for got, wanted in zip(found, expected(name), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-4)
    return True


def fields(name):
    """What XLA's implementation has a use for, and what it ignores."""
    limited = list(xla_of(name).limits.fields)
    paths = field_paths(xla_of(name).config)
    leaves = [p for p in paths if not any(other.startswith(f"{p}.") for other in paths)]
    return limited, [path for path in leaves if path not in limited]


@pytest.mark.parametrize("name", OPERATIONS)
def test_any_value_is_refused_by_name_or_gives_the_right_result(name):
    limited, _ = fields(name)

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
    @given(st.sampled_from(limited), VALUES)
    def walk(path, value):
        check(name, path, value, implementation="xla")

    walk()
    for path in limited:  # the ends, whatever was drawn
        assert check(name, path, xla_of(name).limits.fields[path].minimum)
        assert not check(name, path, 0)
        assert not check(name, path, 2**31)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_field_that_an_implementation_has_no_use_for_changes_nothing(name):
    _, ignored = fields(name)
    for path in ignored[:2]:
        assert check(name, path, -5, implementation="xla")


WALK = """
import json, sys
sys.path[:0] = {paths!r}
import numpy as np
from test_config_values import check, expected
expected("flash_attention")
taken = {{}}
for path in ("block_q", "block_k", "backward_block_q", "backward_block_k"):
    for value in {values!r}:
        taken[path + " " + str(value)] = check(
            "flash_attention", path, value, implementation="cpu"
        )
print(json.dumps(taken))
"""

VALUES_OF_CPP = [
    *(-(2**63), -(2**31), -12, -1, 0, 2**31, 2**32, 2**63, True, 2.5, "8"),
    *(1, 5, 12, 13, 100, 4096, 2**31 - 1, None),
]


def in_a_process(script):
    environment = {
        **os.environ,
        "EJKERNEL_NATIVE": "auto",
        "EJKERNEL_CACHE_DIR": str(pathlib.Path(os.environ["EJKERNEL_CACHE_DIR"]).parent),
    }
    return subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture
def built(monkeypatch, native_library):
    """Where the library is built already, for processes that are started."""
    # Not imported from the conftest: other folders have one too, and the first that was is found.
    folder = pathlib.Path(tempfile.gettempdir()) / f"ejkernel-tests-{os.getuid()}" / "unused"
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(folder))


@pytest.mark.usefixtures("built")
def test_any_value_is_refused_by_name_or_gives_the_right_result_in_cpp():
    paths = [str(TESTS / "kernels"), str(TESTS)]
    found = in_a_process(WALK.format(paths=paths, values=VALUES_OF_CPP))
    assert found.returncode == 0, f"{found.returncode}: {found.stderr[-2000:]}"
    taken = json.loads(found.stdout.splitlines()[-1])
    assert taken["block_q 1"]
    assert taken["backward_block_k 2147483647"]
    assert not taken["block_q -1"]
    assert not taken["backward_block_k 2147483648"]


PLANTED = """
import json, os, pathlib, sys
sys.path[:0] = {paths!r}
import numpy as np
from config_calls import CALLS, invocation, values_and_gradients
from ejkernel.modules import OPERATIONS
from ejkernel.ops import default_executor
from ejkernel.ops.config.tiers.stored import reload_bundles
from ejkernel.ops.utils.serialize import qualified_name
from ejkernel.store.bundle import Bundle

wanted = {{name: values_and_gradients(name) for name in OPERATIONS}}
entries = []
for name in OPERATIONS:
    kernel, inv = invocation(name)
    config, implementation = {{}}, kernel.implementation(inv.handled_by or "xla")
    for path in implementation.limits.fields:
        first, *rest = path.split(".")
        if rest:
            config.setdefault(first, {{}})[rest[0]] = {value!r}
        else:
            config[first] = {value!r}
    kind = qualified_name(implementation.config)
    entries.append({{"key": list(inv.key), "config": config, "config_type": kind, "about": {{}}}})
path = pathlib.Path({folder!r}) / "planted.json"
Bundle(entries).save(path)
os.environ["EJKERNEL_CONFIG_PATH"] = str(path)
reload_bundles()
for name in OPERATIONS:
    kernel, inv = invocation(name)
    decision = default_executor().selector.decide(inv, kernel)
    assert decision.tier != "bundle", decision
    assert "must be" in decision.explain(), decision.explain()
    for got, right in zip(values_and_gradients(name), wanted[name], strict=True):
        np.testing.assert_allclose(got, right)
"""


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("value", [-64, 0])
def test_a_planted_bundle_ends_no_process_and_changes_no_result(value, tmp_path):
    paths = [str(TESTS / "kernels"), str(TESTS)]
    script = PLANTED.format(paths=paths, value=value, folder=str(tmp_path))
    found = in_a_process(script)
    assert found.returncode == 0, f"{found.returncode}: {found.stderr[-2000:]}"
    assert found.stderr.count("a config is not used") == len(OPERATIONS)


ENTRIES = """
import jax, jax.numpy as jnp, numpy as np
from ejkernel import native
from ejkernel.kernels.flash_attention.native import LIBRARY, calls
from ejkernel.kernels.flash_attention.options import Options
from ejkernel.kernels.flash_attention.passes import Results
assert native.why_not(LIBRARY) is None
q, k, v = (jax.random.normal(jax.random.key(i), (1, 40, 2, 16)) for i in range(3))
good = dict(causal=True, softmax_scale=0.25, block_q=24, block_k=32)

def forward(q, k, v, *, block_q, block_k, **options):
    return calls.forward(q, k, v, Options(**options), block_q=block_q, block_k=block_k)

def backward(q, k, v, out, lse, dout, *, block_q, block_k, **options):
    results = Results(q, k, v, out, lse, dout, None)
    return calls.backward(results, Options(**options), block_q=block_q, block_k=block_k)

out, lse = forward(q, k, v, **good)

def refused(call):
    try:
        jax.block_until_ready(call())
    except Exception as error:
        return "INVALID_ARGUMENT" in str(error)
    return False

bad = [dict(block_q=value) for value in {values!r}] + [dict(block_k=value) for value in {values!r}]
bad += [dict(softmax_scale=float("nan")), dict(softmax_scale=float("inf"))]
bad += [dict(logits_soft_cap=float("nan")), dict(logits_soft_cap=-1.0)]
bad += [dict(q_lengths=jnp.ones(7, int)), dict(kv_lengths=jnp.ones(3, int))]
bad += [dict(segment_ids=jnp.ones((1, 39), int)), dict(kv_segment_ids=jnp.ones((1, 40), int))]
bad += [dict(sinks=jnp.ones(3)), dict(mask=jnp.ones((1, 1, 40, 39), bool))]
for change in bad:
    options = good | change
    assert refused(lambda: forward(q, k, v, **options)), change
    assert refused(lambda: backward(q, k, v, out, lse, out, **options)), change
none = jnp.zeros((1, 40, 2, 0))
assert refused(lambda: forward(none, none, v, **good))
assert refused(lambda: backward(q, k, v, out[:, :39], lse, out, **good))
assert refused(lambda: backward(q, k, v, out, lse[..., :39], out, **good))
far, _ = forward(q, k, v, **{{**good, "causal": False, "window": (2**63 - 1, 2**63 - 1)}})
free, _ = forward(q, k, v, **{{**good, "causal": False}})
np.testing.assert_array_equal(far, free)
"""


@pytest.mark.usefixtures("built")
def test_the_functions_in_cpp_check_what_they_are_given_themselves():
    values = [-(2**63), -(2**31), -1, 0]
    found = in_a_process(ENTRIES.format(values=values))
    assert found.returncode == 0, f"{found.returncode}: {found.stderr[-2000:]}"
