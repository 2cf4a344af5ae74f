"""Two runs side by side: what is paired, how sure a difference is, what the pages say."""

from __future__ import annotations

import dataclasses
import json
import random
import re

import pytest
from sample_runs import attention, blocks, empty_run, hostile_run, large_run, loss, plain_run
from test_render import Outline

from ejkernel.report import FORMATS, Candidate, Diff, Run, render, write


def with_factor(operation, factor, **changes):
    """The operation in another run, in which everything took this many times as long."""
    candidates = tuple(
        dataclasses.replace(
            candidate,
            seconds=None if candidate.seconds is None else candidate.seconds * factor,
            samples=tuple(sample * factor for sample in candidate.samples),
        )
        for candidate in operation.candidates
    )
    return dataclasses.replace(
        operation, seconds=operation.seconds * factor, candidates=candidates, **changes
    )


def run_of(*operations, **changes):
    return dataclasses.replace(plain_run(), operations=operations, model=None, **changes)


def test_a_speedup_is_old_over_new():
    diff = Diff.of(run_of(attention(), loss()), run_of(with_factor(attention(), 0.5), loss()))
    first, second = diff.pairs
    assert first.gain.times == pytest.approx(2.0)
    assert first.gain.low > 1
    assert first.finding.word == "faster"
    assert second.gain.times == 1.0
    assert second.finding.word == "no difference"
    assert Diff.of(diff.b, diff.a).pairs[0].finding.word == "slower"
    assert Diff.of(diff.b, diff.a).pairs[0].gain.times == pytest.approx(0.5)


def test_the_interval_holds_what_is_true():
    """Of many pairs of runs whose true ratio is known, nearly all intervals hold it."""
    held = 0
    for seed in range(200):
        draw = random.Random(seed)
        sides = [
            tuple(scale * (1 + 0.1 * abs(draw.gauss(0, 1))) for _ in range(9)) for scale in (1.2, 1)
        ]
        operations = [
            dataclasses.replace(
                loss(), seconds=sorted(taken)[4], config={"rows": 1},
                candidates=(Candidate({"rows": 1}, "measured", sorted(taken)[4], taken),),
            )
            for taken in sides
        ]  # fmt: skip
        (pair,) = Diff.of(run_of(operations[0]), run_of(operations[1])).pairs
        held += pair.gain.low <= 1.2 <= pair.gain.high
    assert held >= 192


def test_operations_are_paired_by_key_and_then_by_call():
    moved = dataclasses.replace(attention(), call_key="7" * 16, op_id="flash_attention@v2")
    other = dataclasses.replace(attention(), signature="float32[1,2048,8,64]", call_key="6" * 16)
    twin = dataclasses.replace(attention(), call_key="5" * 16)  # the same shapes, another call
    diff = Diff.of(run_of(attention(), loss(), other), run_of(twin, attention(), loss()))
    assert [pair.a and pair.a.call_key for pair in diff.pairs] == [
        None, attention().call_key, loss().call_key, "6" * 16,
    ]  # fmt: skip
    assert [pair.in_both for pair in diff.pairs] == [False, True, True, False]
    (pair,) = Diff.of(run_of(attention()), run_of(moved)).pairs
    assert pair.in_both
    assert pair.call.endswith("causal; flash_attention@v1 → flash_attention@v2")


def test_without_samples_nothing_is_claimed():
    bare = dataclasses.replace(attention(), candidates=())
    (pair,) = Diff.of(run_of(bare), run_of(with_factor(bare, 0.5))).pairs
    assert pair.gain.times == pytest.approx(2.0)
    assert pair.finding.word == "not known"
    (pair,) = Diff.of(run_of(bare), run_of(dataclasses.replace(bare, seconds=None))).pairs
    assert pair.gain is None
    assert "–" in render(
        Diff.of(run_of(bare), run_of(dataclasses.replace(bare, seconds=None))), "md"
    )


