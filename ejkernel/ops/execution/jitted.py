"""The way into a kernel: one jitted callable per executor and kernel.

Selection happens inside the jitted function, while JAX traces it. A warm call therefore costs what
a jitted call costs: JAX's own cache, in C++, is the cache. JAX must be told which keywords are
static before it sees their values, so an entry learns their names: a call that does not fit what
was learned is caught while tracing and sorted by its values.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from ..core.invocation import ARRAY, StaticPart, split
from ..core.methods import is_written, written_methods
from ..core.requirements import IMPLEMENTATION
from ..utils.fingerprint import is_array, stable_json

if TYPE_CHECKING:
    from ..core.kernel import Kernel
    from .executor import Executor


class Unsorted(Exception):
    """A call whose keywords are not what the entry has learned; raised while tracing it."""


MAX_JITTED = 128
"""How many jitted functions an entry holds for calls that differ in what is static or built in."""


class JittedCall:
    """Calls one kernel through the executor that `executor` gives at the time of tracing.

    `plain` takes calls without keywords, `keyword` those with. Both may raise; `after_error` then
    runs the call, or raises the clearest error there is.
    """

    __slots__ = (
        "_executor",
        "_for_fixed",
        "_for_static",
        "_learning",
        "_static",
        "kernel",
        "keyword",
        "plain",
    )

    def __init__(self, kernel: Kernel[Any, Any], executor: Callable[[], Executor | None]) -> None:
        self.kernel = kernel
        self._executor = executor
        # A value that is built into the program may be another one in every call, so only the
        # latest functions stay.
        self._for_static = functools.lru_cache(MAX_JITTED)(self._jitted_for)
        self._for_fixed = functools.lru_cache(MAX_JITTED)(self._jitted_with)
        self._static = frozenset(
            {"cfg", IMPLEMENTATION, *kernel.config_keywords, *static_keywords(type(kernel))}
        )
        self._learning = threading.Lock()

        def call(*args: Any) -> Any:
            return self._trace(args, {})

        self.plain = jax.jit(_named(call, kernel))
        self.keyword = self._jitted_for(self._static, learned=True)

    @property
    def fastest(self) -> Any:
        """What to call: the jitted function itself where nothing about a call is to be learned."""
        if not takes_keywords(type(self.kernel)):

            def positional(*args: Any, **kwargs: Any) -> Any:
                return self._trace(args, kwargs)

            static = ("cfg", IMPLEMENTATION, *self.kernel.config_keywords)
            return jax.jit(_named(positional, self.kernel), static_argnames=static)
        plain = self.plain

        def call(*args: Any, **kwargs: Any) -> Any:  # `self.call`, without the way through `self`
            called = self.keyword if kwargs else plain
            try:
                return called(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  raised again, or explained, there
                return self.after_error(error, called, args, kwargs)

        return call

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What JAX traces: select and run, through the executor of this moment."""
        executor = self._executor()
        if executor is None:
            raise RuntimeError(
                f"kernel {self.kernel.full_op_id}: the executor of this call was deleted before "
                "it was traced; keep a reference to it"
            )
        cfg = kwargs.pop("cfg", None)
        cfg = cfg.value if isinstance(cfg, ByContent) else cfg
        fields = self.kernel.config_keywords
        if given := {name: kwargs.pop(name) for name in fields if name in kwargs}:
            self._refuse_traced(given)
            choose = functools.partial(executor.choose_config, self.kernel, *args, **kwargs)
            cfg = self.kernel.config_with(given, choose if cfg is None else lambda: cfg)
        return self.run(executor, args, kwargs, cfg)

    def _refuse_traced(self, given: dict[str, Any]) -> None:
        traced = [name for name, value in given.items() if isinstance(value, jax.core.Tracer)]
        if traced:
            raise TypeError(
                f"kernel {self.kernel.full_op_id}: {', '.join(traced)} is traced, and a config has "
                "to be known while tracing: give a Python value, or name it in the static_argnames "
                "of the jit around the call"
            )

    def run(
        self, executor: Executor, args: tuple[Any, ...], kwargs: dict[str, Any], cfg: Any
    ) -> Any:
        """Run the kernel inside the trace; a mapped entry does it for a whole batch."""
        return executor.run(self.kernel, args, kwargs, cfg=cfg)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call as a kernel is called."""
        called = self.keyword if kwargs else self.plain
        try:
            return called(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  raised again, or explained, there
            return self.after_error(error, called, args, kwargs)

    def sorted_by_value(self, *args: Any, **kwargs: Any) -> Any:
        """Call with keywords: those that hold arrays are traced, the others are static."""
        static = frozenset(name for name, value in kwargs.items() if not holds_arrays(value))
        return self._for_static(static)(*args, **kwargs)

    def _learn(self, kwargs: dict[str, Any]) -> Any:
        """Make `keyword` fit this call, if one set of static names can fit all calls so far."""
        static = {name for name, value in kwargs.items() if not holds_arrays(value)}
        with self._learning:
            if self._static & (kwargs.keys() - static):
                self.keyword = self.sorted_by_value  # an array today, a number yesterday
            elif not static <= self._static:
                self._static = self._static | static
                self.keyword = self._jitted_for(self._static, learned=True)
            return self.keyword

    def _jitted_for(self, static: frozenset[str], learned: bool = False) -> Any:
        # A keyword may be called "args"; nobody calls one like this.
        def call(*ejkernel_args: Any, **kwargs: Any) -> Any:
            if learned and any(_unsorted(value, name in static) for name, value in kwargs.items()):
                raise Unsorted
            return self._trace(ejkernel_args, kwargs)

        return jax.jit(_named(call, self.kernel), static_argnames=sorted(static))

    def compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompiledCall:
        """The program for these arguments, compiled; what is no data is built in."""
        data, fixed = FixedPart.of(args, kwargs)
        compiled = self._jitted_with(fixed).lower(data).compile()
        return CompiledCall(self.kernel.full_op_id, compiled, fixed)

    def _jitted_with(self, fixed: FixedPart) -> Any:
        def call(data: list[Any]) -> Any:
            return self._trace(*fixed.merge(data))

        return jax.jit(_named(call, self.kernel))

    # --- when a call failed ----------------------------------------------------------------------

    def after_error(
        self,
        error: Exception,
        called: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Serve a call that the fast path could not take, or raise the clearest error there is.

        `called` is what raised it. `keyword` may have learned since, in another thread.
        """
        if not isinstance(error, (TypeError, ValueError, Unsorted)):
            raise error
        if kwargs and (fitting := self._learn(kwargs)) != called:
            try:
                return fitting(*args, **kwargs)
            except (TypeError, ValueError, Unsorted) as another:
                error = another
        if isinstance(error, Unsorted):  # an array that looks like a number
            return self.sorted_by_value(*args, **kwargs)
        if "cfg" in kwargs and not _is_hashable(kwargs["cfg"]):
            self.kernel.check_config(kwargs["cfg"])  # by type: stable_json may not know a value
            return self.call(*args, **{**kwargs, "cfg": ByContent(kwargs["cfg"])})
        static = {name: value for name, value in kwargs.items() if not holds_arrays(value)}
        refuse_unhashable(self.kernel, static)
        self._refuse_mixed_devices(error, args, kwargs)
        data, fixed = FixedPart.of(args, kwargs)
        if not fixed.leaves:  # nothing among the data that JAX refuses
            raise error
        if not _is_hashable(fixed):
            raise TypeError(
                f"kernel {self.kernel.full_op_id}: the arguments hold a value that is neither data "
                f"nor hashable: {[v for v in fixed.leaves if not _is_hashable(v)]!r}"
            ) from error
        return self._for_fixed(fixed)(data)

    def _refuse_mixed_devices(
        self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if "device" not in str(error):
            return
        places = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path((args, kwargs)):
            concrete = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
            if concrete and leaf.committed:
                places[jax.tree_util.keystr(path)] = frozenset(leaf.devices())
        if len(set(places.values())) < 2:
            return
        listed = "; ".join(
            f"{_argument_name(path)} on {', '.join(sorted(map(str, devices)))}"
            for path, devices in places.items()
        )
        raise ValueError(
            f"kernel {self.kernel.full_op_id}: the arguments are on different devices: {listed}; "
            "move them with jax.device_put"
        ) from error


@dataclasses.dataclass(frozen=True)
class FixedPart:
    """What a call builds into its program: static keywords; strings and functions among data."""

    rest: StaticPart
    static: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], FixedPart]:
        """The data of a call, and everything else."""
        dynamic = {name: value for name, value in kwargs.items() if holds_arrays(value)}
        static = tuple((name, value) for name, value in kwargs.items() if name not in dynamic)
        data, rest = split((args, dynamic), _jax_can_trace)
        return data, cls(rest, static)

    def merge(self, data: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments and keywords of the call, with this data."""
        args, dynamic = self.rest.merge(data)
        return args, {**dict(self.static), **dynamic}

    @property
    def leaves(self) -> list[Any]:
        """The values among the data that are built in."""
        return [leaf for leaf in self.rest.fixed if leaf is not ARRAY]


@dataclasses.dataclass(frozen=True)
class CompiledCall:
    """A kernel compiled for given shapes; call it as the kernel, with arrays of those shapes.

    `compiled` is JAX's own object, for `cost_analysis()`, `memory_analysis()` and `as_text()`.
    """

    op_id: str
    compiled: jax.stages.Compiled
    fixed: FixedPart

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        static = dict(self.fixed.static)
        for name in static.keys() & kwargs.keys():
            if kwargs[name] != static[name]:
                raise ValueError(
                    f"kernel {self.op_id} was compiled with {name}={static[name]!r}; compile it "
                    "again for another value"
                )
        data, fixed = FixedPart.of(args, kwargs)
        if fixed.rest != self.fixed.rest:
            raise ValueError(
                f"kernel {self.op_id} was compiled for arguments of another structure or with "
                f"other values built in: {self.fixed.rest}; compile it again"
            )
        return self.compiled(data)


class ExecutorKey(weakref.ref["Executor"]):
    """A weak reference to an executor that compares by identity, even if executors define `==`."""

    __slots__ = ()

    __eq__ = object.__eq__
    __hash__ = object.__hash__


class JittedCalls(dict["ExecutorKey | None", JittedCall]):
    """A kernel's entries, made when first asked for; None is for the default executor.

    An entry goes with its executor, and all programs that were compiled for it: a server may make
    an executor for every request.
    """

    def __init__(self, kernel: Kernel[Any, Any]) -> None:
        super().__init__()
        self._kernel = kernel

    def __missing__(self, key: ExecutorKey | None) -> JittedCall:
        if key is None:
            return self.setdefault(None, JittedCall(self._kernel, _default_executor))
        executor = key()
        assert executor is not None  # it is the caller
        watched = weakref.ref(executor, lambda _: self.pop(key, None))
        return self.setdefault(key, JittedCall(self._kernel, watched))


def _default_executor() -> Executor:
    from .executor import default_executor

    return default_executor()


@dataclasses.dataclass(frozen=True, eq=False)
class ByContent:
    """A config that is not hashable itself, compared by what it contains."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByContent) and stable_json(self.value) == stable_json(other.value)

    def __hash__(self) -> int:
        return hash(stable_json(self.value))


def _named(function: Any, kernel: Kernel[Any, Any]) -> Any:
    """Programs, profiles and JAX's own errors show a jitted function's name."""
    function.__name__ = function.__qualname__ = kernel.op_id.replace("/", "_").replace("-", "_")
    return function


def takes_keywords(cls: type[Kernel[Any, Any]]) -> bool:
    """True if a run function, or `prepare`, has keywords of its own, other than `cfg`."""
    functions = run_functions(cls)
    if is_written(cls, "prepare"):
        functions.append(cls.prepare)
    for function in functions:
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD or (
                parameter.kind is not parameter.VAR_POSITIONAL
                and parameter.name not in ("self", "cfg")
                and (
                    parameter.kind is parameter.KEYWORD_ONLY
                    or parameter.default is not parameter.empty
                )
            ):
                return True
    return False


def static_keywords(cls: type[Kernel[Any, Any]]) -> set[str]:
    """Keywords that run functions surely mean as static: by their default or annotation."""
    found = set()
    for function in run_functions(cls):
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY and (
                type(parameter.default) in _STATIC_TYPES
                or parameter.annotation in _STATIC_TYPES
                or parameter.annotation in _STATIC_NAMES
            ):
                found.add(parameter.name)
    return found


def run_functions(cls: type[Kernel[Any, Any]]) -> list[Callable[..., Any]]:
    """What a kernel class runs: its run methods, or the forward functions it lists."""
    listed = [item.forward for item in cls.implementations]
    return listed or [getattr(cls, name) for name in written_methods(cls, "run")]


_STATIC_TYPES = (bool, int, float, complex, str, bytes)
_STATIC_NAMES = tuple(cls.__name__ for cls in _STATIC_TYPES)  # annotations may be text


def _unsorted(value: Any, static: bool) -> bool:
    """True for a tracer where a static value belongs, and for a number that was traced.

    A traced Python number is a weakly typed scalar, or a boolean one; so may an array be, which
    the slower path then sorts out. With `jax.disable_jit` nothing is traced, and values are what
    the caller gave.
    """
    if static:
        return isinstance(value, jax.core.Tracer)
    leaves = jax.tree.leaves(value)
    return not leaves or any(map(_may_be_a_number, leaves))


def _may_be_a_number(leaf: Any) -> bool:
    if not is_array(leaf) or leaf.ndim:
        return False
    return bool(leaf.dtype == bool or getattr(leaf, "weak_type", False))


def holds_arrays(value: Any) -> bool:
    """True for an array, and for a pytree with an array in it."""
    return is_array(value) or any(is_array(leaf) for leaf in jax.tree.leaves(value))


def refuse_unhashable(kernel: Kernel[Any, Any], static: dict[str, Any]) -> None:
    """Raise a `TypeError` that names the static keyword which is not hashable, if there is one."""
    for name, value in static.items():
        if not _is_hashable(value):
            raise TypeError(
                f"kernel {kernel.full_op_id}: the keyword {name!r} is static (it holds no arrays) "
                f"and must be hashable, got {value!r} ({type(value).__name__}); use a tuple, a "
                "frozen dataclass or a string"
            )


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _jax_can_trace(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, (bool, int, float, complex))


def _argument_name(path: str) -> str:
    """`[0][1]` (positional, second) as `argument 1`; `[1]['mask']` as `keyword 'mask'`."""
    group, _, rest = path[1:].partition("]")
    name, _, inner = rest[1:].partition("]")
    return f"{'argument' if group == '0' else 'keyword'} {name}{inner}"
