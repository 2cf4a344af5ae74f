"""Candidates that change their mind: other outputs at each run, or a failure later on."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import Kernel, Tuner
from ejkernel.ops.config.outcome import TuningFailed, Verdict
from ejkernel.ops.tuner.bench import LocalBench
from ejkernel.ops.tuner.isolation.worker_bench import WorkerBench
from ejkernel.ops.tuner.judge import non_determinism
from ejkernel.ops.tuner.race import Race, Withdrawn
from ejkernel.ops.tuner.session import tune_invocation

X = jnp.linspace(1.0, 2.0, 64)


@dataclasses.dataclass(frozen=True)
class How:
    kind: str = "right"


class Moody(Kernel[How, jax.Array]):
    """Adds one to x; some candidates do it otherwise each time they run."""

    def __init__(self, *kinds: str, heuristic: str = "right") -> None:
        super().__init__(name="moody")
        self.kinds = kinds
        self.default = heuristic
        self.runs = itertools.count(1)

    def run(self, x, *, cfg):
        if cfg.kind == "right":
            return x + 1

        def on_host(x):
            number = next(self.runs)
            if cfg.kind == "fails later" and number > 2:
                raise RuntimeError("out of luck")
            error = {"unsteady": 1.0, "almost": 1e-6}.get(cfg.kind, 0.0) * (number - 1)
            return np.asarray(x) + np.float32(1 + error)

        return jax.pure_callback(on_host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def heuristic_cfg(self, inv):
        return How(self.default)

    def candidate_cfgs(self, inv):
        return [How(kind) for kind in self.kinds]


def tune(kernel, **options):
    return tune_invocation(Tuner(progress=False, **options), kernel.bind(X), kernel)


def trials(outcome):
    return {trial.cfg.kind: trial for trial in outcome.trials}


def test_outputs_that_change_from_run_to_run_are_reported_as_such_and_not_chosen():
    outcome = tune(Moody("unsteady"))
    assert outcome.best == How("right")
    unsteady = trials(outcome)["unsteady"]
    assert unsteady.verdict is Verdict.NON_DETERMINISTIC
    assert "two runs of it differ" in unsteady.reason
    assert "the first run's largest value" in unsteady.reason
    assert "non-deterministic" in outcome.explain()
    assert unsteady.seconds is None


def test_a_change_within_the_tolerance_is_said_and_tolerated():
    outcome = tune(Moody("almost"))
    almost = trials(outcome)["almost"]
    assert almost.verdict is Verdict.MEASURED
    assert "not equal bit for bit" in almost.reason
    assert "not equal bit for bit" in outcome.explain()


def test_a_heuristic_that_is_non_deterministic_cannot_be_the_reference():
    kernel = Moody("right", heuristic="unsteady")
    with pytest.raises(TuningFailed, match=r"non-deterministic.*Give the kernel a `reference`"):
        tune(kernel)


def test_a_heuristic_that_is_non_deterministic_loses_against_a_reference():
    class Checked(Moody):
        def reference(self, x):
            return x + 1

    outcome = tune(Checked("right", heuristic="unsteady"))
    assert outcome.best == How("right")
    assert trials(outcome)["unsteady"].verdict is Verdict.NON_DETERMINISTIC


def test_a_reference_that_is_non_deterministic_is_the_culprit():
    runs = itertools.count()

    class Odd(Moody):
        def reference(self, x):
            shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
            return jax.pure_callback(lambda x: np.asarray(x) + np.float32(next(runs)), shape, x)

    with pytest.raises(TuningFailed, match=r"the reference itself failed.*non-deterministic"):
        tune(Odd("right"))


@pytest.mark.filterwarnings("ignore")
def test_a_candidate_that_fails_in_the_middle_of_the_race_withdraws():
    outcome = tune(Moody("fails later"))
    assert outcome.best == How("right")
    late = trials(outcome)["fails later"]
    assert late.verdict is Verdict.FAILED
    assert late.seconds is None
    assert "out of luck" in late.reason or "INTERNAL" in late.reason


def test_a_worker_notices_it_too():
    arrays = [X]
    for bench in (LocalBench(arrays), WorkerBench(arrays)):
        noise = bench.compile(bench.lower(lambda x: x + jax.lax.rng_uniform(0.0, 1.0, x.shape)))
        steady = bench.compile(bench.lower(lambda x: x + 1))
        for handle in (noise, steady):
            bench.run(handle)
        assert bench.repeats(steady) is None
        difference = bench.repeats(noise)
        assert not difference.harmless
        assert "two runs of it differ" in difference.reason


def test_bits_are_compared_not_values():
    nan = jnp.array([jnp.nan, 1.0])
    assert non_determinism([nan], [nan]) is None
    assert non_determinism([jnp.array([0.0])], [jnp.array([-0.0])]).harmless
    key = jax.random.key(0)
    assert non_determinism(key, jax.random.key(0)) is None
    assert not non_determinism(jnp.arange(3), jnp.arange(3) + 1).harmless


def withdrawing(times, after=None):
    """A sampler that gives these times in turn and withdraws when asked `after` times."""
    count = itertools.count()

    def sample():
        number = next(count)
        if after is not None and number >= after:
            raise Withdrawn
        return times * (1 + 0.001 * (number % 3))

    return sample


def test_the_race_goes_on_without_those_who_withdraw():
    race = Race([withdrawing(1.0, after=2), withdrawing(2.0), withdrawing(3.0)])
    assert race.run() == 1
    assert race.withdrawn == {0}


def test_those_who_were_outrun_come_back_if_the_leaders_withdraw():
    # The first two are too close to call, so they still run when the third is long out.
    leaders = [withdrawing(1.0, after=5), withdrawing(1.002, after=5)]
    race = Race([*leaders, withdrawing(9.0), withdrawing(8.0)], margin=0.0)
    assert race.run() == 3
    assert race.withdrawn == {0, 1}
    assert len(race.samples[2]) >= 2


def test_a_race_that_everyone_leaves_has_no_winner():
    assert Race([withdrawing(1.0, after=0), withdrawing(2.0, after=1)], margin=0.0).run() is None


def test_every_step_of_a_tuning_run_is_told():
    steps = []
    tuner = Tuner(progress=False, on_step=lambda step, **data: steps.append((step, data)))
    kernel = Moody("unsteady")
    tune_invocation(tuner, kernel.bind(X), kernel)
    assert {data["name"] for _, data in steps} == {"moody@v1(float32[64])"}
    kinds = [step for step, _ in steps]
    assert kinds[0] == "build"
    assert kinds.index("candidate") < kinds.index("race") < kinds.index("round")
    ready = [data["cfg"].kind for _, data in steps if data.get("verdict") == "ready"]
    assert sorted(ready) == ["right", "unsteady"]
    refused = [data["cfg"] for _, data in steps if data.get("verdict") == "non-deterministic"]
    assert refused == [How("unsteady")]


def test_a_listener_that_raises_does_not_end_the_run(caplog):
    def listen(step, **data):
        raise ValueError("not today")

    outcome = tune(Moody("right"), on_step=listen)
    assert outcome.best == How("right")
    assert "not today" in caplog.text


def test_doubt_is_what_somebody_else_may_gain():
    race = Race([withdrawing(1.0), withdrawing(1.5), withdrawing(1.01)], rounds=3, margin=0.0)
    race.run()
    assert 0 <= race.doubt() < 0.01  # one percent behind, and the noise is a tenth of that
    alone = Race([withdrawing(1.0)], rounds=3)
    alone.run()
    assert alone.doubt() == 0
