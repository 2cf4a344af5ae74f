"""The config of the nearest tuned shape: which calls are near, and what may be lent."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Dimension,
    Kernel,
    NearShapes,
    PersistentCache,
    export_bundle,
    policy_override,
)
from ejkernel.ops.config.explain import call_fields
from ejkernel.ops.config.freshness import made_by
from ejkernel.ops.config.tiers.stored import reload_bundles


@dataclasses.dataclass(frozen=True)
class Config:
    rows: int = 1


class RowSum(Kernel[Config, jax.Array]):
    def __init__(self) -> None:
        super().__init__(name="row_sum")

    def run(self, x, *, cfg, scale=1.0):
        return x.reshape(-1, cfg.rows, x.shape[1]).sum(2).reshape(-1) * scale

    def heuristic_cfg(self, inv):
        return Config(1)

    def candidate_cfgs(self, inv):
        return [Config(rows) for rows in (1, 2, 4, 8) if inv.args[0].shape[0] % rows == 0]


class Lending(RowSum):
    near_shapes = NearShapes(Dimension(argument=0, axis=0, rounding="up"), within=4.0)


def x(rows, columns=8, dtype=jnp.float32):
    return jnp.ones((rows, columns), dtype)


def keep(store, kernel, array, rows, **keywords):
    inv = kernel.bind(array, **keywords)
    store.put(inv.key, Config(rows), about={**made_by(inv, kernel), "seconds": 1.0})


def decide(store, kernel, array, policy=None, **keywords):
    events = []
    chain = ConfigSelectorChain(
        ConfigCache(),
        policy=policy or AutotunePolicy(allow_autotune=False),
        persistent=store,
        on_event=lambda event, **data: events.append((event, data)),
    )
    decision = chain.decide(kernel.bind(array, **keywords), kernel)
    return decision, events


@pytest.fixture
def store(tmp_path):
    return PersistentCache(tmp_path)


# --- the tier ------------------------------------------------------------------------------------


def test_the_nearest_tuned_shape_lends_its_config(store):
    kernel = Lending()
    keep(store, kernel, x(64), 8)
    keep(store, kernel, x(128), 4)
    decision, events = decide(store, kernel, x(48))
    assert (decision.cfg, decision.tier) == (Config(8), "near")
    assert "tuned for float32[64,8]" in decision.reason
    [(event, data)] = events
    assert event == "near_hit"
    assert (data["cfg"], data["near"]) == (Config(8), "float32[64,8]")
    decision, _ = decide(store, kernel, x(96))
    assert decision.cfg == Config(4)


def test_a_tuned_call_itself_comes_first_and_nothing_is_kept(store):
    kernel = Lending()
    keep(store, kernel, x(64), 8)
    decide(store, kernel, x(48))
    assert len(store) == 1
    keep(store, kernel, x(48), 2)
    decision, _ = decide(store, kernel, x(48))
    assert (decision.cfg, decision.tier) == (Config(2), "persistent")


def test_rounding_goes_one_way(store):
    kernel = Lending()
    keep(store, kernel, x(64), 8)
    decision, _ = decide(store, kernel, x(128))  # up: a longer one may not use a shorter one's
    assert decision.tier == "heuristics"
    assert "no tuned call is near enough" in decision.explain()
    decision, _ = decide(store, kernel, x(8))  # more than four times as long
    assert decision.tier == "heuristics"


@pytest.mark.parametrize(
    ("array", "keywords"),
    [
        (x(48, dtype=jnp.bfloat16), {}),
        (x(48, columns=4), {}),
        (x(48), {"scale": 2.0}),
    ],
)
def test_everything_else_has_to_be_equal(store, array, keywords):
    kernel = Lending()
    keep(store, kernel, x(64), 8)
    decision, _ = decide(store, kernel, array, **keywords)
    assert decision.tier == "heuristics"


def test_a_config_that_is_not_valid_here_is_passed_over_for_the_next(store):
    kernel = Lending()
    keep(store, kernel, x(64), 8)
    keep(store, kernel, x(128), 2)
    decision, _ = decide(store, kernel, x(62))  # 62 rows cannot be divided by 8
    assert (decision.cfg, decision.tier) == (Config(2), "near")
    decision, _ = decide(store, kernel, x(61))
    assert decision.tier == "heuristics"
    assert "cannot be traced for this call" in decision.explain()


def test_what_the_kernel_does_not_support_is_not_lent(store):
    class Picky(Lending):
        def not_supported(self, cfg, inv):
            return ["eight is too many"] if cfg.rows == 8 else []

    kernel = Picky()
    keep(store, kernel, x(64), 8)
    decision, _ = decide(store, kernel, x(48))
    assert decision.tier == "heuristics"
    assert "eight is too many" in decision.explain()


def test_a_config_that_cannot_be_traced_is_not_lent_whatever_it_raises(store):
    class Unfinished(Lending):
        def run(self, x, *, cfg, scale=1.0):
            if cfg.rows == 8:
                raise NotImplementedError("eight rows are for later")
            return super().run(x, cfg=cfg, scale=scale)

    kernel = Unfinished()
    keep(store, kernel, x(64), 8)
    decision, _ = decide(store, kernel, x(48))
    assert decision.tier == "heuristics"
    assert "eight rows are for later" in decision.explain()


def test_without_a_heuristic_a_traceable_config_is_lent(store):
    class NoFavourite(Lending):
        def heuristic_cfg(self, inv):
            raise NotImplementedError

    kernel = NoFavourite()
    keep(store, kernel, x(64), 8)
    assert decide(store, kernel, x(48))[0].tier == "near"


def test_it_is_off_unless_the_kernel_or_the_policy_allows_it(store):
    plain, lending = RowSum(), Lending()
    for kernel in (plain, lending):
        keep(store, kernel, x(64), 8)
    assert decide(store, plain, x(48))[0].tier == "heuristics"
    allowed = AutotunePolicy(allow_autotune=False, near_shapes=True)
    decision, _ = decide(store, plain, x(48), allowed)
    assert (decision.cfg, decision.tier) == (Config(8), "near")
    decision, _ = decide(store, plain, x(60), allowed)  # not among its candidates there
    assert decision.tier == "heuristics"
    forbidden = AutotunePolicy(allow_autotune=False, near_shapes=False)
    decision, _ = decide(store, lending, x(48), forbidden)
    assert decision.tier == "heuristics"
    assert "near_shapes=False" in decision.explain()
    with pytest.raises(TypeError, match="near_shapes='yes' must be True, False or None"):
        AutotunePolicy(near_shapes="yes")


def test_the_policy_can_be_changed_for_a_block_and_jitted_functions_follow(store):
    from ejkernel.ops import Executor

    kernel = Lending()
    keep(store, kernel, x(64), 8)
    chain = ConfigSelectorChain(ConfigCache(), autotune=False, persistent=store)
    executor = Executor(chain)
    assert executor.choose_config(kernel, x(48)) == Config(8)
    with policy_override(near_shapes=False):
        assert executor.choose_config(kernel, x(48)) == Config(1)


def test_stale_entries_lend_nothing(store):
    kernel = Lending()
    inv = kernel.bind(x(64))
    about = {**made_by(inv, kernel), "seconds": 1.0, "source": "another"}
    store.put(inv.key, Config(8), about=about)
    decision, _ = decide(store, kernel, x(48))
    assert decision.tier == "heuristics"
    assert "stale" in decision.explain()


def test_tuning_is_preferred_where_it_is_allowed(store):
    kernel = Lending()
    keep(store, kernel, x(64), 8)
    decision, _ = decide(store, kernel, x(48), AutotunePolicy())
    assert decision.tier == "autotune"
    first = AutotunePolicy(cache_miss_fallback="heuristics")
    decision, _ = decide(store, kernel, x(40), first)
    assert decision.tier == "near"


def test_bundles_lend_too(store, tmp_path, monkeypatch):
    kernel = Lending()
    keep(store, kernel, x(64), 8)
    export_bundle(store, tmp_path / "bundle.json")
    monkeypatch.setenv("EJKERNEL_CONFIG_PATH", str(tmp_path / "bundle.json"))
    reload_bundles()
    assert decide(None, kernel, x(48))[0].cfg == Config(8)
    reload_bundles()


def test_an_entry_put_by_hand_says_nothing_of_its_call_and_lends_nothing(store):
    kernel = Lending()
    store.put(kernel.bind(x(64)).key, Config(8))
    assert decide(store, kernel, x(48))[0].tier == "heuristics"


# --- the rule ------------------------------------------------------------------------------------


def distance(rule, asked, tuned):
    kernel = RowSum()
    return rule.distance(call_fields(kernel.bind(asked)), call_fields(kernel.bind(tuned)))


def test_distance_is_counted_in_doublings():
    rule = NearShapes(within=8.0)
    assert distance(rule, x(16), x(16)) == 0
    assert distance(rule, x(16), x(64)) == 2
    assert distance(rule, x(16, 8), x(32, 4)) == 2
    assert distance(rule, x(1), x(64)) is None


def test_buckets_round_in_their_direction():
    up = NearShapes(Dimension(0, 0, "up", (64, 256)))
    assert distance(up, x(65), x(256)) is not None
    assert distance(up, x(256), x(65)) is not None  # both are rounded up to 256
    assert distance(up, x(64), x(65)) is None
    assert distance(up, x(300), x(301)) is None  # beyond the last limit
    down = NearShapes(Dimension(0, 0, "down", (64, 256)))
    assert distance(down, x(64), x(255)) is not None
    assert distance(down, x(255), x(256)) is None
    assert distance(down, x(20), x(30)) is None
    nearest = NearShapes(Dimension(0, -2, "nearest", (64, 256)))
    assert distance(nearest, x(100), x(60)) is not None
    assert distance(nearest, x(100), x(200)) is None


@given(st.integers(1, 500), st.integers(1, 500), st.sampled_from(["up", "down", "nearest"]))
def test_what_is_accepted_is_within_the_factor_and_the_direction(asked, tuned, rounding):
    accepted = Dimension(rounding=rounding).accepts(asked, tuned, 2.0)
    if accepted:
        assert 0.5 <= tuned / asked <= 2
        assert rounding == "nearest" or (tuned >= asked if rounding == "up" else tuned <= asked)
    elif rounding == "nearest":
        assert not 0.5 <= tuned / asked <= 2


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Dimension(rounding="sideways"), "rounding='sideways'"),
        (lambda: Dimension(buckets=(0,)), "buckets"),
        (lambda: NearShapes("rows"), "takes Dimension"),
        (lambda: NearShapes(within=0.5), "within=0.5"),
    ],
)
def test_bad_rules_are_refused(make, complaint):
    with pytest.raises((ValueError, TypeError), match=complaint):
        make()
