"""Every operation under the settings of JAX that change dtypes and shapes: values and gradients.

`tests/modes` has those that concern the whole process, and derivatives.
"""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.settings.examples import EXAMPLES


def _enable_x64():
    return jax.enable_x64(True)


MODES = {
    "x64": _enable_x64,
    "float64": _enable_x64,
    "strict_dtypes": lambda: jax.numpy_dtype_promotion("strict"),
    "strict_ranks": lambda: jax.numpy_rank_promotion("raise"),
    "bfloat16_strict": lambda: jax.numpy_dtype_promotion("strict"),
}
DTYPES = {"float64": jnp.float64, "bfloat16_strict": jnp.bfloat16}
TOLERANCES = {"float64": 1e-9, "bfloat16_strict": 6e-2}
# It says so: sums are in float32, always.
IN_FLOAT32 = ("flash_attention",)


def _assert_close(found, expected, tolerance):
    leaves = dict(jax.tree_util.tree_leaves_with_path(found))
    for path, value in jax.tree_util.tree_leaves_with_path(expected):
        value = np.asarray(value, np.float64)
        scale = max(1.0, np.abs(value).max())
        np.testing.assert_allclose(
            np.asarray(leaves[path], np.float64),
            value,
            atol=tolerance * scale,
            rtol=0,
            err_msg=str(path),
        )


def _run(example, arrays):
    return jax.jit(lambda a: (example(**a), example.gradients(a)))(arrays)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_values_and_gradients(example, mode):
    dtype = DTYPES.get(mode, jnp.float32)
    with MODES[mode]() if dtype == jnp.float64 else contextlib.nullcontext():
        arrays = example.inputs(dtype)
        wide = jnp.promote_types(dtype, jnp.float32)
        exact = {
            name: a.astype(wide) if jnp.issubdtype(a.dtype, jnp.floating) else a
            for name, a in arrays.items()
        }
        expected = _run(example.by_definition(), exact)
    with MODES[mode]():
        found = _run(example, arrays)
    tolerance = TOLERANCES.get(mode, 3e-5)
    if example.operation in IN_FLOAT32:
        tolerance = max(tolerance, 3e-5)
    _assert_close(found, expected, tolerance)
