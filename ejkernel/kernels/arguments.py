"""What every operation asks of its arguments; errors name the operation and the argument.

Everything is checked by shape and dtype alone, so errors come while tracing, under any transform.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.store import reading

LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).tiny)

LARGEST_CAP = 1e30
"""Of scores that are divided by more, float32 has no digits left: below 1e-8 they would be zero."""


def checked_array(operation: str, name: str, value: Any) -> jax.Array:
    """An array of JAX, or of NumPy as JAX takes it; lists and numbers are none, as in `jax.numpy`.

    >>> checked_array("norm", "x", np.ones(2)).dtype
    dtype('float32')
    >>> checked_array("norm", "x", [1.0, 1.0])
    Traceback (most recent call last):
    TypeError: norm: x must be an array, got [1.0, 1.0] (list); jnp.asarray makes one of it
    """
    if isinstance(value, jax.Array):
        return value
    if isinstance(value, (np.ndarray, np.generic)) and not isinstance(value, np.ma.MaskedArray):
        return _of_numpy(operation, name, value)
    if hasattr(value, "__jax_array__"):
        return jnp.asarray(value)
    if isinstance(value, jax.ShapeDtypeStruct):
        return value  # type: ignore[return-value]
    hint = "; jnp.asarray makes one of it" if isinstance(value, (list, tuple, int, float)) else ""
    raise TypeError(
        f"{operation}: {name} must be an array, got {shown(value)} ({type(value).__name__}){hint}"
    )


def _of_numpy(operation: str, name: str, value: Any) -> jax.Array:
    """NumPy's integers have 64 bits and JAX's usually 32: what does not fit must not wrap."""
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"{operation}: {name} is a NumPy array of {value.dtype}; JAX has none of these"
        ) from None
    if array.dtype != value.dtype and value.dtype.kind in "iu" and value.size:
        limits = np.iinfo(array.dtype)
        for number in (int(value.min()), int(value.max())):
            if not limits.min <= number <= limits.max:
                raise ValueError(
                    f"{operation}: {name} holds {number}, which is no {array.dtype}; "
                    "jax.enable_x64 has integers of 64 bits"
                )
    return array


def checked_floating(operation: str, name: str, value: Any) -> jax.Array:
    """An array of a floating type."""
    array = checked_array(operation, name, value)
    if not _is_floating(array.dtype):
        raise TypeError(
            f"{operation}: {name} is {array.dtype}; it must be a floating type, such as float32 or "
            f"bfloat16{_cast_hint(array.dtype)}"
        )
    return array


def checked_integers(operation: str, name: str, value: Any) -> jax.Array:
    """An array of an integer type."""
    array = checked_array(operation, name, value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(
            f"{operation}: {name} is {array.dtype}; it must hold integers, of an integer type such "
            "as int32"
        )
    return array


def refuse_empty(operation: str, name: str, array: Any) -> None:
    """Raise if an axis has no elements."""
    if 0 in array.shape:
        raise ValueError(f"{operation}: {name} has shape {array.shape}; no axis may be empty")


def check_axes(operation: str, arrays: Mapping[str, tuple[Any, str]], *, advice: str = "") -> None:
    """Raise if an array lacks an axis of its layout, or if arrays differ in one that they share.

    A layout names the axes of an array; `...` stands for any number of leading ones.

    >>> x = np.ones((3, 5))
    >>> check_axes("product", {"x": (x, "m k"), "w": (x, "k n")})
    Traceback (most recent call last):
    ValueError: product: w has shape (3, 5); it must be (5, n): of x (3, 5) and w (3, 5) k must be \
