"""What a call has to do: counted by hand for small calls, and stored with the times."""

from __future__ import annotations

import dataclasses

import config_calls
import jax
import jax.numpy as jnp
import pytest

from ejkernel import modules
from ejkernel.ops import (
    BatchAxes,
    ConfigCache,
    ConfigSelectorChain,
    Kernel,
    PersistentCache,
    Tuner,
    Work,
    autotune_lowered,
    clear_invocations,
    get_invocations,
)
from ejkernel.ops.core.work import counted_work
from ejkernel.ops.utils.provenance import source_hash

F32 = 4


def invocation(name, *args, **kwargs):
    """The invocation of a call of one of our operations, which is traced only."""
    clear_invocations()
    jax.eval_shape(lambda: getattr(modules, name)(*args, **kwargs))
    (inv,) = get_invocations()
    return inv


def of_calls(name):
    args, kwargs, _ = config_calls.CALLS[name]()
    return invocation(name, *args, **kwargs)


def work_of(inv):
    return inv.kernel.work(inv)


@pytest.mark.parametrize("name", sorted(config_calls.CALLS))
def test_every_operation_counts_its_work_forward(name):
    work = work_of(of_calls(name))
    assert work.bytes > 0
    assert (work.flops or 0) > 0 or "norm" in name


def test_matrix_products_are_counted_by_what_is_differentiated():
    forward = of_calls("grouped_matmul")
    one = 2 * 40 * 16 * 32
    assert work_of(forward).flops == one
    assert work_of(forward.differentiate()).flops == 3 * one
    assert work_of(forward.differentiate("1")).flops == 2 * one
    sizes = 40 * 16 + 4 * 16 * 32
    assert work_of(forward).bytes == F32 * (sizes + 4 + 40 * 32)
    assert work_of(forward.differentiate()).bytes == F32 * (2 * (sizes + 4 + 40 * 32) + sizes)


def test_a_gated_unit_has_two_products_and_six_with_gradients():
    forward = of_calls("gated_linear_unit")
    assert work_of(forward).flops == 2 * 2 * 40 * 16 * 32
    assert work_of(forward.differentiate()).flops == 3 * work_of(forward).flops
    assert work_of(forward.differentiate("0")).flops == 2 * work_of(forward).flops
    args, _, _ = config_calls.CALLS["gated_linear_unit"]()
    stacked = invocation("gated_linear_unit", args[0], jnp.stack(args[1:], 1))
    assert work_of(stacked.differentiate()).flops == work_of(forward.differentiate()).flops


def test_the_loss_counts_its_logits_once():
    forward = of_calls("linear_cross_entropy")
    assert work_of(forward).flops == 2 * 40 * 16 * 50
    assert work_of(forward.differentiate("0", "1")).flops == 3 * 2 * 40 * 16 * 50


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window": 7},
        {"causal": True, "window": 5},
        {"window": (3, None)},
        {"segment_ids": jnp.zeros((2, 45), jnp.int32)},
        {"segment_ids": jnp.zeros((2, 45), jnp.int32), "causal": True},
    ],
)
def test_attention_counts_the_scores_that_are_seen(options):
    draw = config_calls.normal
    q, k, v = draw(0, 2, 45, 4, 16), draw(1, 2, 45, 2, 16), draw(2, 2, 45, 2, 8)
    inv = invocation("flash_attention", q, k, v, **options)
    _, kwargs = inv.kernel.make_inputs(inv, jax.random.key(0))
    rows, keys = jnp.arange(45)[:, None], jnp.arange(45)[None, :]
    seen = jnp.ones((45, 45), bool)
    left, right = kwargs.get("window") or (None, None)
    right = 0 if kwargs.get("causal") else right
    seen &= True if left is None else keys >= rows - left
    seen &= True if right is None else keys <= rows + right
    if (ids := kwargs.get("segment_ids")) is not None:
        seen &= ids[0][:, None] == ids[0][None, :]
    pairs = 2 * 4 * int(seen.sum())
    assert work_of(inv).flops == 2 * pairs * (16 + 8)
    # dq and dk need the gradient of the weights; each of the three is a product of its own.
    assert work_of(inv.differentiate("0", "1", "2")).flops == 3 * work_of(inv).flops
    assert work_of(inv.differentiate("2")).flops == 2 * pairs * (16 + 8 + 8)


