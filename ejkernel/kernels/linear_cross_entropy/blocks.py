"""The configs of the loss, and block sizes that are good without measuring."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

from ejkernel.ops import BwdParams, FwdParams, device_kind


@dataclasses.dataclass(frozen=True)
class LinearCrossEntropyConfig:
    """Tiles of the forward and of the backward pass; None leaves one to the heuristic.

    `blocksize_m` is a number of rows, `blocksize_n` of words, `blocksize_k` of features. With the
    XLA implementation `fwd` is for the loss alone, `bwd` for the loss with its gradients.
    """

    fwd: FwdParams = dataclasses.field(default_factory=FwdParams)
    bwd: BwdParams = dataclasses.field(default_factory=BwdParams)


def config(
    forward: tuple[int, ...], backward: tuple[int, ...], **launch: int
) -> LinearCrossEntropyConfig:
    """A config of two tiles: rows, words, features, as many of them as are given."""
    names = ("blocksize_m", "blocksize_n", "blocksize_k")
    return LinearCrossEntropyConfig(
        FwdParams(**dict(zip(names, forward, strict=False)), **launch),
        BwdParams(**dict(zip(names, backward, strict=False))),
    )


class Sizes(NamedTuple):
    """What block sizes are chosen by."""

    rows: int
    features: int
    vocab: int
    itemsize: int

    @staticmethod
    def of(hidden: Any, weight: Any, *, vocab_first: bool = False, **_: Any) -> Sizes:
        features = hidden.shape[-1]
        vocab = weight.shape[0 if vocab_first else 1]
        return Sizes(hidden.size // features, features, vocab, hidden.dtype.itemsize)


def xla_rows(sizes: Sizes) -> int:
    """Rows whose logits exist at a time, if only the loss is wanted.

    On a CPU (interleaved timings, two Zen 3 cores): logits are read again and should be near, so
    4 MiB of them, or 256 rows; 1024 rows of 10,000 words took 1.7 times as long. Elsewhere: logits
    of 256 MiB.
    """
    most = 2**20 if device_kind() == "cpu" else 2**26
    return min(sizes.rows, max(256, most // sizes.vocab))


def xla_blocks(sizes: Sizes) -> tuple[int, int]:
    """With gradients: rows at a time, and words whose weights are updated at a time.

    On a CPU (interleaved timings, two Zen 3 cores), by the size of the weight's gradient, which
    every chunk of rows reads and writes:

    * Up to 32 MiB that is cheap, and logits should be near: about 8 MiB of them, all words at a
      time. 1024 rows of 64 features and 10,000 words took 0.5 of the time of one chunk, 0.8 of
      that of 4096 words at a time; 13 other sizes 0.88 to 1.0 of that of 1024 words. Fewer than
      256 rows took up to 1.1 of the time of 256, and with 1024 features 512 rows 0.96 of it.
    * Beyond, few chunks are fast ones: 512 rows of 50,257 words and 1024 features took 1.0 of the
      plain loss's time in one chunk, 1.6 in two, 2.1 in four. Logits of 128 MiB are allowed, and
      256 rows whatever they need. The product that is added to the gradient should stay in the
      cache: 1024 words of 1024 features, 4 MiB.

    Elsewhere: logits of 256 MiB, and few enough steps that each fills the device.
    """
    if device_kind() == "cpu" and sizes.features * sizes.vocab <= 2**23:
        near = 2 ** round(math.log2(2**21 / sizes.vocab))
        return min(sizes.rows, max(256, sizes.features // 2, near)), sizes.vocab
    if device_kind() == "cpu":
        rows = max(256, 2**25 // sizes.vocab)
        return min(sizes.rows, rows), min(sizes.vocab, max(256, 2**20 // sizes.features))
    return xla_rows(sizes), min(sizes.vocab, 16384)


def tpu_tile(sizes: Sizes, *, backward: bool) -> tuple[int, int]:
    """Rows and words of a tile that fits into VMEM."""
    from . import pallas_tpu

    return pallas_tpu.default_tile(*sizes, backward=backward)
