"""How a function and its inputs are sent to a worker: as a program and as plain arrays.

The parent traces and exports; what only this process understands (how outputs are nested and named,
which arrays are random keys) stays here.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from ejkernel.native import loading as native
from ejkernel.native.calling import in_exports

from ...config.functions import Function
from ...utils.fingerprint import short_hash
from ...utils.locations import without_locations
from ..bench import CandidateError, Lowered
from .worker import ANY_CUSTOM_CALL, Header, describe


class Input:
    """An input array as it is sent: key arrays as the numbers they are made of."""

    def __init__(self, array: Any) -> None:
        self._key_kind = None
        weak = bool(getattr(array, "weak_type", False))
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            self._key_kind = jax.random.key_impl(array)
            array = jax.random.key_data(array)
        values = np.asarray(array)
        # As jit would: without x64, an array of 64 bits is taken for one of 32.
        self.values = values.astype(jax.dtypes.canonicalize_dtype(values.dtype), copy=False)
        self.abstract = jax.ShapeDtypeStruct(values.shape, self.values.dtype, weak_type=weak)

    def as_given(self, array: Any) -> Any:
        """What the function takes, from what the program takes."""
        if self._key_kind is None:
            return array
        return jax.random.wrap_key_data(array, impl=self._key_kind)


@dataclasses.dataclass(frozen=True)
class ExportedProgram:
    """A traced function: what the worker needs, and what its outputs are called here."""

    module: bytes
    header: Header
    outputs: Any  # a pytree of shapes


def exported(function: Function, inputs: Sequence[Input], platform: str) -> Lowered:
    """The program of a function of these inputs, with its fingerprint.

    Raises:
      CandidateError: it cannot be exported, or not for a worker with one device.
    """
    seen: list[Any] = []

    def program(arrays: list[Any]) -> list[Any]:
        pairs = zip(inputs, arrays, strict=True)
        out = function(*(given.as_given(array) for given, array in pairs))
        seen[:] = [jax.tree.map(_shape, out)]
        return [_plain(leaf) for leaf in jax.tree.leaves(out)]

    abstract = [given.abstract for given in inputs]
    jitted = jax.jit(program)
    exporting = export.export(jitted, platforms=[platform], disabled_checks=ANY_CUSTOM_CALL)
    try:
        with without_locations(), in_exports():
            made = exporting(abstract)
    except Exception as error:
        jitted.trace(abstract)  # the user's own errors come out as they are
        reason = f"it cannot be lowered for a worker: {type(error).__name__}: {error}"
        raise CandidateError(reason) from error
    if made.nr_devices != 1 or made.ordered_effects:
        raise CandidateError("a worker runs programs of one device, without ordered effects")
    [outputs] = seen
    header = {
        "platform": platform,
        "kept": list(made.module_kept_var_idx),
        "outputs": [describe(aval) for aval in made.out_avals],
        "native": native.for_workers(),
    }
    # The module alone does not tell how its outputs are named and nested.
    named = [str(part) for part in jax.tree_util.tree_flatten_with_path(outputs)]
    module = made.mlir_module_serialized
    fingerprint = short_hash("\n".join((hashlib.sha256(module).hexdigest(), *named)), 32)
    return Lowered(fingerprint, ExportedProgram(module, header, outputs))


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    kind = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype)


def _plain(leaf: Any) -> Any:
    """An output as it is sent: an ordinary array."""
    dtype = jax.typeof(leaf).dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    if dtype == jax.dtypes.float0:  # a derivative of integers, which has no values
        return jnp.zeros(leaf.shape, bool)
    return leaf
