"""Block sizes and launch parameters that most attention and matmul configs are made of."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class FwdParams:
    """Parameters of a forward kernel; `None` leaves the choice to the kernel.

    >>> FwdParams(q_blocksize=128, kv_blocksize=64).kv_blocksize
    64
    """

    q_blocksize: int | None = None
    kv_blocksize: int | None = None
    blocksize_m: int | None = None
    blocksize_n: int | None = None
    blocksize_k: int | None = None
    blocksize_heads: int | None = None
    blocksize_keys: int | None = None
    num_key_splits: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None


@dataclasses.dataclass(frozen=True)
class BwdParams:
    """Parameters of a backward kernel; `None` leaves the choice to the kernel."""

    q_blocksize: int | None = None
    kv_blocksize: int | None = None
    blocksize_m: int | None = None
    blocksize_n: int | None = None
    blocksize_k: int | None = None
    blocksize_heads: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
