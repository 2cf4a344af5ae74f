"""`tunable`: a function whose keyword parameters are its config becomes a kernel."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import operator
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    ParamSpec,
    TypeVar,
    get_type_hints,
    overload,
)

import jax
import numpy as np

from .ops.core.implementation import Implementation
from .ops.core.invocation import Invocation
from .ops.core.kernel import Kernel, kernel_named
from .ops.core.space import Space
from .ops.execution.executor import default_executor
from .ops.utils.display import Explanation
from .ops.utils.fingerprint import is_array, stable_json
from .ops.utils.serialize import to_plain
from .store.reading import shown

if TYPE_CHECKING:
    from .tuning import TuningResult

P = ParamSpec("P")
R = TypeVar("R")

Values = Iterable[Any] | Callable[..., Iterable[Any]]
"""The values of one parameter, or a function that lists them from arguments of the call."""

Gradient = Callable[..., Any] | tuple[Callable[..., Any], Callable[..., Any]]


class Tunable(Kernel[Any, R], Generic[P, R]):
    """A function with a config: what `tunable` makes. It is a `Kernel`, and called as the function.

    Attributes:
      Config: the class of its configs, a frozen dataclass with one field per tunable parameter.
    """

    Config: ClassVar[Any]
    _signature: ClassVar[inspect.Signature]
    _call_signature: ClassVar[inspect.Signature]  # without the config

    if TYPE_CHECKING:

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
            """Call the function; tunable parameters that are not given come from the config."""
            ...

    def tune(self, *args: Any, **kwargs: Any) -> TuningResult:
        """Measure all configs for these arguments and store the fastest: see `ejkernel.tune`."""
        from .tuning import tune

        return tune(self, *args, **kwargs)

    def best(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The config that a call with these arguments runs with."""
        return default_executor().choose_config(self, *args, **kwargs)

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> Explanation:
        """Why a call with these arguments runs with the config it runs with."""
        return default_executor().explain(self, *args, **kwargs)

    def bind(self, *args: Any, **kwargs: Any) -> Invocation[Any, R]:
        given = {name: kwargs.pop(name) for name in self.config_keywords if name in kwargs}
        if given:
            chosen = functools.partial(default_executor().choose_config, self, *args, **kwargs)
            kwargs["cfg"] = self.config_with(given, chosen)
        return super().bind(*args, **kwargs)

    def prepare(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments that are given by name go to their places, so that a call has one key."""
        kinds = {p.name: p.kind for p in self._signature.parameters.values()}
        names = [name for name, kind in kinds.items() if kind in _BY_POSITION]
        if len(args) > len(names) and inspect.Parameter.VAR_POSITIONAL not in kinds.values():
            raise TypeError(
                f"{self.op_id}() takes {len(names)} positional arguments ({', '.join(names)}), and "
                f"{len(args)} were given; {', '.join(self.config_keywords)} and options are given "
                "by keyword"
            )
        at = next((i for i, n in enumerate(names) if n in self.config_keywords), len(names))
        if len(args) > at < len(names):
            raise TypeError(
                f"{self.op_id}: argument {at + 1} is {names[at]}, which is tunable: give it by "
                f"keyword ({names[at]}=…), or leave it out"
            )
        try:
            self._call_signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"{self.op_id}(): {error}; its signature is {self._signature}"
            ) from None
        for name in names[len(args) : at]:
            if name not in kwargs:
                break
            args = (*args, kwargs.pop(name))
        for name, arg in zip(names, args, strict=False):
            self._check_argument(name, arg)
        return args, kwargs

    def _check_argument(self, name: str, argument: Any) -> None:
        try:
            stable_json([leaf for leaf in jax.tree.leaves(argument) if not is_array(leaf)])
        except TypeError as error:
            raise TypeError(
                f"{self.op_id}: {name}={shown(argument)} cannot be part of a call's key. If it "
                "holds arrays, register its class as a pytree (jax.tree_util.register_dataclass); "
                "if it holds options, make it a frozen dataclass"
            ) from error

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else BoundTunable(self, instance)

    def __reduce__(self) -> str:
        return type(self).__qualname__  # a decorated function is found by its name

    def __repr__(self) -> str:
        return f"tunable({self.full_op_id!r}, {', '.join(self.config_keywords)})"


class BoundTunable(functools.partial[Any]):
    """A tunable function as a method of an object: `layer.attend(x)`, `layer.attend.tune(x)`."""

    def __getattr__(self, name: str) -> Any:
        if name in ("tune", "best", "explain", "bind"):
            return functools.partial(getattr(self.func, name), *self.args)
        return getattr(self.func, name)


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@overload
def tunable(
    function: Callable[P, R],
    /,
    *,
    space: Space | Mapping[str, Values] | Sequence[Mapping[str, Any]] | None = ...,
    reference: Callable[..., Any] | None = ...,
    constraint: Callable[..., bool] | Sequence[Callable[..., bool]] = ...,
    heuristic: Mapping[str, Any] | Callable[..., Mapping[str, Any]] | None = ...,
    name: str | None = ...,
    version: str = ...,
    make_inputs: Callable[..., Any] | None = ...,
    backward: Gradient | None = ...,
    **values: Values,
) -> Tunable[P, R]: ...
@overload
def tunable(
    space: Space | Mapping[str, Values] | Sequence[Mapping[str, Any]] | None = ...,
    /,
    **options: Any,
) -> Callable[[Callable[P, R]], Tunable[P, R]]: ...
def tunable(
    what: Any = None,
    /,
    *,
    space: Any = None,
    reference: Callable[..., Any] | None = None,
    constraint: Any = (),
    heuristic: Any = None,
    name: str | None = None,
    version: str = "1",
    make_inputs: Callable[..., Any] | None = None,
    backward: Any = None,
    **values: Any,
) -> Any:
    """Let some parameters of a function be chosen by measurement.

    ::

        @tunable(block=[64, 128, 256])
        def total(x, *, block=128):
            return jax.lax.map(jnp.sum, x.reshape(-1, block)).sum()

        total(x)              # block from the store, else 128
        total(x, block=256)   # this value
        total.tune(x)         # measured, checked, stored; later calls use it, in any process

    The parameters that are named here are the config, and their defaults are the heuristic config.
    The others are the call: arrays (pytrees of them too), and options, which are given by keyword.
    The result is a `Kernel`. It jits by itself; `jax.jit` may stand above it or below it.

    Args:
      what: the function, where `tunable` is called around somebody else's; or the space.
      space: the values of each parameter, as a mapping or a `Space`; or a list of combinations,
        each a mapping.
      reference: the definition in plain JAX, with the same arguments except for the config.
        Candidates are compared with it; default: with the result of the heuristic config.
      constraint: one or several functions that say whether a combination may run. They take tunable
        parameters and arguments of the call by name: `lambda block, x: x.size % block == 0`.
      heuristic: a mapping, or a function that gives one; it takes arguments of the call by name.
        What it leaves out has the default of the function's signature, or the first value.
      name: of the operation, in stores and labels; default: the function's own.
      version: raise it when a change makes stored configs meaningless.
      make_inputs: `make_inputs(inv, key) -> (args, kwargs)`, realistic inputs to measure with.
      backward: a gradient of your own. One function, `backward(out, dout, *args, **keywords)`; or
        two, `forward(*args, **keywords) -> (out, residuals)` and
        `backward(residuals, out, dout, *args, **keywords)`. The keywords hold the config. Gradients
        come as a tuple, one for each positional argument. Default: JAX differentiates the function.
      values: the values of each tunable parameter: a list, or a function that makes one from
        arguments of the call, which it takes by name.

    >>> import jax, jax.numpy as jnp
    >>> @tunable(block=[1, 2, 4], constraint=lambda block, x: x.size % block == 0)
    ... def total(x, *, block=4):
    ...     return jax.lax.map(jnp.sum, x.reshape(-1, block)).sum()
    >>> float(total(jnp.arange(6.0)))
    15.0
    >>> total.candidates(total.bind(jnp.arange(6.0)))
    [TotalConfig(block=1), TotalConfig(block=2)]
    """
    is_function = not isinstance(what, Space) and (callable(what) or isinstance(what, classmethod))
    if what is not None and not is_function:
        if space is not None:
            raise TypeError(
                "tunable: the space is given twice, as the first argument and as space="
            )
        space = what
    make = functools.partial(
        _tunable,
        module=sys._getframe(1).f_globals.get("__name__", "__main__"),
        space=space,
        reference=reference,
        constraint=constraint,
        heuristic=heuristic,
        name=name,
        version=version,
        make_inputs=make_inputs,
        backward=backward,
        values=values,
    )
    return make(what) if is_function else make


def _tunable(function: Any, **options: Any) -> Any:
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(_made(function.__func__, **options))
    return _made(function, **options)


def _made(
    function: Any,
    *,
    module: str,
    space: Any,
    reference: Any,
    constraint: Any,
    heuristic: Any,
    name: str | None,
    version: str,
    make_inputs: Any,
    backward: Any,
    values: dict[str, Any],
) -> Any:
    if not callable(function) or isinstance(function, (Kernel, type)):
        raise TypeError(f"tunable: {function!r} is no function that could be tuned")
    if _returns_no_arrays(function):
        raise TypeError(f"tunable: {function!r} is a generator or asynchronous; JAX traces neither")
    title = name or _title(function)
    if title == "<lambda>":
        raise TypeError("tunable: a lambda has no name for stores and labels; give it one: name=…")
    points = _Points(f"tunable({title})", function, space, values, constraint, heuristic)
    config = points.config_class(title, module)
    # The kernel jits it, with the config built in: a `jit` inside would trace the config.
    plain = function
    while hasattr(plain, "lower") and hasattr(plain, "__wrapped__"):
        plain = plain.__wrapped__

    def run(*args: Any, cfg: Any, **kwargs: Any) -> Any:
        try:
            return plain(*args, **kwargs, **_keywords(cfg))
        except Exception as error:
            error.add_note(f"{title} ran with {cfg}")
            _explain_traced_options(error, title, points.signature, args)
            raise

    run.__signature__ = points.call_signature  # type: ignore[attr-defined]
    passes = _passes(f"tunable({title})", run, backward)
    namespace: dict[str, Any] = {
        "__module__": module,
        "__qualname__": getattr(function, "__qualname__", title),
        "implementations": (Implementation(name="run", config=config, **passes),),
        "config_keywords": points.names,
        "function": staticmethod(plain),
        "Config": config,
        "_signature": points.signature,
        "_call_signature": points.call_signature,
    }
    # The gradient is here only to be read: with another one, entries are stale.
    rules = backward if isinstance(backward, tuple) else (backward,)
    written = {"reference": reference, "make_inputs": make_inputs}
    written |= {f"gradient_{number}": rule for number, rule in enumerate(rules)}
    for key, given in written.items():
        if given is not None:
            namespace[key] = staticmethod(given)
    _warn_of_namesake(f"{title}@v{version}", function)
    kernel = type(title, (Tunable,), namespace)(name=title, version=version)
    # Without the function's attributes: one called `version` would be taken for the kernel's.
    return functools.update_wrapper(kernel, function, updated=())


def _title(function: Any) -> str:
    """The function's name, with that of its class: `Layer.attend`."""
    named = function.func if isinstance(function, functools.partial) else function
    qualified: str = getattr(named, "__qualname__", "") or type(named).__name__
    return qualified.rpartition("<locals>.")[2]


def _returns_no_arrays(function: Any) -> bool:
    kinds = (
        inspect.isgeneratorfunction,
        inspect.iscoroutinefunction,
        inspect.isasyncgenfunction,
    )
    return any(is_of_kind(inspect.unwrap(function)) for is_of_kind in kinds)


def _warn_of_namesake(full_op_id: str, function: Any) -> None:
    """Two functions under one name would overwrite each other's stored configs."""
    other = kernel_named(full_op_id)
    if not isinstance(other, Tunable):
        return
    first, second = (
        f"{getattr(owner, '__module__', '')}.{getattr(owner, '__qualname__', '<locals>')}"
        for owner in (other, function)
    )
    if first != second and "<locals>" not in first + second:
        warnings.warn(
            f"two tunable functions are called {full_op_id}: {first} and {second}. Their stored "
            "configs overwrite each other; give one of them a name of its own: tunable(name=…)",
            stacklevel=4,
        )


def _explain_traced_options(
    error: Exception, title: str, signature: inspect.Signature, args: tuple[Any, ...]
) -> None:
    """Python values that are given by position are traced; a function may not expect that."""
    names = [p.name for p in signature.parameters.values() if p.kind in _BY_POSITION]
    traced = [
        name
        for name, arg in zip(names, args, strict=False)
        if isinstance(arg, jax.core.Tracer)
        and not arg.ndim
        and (arg.weak_type or arg.dtype == bool)
    ]
    if traced and isinstance(error, TypeError):
        error.add_note(
            f"{title}: {', '.join(traced)} was given by position, where Python values are traced "
            f"like arrays. Give options by keyword: {', '.join(f'{name}=…' for name in traced)}"
        )


class _Points:
    """The tunable parameters of a function: their values, constraints and heuristic."""

    def __init__(
        self,
        where: str,
        function: Any,
        space: Any,
        values: dict[str, Any],
        constraint: Any,
        heuristic: Any,
    ) -> None:
        self.where = where
        self.signature = inspect.signature(function)
        self.parameters = self.signature.parameters
        self.combinations: list[Mapping[str, Any]] | None = None
        constraints = [constraint] if callable(constraint) else list(constraint)
        if isinstance(space, Space):
            constraints += space.constraints
            space = space.dimensions
        if isinstance(space, Mapping):
            values = {**space, **values}
        elif space is not None:
            self.combinations = [dict(point) for point in space]
            values = {
                n: [p[n] for p in self.combinations if n in p]
                for n in dict.fromkeys(itertools.chain(*self.combinations))
            }
        self.names = tuple(values)
        if not self.names:
            raise TypeError(
                f"{where}: say which parameters are tunable and their values, as in "
                "@tunable(block=[64, 128])"
            )
        for name in self.names:
            self._check_parameter(name)
        self.call_signature = self._without_config()
        self._hints = _type_hints(function)
        self.values = {name: self._checked_values(name, given) for name, given in values.items()}
        self.constraints = [self._asking("constraint", c, self.names) for c in constraints]
        if heuristic is not None and not isinstance(heuristic, Mapping):
            heuristic = self._asking("heuristic", heuristic)
        self._heuristic = heuristic

    # --- what is refused -------------------------------------------------------------------------

    def _check_parameter(self, name: str) -> None:
        if name in ("cfg", "implementation"):
            raise TypeError(
                f"{self.where}: a call gives {_RESERVED[name]} as {name}=; the parameter needs "
                "another name"
            )
        if name in _METHODS:
            raise TypeError(
                f"{self.where}: a tunable parameter cannot be named {name!r}, which every config "
                "class has already"
            )
        parameter = self.parameters.get(name)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())
        if parameter is None and takes_any:
            return
        if parameter is None or parameter.kind not in _BY_KEYWORD:
            raise TypeError(
                f"{self.where}: {name!r} is no keyword parameter of the function, whose signature "
                f"is {self.signature}"
            )

    def _checked_values(self, name: str, values: Any) -> Any:
        if callable(values):
            return self._asking(name, values)
        if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
            raise TypeError(
                f"{self.where}: {name}={values!r} must be a list of values, or a function that "
                "gives one"
            )
        listed = np.asarray(values).tolist() if is_array(values) else values
        distinct: dict[Any, Any] = {}
        for value in map(_plain_number, listed):
            self._check_value(name, value)
            distinct.setdefault((type(value), value), value)  # 1 and True are equal, not the same
        if not distinct:
            raise ValueError(f"{self.where}: {name}=[] has no values to try")
        return list(distinct.values())

    def _check_value(self, name: str, value: Any) -> None:
        try:
            hash(value)
            to_plain(value)
        except TypeError:
            raise TypeError(
                f"{self.where}: {name}={value!r} ({type(value).__name__}) cannot be the value of a "
                "config, which is hashed and stored; use numbers, strings, None, dtypes, enums, "
                "tuples or frozen dataclasses (for a function its name)"
            ) from None

    def _asking(self, what: str, function: Any, more: Iterable[str] = ()) -> Callable[..., Any]:
        """A function that takes what it names: arguments of the call, `inv`, and `more`."""
        if not callable(function):
            raise TypeError(f"{self.where}: {what}={function!r} must be a function")
        wanted = inspect.signature(function).parameters.values()
        known = {"inv", *self.parameters, *more} - (set(self.names) - set(more))
        unknown = [p.name for p in wanted if p.name not in known and p.default is p.empty]
        if unknown:
            raise TypeError(
                f"{self.where}: the function for {what} asks for {', '.join(unknown)}; it may ask "
                f"for {', '.join(sorted(known))}"
            )
        names = [p.name for p in wanted if p.name in known]
        return lambda known: function(**{name: known[name] for name in names if name in known})

    def _without_config(self) -> inspect.Signature:
        """The signature of a call that leaves the config out.

        What stands after a tunable parameter has no position in such a call.
        """
        parameters, by_position = [], True
        for parameter in self.parameters.values():
            if parameter.name in self.names:
                by_position = by_position and parameter.kind not in _BY_POSITION
            elif by_position or parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
                parameters.append(parameter)
            else:
                parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
        ordered = sorted(parameters, key=lambda parameter: parameter.kind)
        return self.signature.replace(parameters=ordered)

    # --- what a config class is made of ----------------------------------------------------------

    def config_class(self, title: str, module: str) -> Any:
        """A frozen dataclass with a field for each tunable parameter."""
        parts = re.split(r"\W|_", title)
        name = "".join(part[:1].upper() + part[1:] for part in parts) + "Config"
        fields = [(name, self._type_of(name)) for name in self.names]
        namespace = {
            "heuristic": classmethod(lambda cls, inv: cls(**self.heuristic(inv))),
            "space": classmethod(lambda cls, inv: [cls(**point) for point in self.allowed(inv)]),
            "unfit": lambda cfg, inv: self.unfit(_keywords(cfg), inv),
            "__module__": module,
            "__doc__": f"The tunable parameters of `{title}`.",
        }
        return dataclasses.make_dataclass(name, fields, namespace=namespace, frozen=True)

    def _type_of(self, name: str) -> Any:
        """What the values of a parameter are, so that a stored one is read back as it was."""
        values = self.values[name]
        if callable(values):
            return self._hints.get(name, Any)
        default = self.parameters[name].default if name in self.parameters else _MISSING
        known = [*values, *([] if default is _MISSING else [_plain_number(default)])]
        return functools.reduce(operator.or_, dict.fromkeys(map(_type_of_value, known)))

    def heuristic(self, inv: Invocation[Any, Any]) -> dict[str, Any]:
        """The defaults; where a constraint excludes them, the first combination that is allowed."""
        known = self._known(inv)
        given = self._heuristic(known) if callable(self._heuristic) else self._heuristic
        point = self._completed(dict(given or {}), known)
        if unknown := point.keys() - set(self.names):
            raise TypeError(f"{self.where}: heuristic gives {', '.join(map(str, unknown))}")
        if given or self._is_allowed(point, known):
            return point
        if (first := next(iter(self.allowed(inv)), None)) is not None:
            return first
        raise ValueError(
            f"{self.where}: no combination of {', '.join(self.names)} meets the constraint for "
            f"{inv.signature}, nor do the defaults"
        )

    def _completed(self, point: Mapping[str, Any], known: dict[str, Any]) -> dict[str, Any]:
        missing = [name for name in self.names if name not in point]
        return {**point, **{name: self._default(name, known) for name in missing}}

    def _default(self, name: str, known: dict[str, Any]) -> Any:
        default = self.parameters[name].default if name in self.parameters else _MISSING
        return self._listed(name, known)[0] if default is _MISSING else _plain_number(default)

    def _listed(self, name: str, known: dict[str, Any]) -> list[Any]:
        values: Any = self.values[name]
        if callable(values):
            values = self._checked_values(name, values(known))
        return list(values)

    def allowed(self, inv: Invocation[Any, Any]) -> Iterator[dict[str, Any]]:
        """The combinations that meet the constraints."""
        known = self._known(inv)
        points: Iterable[Mapping[str, Any]] = self.combinations or (
            dict(zip(self.names, point, strict=True))
            for point in itertools.product(*(self._listed(name, known) for name in self.names))
        )
        for point in points:
            if self._is_allowed(complete := self._completed(point, known), known):
                yield complete

    def unfit(self, point: dict[str, Any], inv: Invocation[Any, Any]) -> str | None:
        """Why a combination may not run: it does not meet a constraint."""
        if self._is_allowed(point, self._known(inv)):
            return None
        return "the constraint of the function excludes this combination for these arguments"

    def _is_allowed(self, point: dict[str, Any], known: dict[str, Any]) -> bool:
        return all(constraint({**known, **point}) for constraint in self.constraints)

    def _known(self, inv: Invocation[Any, Any]) -> dict[str, Any]:
        """The arguments of a call by name."""
        kwargs = {name: value for name, value in inv.kwargs.items() if name in self.parameters}
        bound = self.signature.bind_partial(*inv.args, **kwargs)
        bound.apply_defaults()
        return {**bound.arguments, "inv": inv}


