"""What is in force right now: overlays and policy overrides, as part of every jit key.

The layers of the current thread or asyncio task are kept in a `ContextVar`; their content is
mirrored into a JAX user context, which belongs to the key of every jitted function. So entering a
layer re-selects in functions that were jitted long before, the user's own included, and leaving it
returns to the old executables without tracing again.

The mirrored value is a string made of the layers' *content*. Two equal overlays are one key, and a
collected one can never be mistaken for a new one at the same address.
"""

from __future__ import annotations

import contextvars
import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import jax

from . import tasks

LayerT = TypeVar("LayerT", bound="Layer")


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """One thing in force. `content` says all of it: layers with equal content are equal."""

    content: str


class Ambient(str):
    """All layers in force; as a string, their content (cheap to hash and compare in C)."""

    layers: tuple[Layer, ...]

    @classmethod
    def of(cls, layers: tuple[Layer, ...]) -> Ambient:
        """The ambient made of these layers, outermost first."""
        self = cls("\n".join(layer.content for layer in layers))
        self.layers = layers
        return self


_layers: contextvars.ContextVar[tuple[Layer, ...]] = contextvars.ContextVar(
    "ejkernel_layers", default=()
)

# Created once, at import: JAX does not allow it beside other JAX calls.
_mirror = jax.make_user_context(None)
_generation = jax.make_user_context(0)
_generation_lock = threading.Lock()


def layers_in_force(kind: type[LayerT]) -> Iterator[LayerT]:
    """The layers of one kind, innermost first.

    They are read from the mirror, not from the `ContextVar`: what is in the jit key is what
    decides, or a cached program could disagree with its key.
    """
    ambient = _mirror.value
    if ambient is None:
        return
    for layer in reversed(ambient.layers):
        if isinstance(layer, kind):
            yield layer


def push(layer: LayerT) -> LayerT:
    """Put a layer in force in this thread or asyncio task; returns what `remove` takes away."""
    # A copy, because the same layer may be entered twice and each exit must take away its own.
    entered = dataclasses.replace(layer)
    tasks.follow_switches(synchronise)
    _layers.set((*_layers.get(), entered))
    synchronise()
    return entered


def remove(entered: Layer) -> None:
    """Take away what `push` put in force."""
    # Not a token reset: tasks and generators may leave their blocks in any order.
    _layers.set(tuple(layer for layer in _layers.get() if layer is not entered))
    synchronise()


@contextmanager
def pushed(layer: Layer) -> Iterator[None]:
    """Put a layer in force for a block."""
    entered = push(layer)
    try:
        yield
    finally:
        remove(entered)


def synchronise() -> None:
    """Make JAX's thread-local value what the current thread or task has in force."""
    layers = _layers.get()
    wanted = Ambient.of(layers) if layers else None
    if _mirror.value != wanted:
        _mirror(wanted).__enter__()


def forget_traces() -> None:
    """Make every jitted function select again, in all threads.

    Only for when a config that was already traced has changed: it costs the whole process a
    retrace.
    """
    with _generation_lock:
        _generation.set_global(_generation.get_global() + 1)
