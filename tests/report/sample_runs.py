"""Runs to show: a plain one, one full of hostile texts, a large one, an empty one."""

from __future__ import annotations

import dataclasses
import random

from ejkernel.report import (
    BeforeAfter,
    Candidate,
    CountedWork,
    Gain,
    NotTuned,
    Operation,
    Roofline,
    Run,
)
from ejkernel.speedup import PlainJax

HOSTILE = (
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)' x='",
    "<!--",
    "]]>",
    "&lt;b&gt; &amp; | `code` **bold** [link](javascript:alert(1))",
    "a\x00b\x1b[31m\u202e\n\nlines\r\nof it",
    "javascript:alert(1)",
    "{{7*7}} ${alert(1)}",
)


def samples(middle: float, count: int, seed: int) -> tuple[float, ...]:
    noise = random.Random(seed)
    return tuple(middle * (1 + abs(noise.gauss(0, 0.05))) for _ in range(count))


def blocks(q: int, kv: int, bwd: int = 256) -> dict:
    return {"fwd": {"q": q, "kv": kv, "warps": None}, "bwd": {"q": bwd}}


def attention() -> Operation:
    candidates = []
    for i, q in enumerate((64, 128, 256, 512)):
        for j, kv in enumerate((64, 128, 256, 512)):
            seconds = 0.004 * (1 + 0.3 * abs(i - 2) + 0.2 * abs(j - 1))
            if (q, kv) == (512, 512):
                reason = "RESOURCE_EXHAUSTED: VMEM\n" + "a long story, " * 40
                candidates.append(Candidate(blocks(q, kv), "failed", reason=reason))
            elif (q, kv) == (64, 512):
                candidates.append(Candidate(blocks(q, kv), "wrong", reason="3 of 64 differ"))
            else:
                taken = samples(seconds, 12, 10 * i + j)
                if (q, kv) == (128, 128):  # a moment in which the machine did something else
                    taken = (*taken[:7], 0.09, *taken[8:])
                factor = 0.0074 / (seconds * 1.03)
                gain = Gain(factor, 0.95 * factor, 1.06 * factor)
                candidates.append(
                    Candidate(blocks(q, kv), "measured", seconds * 1.03, taken, speedup=gain)
                )
    candidates = [dataclasses.replace(c, order=n) for n, c in enumerate(candidates, 1)]
    candidates.append(Candidate(blocks(64, 64, 512), "duplicate", 0.0064, reason="as fwd(64, 64)"))
    candidates.append(Candidate(blocks(128, 64, 512), "not tried", reason="not proposed"))
    return Operation(
        op_id="flash_attention@v1",
        call_key="0123456789abcdef",
        signature="float32[1,1024,8,64], float32[1,1024,8,64], float32[1,1024,8,64], causal=True",
        config=blocks(256, 128),
        heuristic=blocks(64, 64),
        seconds=0.00412,
        heuristic_seconds=0.0074,
        gain=Gain(1.8, 1.7, 1.9),
        lead=Gain(1.2, 1.1, 1.3),
        measured="forward and backward",
        clock="wall",
        sure=True,
        took=12.5,
        origin="measured 14 of 18 candidates",
        versions={"jax": "0.10.2"},
        candidates=tuple(candidates),
        work=CountedWork(flops=8.6e8, bytes=8.4e6, dtype="float32"),
        plain=PlainJax("dot_product_attention", 0.00412 * 2.1, Gain(2.1, 1.9, 2.4)),
    )


def loss() -> Operation:
    rows = [Candidate({"rows": n}, "measured", 0.01 * m, samples(0.0095 * m, 9, n))
            for n, m in ((64, 1.4), (128, 1.0), (256, 1.01))]  # fmt: skip
    return Operation(
        "chunked_loss@v2", "fedcba9876543210", "float32[1024,256]", {"rows": 128}, {"rows": 128},
        0.01, 0.01, Gain(1.0, 1.0, 1.0), Gain(1.01, 0.99, 1.03), "forward", "wall", False,
        took=3.0, candidates=tuple(rows), when="2026-01-01T00:00:00+00:00", where="tower",
    )  # fmt: skip


def model() -> BeforeAfter:
    return BeforeAfter(
        "the whole model",
        samples(0.1, 9, 1),
        samples(0.08, 9, 2),
        Gain(1.25, 1.2, 1.31),
        difference=3e-7,
    )


