"""A user's function with the arguments that it is tuned for: traced once, run on equal state."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..config.context import policy_override
from ..core.invocation import split
from ..core.kernel import Kernel
from ..tuner.inputs import random_like
from .call_counts import count_calls


class WholeFunction:
    """A function and the arguments to run it with; every run starts from the same state.

    A jitted function is called as it is. Another one is jitted: its arrays are inputs of the
    program, everything else is built in.

    Args:
      function: a function, jitted (`jax.jit`, `nnx.jit`) or not; a kernel.
      args: what it is called with: arrays, or `jax.ShapeDtypeStruct`, which become random arrays.
      kwargs: likewise.
      name: what messages call it; default: its own name.

    >>> WholeFunction(jnp.sin, (jnp.zeros(3),)).timed()[1].shape
    (3,)
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        name: str = "",
    ) -> None:
        self.function = function
        self.args = tuple(args)
        self.kwargs = dict(kwargs or {})
        own = "op_id" if isinstance(function, Kernel) else "__name__"
        self.name = name or getattr(function, own, None) or type(function).__name__

    # --- the program -----------------------------------------------------------------------------

    @functools.cached_property
    def lowered(self) -> Any:
        """The program, lowered with what is stored and else with heuristics: nothing is tuned."""
        if self._traced is not None:
            return self._traced.lower()
        with _choosing_without_tuning():
            return self.function.lower(*self.args, **self.kwargs)  # type: ignore[attr-defined]

    def count_calls(self) -> dict[str, int] | None:
        """How often a run calls each labelled operation; None if that cannot be known."""
        return None if self._jaxpr is None else count_calls(self._jaxpr)

    @property
    def _jaxpr(self) -> Any:
        traced = getattr(self._traced, "traced", self._traced)  # NNX has a wrapper of its own
        return getattr(traced, "jaxpr", None)

    @functools.cached_property
    def _traced(self) -> Any:
        """What `trace` gives; None for a jitted function that can only be lowered."""
        with _choosing_without_tuning():
            if self._jits_itself:
                trace = getattr(self.function, "trace", None)
                return None if trace is None else trace(*self.args, **self.kwargs)
            return self._jitted.trace(*split((self.args, self.kwargs))[0])

    @property
    def _jits_itself(self) -> bool:
        return hasattr(self.function, "lower") and not isinstance(self.function, Kernel)

    @functools.cached_property
    def _jitted(self) -> Any:
        _, rest = split((self.args, self.kwargs))

        def call(*arrays: Any) -> Any:
            args, kwargs = rest.merge(arrays)
            return self.function(*args, **kwargs)

        return jax.jit(call)

    # --- running it ------------------------------------------------------------------------------

    def timed(self) -> tuple[float, Any]:
        """Seconds of one run, and what it returned.

        Arguments that a run changes or gives away (donated buffers, Flax NNX modules, refs) are
        copied for it, so each run meets the same state and the caller's own stays as it is.
        """
        args, kwargs = self._fresh_arguments()
        for ref, value in self._closed_over_refs:
            ref[...] = value
        call: Callable[[], Any] = functools.partial(self.function, *args, **kwargs)
        if not self._jits_itself:
            call = functools.partial(self._jitted, *split((args, kwargs))[0])
        with _choosing_without_tuning():
            start = time.perf_counter()
            out = jax.block_until_ready(call())
            seconds = time.perf_counter() - start
        for ref, value in self._closed_over_refs:
            ref[...] = value
        return seconds, out

    @functools.cached_property
    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = random_like((self.args, self.kwargs), only_abstract=True)
        return args, kwargs

    def _fresh_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = self._arguments
        if not self._changes_its_arguments:
            return given
        nnx = sys.modules.get("flax.nnx")
        if nnx is not None and _holds_nnx_objects(nnx, given):
            definition, state = nnx.split(given)
            copied = nnx.merge(definition, jax.tree.map(_copy, state))
        else:
            copied = jax.tree.map(_copy, given, is_leaf=_is_ref)
        args, kwargs = jax.block_until_ready(copied)
        return args, kwargs

    @functools.cached_property
    def _changes_its_arguments(self) -> bool:
        """True if a run may leave its arguments different from what they were."""
        if not self._jits_itself:
            return any(map(_is_ref, jax.tree.leaves(self._arguments, is_leaf=_is_ref)))
        nnx = sys.modules.get("flax.nnx")
        if nnx is not None and _holds_nnx_objects(nnx, self._arguments):
            return True
        leaves = jax.tree.leaves(self._arguments, is_leaf=_is_ref)
        return any(map(_is_ref, leaves)) or _donates(self.lowered)

    @functools.cached_property
    def _closed_over_refs(self) -> list[tuple[Any, Any]]:
        """The refs that the function changes without being given them, with their values now."""
        constants = getattr(self._jaxpr, "consts", ())
        return [(ref, jnp.copy(ref[...])) for ref in constants if _is_ref(ref)]


def _choosing_without_tuning() -> Any:
    return policy_override(autotune=False, strict=False)


def _donates(lowered: Any) -> bool:
    infos = jax.tree.leaves(lowered.args_info, is_leaf=lambda leaf: hasattr(leaf, "donated"))
    return any(getattr(info, "donated", False) for info in infos)


def _holds_nnx_objects(nnx: Any, tree: Any) -> bool:
    kinds = (nnx.Pytree, nnx.Variable)  # modules, optimizers, metrics, random streams
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kinds))
    return any(isinstance(leaf, kinds) for leaf in leaves)


def _is_ref(leaf: Any) -> bool:
    return isinstance(leaf, jax.Ref)


def _copy(leaf: Any) -> Any:
    if _is_ref(leaf):
        return jax.new_ref(jnp.copy(leaf[...]))
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf
