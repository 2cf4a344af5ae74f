"""Executors: pick a config while tracing, run the kernel with it."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self, TypeVar

from ..config import context
from ..config.context import AutotunePolicy
from ..config.decision import Decision, Miss
from ..config.persistent import PersistentCache
from ..config.selection import ConfigSelectorChain
from ..core.invocation import Invocation, symbolic_sizes
from ..core.kernel import Kernel
from ..core.requirements import refuse_reference, requests_reference
from ..core.running import default_config, run_selected, run_unlabelled, run_with_default
from ..core.symbolic import run_with_symbols
from ..registry import Recorded
from ..utils import environment
from ..utils.display import Explanation
from .jitted import CompiledCall, ExecutorKey
from .partitioned import run_definition, run_partitioned

C = TypeVar("C")
O = TypeVar("O")  # noqa: E741

logger = logging.getLogger(__name__)


class ConfigChooser(Protocol):
    """What an executor needs: something that picks a config for an invocation."""

    def choose(self, inv: Invocation[C, O], kernel: Kernel[C, O]) -> C:
        """The config to run the kernel with."""
        ...


class Executor:
    """Runs kernels with the configs that its chooser picks.

    Works eagerly and under `jit`, `grad`, `vmap`, `scan`, `remat` and `shard_map`. Selection runs
    while JAX traces; a warm call is a jitted call.

    >>> import jax.numpy as jnp
    >>> from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor
    >>> executor = Executor(ConfigSelectorChain(cache=ConfigCache(), autotune=False))
    """

    # Kernels have their entries for this executor under `_key`, which does not keep it alive.
    __slots__ = ("__dict__", "__weakref__", "_key")

    _key: ExecutorKey

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # Not in `__init__`, which neither copies nor all subclasses run.
        self = super().__new__(cls)
        self._key = ExecutorKey(self)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """What a copy takes over: everything but the key, of which it has its own."""
        return dict(self.__dict__)

    def __init__(self, chooser: ConfigChooser | None = None) -> None:
        if chooser is None:
            chooser = ConfigSelectorChain()
        if not callable(getattr(chooser, "choose", None)):
            raise TypeError(
                f"Executor: chooser must have a choose(inv, kernel) method, got {chooser!r}"
            )
        self.chooser = chooser

    @property
    def selector(self) -> ConfigSelectorChain:
        """The chooser, when it is a selector chain."""
        if not isinstance(self.chooser, ConfigSelectorChain):
            raise TypeError(
                f"this executor's chooser is a {type(self.chooser).__name__}, not a "
                "ConfigSelectorChain"
            )
        return self.chooser

    def __call__(self, kernel: Kernel[Any, O], /, *args: Any, **kwargs: Any) -> O:
        """Select a config and run; `cfg=` fixes it, other keywords go to the kernel."""
        called = None
        try:
            entry = kernel._entries[self._key]
            called = entry.keyword if kwargs else entry.plain
            return called(*args, **kwargs)  # type: ignore[no-any-return]
        except Exception as error:  # noqa: BLE001  raised again, or explained, there
            if not isinstance(kernel, Kernel):
                raise _not_a_kernel(kernel) from None
            return kernel._entries[self._key].after_error(error, called, args, kwargs)  # type: ignore[no-any-return]

    def choose_config(self, kernel: Kernel[C, Any], /, *args: Any, **kwargs: Any) -> C:
        """The config that a call with these arguments runs with (it may tune, like the call)."""
        inv: Invocation[C, Any] = _bound(kernel, args, kwargs)
        return self.chooser.choose(inv, kernel)

    def decide(self, kernel: Kernel[C, Any], /, *args: Any, **kwargs: Any) -> Decision[C]:
        """The same, as a `Decision` with its reasons."""
        return self.selector.decide(_bound(kernel, args, kwargs), kernel)

    def explain(self, kernel: Kernel[Any, Any], /, *args: Any, **kwargs: Any) -> Explanation:
        """Why a call with these arguments runs with the config it runs with, as text."""
        return self.decide(kernel, *args, **kwargs).explain()

    def compile(self, kernel: Kernel[Any, Any], /, *args: Any, **kwargs: Any) -> CompiledCall:
        """A compiled callable for the shapes of these arguments (arrays or abstract shapes)."""
        if not isinstance(kernel, Kernel):
            raise _not_a_kernel(kernel)
        return kernel._entries[self._key].compile(args, kwargs)

    def run(
        self,
        kernel: Kernel[Any, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        cfg: Any = None,
        batch_axes: Any = None,
        stamp: bool = True,
    ) -> Any:
        """Select and run inside the current trace: what every call comes down to."""
        if cfg is not None:
            kernel.check_config_class(cfg)
        args, kwargs = kernel.prepared(args, kwargs)

        def call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            given = {"batch_axes": batch_axes, "override_cfg": cfg, "stamp": stamp}
            return self._run(Invocation(kernel=kernel, args=args, kwargs=kwargs, **given), kernel)

        if symbolic_sizes((args, kwargs)):
            return run_with_symbols(kernel, args, kwargs, call)
        return call(args, kwargs)

    def _run(self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Any:
        if requests_reference(inv):
            if inv.override_cfg is not None:
                refuse_reference(inv, f"; cfg={inv.override_cfg!r} was given")
            # Neither recorded nor labelled: what is, is tuned.
            return run_definition(inv, kernel, lambda i, k: run_unlabelled(i, k, None))
        if kernel.partitioning is not None:
            partitioned = run_partitioned(inv, kernel, self._run_here, run_with_default)
            if partitioned is not None:
                return partitioned.output
        return self._run_here(inv, kernel)

    def _run_here(self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Any:
        """Select and run with the shapes that the current trace sees."""
        recorded = Recorded()
        # JAX holds `select` with the program, to differentiate it later. That must not keep the
        # executor: a server may make one for every request.
        chooser = _weakly(self.chooser)
        missing: list[Invocation[Any, Any]] = []

        def select(inv: Invocation[Any, Any]) -> Any:
            chosen = _choose(chooser(), inv, kernel)
            if isinstance(chosen, Miss):
                if inv.differentiated:
                    raise chosen.error()
                # JAX traces a call forward even where it goes on to differentiate it. Whether the
                # call runs like this is known when the program is lowered.
                missing.append(inv.abstract())
                chosen = default_config(inv, kernel)
            recorded.while_tracing(kernel, inv)
            return chosen

        def runs_forward() -> None:
            recorded.runs_forward()
            if missing:
                context.forget_traces()  # this one was made with a config that nobody chose
                chosen = _choose(chooser(), missing[-1], kernel)
                if isinstance(chosen, Miss):
                    raise chosen.error()

        return run_selected(inv, kernel, select, runs_forward)


def _choose(chooser: Any, inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Any:
    """The config of a call, or a `Miss`; of a chooser that is gone the kernel's default."""
    given = inv.override_cfg
    if chooser is None:
        return default_config(inv, kernel)
    if getattr(type(chooser), "choose", None) is ConfigSelectorChain.choose:
        answer = chooser.answer(inv, kernel)
        if isinstance(answer, Miss):
            return answer
        chosen = answer.cfg
    elif given is not None and not isinstance(chooser, ConfigSelectorChain):
        return kernel.check_config(given, inv=inv)  # it need not know of overrides
    else:
        chosen = chooser.choose(inv, kernel)
    return kernel.check_config(chosen, "the chooser returned", inv)