def plain_run() -> Run:
    return Run(
        title="A small transformer",
        device="cpu|amd-epyc|2-threads",
        created="2026-11-16T02:23:41+00:00",
        seconds=42.0,
        operations=(attention(), loss()),
        not_tuned=(NotTuned("ejkernel_ops#other@v1:0011223344556677", "no kernel of that name"),),
        model=model(),
        store="~/.cache/ejkernel/configs",
        command="python examples/tune_transformer.py",
        environment={
            "device": "cpu|amd-epyc|2-threads", "jax": "0.10.2", "host": "laptop",
            "commit": "0123456789abcdef0123456789abcdef01234567",
        },
        roofline=Roofline("cpu|amd-epyc|2-threads", {"float32": 2.6e11}, 3.4e10),
    )  # fmt: skip


def changed_run() -> Run:
    """The plain run some days later: one operation faster, one as before, one new, one gone."""
    was = plain_run()
    faster = dataclasses.replace(
        attention(), config=blocks(256, 64), seconds=0.0035,
        candidates=tuple(
            dataclasses.replace(c, samples=tuple(0.7 * sample for sample in c.samples))
            for c in attention().candidates
        ),
    )  # fmt: skip
    new = dataclasses.replace(loss(), op_id="rms_norm@v1", call_key="9" * 16, signature="f32[8]")
    other = dataclasses.replace(loss(), op_id="layer_norm@v1", call_key="8" * 16)
    return dataclasses.replace(
        was,
        created="2026-11-18T09:00:00+00:00",
        operations=(faster, loss(), new, other),
        model=dataclasses.replace(model(), after=tuple(0.9 * s for s in model().after)),
        environment={**was.environment, "jax": "0.10.3", "commit": "f" * 40},
    )


def hostile_run() -> Run:
    """Every text of a run is something that wants to break out."""

    def bad(i: int) -> str:
        return HOSTILE[i % len(HOSTILE)]

    candidates = tuple(
        Candidate(
            {bad(i): bad(i + 1), "size": i, "n": 3 * i % 4}, verdict, seconds, taken, bad(i), i
        )
        for i, (verdict, seconds, taken) in enumerate(
            [("measured", 1e-3 * (1 + i), samples(1e-3 * (1 + i), 5, i)) for i in range(9)]
            + [("wrong", None, ())] * 9
            + [("failed", None, ())] * 9
            + [(text, None, ()) for text in HOSTILE]
        )
    )
    operations = tuple(
        dataclasses.replace(
            attention(), op_id=text, call_key=text, signature=f"{text}, {text}",
            config={text: text}, heuristic={"a": text}, measured=text, clock=text, origin=text,
            when=text, where=text,
            versions={"jax": text, text: text}, notes=(text,), incomplete=text if i % 2 else "",
            sure=False, candidates=candidates, work=CountedWork(1e9, 1e6, text),
            plain=PlainJax(text, 1e-3, reason=text),
        )
        for i, text in enumerate(HOSTILE)
    )  # fmt: skip
    everything = "\n".join(HOSTILE)
    return Run(
        everything, everything, everything, 1.0, operations,
        tuple(NotTuned(text, text) for text in HOSTILE),
        dataclasses.replace(model(), what=everything, notes=HOSTILE),
        everything, everything, {text: text for text in HOSTILE}, HOSTILE,
        roofline=Roofline(everything, dict.fromkeys(HOSTILE, 1e11), 1e10, everything),
    )  # fmt: skip


def large_run() -> Run:
    """A searched space of 2,000 candidates, 300 of them measured."""
    draw = random.Random(0)
    candidates = []
    for i in range(2000):
        config = {
            "m": 2 ** (i % 8 + 4),
            "n": 2 ** (i // 8 % 8 + 4),
            "stages": i // 64 % 5,
            "k": i // 320,
        }
        if i % 7 == 0:
            seconds = 0.001 * (1 + draw.random() * 20)
            taken = samples(seconds, 3, i)
            candidates.append(Candidate(config, "measured", seconds, taken, order=i + 1))
        elif i % 11 == 0:
            candidates.append(Candidate(config, "failed", reason="out of memory"))
        else:
            candidates.append(Candidate(config, "not tried", reason="not proposed"))
    best = min((c for c in candidates if c.seconds), key=lambda c: c.seconds)
    operation = dataclasses.replace(
        attention(), config=best.config, heuristic=candidates[7].config, seconds=best.seconds,
        heuristic_seconds=candidates[7].seconds, candidates=tuple(candidates),
    )  # fmt: skip
    many = tuple(dataclasses.replace(loss(), call_key=f"{i:016x}") for i in range(12))
    return Run("Large", "gpu|h100", "2026-01-01", 600.0, (operation, *many))


def empty_run() -> Run:
    return Run("Nothing", "cpu|x|2-threads", "2026-01-01T00:00:00+00:00")