equal
    """
    known: dict[str, tuple[tuple[Any, ...], str]] = {}  # the sizes of an axis, and of which array
    for name, (array, layout) in arrays.items():
        axes = layout.split()
        leading = array.ndim - len(axes) + 1 if axes[0] == "..." else 1
        if leading < 0 or array.ndim != len(axes) - 1 + leading:
            raise ValueError(
                f"{operation}: {name} has shape {array.shape}; it must be {_as_shape(axes)}"
            )
        refuse_empty(operation, name, array)
        parts = [array.shape[:leading], *((size,) for size in array.shape[leading:])]
        for axis, sizes in zip(axes, parts, strict=True):
            first, other = known.setdefault(axis, (sizes, f"{name} {array.shape}"))
            if sizes != first:
                needed = [size for part in axes for size in known.get(part, ((part,),))[0]]
                shared = "the leading axes" if axis == "..." else axis
                raise ValueError(
                    f"{operation}: {name} has shape {array.shape}; it must be {_as_shape(needed)}: "
                    f"of {other} and {name} {array.shape} {shared} must be equal{advice}"
                )


def _as_shape(sizes: Sequence[Any]) -> str:
    return f"({', '.join(map(str, sizes))}{',' if len(sizes) == 1 else ''})"


def check_one_dtype(operation: str, arrays: Mapping[str, jax.Array]) -> None:
    """Raise if the arrays, by name, are not all of one dtype."""
    if len({array.dtype for array in arrays.values()}) > 1:
        given = ", ".join(f"{name} {array.dtype}" for name, array in arrays.items())
        raise TypeError(f"{operation}: all arrays must have one dtype, got {given}; cast them")


def checked_flag(operation: str, name: str, value: Any) -> bool:
    """A `bool` that is known while tracing."""
    constant = _constant(operation, name, value, "True or False")
    if isinstance(constant, (bool, np.bool_, int, np.integer)) and constant in (0, 1):
        return bool(constant)
    raise TypeError(f"{operation}: {name} must be True or False, got {shown(value)}")


def checked_number(
    operation: str,
    name: str,
    value: Any,
    *,
    least: float = -LARGEST,
    above: float = -math.inf,
    below: float = math.inf,
    advice: str = "",
) -> float:
    """A finite `float` that is known while tracing, and within limits."""
    constant = _constant(operation, name, value, "a number", advice)
    if isinstance(constant, (bool, np.bool_)) or not isinstance(
        constant, (int, float, np.integer, np.floating)
    ):
        raise TypeError(f"{operation}: {name} must be a number, got {shown(value)}")
    # Kernels compute with float32: there 1 - 1e-12 is 1, and 1e-50 is 0.
    if -LARGEST <= constant <= LARGEST and constant >= least:
        rounded = float(np.float32(constant))
        if above < rounded < below:
            return float(constant)
    bounds = [
        *([f"at least {least}"] if least > -LARGEST else []),
        *(["positive" if above == 0 else f"above {above}"] if above > -math.inf else []),
        *([f"below {below}"] if below < math.inf else []),
    ]
    said = " and ".join(["finite in float32", *bounds])
    raise ValueError(f"{operation}: {name}={shown(value)} must be {said}")


def checked_integer(operation: str, name: str, value: Any, *, least: int, most: int) -> int:
    """An `int` that is known while tracing, and within limits."""
    constant = _constant(operation, name, value, "an int")
    try:
        if isinstance(constant, (bool, np.bool_)):
            raise TypeError
        number = operator.index(constant)
    except TypeError:
        raise TypeError(f"{operation}: {name} must be an int, got {shown(value)}") from None
    if not least <= number <= most:
        raise ValueError(f"{operation}: {name}={number} must be from {least} to {most}")
    return number


def checked_choice(operation: str, name: str, value: Any, choices: Sequence[str]) -> str:
    """One of some names."""
    if isinstance(value, str) and value in choices:
        return value
    known = ", ".join(map(repr, choices))
    raise (ValueError if isinstance(value, str) else TypeError)(
        f"{operation}: {name}={shown(value)} must be one of {known}"
    )


def checked_precision(operation: str, value: Any) -> str:
    """The precision of products, by its name."""
    if isinstance(value, (str, jax.lax.Precision)):
        try:
            return jax.lax.Precision(value).name.lower()
        except ValueError:
            pass
    raise (ValueError if isinstance(value, str) else TypeError)(
        f"{operation}: precision={shown(value)} must be 'default', 'high' or 'highest'"
    )


def checked_floating_type(operation: str, name: str, value: Any) -> np.dtype[Any]:
    """A floating dtype, from anything that names one."""
    try:
        # A Python object is no dtype, though NumPy takes some for `object`.
        dtype: np.dtype[Any] | None = None if _holds_data(value) else np.dtype(jnp.dtype(value))
    except TypeError:
        dtype = None
    if dtype is None or not _is_floating(dtype):
        raise TypeError(
            f"{operation}: {name}={shown(value)} must be a floating type, such as float32 or "
            "bfloat16"
        )
    return dtype


def checked_soft_cap(operation: str, cap: Any) -> float:
    """A positive number that scores can be divided by."""
    advice = "it is a constant of the model"
    number = checked_number(operation, "logits_soft_cap", cap, above=0, advice=advice)
    if not SMALLEST <= number <= LARGEST_CAP:
        raise ValueError(
            f"{operation}: logits_soft_cap={shown(cap)} must be positive, from {SMALLEST} to "
            f"{LARGEST_CAP}: scores are divided by it; None means no cap"
        )
    return number


def given_options(operation: str, implementation: Any, cfg: Any) -> dict[str, Any]:
    """What every operation passes on, where it is given."""
    options = {}
    if implementation is not None:
        if not isinstance(implementation, str):
            raise TypeError(
                f"{operation}: implementation={shown(implementation)} must be a name, such as 'xla'"
            )
        options["implementation"] = implementation
    if cfg is not None:
        if _holds_data(cfg):
            raise TypeError(f"{operation}: cfg={shown(cfg)} must be a config, not an array")
        options["cfg"] = cfg
    return options


def shown(value: Any) -> str:
    """A value in an error: short, and not the whole of an array."""
    if isinstance(value, jax.core.Tracer):
        return f"a tracer ({value.aval})"
    if isinstance(value, (jax.Array, np.ndarray)) and value.size > 1:
        return f"an array {value.dtype}{list(value.shape)}"
    return reading.shown(value)


def _constant(operation: str, name: str, value: Any, kind: str, advice: str = "") -> Any:
    """A scalar of Python or NumPy. What JAX computes is none: under `jit` it would be traced."""
    if isinstance(value, jax.Array):
        more = f"; {advice}" if advice else ""
        raise TypeError(
            f"{operation}: {name} must be {kind} known while tracing, got {shown(value)}{more}"
        )
    return value[()] if isinstance(value, np.ndarray) and value.ndim == 0 else value


def _is_floating(dtype: Any) -> bool:
    """Of 16 bits or more: JAX does not mix smaller ones with others."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize >= 2


def _cast_hint(dtype: Any) -> str:
    return ", of 16 bits or more; cast it" if jnp.issubdtype(dtype, jnp.floating) else ""


def _holds_data(value: Any) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, np.generic))