def _weakly(chooser: Any) -> Callable[[], Any]:
    """A reference that does not keep a chooser alive, if its class allows that."""
    try:
        return weakref.ref(chooser)
    except TypeError:
        return lambda: chooser


def _bound(
    kernel: Kernel[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Invocation[Any, Any]:
    if not isinstance(kernel, Kernel):
        raise _not_a_kernel(kernel)
    return kernel.bind(*args, **kwargs)


def _not_a_kernel(given: Any) -> TypeError:
    what = f"the class {given.__name__}" if isinstance(given, type) else repr(given)
    return TypeError(f"Executor: the first argument must be a kernel (an instance), got {what}")


# --- the executor behind `kernel(...)` -----------------------------------------------------------

_default: Executor | None = None
_default_lock = threading.Lock()


def default_executor() -> Executor:
    """The executor behind `kernel(...)` and `ejkernel.modules`, made when first needed.

    It reads the persistent store and otherwise uses heuristics; with `EJKERNEL_AUTOTUNE=1`, or
    inside `policy_override(autotune=True)`, it tunes what the store does not have.
    """
    global _default
    with _default_lock:
        if _default is None:
            _default = Executor(
                ConfigSelectorChain(
                    policy=AutotunePolicy(allow_autotune=environment.AUTOTUNE.enabled()),
                    persistent=_default_store(),
                )
            )
        return _default


def _default_store() -> PersistentCache | None:
    """The store at its usual place, or none, with a warning: no first call fails for its sake."""
    try:
        return PersistentCache()
    except OSError as error:
        logger.warning("ejkernel: going on without a persistent store: %s", error)
        return None


def set_default_executor(executor: Executor | None) -> None:
    """Put another executor behind `kernel(...)`; None makes a new default one when needed.

    Functions jitted before select again, through the new executor.
    """
    global _default
    if executor is not None and not isinstance(executor, Executor):
        raise TypeError(f"set_default_executor takes an Executor or None, got {executor!r}")
    with _default_lock:
        if executor is _default:
            return  # nothing was traced through another one
        _default = executor
    context.forget_traces()