_MISSING = inspect.Parameter.empty
_METHODS = ("heuristic", "space", "unfit")
_BY_KEYWORD = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


_RESERVED = {"cfg": "its whole config", "implementation": "the implementation to run"}


def _plain_number(value: Any) -> Any:
    """A number of NumPy as Python's: a config that was stored is read back with those."""
    return value.item() if isinstance(value, np.generic) else value


def _type_of_value(value: Any) -> Any:
    """The type of a value, with the classes that its tuples hold: those are rebuilt by name."""
    if not isinstance(value, tuple) or type(value) is not tuple or not value:
        return type(value)
    inside = functools.reduce(operator.or_, dict.fromkeys(map(_type_of_value, value)))
    return tuple[inside, ...]  # type: ignore[valid-type]


def _type_hints(function: Any) -> dict[str, Any]:
    """The annotations of a function, where they can be read."""
    try:
        return get_type_hints(inspect.unwrap(function))
    except (NameError, TypeError, AttributeError):  # written for a type checker alone
        return {}


def _keywords(cfg: Any) -> dict[str, Any]:
    """The fields of a config as keywords; nested dataclasses stay what they are."""
    return {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}


def _passes(where: str, run: Callable[..., Any], backward: Any) -> dict[str, Any]:
    """The functions of an `Implementation`, with a gradient if there is one."""
    if backward is None:
        return {"forward": run}
    pair = backward if isinstance(backward, tuple) else (None, backward)
    if len(pair) != 2 or not callable(pair[1]) or not (pair[0] is None or callable(pair[0])):
        raise TypeError(
            f"{where}: backward={backward!r} must be one function, backward(out, dout, *args, "
            "**keywords), or two, (forward, backward), of which the first gives (out, residuals)"
        )
    ahead, behind = pair

    def forward(*args: Any, cfg: Any, **kwargs: Any) -> Any:
        if ahead is None:
            return run(*args, cfg=cfg, **kwargs), None
        return ahead(*args, **kwargs, **_keywords(cfg))

    def gradients(saved: Any, out: Any, dout: Any, *args: Any, cfg: Any, **kwargs: Any) -> Any:
        first = (out, dout) if ahead is None else (saved, out, dout)
        return behind(*first, *args, **kwargs, **_keywords(cfg))

    return {"forward": run, "forward_with_residuals": forward, "backward": gradients}
