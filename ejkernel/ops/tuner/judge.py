"""Is a candidate right? Its outputs are compared with the reference before its time counts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Largest error allowed, as a share of the reference's largest value (and, in the mean square, of
# its root mean square). Wide enough for another order of summation, far too narrow for a wrong
# algorithm.
_TOLERANCE = {
    "float64": 1e-9,
    "complex128": 1e-9,
    "float32": 1e-3,
    "complex64": 1e-3,
    "float16": 1e-2,
    "bfloat16": 4e-2,
}
_DEFAULT_TOLERANCE = 2e-1  # eight-bit floats


def differs(output: Any, reference: Any) -> str | None:
    """Why `output` is not the reference's, or None if it is."""
    if jax.tree.structure(output) != jax.tree.structure(reference):  # type: ignore[operator]
        return (
            f"output structure {jax.tree.structure(output)} differs from the reference's "
            f"{jax.tree.structure(reference)}"
        )
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(output), jax.tree.leaves(reference), strict=True
    )
    for (path, got), wanted in pairs:
        reason = _leaf_differs(got, wanted)
        if reason is not None:
            where = jax.tree_util.keystr(path)
            return f"output{where}: {reason}"
    return None


@dataclasses.dataclass(frozen=True)
class NonDeterminism:
    """Two runs of one program on the same inputs gave different outputs.

    Attributes:
      reason: how they differ, in words.
      harmless: the difference is within the tolerance of the dtype, as that of a sum whose order
        changes from run to run.
    """

    reason: str
    harmless: bool


def non_determinism(first: Any, second: Any) -> NonDeterminism | None:
    """How the outputs of two runs of the same program differ, or None if they are equal bits."""
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    if all(_bits(one) == _bits(other) for one, other in pairs):
        return None
    reason = differs(second, first)
    if reason is None:
        return NonDeterminism("two runs of it are not equal bit for bit", harmless=True)
    # What `differs` calls the reference is the first run here.
    return NonDeterminism(
        f"two runs of it differ: {reason.replace('the reference', 'the first run')}",
        harmless=False,
    )


def _bits(leaf: Any) -> bytes:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def _leaf_differs(got: Any, wanted: Any) -> str | None:
    if got.shape != wanted.shape:
        return f"shape {got.shape} differs from the reference's {wanted.shape}"
    if got.dtype != wanted.dtype:
        return f"dtype {got.dtype} differs from the reference's {wanted.dtype}"
    if jnp.issubdtype(got.dtype, jax.dtypes.extended):
        got, wanted = jax.random.key_data(got), jax.random.key_data(wanted)
    if not jnp.issubdtype(got.dtype, jnp.inexact):
        wrong = int(np.sum(np.asarray(got) != np.asarray(wanted)))
        return f"{wrong} of {got.size} values differ from the reference" if wrong else None
    tolerance = _TOLERANCE.get(str(got.dtype), _DEFAULT_TOLERANCE)
    if _clearly_equal(np.asarray(got), np.asarray(wanted), tolerance):
        return None
    wide = np.complex128 if jnp.issubdtype(got.dtype, jnp.complexfloating) else np.float64
    return _numbers_differ(np.asarray(got).astype(wide), np.asarray(wanted).astype(wide), tolerance)


def _clearly_equal(got: Any, wanted: Any, tolerance: float) -> bool:
    """The cheap half of the comparison: does even the largest error disappear in the mean size?

    Most candidates are right, and the long way takes longer than running many of them.
    """
    if got.dtype not in (np.float32, np.float64) or got.size == 0:
        return False
    flat = wanted.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        error = got.reshape(-1) - flat
        mean_size = float(np.sqrt(np.dot(flat, flat) / flat.size))
    np.abs(error, out=error)
    return bool(error.max() <= 0.5 * tolerance * mean_size < np.inf)  # false if there is any NaN


def _numbers_differ(got: Any, wanted: Any, tolerance: float) -> str | None:
    strange = ~np.isfinite(got)
    if np.any(strange & np.isfinite(wanted)):
        count = int(np.sum(strange & np.isfinite(wanted)))
        return f"{count} of {got.size} values are NaN or infinite where the reference's are not"
    same_strangeness = strange | ~np.isfinite(wanted)
    error = np.where(same_strangeness, 0.0, np.abs(got - wanted))
    size = np.where(same_strangeness, 0.0, np.abs(wanted))
    if error.size == 0:
        return None
    largest, scale = float(error.max()), float(size.max())
    mean_error, mean_size = float(np.sqrt(np.mean(error**2))), float(np.sqrt(np.mean(size**2)))
    if largest <= tolerance * scale and mean_error <= tolerance * mean_size:
        return None
    return (
        f"largest error {largest:.3g} where the reference's largest value is {scale:.3g} "
        f"(allowed {tolerance:g} of it)"
    )
