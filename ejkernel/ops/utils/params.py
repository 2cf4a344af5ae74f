"""Block sizes and launch parameters that most attention and matmul configs are made of."""

from __future__ import annotations

import dataclasses

from .serialize import declare_type


@dataclasses.dataclass(frozen=True, repr=False)
class _Params:
    """What both passes have; shows the fields that have a value: of ten, two or three do."""

    q_blocksize: int | None = None
    kv_blocksize: int | None = None
    blocksize_m: int | None = None
    blocksize_n: int | None = None
    blocksize_k: int | None = None
    blocksize_heads: int | None = None

    def __repr__(self) -> str:
        given = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        shown = ", ".join(f"{name}={value!r}" for name, value in given if value is not None)
        return f"{type(self).__name__}({shown})"


@dataclasses.dataclass(frozen=True, repr=False)
class FwdParams(_Params):
    """Parameters of a forward kernel; `None` leaves the choice to the kernel.

    >>> FwdParams(q_blocksize=128, kv_blocksize=64)
    FwdParams(q_blocksize=128, kv_blocksize=64)
    """

    blocksize_keys: int | None = None
    num_key_splits: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None


@dataclasses.dataclass(frozen=True, repr=False)
class BwdParams(_Params):
    """Parameters of a backward kernel; `None` leaves the choice to the kernel."""

    num_warps: int | None = None
    num_stages: int | None = None


declare_type(FwdParams)
declare_type(BwdParams)
