"""What is active right now: policies, overrides of them, and overlays, as part of every jit key.

The layers of the current thread or asyncio task are held in a `ContextVar`; their content is
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
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import jax

from ..utils import environment
from ..utils.fingerprint import stable_json

if TYPE_CHECKING:
    from ..core.invocation import Invocation
    from .selection import ConfigSelectorChain

C = TypeVar("C")
O = TypeVar("O")  # noqa: E741
LayerT = TypeVar("LayerT", bound="Layer")

# --- layers --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """One thing that is active. `content` says all of it: layers with equal content are equal."""

    content: str


class Layers(str):
    """All active layers; as a string, their content (cheap to hash and compare in C)."""

    layers: tuple[Layer, ...]

    @classmethod
    def of(cls, layers: tuple[Layer, ...]) -> Layers:
        """The value made of these layers, outermost first."""
        self = cls("\n".join(layer.content for layer in layers))
        self.layers = layers
        return self


# Whose layers are active, in the order of entering; with the thread that entered them, because a
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


def active_layers(kind: type[LayerT]) -> Iterator[LayerT]:
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
    """Activate a layer in this thread or asyncio task, until `leave(owner)`.

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


class Block(AbstractContextManager[None]):
    """A layer as a context manager, to be used as often as one likes, also inside itself."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer

    def __enter__(self) -> None:
        enter(self, self.layer)

    def __exit__(self, *_: object) -> None:
        leave(self)


def carried() -> Callable[[], AbstractContextManager[None]]:
    """What is active here and now, to be activated in another thread."""
    entered, settings = _entered(), _current_settings()

    @contextlib.contextmanager
    def activated() -> Iterator[None]:
        with settings():
            before = _entered()
            _set_entered(entered)
            try:
                yield
            finally:
                _set_entered(before)

    return activated


_SETTINGS = (
    "enable_x64",
    "numpy_dtype_promotion",
    "numpy_rank_promotion",
    "default_matmul_precision",
    "default_prng_impl",
    "threefry_partitionable",
    "legacy_prng_key",
    "debug_nans",
    "debug_infs",
)


def _current_settings() -> Callable[[], AbstractContextManager[None]]:
    """The settings of this thread that change what is traced, to be activated elsewhere."""
    values = {name: getattr(jax.config, f"jax_{name}") for name in _SETTINGS}

    @contextlib.contextmanager
    def activated() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name, value in values.items():
                if getattr(jax.config, f"jax_{name}") != value:
                    stack.enter_context(getattr(jax, name)(value))
            yield

    return activated


def _entered() -> _Entered:
    thread, entered = _state.get()
    return entered if thread is _this_thread() else ()


def _set_entered(entered: _Entered) -> None:
    """Activate exactly these layers in this task, and in JAX's context of this thread."""
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


# --- policies ------------------------------------------------------------------------------------

Fallback = Literal["autotune", "heuristics"]


