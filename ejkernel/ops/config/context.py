"""What is in force right now: overlays and policy overrides, as part of every jit key.

The layers of the current thread or asyncio task are kept in a `ContextVar`; their content is
mirrored into a JAX user context, which belongs to the key of every jitted function. So entering a
layer re-selects in functions that were jitted long before, the user's own included, and leaving it
returns to the old executables without tracing again.

The mirrored value is a string made of the layers' *content*. Two equal overlays are one key, and a
collected one can never be mistaken for a new one at the same address.

JAX's context belongs to a thread, and Python tells nobody when a thread goes from one asyncio task
to another. So a task must not await inside a block; a call that is traced where one did is refused.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax

from ..utils.settings import current_settings

LayerT = TypeVar("LayerT", bound="Layer")


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """One thing in force. `content` says all of it: layers with equal content are equal."""

    content: str


class Layers(str):
    """All layers in force; as a string, their content (cheap to hash and compare in C)."""

    layers: tuple[Layer, ...]

    @classmethod
    def of(cls, layers: tuple[Layer, ...]) -> Layers:
        """The value made of these layers, outermost first."""
        self = cls("\n".join(layer.content for layer in layers))
        self.layers = layers
        return self


# Whose layers are in force, in the order of entering; with the thread that entered them, because a
# worker thread may be started with a copy of our context but has none of JAX's.
_Entered = tuple[tuple[object, Layer], ...]
_state: contextvars.ContextVar[tuple[object, _Entered]] = contextvars.ContextVar(
    "ejkernel_layers", default=(None, ())
)
_thread = threading.local()

# Created once, at import: JAX does not allow it next to other JAX calls.
_mirror = jax.make_user_context(None)
_generation = jax.make_user_context(0)
_generation_lock = threading.Lock()


def layers_in_force(kind: type[LayerT]) -> Iterator[LayerT]:
    """The layers of one kind, innermost first.

    They are read from the mirror, not from the `ContextVar`: what is in the jit key is what
    decides, or a cached program could disagree with its key.
    """
    mirrored = _mirror.value
    if mirrored != _layers_of_this_task():
        raise RuntimeError(
            "an asyncio task awaited inside a block of ejkernel (overlay_cache, policy_override, "
            "`with result:`), and this task would run with the configs of that one. Leave the "
            "block before awaiting, or run the whole block in a thread: "
            "await asyncio.to_thread(function)"
        )
    if mirrored is None:
        return
    for layer in reversed(mirrored.layers):
        if isinstance(layer, kind):
            yield layer


def enter(owner: object, layer: Layer) -> None:
    """Put a layer in force in this thread or asyncio task, until `leave(owner)`.

    An owner may enter several times; each `leave` takes away the latest.
    """
    _set_entered((*_entered(), (owner, layer)))


def leave(owner: object) -> None:
    """Take away what the owner entered last. Blocks may be left in any order, as tasks do."""
    entered = _entered()
    for position in reversed(range(len(entered))):
        if entered[position][0] is owner:
            _set_entered(entered[:position] + entered[position + 1 :])
            return
    raise RuntimeError("a block of ejkernel is left in another thread or task than it was entered")


class Block(contextlib.AbstractContextManager[None]):
    """A layer as a context manager, to be used as often as one likes, also inside itself."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer

    def __enter__(self) -> None:
        enter(self, self.layer)

    def __exit__(self, *_: object) -> None:
        leave(self)


def carried() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """What is in force here and now, to be put in force in another thread."""
    entered, settings = _entered(), current_settings()

    @contextlib.contextmanager
    def in_force() -> Iterator[None]:
        with settings():
            before = _entered()
            _set_entered(entered)
            try:
                yield
            finally:
                _set_entered(before)

    return in_force


def _entered() -> _Entered:
    thread, entered = _state.get()
    return entered if thread is _this_thread() else ()


def _set_entered(entered: _Entered) -> None:
    """Put exactly these layers in force in this task, and in JAX's context of this thread."""
    _state.set((_this_thread(), entered))
    wanted = _layers_of_this_task()
    if _mirror.value != wanted:
        _mirror(wanted).__enter__()


def _layers_of_this_task() -> Layers | None:
    layers = tuple(layer for _, layer in _entered())
    return Layers.of(layers) if layers else None


def _this_thread() -> object:
    if not hasattr(_thread, "token"):
        _thread.token = object()  # unlike a thread's number, never used again
    return _thread.token


def forget_traces() -> None:
    """Make every jitted function select again, in all threads.

    Only for when a config that was already traced has changed: it costs the whole process a
    retrace.
    """
    with _generation_lock:
        _generation.set_global(_generation.get_global() + 1)