def test_the_whole_model_decides_where_both_ran_it():
    a = plain_run()
    faster = dataclasses.replace(a.model, after=tuple(0.8 * s for s in a.model.after))
    top = Diff.of(a, dataclasses.replace(a, model=faster)).headline()
    assert top.title == "The whole model is 1.25× as fast in B as in A"
    assert top.finding.word == "faster"
    assert Diff.of(a, a).headline().figure == "≈ 1×"
    slower = dataclasses.replace(a.model, after=tuple(2 * s for s in a.model.after))
    assert "slower in B" in Diff.of(a, dataclasses.replace(a, model=slower)).headline().title


def test_nothing_in_common_is_said():
    assert Diff.of(empty_run(), plain_run()).headline().title == "Nothing can be compared"
    assert "Neither run has tuned an operation" in render(Diff.of(empty_run(), empty_run()))


def test_pages_say_what_is_different():
    a = run_of(attention(), dataclasses.replace(loss(), op_id="gone@v1", call_key="1" * 16))
    changed = with_factor(attention(), 0.9, config=blocks(256, 64))
    b = dataclasses.replace(
        run_of(changed, dataclasses.replace(loss(), op_id="new@v1", call_key="2" * 16)),
        device="gpu|h100",
        environment={**a.environment, "jax": "0.11.0", "commit": "f" * 40},
    )
    for form in ("html", "md"):
        text = render(Diff.of(a, b), form).replace("\\", "")
        for words in (
            "Only in A", "gone", "Only in B", "new", "Configs that changed", "gpu|h100", "0.11.0",
            "two machines", "commit 0123456789ab → ffffffffffff", "not interleaved",
        ):  # fmt: skip
            assert words in text, (form, words)
    assert "fwd.kv</code> <code>128</code> → <code>64</code>" in render(Diff.of(a, b))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("make", [plain_run, hostile_run, large_run, empty_run])
def test_any_two_runs_can_be_compared(make, form, tmp_path):
    for a, b in ((make(), plain_run()), (plain_run(), make()), (make(), make())):
        file = write(Diff.of(a, b), tmp_path / f"diff.{form}")
        if form == "json":
            assert len(json.loads(file.read_text())["pairs"]) == len(Diff.of(a, b).pairs)


@pytest.mark.parametrize("seconds", [0.0, 1e-15, 1e12, None])
def test_any_times_can_be_compared(seconds):
    odd = dataclasses.replace(
        attention(), seconds=seconds,
        candidates=tuple(
            dataclasses.replace(c, samples=(0.0, 1e-15, 1e12)) for c in attention().candidates
        ),
    )  # fmt: skip
    for form in FORMATS:
        render(Diff.of(run_of(odd), run_of(attention())), form)
        render(Diff.of(run_of(attention()), run_of(odd)), form)


def test_records_of_before_can_be_compared():
    text = plain_run().dumps()
    data = json.loads(text)
    for operation in data["operations"]:
        del operation["work"]
        for candidate in operation["candidates"]:
            del candidate["order"]
    del data["roofline"]
    old = Run.loads(json.dumps(data))
    assert old.operations[0].work is None
    assert "Only in" not in render(Diff.of(old, plain_run()), "md")


def test_hostile_texts_are_shown_and_do_nothing():
    text = render(Diff.of(hostile_run(), hostile_run()))
    outline = Outline(text)
    assert outline.tags.count("script") == 1
    assert "img" not in outline.tags
    assert not [name for name, _ in outline.attributes if name.startswith("on")]
    assert "\x00" not in text
    addresses = [value for name, value in outline.attributes if name in ("src", "href")]
    assert all(address.startswith("data:,") for address in addresses)
    tables = [
        line
        for line in render(Diff.of(hostile_run(), hostile_run()), "md").splitlines()
        if line.startswith("|")
    ]
    cells = {len(re.findall(r"(?<!\\)\|", line)) for line in tables}
    assert cells <= {8, 5}  # of the three tables, nothing else