def test_paged_attention_counts_the_tokens_that_the_tuner_measures_with():
    inv = of_calls("paged_attention")
    args, _ = inv.kernel.make_inputs(inv, jax.random.key(0))
    assert work_of(inv).flops == 2 * 4 * (16 + 16) * int(args[4].sum())
    assert work_of(inv.differentiate("0")) is None


@dataclasses.dataclass(frozen=True)
class Rows:
    rows: int = 16


class Counted(Kernel[Rows, jax.Array]):
    """A kernel with a count of its own, which may be anything."""

    says = Work(flops=1000.0, bytes=500)

    def run(self, x, *, cfg):
        return jax.lax.map(lambda c: c.sum(1), x.reshape(-1, cfg.rows, x.shape[1])).reshape(-1)

    def candidate_cfgs(self, inv):
        return [Rows(8), Rows(16), Rows(32)]

    def work(self, inv):
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


X = jnp.ones((64, 16))


def tuned(kernel, folder):
    store = PersistentCache(folder)
    selector = ConfigSelectorChain(ConfigCache(), tuner=Tuner(effort="quick"), persistent=store)
    result = autotune_lowered(selector, jax.jit(kernel).lower(X))
    (entry,) = result.entries
    return entry.outcome, store.entry((result.device, entry.op_id, entry.call_key))


def test_what_is_counted_is_stored_with_the_times(tmp_path):
    outcome, entry = tuned(Counted("counted_work"), tmp_path)
    expected = {"flops": 1000.0, "bytes": 500, "dtype": "float32"}
    assert outcome.work == expected
    assert entry["about"]["work"] == expected


@pytest.mark.parametrize("says", [ValueError("no idea"), 7, {"flops": 1}])
def test_a_count_that_fails_costs_no_tuning(says, tmp_path):
    kernel = Counted(f"counted_{type(says).__name__.lower()}")
    kernel.says = says
    outcome, entry = tuned(kernel, tmp_path)
    assert outcome.work is None
    assert entry["about"]["work"] is None
    assert any("GFLOP/s are not shown" in note for note in outcome.notes)


def test_numbers_that_are_no_count_are_refused():
    for bad in (-1, float("nan"), float("inf"), "many", True):
        with pytest.raises(ValueError, match="flops="):
            Work(flops=bad)


def test_a_batch_is_as_much_work_as_its_examples():
    inv = dataclasses.replace(
        Counted("counted_batch").bind(X), batch_axes=BatchAxes("vmap", (0,), 5)
    )
    assert counted_work(inv.kernel, inv) == {"flops": 5000.0, "bytes": None, "dtype": "float32"}


def test_counting_does_not_make_stored_configs_stale():
    class Without(Kernel[Rows, jax.Array]):
        def run(self, x, *, cfg):
            return x

    class With(Kernel[Rows, jax.Array]):
        def run(self, x, *, cfg):
            return x

        def work(self, inv):
            return Work(1.0)

    assert source_hash(With) == source_hash(Without)


def test_trials_say_in_which_order_they_were_tried(tmp_path):
    outcome, _ = tuned(Counted("counted_order"), tmp_path)
    heuristic_first = [trial.cfg.rows for trial in sorted(outcome.trials, key=lambda t: t.order)]
    assert heuristic_first == [16, 8, 32]
    plain = [trial.to_plain() for trial in outcome.trials]
    assert sorted(trial["order"] for trial in plain) == [1, 2, 3]


def test_a_run_that_goes_on_counts_on(tmp_path):
    kernel, store = Counted("counted_on"), PersistentCache(tmp_path)

    def outcome(**limits):
        tuner = Tuner(effort="quick", **limits)
        selector = ConfigSelectorChain(ConfigCache(), tuner=tuner, persistent=store)
        (entry,) = autotune_lowered(selector, jax.jit(kernel).lower(X)).entries
        return {trial.cfg.rows: trial.order for trial in entry.outcome.trials}

    first = outcome(evaluations=1)
    assert first == {16: 1, 8: None, 32: None}
    assert outcome() == {16: 1, 8: 2, 32: 3}
