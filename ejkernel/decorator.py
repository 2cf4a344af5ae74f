"""`tunable`: a function whose keyword parameters are its config becomes a kernel."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, ParamSpec, TypeVar, overload

from .ops.core.implementation import Implementation
from .ops.core.invocation import Invocation
from .ops.core.kernel import Kernel
from .ops.core.space import Space
from .ops.execution.executor import default_executor
from .ops.utils.display import Explanation

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
        for name in names[len(args) : at]:
            if name not in kwargs:
                break
            args = (*args, kwargs.pop(name))
        return args, kwargs

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> str:
        return type(self).__qualname__  # a decorated function is found by its name

    def __repr__(self) -> str:
        return f"tunable({self.full_op_id!r}, {', '.join(self.config_keywords)})"


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
def tunable(what: Any = None, /, **options: Any) -> Any:
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
    options["module"] = sys._getframe(1).f_globals.get("__name__", "__main__")
    if callable(what) and not isinstance(what, Space):
        return _made(what, **options)
    if what is not None:
        if options.get("space") is not None:
            raise TypeError(
                "tunable: the space is given twice, as the first argument and as space="
            )
        options["space"] = what
    return lambda function: _made(function, **options)


def _made(
    function: Any,
    *,
    module: str,
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
    if not callable(function) or isinstance(function, (Kernel, type)):
        raise TypeError(f"tunable: {function!r} is no function that could be tuned")
    named = function.func if isinstance(function, functools.partial) else function
    title = name or getattr(named, "__name__", None) or type(function).__name__
    if title == "<lambda>":
        raise TypeError("tunable: a lambda has no name for stores and labels; give it one: name=…")
    points = _Points(f"tunable({title})", function, space, values, constraint, heuristic)
    config = points.config_class(title, module)
    # The kernel jits it, with the config built in: a `jit` inside would trace the config.
    plain = function.__wrapped__ if hasattr(function, "lower") else function

    def run(*args: Any, cfg: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs, **_keywords(cfg))

    parameters = [p for p in points.parameters.values() if p.name not in points.names]
    run.__signature__ = points.signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    passes = _passes(f"tunable({title})", run, backward)
    namespace: dict[str, Any] = {
        "__module__": module,
        "__qualname__": getattr(function, "__qualname__", title),
        "implementations": (Implementation(name="run", config=config, **passes),),
        "config_keywords": points.names,
        "function": staticmethod(plain),
        "Config": config,
        "_signature": points.signature,
    }
    for key, given in (("reference", reference), ("make_inputs", make_inputs)):
        if given is not None:
            namespace[key] = staticmethod(given)
    kernel = type(title, (Tunable,), namespace)(name=title, version=version)
    return functools.update_wrapper(kernel, function)


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
        self.values = {name: self._checked_values(name, given) for name, given in values.items()}
        self.constraints = [self._asking("constraint", c, self.names) for c in constraints]
        if heuristic is not None and not isinstance(heuristic, Mapping):
            heuristic = self._asking("heuristic", heuristic)
        self._heuristic = heuristic

    # --- what is refused -------------------------------------------------------------------------

    def _check_parameter(self, name: str) -> None:
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
        distinct = list(dict.fromkeys(values))
        if not distinct:
            raise ValueError(f"{self.where}: {name}=[] has no values to try")
        return distinct

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

    # --- what a config class is made of ----------------------------------------------------------

    def config_class(self, title: str, module: str) -> Any:
        """A frozen dataclass with a field for each tunable parameter."""
        name = "".join(part[:1].upper() + part[1:] for part in title.split("_")) + "Config"
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
        default = self.parameters[name].default if name in self.parameters else _MISSING
        known = [] if callable(values) else [*values, *([default] if default != _MISSING else [])]
        kinds = {type(value) for value in known}
        return functools.reduce(operator.or_, kinds) if kinds else Any

    def heuristic(self, inv: Invocation[Any, Any]) -> dict[str, Any]:
        """The defaults; where a constraint excludes them, the first combination that is allowed."""
        known = self._known(inv)
        given = self._heuristic(known) if callable(self._heuristic) else self._heuristic
        point = self._completed(dict(given or {}), known)
        if unknown := point.keys() - set(self.names):
            raise TypeError(f"{self.where}: heuristic gives {', '.join(map(str, unknown))}")
        if given or self._is_allowed(point, known):
            return point
        return next(iter(self.allowed(inv)), point)

    def _completed(self, point: Mapping[str, Any], known: dict[str, Any]) -> dict[str, Any]:
        missing = [name for name in self.names if name not in point]
        return {**point, **{name: self._default(name, known) for name in missing}}

    def _default(self, name: str, known: dict[str, Any]) -> Any:
        default = self.parameters[name].default if name in self.parameters else _MISSING
        return self._listed(name, known)[0] if default is _MISSING else default

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
_BY_KEYWORD = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


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