@dataclasses.dataclass(frozen=True)
class AutotunePolicy:
    """What may happen on a miss, and in which order.

    Attributes:
      allow_autotune: measure the candidates.
      allow_heuristics: use the kernel's default config.
      cache_miss_fallback: which of the two comes first; the other follows if allowed.
      validate_backward: choose and tune every call forward plus backward, gradients compared too.
        Without it that is done for the calls that a program differentiates, and only for those.
      near_shapes: before the heuristics, use the config of the nearest tuned shape: True for every
        kernel, False for none, None for those that declare it (`Kernel.near_shapes`).
      strict: a call without a stored config is an error: nothing is tuned, lent or guessed
        while a program runs. None: as `EJKERNEL_STRICT` says.
    """

    allow_autotune: bool = True
    allow_heuristics: bool = True
    cache_miss_fallback: Fallback = "autotune"
    validate_backward: bool = False
    near_shapes: bool | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        if self.cache_miss_fallback not in ("autotune", "heuristics"):
            raise ValueError(
                f"AutotunePolicy: cache_miss_fallback={self.cache_miss_fallback!r} is not known; "
                'it is "autotune" or "heuristics"'
            )
        for name in ("allow_autotune", "allow_heuristics", "validate_backward"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(
                    f"AutotunePolicy: {name}={getattr(self, name)!r} must be True or False"
                )
        for name in ("near_shapes", "strict"):
            if not isinstance(getattr(self, name), bool | None):
                raise TypeError(
                    f"AutotunePolicy: {name}={getattr(self, name)!r} must be True, False or None"
                )

    @property
    def tunes_first(self) -> bool:
        """On a miss, tuning comes before anything else."""
        return (
            self.allow_autotune
            and not self.strict
            and (self.cache_miss_fallback == "autotune" or not self.allow_heuristics)
        )

    def reason_against(self, tier: str) -> str | None:
        """Why the tier of this name is not asked; None if it is."""
        field = _ALLOWED_BY.get(tier, "")
        if getattr(self, field, None) is False:
            return f"the policy does not allow it ({field}=False)"
        return None

    @classmethod
    def tuning(cls, autotune: bool) -> AutotunePolicy:
        """The policy behind the shorthand `autotune=True` or `autotune=False`."""
        return cls(**_expand({"autotune": autotune}, "AutotunePolicy.tuning"))


_ALLOWED_BY = {
    "autotune": "allow_autotune",
    "near": "near_shapes",
    "heuristics": "allow_heuristics",
}
"""The field of a policy that must not be False, by tier."""


@dataclasses.dataclass(frozen=True, eq=False)
class _PolicyLayer(Layer):
    selector_id: str | None  # None: every selector
    changes: dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class _ForwardOnlyLayer(Layer):
    pass


def policy_override(
    selector: ConfigSelectorChain | None = None, **changes: Any
) -> AbstractContextManager[None]:
    """Change the policy for a block: of one selector, or of every selector in this context.

    `autotune=True/False` is a shorthand for `allow_autotune` with the fitting fallback. It holds
    for this thread or asyncio task only, is undone on leaving, also by an exception, and functions
    jitted before select again.

    >>> from ejkernel.ops import policy_override
    >>> with policy_override(autotune=False):
    ...     pass  # nothing is tuned here
    """
    fields = _expand(changes, "policy_override")
    AutotunePolicy(**fields)  # refuse wrong values here, where the caller sees it
    selector_id = None if selector is None else selector.selector_id
    content = f"policy {selector_id} {stable_json(fields)}"
    return Block(_PolicyLayer(content, selector_id, fields))


def forward_autotune_only() -> AbstractContextManager[None]:
    """While active, configs are chosen by what was measured forward, and only that is measured.

    Also for calls that a program differentiates, and with `validate_backward=True`.
    """
    return Block(_ForwardOnlyLayer("forward only"))


def asked_call(inv: Invocation[C, O], policy: AutotunePolicy) -> Invocation[C, O]:
    """The call that a config is looked for: with its gradient if the program needs that.

    `validate_backward` asks as if the program did, `forward_autotune_only` as if it did not.
    """
    if any(True for _ in active_layers(_ForwardOnlyLayer)):
        return inv.forward()
    return inv.differentiate() if policy.validate_backward and not inv.differentiated else inv


def effective_policy(policy: AutotunePolicy, selector_id: str) -> AutotunePolicy:
    """A selector's policy with every active override applied, innermost last.

    What the policy leaves to the environment is settled here, so that the answer is a whole policy:
    it is part of the question that the processes of a job agree on.
    """
    changes: dict[str, Any] = {}
    for layer in active_layers(_PolicyLayer):
        if layer.selector_id in (None, selector_id):
            changes = {**layer.changes, **changes}
    if changes:
        policy = dataclasses.replace(policy, **changes)
    if policy.strict is None:
        policy = dataclasses.replace(policy, strict=environment.STRICT.enabled())
    return policy


def _expand(changes: dict[str, Any], caller: str) -> dict[str, Any]:
    known = {field.name for field in dataclasses.fields(AutotunePolicy)}
    unknown = sorted(set(changes) - known - {"autotune"})
    if unknown:
        raise TypeError(
            f"{caller}: the policy has no field {', '.join(map(repr, unknown))}; "
            f"its fields are {', '.join(sorted(known))} (and the shorthand autotune)"
        )
    fields = dict(changes)
    if "autotune" in fields:
        tune = fields.pop("autotune")
        if not isinstance(tune, bool):
            raise TypeError(f"{caller}: autotune={tune!r} must be True or False")
        fields.setdefault("allow_autotune", tune)
        fields.setdefault("cache_miss_fallback", "autotune" if tune else "heuristics")
    return fields
