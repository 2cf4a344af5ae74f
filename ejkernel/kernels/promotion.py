"""Strict modes of JAX are about the code of those who turn them on, not about kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def usual_promotion(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The function, traced with JAX's usual promotion of dtypes and ranks, whatever the mode is."""

    @functools.wraps(function)
    def called(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return function(*args, **kwargs)

    return called
