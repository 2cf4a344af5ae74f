"""Of several operations, those that take the time get the effort."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops import (
    ConfigCache,
    ConfigSelectorChain,
    Kernel,
    PersistentCache,
    Tuner,
    autotune,
    autotune_recorded,
)
from ejkernel.ops.config.selection import Sources
from ejkernel.ops.execution import tuning
from ejkernel.ops.tuner.search.effort import EFFORTS, Effort


@dataclasses.dataclass(frozen=True)
class Times:
    repeat: int = 1


class Heavy(Kernel[Times, jax.Array]):
    """A product, again and again; `work` says how often."""

    work = 600

    def __init__(self) -> None:
        super().__init__(name=type(self).__name__.lower())

    def run(self, x, *, cfg):
        step = lambda _, y: jnp.tanh(y @ x)  # noqa: E731
        return jax.lax.fori_loop(0, self.work, step, x + 0 * cfg.repeat)

    def heuristic_cfg(self, inv):
        return Times(1)

    def candidate_cfgs(self, inv):
        return [Times(1), Times(2)]


class Light(Heavy):
    work = 1


X = jnp.ones((128, 128)) / 128


def model(x):
    return Light()(x) + Heavy()(x)


class Watching(ConfigSelectorChain):
    """Notes with which tuner each operation was tuned, in order."""

    def __init__(self, **options):
        self.asked = []
        super().__init__(ConfigCache(), **options)

    def answer(self, inv, kernel, sources=Sources.ALL, tuner=None):
        if sources is Sources.MEASURED:
            self.asked.append((kernel.full_op_id, tuner))
        return super().answer(inv, kernel, sources, tuner)


def test_the_slow_operation_comes_first_and_the_fast_one_gets_less_effort():
    selector = Watching(tuner=Tuner(progress=False))
    result = autotune(model, X, selector=selector)
    (first, with_much), (second, with_less) = selector.asked
    assert "heavy" in first
    assert "light" in second
    assert with_much.effort == EFFORTS["standard"]
    assert with_less.effort == EFFORTS["quick"]
    assert [entry.op_id.split("@")[0] for entry in result.entries] == ["light", "heavy"]


def test_seconds_are_divided_by_share():
    selector = Watching(tuner=Tuner(progress=False, seconds=60.0))
    autotune(model, X, selector=selector)
    (_, heavy), (_, light) = selector.asked
    assert 60 < heavy.seconds <= 120
    assert light.seconds == pytest.approx(6.0, abs=4.0)
    assert selector.tuner.seconds == 60.0


def test_one_operation_is_tuned_as_it_is():
    selector = Watching(tuner=Tuner(progress=False))
    autotune(lambda x: Heavy()(x), X, selector=selector)
    assert [tuner for _, tuner in selector.asked] == [None]


def test_what_is_known_is_not_even_timed(tmp_path, monkeypatch):
    store = PersistentCache(tmp_path)
    autotune(model, X, selector=Watching(tuner=Tuner(progress=False), persistent=store))
    monkeypatch.setattr(tuning, "_heuristic_seconds", lambda *_: pytest.fail("timed"))
    again = Watching(tuner=Tuner(progress=False), persistent=store)
    assert len(autotune(model, X, selector=again).entries) == 2
    assert again.asked == []


def test_an_operation_that_cannot_be_timed_is_reported_with_its_own_reason():
    class Broken(Heavy):
        def run(self, x, *, cfg):
            raise ValueError("no way")

    invocations = [Broken().bind(X), Heavy().bind(X)]
    selector = ConfigSelectorChain(ConfigCache(), tuner=Tuner(progress=False))
    result = autotune_recorded(invocations, selector)
    assert [entry.op_id.split("@")[0] for entry in result.entries] == ["heavy"]
    [skipped] = result.skipped
    assert "no way" in skipped.reason


def test_levels_of_effort_go_down_to_the_lowest():
    assert EFFORTS["full"].lower() is EFFORTS["standard"]
    assert EFFORTS["quick"].lower() is EFFORTS["quick"]
    own = dataclasses.replace(EFFORTS["full"], rounds=7)
    assert isinstance(own, Effort)
    assert own.lower() is own


def test_a_changed_tuner_keeps_what_was_given():
    tuner = Tuner(iters=3, progress=False)
    assert tuner.changed(effort="full").iters == 3
    assert Tuner(progress=False).changed(effort="full").iters == EFFORTS["full"].screening
    assert tuner.changed(seconds=5).seconds == 5
    with pytest.raises(ValueError, match="seconds"):
        tuner.changed(seconds=-1)
