"""Static figures against measured times, on this machine's CPU: how well do they rank configs?

    python benchmarks/static_ranking.py [--quick]

Spearman's rank correlation between figures and measured times of all configs of a call, and the
regret of the config that a figure would choose (its time over the best one's). 1.0 is a perfect
order, 0 none. The CPU is the only device where the project can measure; the schedule-based
estimates for TPU and CUDA cannot be compared with anything here.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile

import jax
import jax.numpy as jnp

from ejkernel import targets
from ejkernel.kernels.flash_attention import FlashAttention, FlashAttentionXlaConfig
from ejkernel.ops import Kernel, Tuner
from ejkernel.ops.config.outcome import Verdict
from ejkernel.ops.tuner.session import function_maker, tune_invocation
from ejkernel.ops.utils import environment
from ejkernel.ops.utils.display import brief, text_table
from ejkernel.targets.lowering import lower


@dataclasses.dataclass(frozen=True)
class Blocks:
    rows: int = 64
    columns: int = 64


class BlockedMatmul(Kernel[Blocks, jax.Array]):
    def run(self, x, y, *, cfg):
        left = x.reshape(-1, cfg.rows, x.shape[1])
        right = y.reshape(y.shape[0], -1, cfg.columns).swapaxes(0, 1)

        def row(block):
            return jax.lax.map(lambda column: block @ column, right)

        out = jax.lax.map(row, left)  # rows, columns, rows of a block, columns of a block
        return out.transpose(0, 2, 1, 3).reshape(x.shape[0], y.shape[1])

    def candidate_cfgs(self, inv):
        return [Blocks(r, c) for r in (16, 64, 256, 512) for c in (16, 64, 256, 512)]


class BlockedSoftmax(Kernel[Blocks, jax.Array]):
    def run(self, x, *, cfg):
        parts = x.reshape(-1, cfg.rows, x.shape[1])
        return jax.lax.map(jax.nn.softmax, parts).reshape(x.shape)

    def candidate_cfgs(self, inv):
        return [Blocks(rows) for rows in (1, 4, 16, 64, 256, 1024, 2048)]


def spearman(a: list[float], b: list[float]) -> float:
    """The correlation of the ranks of two lists; equal values share a rank."""

    def ranks(values: list[float]) -> list[float]:
        order = sorted(values)
        return [order.index(v) + (order.count(v) - 1) / 2 for v in values]

    ra, rb = ranks(a), ranks(b)
    if len(set(ra)) == 1 or len(set(rb)) == 1:
        return float("nan")
    return statistics.correlation(ra, rb)


def _cost(function, inv) -> dict[str, float]:
    jitted = jax.jit(lambda *args: function(*args, **inv.kwargs))
    cost = jitted.lower(*inv.args).compile().cost_analysis()
    return cost[0] if isinstance(cost, list) else cost


def figures(kernel, inv, configs) -> dict[str, list[float]]:
    result = targets.check(inv, target="cpu", configs=configs, jobs=1)
    programs = [lower(kernel, inv, cfg, targets.find("cpu")) for cfg in configs]
    compiled = [_cost(function_maker(inv, kernel)(cfg), inv) for cfg in configs]
    return {
        "cost_analysis: flops": [cost.get("flops", 0.0) for cost in compiled],
        "cost_analysis: bytes accessed": [cost.get("bytes accessed", 0.0) for cost in compiled],
        "as written: flops": [float(program.flops) for program in programs],
        "as written: bytes touched": [float(program.touched) for program in programs],
        "estimate of targets.check": [
            entry.estimate.seconds if entry.estimate else float("inf") for entry in result.entries
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small shapes, for a smoke test")
    quick = parser.parse_args().quick
    environment.preset("EJKERNEL_CACHE_DIR", tempfile.mkdtemp())
    n = 256 if quick else 1024
    f32 = jnp.float32
    attention = FlashAttention()
    qkv = [jax.ShapeDtypeStruct((1, n, 8, 64), f32)] * 3
    sizes = (64, 128, 256) if quick else (64, 128, 256, 512)
    blocks = [
        FlashAttentionXlaConfig(block_q=block_q, block_k=block_k)
        for block_q in sizes
        for block_k in sizes
    ]
    calls = [
        BlockedMatmul().bind(*[jax.ShapeDtypeStruct((512, 512), f32)] * 2),
        BlockedSoftmax().bind(jax.ShapeDtypeStruct((2048, n), f32)),
        attention.bind(*qkv, causal=False, softmax_scale=0.125),
        attention.bind(*qkv, causal=True, softmax_scale=0.125),
    ]
    rows = []
    for inv in calls:
        kernel = inv.kernel
        assert kernel is not None
        configs = blocks if kernel is attention else kernel.candidates(inv)
        tuner = Tuner(
            effort="quick" if quick else "standard", strategy="exhaustive", progress=False
        )
        outcome = tune_invocation(tuner, inv, kernel, candidates=configs)
        measured = [t for t in outcome.trials if t.verdict is Verdict.MEASURED]
        kept = [trial.cfg for trial in measured]
        times = [trial.seconds for trial in measured]
        for name, values in figures(kernel, inv, kept).items():
            chosen = min(range(len(kept)), key=values.__getitem__)
            rows.append(
                (
                    f"{kernel.op_id}({inv.signature})"[:48],
                    str(len(kept)),
                    name,
                    f"{spearman(values, times):+.2f}",
                    f"{times[chosen] / min(times):.2f}x",
                    brief(kept[chosen]),
                )
            )
        spread = max(times) / min(times)
        print(f"{kernel.op_id}: {len(kept)} configs, slowest/fastest {spread:.1f}", file=sys.stderr)
    header = ("call", "configs", "figure", "Spearman", "regret", "it would choose")
    print(text_table(header, rows, right=(1, 3, 4)))


if __name__ == "__main__":
    main()
