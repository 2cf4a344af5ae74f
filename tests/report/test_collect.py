"""From a real tuning run to a record: fresh, from the store, interrupted, with hostile names."""

from __future__ import annotations

import dataclasses
import math
import random

import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops import (
    AutotuningResult,
    ConfigCache,
    ConfigSelectorChain,
    Entry,
    Kernel,
    PersistentCache,
    Tuner,
    autotune_lowered,
)
from ejkernel.report import Gain, Run, before_and_after, render
from ejkernel.speedup import gain_of


@dataclasses.dataclass(frozen=True)
class Rows:
    rows: int = 16
    zeros: bool = False


class RowSum(Kernel[Rows, jax.Array]):
    def __init__(self):
        super().__init__(name="row_sum")

    def run(self, x, *, cfg):
        if cfg.rows == 5:
            raise ValueError("5 rows <b>cannot</b> be")
        sums = jax.lax.map(lambda c: c.sum(1), x.reshape(-1, cfg.rows, x.shape[1])).reshape(-1)
        return jnp.zeros_like(sums) if cfg.zeros else sums

    def heuristic_cfg(self, inv):
        return Rows(16)

    def candidate_cfgs(self, inv):
        return [Rows(8), Rows(32), Rows(5), Rows(32, zeros=True)]


row_sum = RowSum()


def model(x):
    return jnp.tanh(row_sum(x)).sum()


X = jnp.arange(64 * 8, dtype=jnp.float32).reshape(64, 8) / 512


def tuned(selector):
    return autotune_lowered(selector, jax.jit(model).lower(X))


@pytest.fixture
def selector(tmp_path):
    return ConfigSelectorChain(
        ConfigCache(), tuner=Tuner(effort="quick"), persistent=PersistentCache(tmp_path / "store")
    )


def test_a_run_has_every_candidate_with_its_fate(selector):
    run = Run.of(tuned(selector), seconds=1.5)
    (operation,) = run.operations
    fates = {(c.config["rows"], c.config["zeros"]): c for c in operation.candidates}
    assert fates[16, False].verdict == fates[8, False].verdict == "measured"
    assert fates[16, False].samples
    assert fates[5, False].verdict == "failed"
    assert "5 rows <b>cannot</b> be" in fates[5, False].reason
    assert fates[32, True].verdict == "wrong"
    assert operation.heuristic == {"rows": 16, "zeros": False}
    assert operation.gain is not None
    assert operation.gain.low <= operation.gain.times <= operation.gain.high
    assert operation.took > 0
    assert operation.measured == "forward"
    assert run.title == "row_sum"
    assert run.environment["jax"] == jax.__version__
    assert run.seconds == 1.5
    assert Run.loads(run.dumps()) == run
    assert "5 rows &lt;b&gt;cannot" in render(run)


def test_a_second_run_reads_the_candidates_from_the_store(selector):
    first = Run.of(tuned(selector)).operations[0]
    again = ConfigSelectorChain(ConfigCache(), persistent=PersistentCache(selector.persistent.path))
    result = tuned(again)
    assert result.entries[0].outcome is None
    (bare,) = Run.of(result).operations
    assert bare.candidates == ()
    assert "Run.of(result, store=…)" in render(result)
    (stored,) = Run.of(result, store=selector.persistent.path).operations
    assert stored.earlier
    assert stored.heuristic == first.heuristic
    assert {str(c.config): c.verdict for c in stored.candidates} == {
        str(c.config): c.verdict for c in first.candidates
    }
    assert math.isclose(stored.gain.times, first.gain.times, rel_tol=1e-6)
    assert stored.took == first.took
    (whole,) = Run.of_store(selector.persistent).operations
    assert whole.call_key == stored.call_key
    assert whole.gain == stored.gain
    assert Run.of_store(selector.persistent, device="tpu|v9").operations == ()


