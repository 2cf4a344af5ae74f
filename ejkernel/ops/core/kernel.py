"""What a kernel author writes: one operation, its implementations, its space of configs."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import types
import typing
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from ...store.reading import shown
from ..utils.fingerprint import device_kind, stable_json
from ..utils.serialize import (
    config_type_named,
    declare_type,
    from_plain,
    qualified_name,
)
from .implementation import Implementation, class_name, is_constructible
from .invocation import Invocation, KeyBuilder
from .methods import (
    SUFFIXES,
    check_config_type,
    check_implementations,
    check_kernel,
    check_method_names,
    check_near_misses,
    check_run_methods,
    default,
    implementations_of,
    method_name,
)
from .near import NearShapes
from .partitioning import needs_mesh
from .requirements import (
    IMPLEMENTATION,
    REFERENCE,
    Limits,
    Supports,
    field_reasons,
    has_reference,
    implementation_for,
    implementation_keyword,
    limit_reasons,
    refuse_reference,
    requested,
    with_plain_numbers,
    without_implementation,
)
from .space import Space
from .types import Cfg, Out

if TYPE_CHECKING:
    from ..execution.jitted import JittedCalls
    from .work import Work

_make_entries: Callable[[Kernel[Any, Any]], JittedCalls]

# The kernels of this process in the order of their making, for as long as somebody holds them.
_alive: weakref.WeakValueDictionary[int, Kernel[Any, Any]] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def kernel_named(full_op_id: str) -> Kernel[Any, Any] | None:
    """The newest live kernel with this operation id, if any: how a label finds its kernel."""
    kernels = (ref() for ref in reversed(_alive.valuerefs()))
    return next((k for k in kernels if k is not None and k.full_op_id == full_op_id), None)


def operations() -> list[str]:
    """The operation ids of all live kernels."""
    return [kernel.full_op_id for ref in _alive.valuerefs() if (kernel := ref()) is not None]


def provide_calling(make_entries: Callable[[Kernel[Any, Any]], JittedCalls]) -> None:
    """Set what makes the jitted calls of a kernel: `execution`, which core may not import."""
    global _make_entries
    _make_entries = make_entries


class Kernel(Generic[Cfg, Out]):
    """One operation: an implementation per platform, a default config, a space of configs.

    A subclass writes `run` (and, where a device deserves its own, `run_triton`, `run_pallas`,
    `run_xla`, `run_gpu`, `run_tpu`, `run_cpu`), `heuristic_cfg`, and `candidate_cfgs` or
    `config_space`, whichever name it prefers. Calling the kernel picks a config and runs it.

    Gradients come from JAX, through `run`, unless the kernel writes its own rule in one of two
    forms (each may carry a platform suffix too)::

        def custom_vjp(self, primals, cfg, kwargs, cotangents): return grads

        def fwd_with_residuals(self, *args, cfg, **kwargs): return out, residuals
        def vjp(self, residuals, out, dout, *args, cfg, **kwargs): return grads

    `grads` holds one gradient per positional argument, `None` where there is none. Keyword
    arguments that are arrays and need gradients go into one dict after them.

    Optional: `reference(*args, **kwargs)`, the definition in plain JAX. The tuner compares
    candidates with it, and `implementation="reference"` calls it, for instance to differentiate
    more often than a rule of the kernel's own allows. For the tuner alone:
    `make_inputs(inv, key) -> (args, kwargs)`, realistic inputs to measure with, and
    `plain(*args, **kwargs)`, what users would write in plain JAX, where the reference is slower
    than that: it is timed with the candidates (the reference otherwise) to say what the kernel
    gains, and raises `NotImplementedError` for a call that it cannot express. For the report:
    `work(inv) -> Work`, the operations and bytes of a call.

    >>> import dataclasses, jax, jax.numpy as jnp
    >>> @dataclasses.dataclass(frozen=True)
    ... class ScaleConfig:
    ...     chunks: int = 1
    >>> class Scale(Kernel[ScaleConfig, jax.Array]):
    ...     def run(self, x, *, cfg, factor=2.0):
    ...         return jnp.concatenate([c * factor for c in jnp.split(x, cfg.chunks)])
    ...     def heuristic_cfg(self, inv):
    ...         return ScaleConfig(chunks=1)
    >>> Scale()(jnp.arange(4.0), factor=3.0).tolist()
    [0.0, 3.0, 6.0, 9.0]
    """

    version: str = "1"
    """Raise it when a change makes older tuned configs meaningless."""

    unkeyed: ClassVar[tuple[str, ...]] = ()
    """Keywords that do not affect which config is best (`seed`): they stay out of the key."""

    implementations: ClassVar[Sequence[Implementation[Any, Any]]] = ()
    """Ways to compute the operation, the preferred one first: instead of methods with suffixes."""

    tune_implementations: ClassVar[bool] = False
    """Race the device's implementations too. Where they share a config class, it needs a field
    `implementation: str | None = None`, which then says which one a config is for."""

    supports: ClassVar[Mapping[str, Supports]] = {}
    """What implementations can do, by name (`"pallas"`): a call goes to the first that supports
    it. One that is not named supports everything."""

    limits: ClassVar[Mapping[str, Limits]] = {}
    """What the fields of a config may be, by implementation: see `Limits`. One that is not named
    takes every config of the kernel's class."""

    near_shapes: ClassVar[NearShapes | None] = None
    """Where a call that was never tuned may use the config of a tuned one of other sizes."""

    partitioning: ClassVar[Any] = None
    """How calls are divided over a mesh: a `Partitioning`, or a method `(inv) -> Partitioning`."""

    config_keywords: ClassVar[tuple[str, ...]] = ()
    """Fields of the config that a call may give by themselves; the rest is then chosen."""

    key_builder: KeyBuilder | None = None
    """Builds the call key instead of `Invocation.call_key`, if set."""

    config_type: ClassVar[Any] = None
    """The config class, taken from `Kernel[MyConfig, …]`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_method_names(cls)
        check_near_misses(cls, dir(Kernel))
        check_run_methods(cls)
        _give_both_names(cls)
        _keep_builder_a_function(cls)
        declared = _declared_config_type(cls)
        if declared is not None:
            cls.config_type = declared
        check_config_type(cls, cls.config_type)
        declare_type(cls.config_type)
        check_implementations(cls)
        for item in cls.implementations:
            declare_type(item.config)

    def __init__(
        self, name: str | None = None, *, op_id: str | None = None, version: str | None = None
    ) -> None:
        if name is not None and op_id is not None and name != op_id:
            raise TypeError(
                f"{type(self).__name__}: name={name!r} and op_id={op_id!r} are two spellings of "
                "the same argument; give one"
            )
        chosen = name or op_id
        if chosen is not None:
            self.__dict__["_op_id"] = chosen
            self._make_callable()  # programs and JAX's errors carry the name
        if version is not None:
            self.version = str(version)
        check_kernel(self)
        _alive[next(_numbers)] = self

    # --- identity --------------------------------------------------------------------------------

    @property
    def op_id(self) -> str:
        """The operation's name, without its version."""
        return self.__dict__.get("_op_id") or _name_from_class(type(self))

    @property
    def full_op_id(self) -> str:
        """The name used in caches, labels and events: `matmul@v1`."""
        return f"{self.op_id}@v{self.version}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.full_op_id!r})"

    # --- what a kernel author may override -------------------------------------------------------

    @default
    def prepare(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Normalise the arguments before anything else sees them."""
        return args, kwargs

    @default
    def run(self, *args: Any, cfg: Cfg, **kwargs: Any) -> Out:
        """Compute the operation with a config: the default implementation, for any device."""
        raise NotImplementedError(f"kernel {self.full_op_id} has no run method for this device")

    @default
    def heuristic_cfg(self, inv: Invocation[Cfg, Out]) -> Cfg:
        """A good config without measuring; by default the config class with all its defaults."""
        if is_constructible(self.config_type):
            return self.config_type()  # type: ignore[no-any-return]
        raise NotImplementedError(f"kernel {self.full_op_id} has no heuristic_cfg method")

    def entries_are_independent(self, *args: Any, **kwargs: Any) -> bool:
        """True if the first axis is a batch whose entries have nothing to do with each other.

        That of the first argument, of arguments of the same size there, and of every output. Then
        its size may be a symbol (`jax.export.symbolic_shape`).
        """
        return False

    def default_keywords(self, *args: Any) -> Mapping[str, Any]:
        """What keywords are when nobody says otherwise, for these arguments.

        Tables and messages leave such keywords out. Nothing else depends on it.
        """
        return {}

    @default
    def candidate_cfgs(self, inv: Invocation[Cfg, Out]) -> Iterable[Cfg]:
        """Configs worth trying. Another name for `config_space`; write either."""
        return [self.heuristic_cfg(inv)]

    @default
    def config_space(self, inv: Invocation[Cfg, Out]) -> Iterable[Cfg]:
        """Configs worth trying. Another name for `candidate_cfgs`; write either."""
        return [self.heuristic_cfg(inv)]

    def work(self, inv: Invocation[Cfg, Out]) -> Work | None:
        """What a call has to do, so that reports show GFLOP/s and GB/s; None if nobody counts it.

        Forward, and forward and backward if `inv.differentiated` says that the call is.
        """
        return None

    # --- what callers use ------------------------------------------------------------------------

    def bind(self, *args: Any, **kwargs: Any) -> Invocation[Cfg, Out]:
        """The `Invocation` that calling the kernel with these arguments would make."""
        override = kwargs.pop("cfg", None)
        args, kwargs = self.prepared(args, kwargs)
        return Invocation(kernel=self, args=args, kwargs=kwargs, override_cfg=override)

    def prepared(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What `prepare` makes of the arguments, checked."""
        result = self.prepare(*args, **without_implementation(kwargs))
        if (
            not isinstance(result, tuple)
            or len(result) != 2
            or not isinstance(result[0], (tuple, list))
            or not isinstance(result[1], Mapping)
        ):
            raise TypeError(
                f"kernel {self.full_op_id}: prepare must return (args, kwargs), got {result!r}"
            )
        return tuple(result[0]), {**result[1], **implementation_keyword(kwargs)}

    def config_with(self, given: Mapping[str, Any], chosen: Callable[[], Any]) -> Any:
        """The config with these fields; what is not given comes from the one that is chosen."""
        (cls,) = self.config_types
        if given.keys() == {field.name for field in dataclasses.fields(cls)}:
            return cls(**given)
        return dataclasses.replace(chosen(), **given)

    @property
    def config_types(self) -> tuple[Any, ...]:
        """The classes of its configs, those of the preferred implementations first."""
        if not self.implementations:
            return () if self.config_type is None else (self.config_type,)
        return tuple(dict.fromkeys(item.config for item in self.implementations))

    def config_from_plain(self, plain: Any, type_name: str) -> Any:
        """The config that was written as `plain`; `type_name` says which of its classes it is.

        A kernel with one class takes it for that, whatever the name.
        """
        types = self.config_types or (config_type_named(type_name),)
        named = [cls for cls in types if len(types) == 1 or qualified_name(cls) == type_name]
        if not named:
            raise TypeError(
                f"kernel {self.full_op_id} has no configs of the class {shown(type_name)}; it has "
                f"{', '.join(map(class_name, types))}"
            )
        return from_plain(plain, named[0])

    def implementations_here(self) -> Sequence[Implementation[Any, Any]]:
        """The implementations that run on the current device, the preferred one first."""
        if not self.implementations:
            return implementations_of(self, device_kind())
        return [item for item in self.implementations if item.runs_on(device_kind())]

    def all_implementations(self) -> Sequence[Implementation[Any, Any]]:
        """The implementations for any device; not the reference, which has no configs."""
        return self.implementations or implementations_of(self, device_kind(), everywhere=True)

    def has_gradient_rule(self) -> bool:
        """Whether any of its implementations has a gradient rule of its own."""
        return any(item.backward is not None for item in self.all_implementations())

    def implementation(self, name: str) -> Implementation[Any, Any]:
        """The implementation of this name: of a run method its suffix, `"run"` without one.

        `"reference"` is the definition, if there is one.
        """
        found = {item.name: item for item in self.all_implementations()}
        if has_reference(self):
            definition = getattr(self, REFERENCE)
            found[REFERENCE] = Implementation(
                name=REFERENCE, forward=lambda *args, cfg, **kwargs: definition(*args, **kwargs)
            )
        if name not in found:
            raise ValueError(
                f"kernel {self.full_op_id}: implementation={name!r} does not exist; it has "
                f"{', '.join(found)}"
            )
        return found[name]

    def heuristic(
        self, inv: Invocation[Cfg, Out], implementation: Implementation[Any, Any] | None = None
    ) -> Cfg:
        """The heuristic config of an implementation (default: the one for the call), checked."""
        refuse_reference(inv)
        chosen = implementation or implementation_for(self, inv)
        method = f"the heuristic of {chosen.name!r}" if self.implementations else "heuristic_cfg"
        return self.check_config(chosen.heuristic_config(inv), f"{method} returned", inv, chosen)

    def candidates(self, inv: Invocation[Cfg, Out]) -> list[Cfg]:
        """Every distinct config to try on the current device; the heuristic one comes first."""
        refuse_reference(inv)
        if not self.tune_implementations or requested(inv) is not None:
            return self._candidates_of(inv, implementation_for(self, inv))
        return [
            _for_implementation(cfg, item.name)
            for item in self.implementations_here()
            if not item.unsupported(inv)
            for cfg in self._candidates_of(inv, item)
        ]

    def _candidates_of(
        self, inv: Invocation[Cfg, Out], implementation: Implementation[Any, Any]
    ) -> list[Cfg]:
        # Calls that need collectives are not tuned: the tuner measures on one device.
        listed = None if needs_mesh(self, inv) else implementation.space
        configs: Iterable[Any] = [] if listed is None else listed(inv)
        if isinstance(configs, Space):
            configs = configs.of(implementation.config)
        said = "candidate_cfgs (config_space) listed"
        if self.implementations:
            said = f"the space of {implementation.name!r} listed"
        checked = [self.check_config_class(cfg, said) for cfg in configs]
        return self.with_heuristic(inv, checked, implementation)

    def with_heuristic(
        self,
        inv: Invocation[Cfg, Out],
        configs: Iterable[Cfg],
        implementation: Implementation[Any, Any] | None = None,
    ) -> list[Cfg]:
        """The heuristic config, if there is one, and then the others, each once."""
        found: list[Cfg] = []
        with contextlib.suppress(NotImplementedError):  # a space without a heuristic is fine
            found.append(self.heuristic(inv, implementation))
        distinct: dict[Any, Cfg] = {}
        for cfg in (*found, *configs):
            distinct.setdefault((type(cfg), stable_json(cfg)), cfg)
        return list(distinct.values())

    def check_config(
        self,
        cfg: Any,
        origin: str = "cfg is",
        inv: Invocation[Cfg, Out] | None = None,
        implementation: Implementation[Any, Any] | None = None,
    ) -> Cfg:
        """Return `cfg` if it is a config of this kernel, and, with `inv`, one for that call.

        Numbers of NumPy in it are turned into Python's.

        Raises a `TypeError` for another class or a field of another type, and a `ValueError` for a
        field that is not within the `limits` of the implementation (default: the one that handles
        the call).
        """
        self.check_config_class(cfg, origin)
        if reasons := field_reasons(cfg):
            raise TypeError(self._refusal(cfg, origin, reasons))
        if inv is not None:
            named = getattr(cfg, IMPLEMENTATION, None)
            if named is not None and requested(inv) not in (None, named):
                reason = f"the call requests {IMPLEMENTATION}={requested(inv)!r}"
                raise ValueError(self._refusal(cfg, origin, [reason]))
            chosen = implementation or implementation_for(self, inv, cfg)
            if not chosen.takes(cfg):
                raise TypeError(self._not_of(cfg, origin, (chosen.config,), f" for {chosen.name}"))
            if reasons := limit_reasons(chosen, cfg, inv):
                raise ValueError(self._refusal(cfg, origin, reasons))
        return with_plain_numbers(cfg)  # type: ignore[no-any-return]

    def check_config_class(self, cfg: Any, origin: str = "cfg is") -> Cfg:
        """Return `cfg` if it is of a config class of this kernel, else raise a `TypeError`."""
        classes = self.config_types
        known = all(isinstance(cls, type) for cls in classes)
        if classes and known and not isinstance(cfg, classes):
            raise TypeError(self._not_of(cfg, origin, classes))
        if cfg is None:
            raise TypeError(f"kernel {self.full_op_id}: {origin} None; a config is needed")
        return cfg  # type: ignore[no-any-return]

    def _not_of(self, cfg: Any, origin: str, classes: tuple[Any, ...], purpose: str = "") -> str:
        return (
            f"kernel {self.full_op_id}: {origin} {shown(cfg, 1000)} ({type(cfg).__name__}); "
            f"this kernel's configs{purpose} are {' or '.join(map(class_name, classes))} objects"
        )

    def _refusal(self, cfg: Any, origin: str, reasons: list[str]) -> str:
        return (
            f"kernel {self.full_op_id}: {origin} {shown(cfg, 1000)}, and {'; '.join(reasons)}. "
            "Change it, or leave the config out: then the kernel chooses one."
        )

    # --- the machinery behind __call__ -----------------------------------------------------------

    # `_call` is a slot: what Python finds as `Kernel.__call__` is its descriptor, which hands out
    # the instance's own callable from C. So calling a kernel is calling that callable, with no
    # Python in between; for a kernel without keywords it is the jitted function itself.
    __slots__ = ("__dict__", "__weakref__", "_call", "_entries")

    _entries: JittedCalls

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        self._make_callable()
        return self

    def _make_callable(self) -> None:
        entries = _make_entries(self)
        object.__setattr__(self, "_entries", entries)
        object.__setattr__(self, "_call", entries[None].fastest)

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles take along: not the ways in, which a copy makes anew."""
        return dict(self.__dict__)

    if TYPE_CHECKING:

        def __call__(self, *args: Any, **kwargs: Any) -> Out:
            """Run through the default executor; `cfg=` fixes the config of this call."""
            ...

    else:
        __call__ = None  # the slot's descriptor, below


Kernel.__call__ = Kernel._call  # type: ignore[attr-defined, method-assign]


def _for_implementation(cfg: Any, name: str) -> Any:
    """A config that says which implementation it is for, if its class alone does not."""
    return dataclasses.replace(cfg, implementation=name) if hasattr(cfg, IMPLEMENTATION) else cfg


def _give_both_names(cls: type) -> None:
    """A class that writes `config_space` has `candidate_cfgs` too, and the other way round."""
    for suffix in ("", *SUFFIXES):
        names = [method_name(method, suffix) for method in ("candidate_cfgs", "config_space")]
        for written, other in (names, names[::-1]):
            if written in vars(cls) and other not in vars(cls):
                setattr(cls, other, vars(cls)[written])


def _keep_builder_a_function(cls: type) -> None:
    """`key_builder = some_function(inv)` in a class body is meant as it is, not as a method."""
    builder = vars(cls).get("key_builder")
    if isinstance(builder, types.FunctionType) and builder.__code__.co_argcount == 1:
        cls.key_builder = staticmethod(builder)  # type: ignore[attr-defined]


def _declared_config_type(cls: type) -> Any:
    for base in getattr(cls, "__orig_bases__", ()):
        origin = typing.get_origin(base)
        if isinstance(origin, type) and issubclass(origin, Kernel):
            declared = next(iter(typing.get_args(base)), Any)
            if not isinstance(declared, (TypeVar, str)) and declared is not Any:
                return declared
    return None


def _name_from_class(cls: type) -> str:
    name = cls.__name__.removesuffix("Kernel") or cls.__name__
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower().strip("_")