def test_what_a_result_lacks_is_left_out():
    entry = Entry("row_sum@v1", "0" * 16, Rows(8), "float32[8]", 1e-3, 2e-3, "loaded")
    run = Run.of(AutotuningResult("cpu|x|1-threads", [entry]))
    assert run.operations[0].gain is None
    assert "2.00×" in render(run, "md")
    odd = Entry("row_sum@v1", "0" * 16, object(), "float32[8]")
    assert "object object" in Run.of(AutotuningResult("cpu|x", [odd])).operations[0].config
    with pytest.raises(TypeError, match="takes an AutotuningResult, got 7"):
        Run.of(7)


def test_a_gain_needs_more_than_one_sample():
    gain = gain_of([2.0, 2.1, 2.0, 2.2], [1.0, 1.05, 1.0, 1.1])
    assert gain.times == pytest.approx(2.0)
    assert gain.low > 1.9
    assert gain.is_real
    assert gain_of([2.0], [1.0]) == Gain(2.0, 0.0, 0.0)


@pytest.mark.parametrize("rounds", [7, 11, 30])
def test_the_limits_of_a_gain_hold_it_whatever_the_noise(rounds):
    """Nothing differs, and a neighbour takes half of the machine now and then."""
    draw = random.Random(rounds)

    def taken():
        return [draw.gauss(1, 0.02) * draw.choice((1, 1, 2)) for _ in range(rounds)]

    wrong = sum(gain_of(taken(), taken()).is_real for _ in range(500))
    assert wrong <= 25  # 2 % of them, and room for chance


def test_a_clear_gain_is_seen_in_little_noise():
    draw = random.Random(0)
    before = [draw.gauss(1.2, 0.02) for _ in range(9)]
    after = [draw.gauss(1.0, 0.02) for _ in range(9)]
    gain = gain_of(before, after)
    assert 1.1 < gain.low < 1.2 < gain.high < 1.3


def test_before_and_after_runs_both_configs_in_turns(selector):
    result = AutotuningResult(
        entries=[Entry(row_sum.full_op_id, row_sum.bind(X).call_key, Rows(8), "x")]
    )
    seen = []

    class Spy(RowSum):
        def run(self, x, *, cfg):
            seen.append(cfg.rows)
            return super().run(x, cfg=cfg)

    spy = Spy()
    measured = before_and_after(lambda x: spy(x).sum(), (X,), result=result, rounds=4)
    assert seen[-2:] == [16, 8]  # the heuristic config, then the tuned one
    assert len(measured.before) == len(measured.after) == 4
    assert measured.difference == pytest.approx(0.0, abs=1e-6)
    assert measured.notes == ()
    assert measured.gain.low <= measured.gain.times <= measured.gain.high


def test_before_and_after_says_when_outputs_differ():
    key = row_sum.bind(X).call_key
    row_sum(X)
    wrong = AutotuningResult(entries=[Entry(row_sum.full_op_id, key, Rows(8, zeros=True), "x")])
    measured = before_and_after(model, (X,), result=wrong, rounds=1)
    assert measured.difference > 0.5
    run = dataclasses.replace(Run.of(wrong), model=measured)
    assert "look into it" in render(run)
    assert "one run only" in render(run)


def test_before_and_after_keeps_arguments_that_are_given_away():
    step = jax.jit(lambda state, x: (state + row_sum(x).sum(), x), donate_argnums=0)
    state = jnp.zeros((4,))
    result = AutotuningResult(entries=[])
    measured = before_and_after(step, (state, X), result=result, rounds=2, seconds=0)
    assert len(measured.after) == 2
    assert not state.is_deleted()


def test_before_and_after_remarks_what_has_no_heuristic_config():
    result = AutotuningResult(entries=[Entry("unknown@v1", "0" * 16, Rows(8), "x")])
    measured = before_and_after(model, (X,), result=result, rounds=1)
    assert "unknown@v1" in measured.notes[0]
    with pytest.raises(ValueError, match="rounds=0"):
        before_and_after(model, (X,), result=result, rounds=0)
