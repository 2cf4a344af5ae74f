"""A call that a program differentiates is a question of its own, in every tier and tool.

The tuner of these tests picks one factor for calls that run forward and another for those that are
measured with their gradient; outputs and gradients show the factor that ran.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import (
    AutotunePolicy,
    AutotuningResult,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Kernel,
    PersistentCache,
    StrictMiss,
    Tuner,
    autotune_lowered,
    autotune_recorded,
    export_bundle,
    extract_labels_from_hlo_text,
    find_labels_in_lowered,
    forward_autotune_only,
    get_invocations,
    label,
    labels_to_configs,
    overlay_cache,
    policy_override,
    set_default_executor,
)
from ejkernel.ops.config.tiers.stored import reload_bundles

ROOT = Path(__file__).resolve().parents[3]
X = jnp.arange(1.0, 5.0)
HEURISTIC, TRAINING, FORWARD = 1.0, 2.0, 3.0


@dataclasses.dataclass(frozen=True)
class Factor:
    factor: float = HEURISTIC


class ByJax(Kernel[Factor, jax.Array]):
    def run(self, x, *, cfg):
        return x * cfg.factor

    def candidate_cfgs(self, inv):
        return [Factor(f) for f in (HEURISTIC, TRAINING, FORWARD)]


class ByCustomVjp(ByJax):
    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return (cotangents[0] * cfg.factor,)


class ByResiduals(ByJax):
    def fwd_with_residuals(self, x, *, cfg):
        return x * cfg.factor, ()

    def vjp(self, residuals, out, dout, x, *, cfg):
        return (dout * cfg.factor,)


class PicksByQuestion(Tuner):
    """Measures nothing, and sees by its program whether a candidate computes its gradient too."""

    def autotune(self, make_fn, args, kwargs, candidates):
        program = str(jax.make_jaxpr(make_fn(candidates[0]))(*args))
        return Factor(TRAINING if "optimization_barrier" in program else FORWARD)


@pytest.fixture(params=[ByJax, ByCustomVjp, ByResiduals])
def kernel(request):
    return request.param("scale")


class Counted(ConfigSelectorChain):
    """Counts its tuning runs."""

    def __init__(self, **options):
        self.runs = 0
        super().__init__(ConfigCache(), tuner=PicksByQuestion(), on_event=self._event, **options)

    def _event(self, event, **data):
        self.runs += event == "autotune_start"


def programs(kernel):
    """A forward program and a training program: both show the factor that ran."""
    forward = jax.jit(lambda x: kernel(x))
    training = jax.jit(jax.grad(lambda x: kernel(x).sum()))
    return forward, training


def factors(kernel):
    forward, training = programs(kernel)
    return float(forward(X)[0] / X[0]), float(training(X)[0])


def test_each_program_is_measured_as_it_runs_and_once(kernel):
    selector = Counted()
    forward, training = programs(kernel)
    trained = autotune_lowered(selector, training.lower(X))
    assert [entry.cfg for entry in trained.entries] == [Factor(TRAINING)]
    assert selector.runs == 1
    ran = autotune_lowered(selector, forward.lower(X))
    assert [entry.cfg for entry in ran.entries] == [Factor(FORWARD)]
    assert selector.runs == 2
    for program in (forward, training):
        autotune_lowered(selector, program.lower(X))
    assert selector.runs == 2
    with trained:
        assert factors(kernel) == (HEURISTIC, TRAINING)
    with ran:
        assert factors(kernel) == (FORWARD, HEURISTIC)
    with AutotuningResult.loads((trained | ran).dumps()):
        assert factors(kernel) == (FORWARD, TRAINING)
    assert factors(kernel) == (HEURISTIC, HEURISTIC)


def test_the_labels_of_the_two_programs_differ(kernel):
    forward, training = programs(kernel)
    inv = kernel.bind(X)
    (of_forward,) = find_labels_in_lowered(forward.lower(X))
    (of_training,) = find_labels_in_lowered(training.lower(X))
    assert of_forward == label("scale@v1", inv.key.call_key)
    assert of_training == label("scale@v1", inv.differentiate().key.call_key)
    assert extract_labels_from_hlo_text(training.lower(X).as_text()) == [of_training]


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.grad(lambda x: f(x).sum()),
        lambda f: jax.grad(lambda x: jax.jit(f)(x).sum()),
        lambda f: jax.grad(lambda x: jax.checkpoint(f)(x).sum()),
        lambda f: jax.grad(lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, 1)[0].sum()),
        lambda f: lambda x: jax.vjp(f, x)[1](jnp.ones(4))[0],
        lambda f: lambda x: jax.vmap(jax.grad(lambda x: f(x).sum()))(x[None])[0],
    ],
    ids=["grad", "grad of jit", "remat", "scan", "vjp", "vmap"],
)
def test_every_way_of_differentiating_asks_for_training(kernel, transform):
    selector = Counted()
    lowered = jax.jit(transform(kernel)).lower(X)
    assert autotune_lowered(selector, lowered).entries[0].cfg == Factor(TRAINING)
    assert selector.runs == 1


def test_forward_mode_asks_for_training_too():
    kernel = ByJax("scale")
    with overlay_cache({kernel.bind(X).differentiate().key: Factor(TRAINING)}):
        assert float(jax.jvp(kernel, (X,), (X,))[1][0]) == TRAINING
        hessian = jax.hessian(lambda x: (kernel(x) ** 2).sum())(X)
    np.testing.assert_allclose(hessian, 2 * TRAINING**2 * np.eye(4))


def test_executors_choose_for_each_program(kernel):
    executor = Executor(Counted())
    forward = float(executor(kernel, X)[0] / X[0])
    training = float(jax.grad(lambda x: executor(kernel, x).sum())(X)[0])
    assert (forward, training) == (FORWARD, TRAINING)


def test_what_is_recorded_is_what_the_program_runs(kernel):
    _, training = programs(kernel)
    training.lower(X)
    (recorded,) = get_invocations()
    assert recorded.differentiated == ("0",)
    assert recorded.signature == "grad[0](float32[4])"
    result = autotune_recorded(Counted())
    assert [entry.cfg for entry in result.entries] == [Factor(TRAINING)]


@pytest.mark.parametrize("first", ["forward", "training"])
def test_a_call_that_also_runs_forward_is_recorded_twice(kernel, first):
    for program in programs(kernel) if first == "forward" else programs(kernel)[::-1]:
        program(X)
    recorded = [inv.differentiated for inv in get_invocations()]
    assert sorted(recorded) == [(), ("0",)]


def test_which_arguments_are_differentiated_is_part_of_the_question():
    class Product(ByJax):
        def run(self, a, b, *, cfg):
            return a * b * cfg.factor

    kernel = Product("product")
    both = jax.grad(lambda a, b: kernel(a, b).sum(), argnums=(0, 1))
    one = jax.grad(lambda a, b: kernel(a, b).sum(), argnums=1)
    labels = [find_labels_in_lowered(jax.jit(f).lower(X, X)) for f in (both, one, kernel)]
    inv = kernel.bind(X, X)
    asked = (inv.differentiate(), inv.differentiate("1"), inv)
    assert labels == [[label("product@v1", i.key.call_key)] for i in asked]


@dataclasses.dataclass(frozen=True)
class Keeps:
    count: int = 1


class KeepsResiduals(Kernel[Keeps, jax.Array]):
    """Its config says how many arrays it keeps for its backward pass."""

    def __init__(self, frozen: int, learned: int):
        super().__init__("keeps")
        self._counts = {1: frozen, 2: learned}

    def run(self, a, b, *, cfg):
        return a * b

    def heuristic_cfg(self, inv):
        return Keeps(self._counts.get(len(inv.differentiated), 0))

    def fwd_with_residuals(self, a, b, *, cfg):
        return a * b, [a * (i + 1) for i in range(cfg.count)]

    def vjp(self, residuals, out, dout, a, b, *, cfg):
        kept = sum(residuals) / sum(range(1, cfg.count + 1)) if cfg.count else a
        return dout * b, dout * kept


TRANSFORMS = {
    "jit": jax.jit,
    "checkpoint": lambda f: jax.jit(jax.checkpoint(f)),
    "vmap": lambda f: lambda a, b: jax.vmap(jax.jit(f))(a[None], b[None])[0],
    "scan": lambda f: (
        lambda a, b: jax.lax.scan(lambda c, _: (c + f(a, b), None), 0 * a, None, 1)[0]
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("counts", [(0, 1), (1, 0), (1, 30), (30, 1), (3, 3)])
def test_what_is_kept_depends_on_what_is_differentiated(counts, transform):
    kernel = KeepsResiduals(*counts)
    call = TRANSFORMS[transform](lambda a, b: kernel(a, b))

    def loss(a, b):
        return jnp.sum(call(a, X)) + jnp.sum(call(a, b)) + jnp.sum(call(X, b))

    found = jax.jit(jax.grad(loss, argnums=(0, 1)))(X, 2 * X)
    np.testing.assert_allclose(found[0], 3 * X)
    np.testing.assert_allclose(found[1], 2 * X)


def test_a_key_builder_need_not_know_of_gradients():
    class Built(ByJax):
        key_builder = lambda inv: "the same for all"  # noqa: E731

    inv = Built("built").bind(X)
    assert inv.key != inv.differentiate().key == inv.differentiate().key
    assert inv.forward().key == inv.key


# --- stores ---------------------------------------------------------------------------------------


def test_a_store_answers_each_program(kernel, tmp_path):
    first = Counted(persistent=tmp_path)
    forward, training = programs(kernel)
    autotune_lowered(first, training.lower(X))
    autotune_lowered(first, forward.lower(X))
    keys = PersistentCache(tmp_path).keys()
    assert len(keys) == 2
    second = Counted(persistent=tmp_path)
    set_default_executor(Executor(second))
    assert factors(kernel) == (FORWARD, TRAINING)
    assert second.runs == 0
    assert dict(labels_to_configs(training.lower(X), second)) == {
        label("scale@v1", kernel.bind(X).differentiate().key.call_key): Factor(TRAINING)
    }


def test_a_bundle_answers_each_program(kernel, tmp_path, monkeypatch):
    selector = Counted(persistent=tmp_path / "store")
    _, training = programs(kernel)
    autotune_lowered(selector, training.lower(X))
    export_bundle(selector.persistent, tmp_path / "bundle.json")
    monkeypatch.setenv("EJKERNEL_CONFIG_PATH", str(tmp_path / "bundle.json"))
    reload_bundles()
    set_default_executor(None)  # what was traced before keeps its configs
    try:
        assert factors(kernel) == (HEURISTIC, TRAINING)
    finally:
        monkeypatch.delenv("EJKERNEL_CONFIG_PATH")
        reload_bundles()


def test_older_entries_answer_for_what_they_measured(kernel, tmp_path):
    """Before, both were kept at the key of the call alone."""
    key = kernel.bind(X).key
    store = PersistentCache(tmp_path)
    store.put(key, Factor(TRAINING), about={"measured": "forward and backward"})
    set_default_executor(Executor(ConfigSelectorChain(autotune=False, persistent=store)))
    assert factors(kernel) == (HEURISTIC, TRAINING)
    explained = Executor(ConfigSelectorChain(autotune=False, persistent=store)).explain(kernel, X)
    assert "measured forward and backward, and this program runs it forward" in explained
    store.put(key, Factor(FORWARD), about={"measured": "forward"})
    set_default_executor(Executor(ConfigSelectorChain(autotune=False, persistent=store)))
    assert factors(kernel) == (FORWARD, HEURISTIC)


def test_the_reason_of_a_miss_names_the_gradient(kernel, tmp_path):
    selector = Counted(persistent=tmp_path)
    autotune_lowered(selector, programs(kernel)[0].lower(X))
    asked = kernel.bind(X).differentiate()
    other = ConfigSelectorChain(autotune=False, persistent=tmp_path)
    assert "runs it forward only, this one differentiates it in 0" in str(
        other.decide(asked, kernel)
    )


def test_a_program_is_tuned_from_its_text_in_another_process(tmp_path):
    text = jax.jit(jax.grad(lambda x: SCALE(x).sum())).lower(X).as_text()
    (tmp_path / "program.txt").write_text(text)
    script = """
        import sys
        from tests.ops.config.test_forward_and_training import Counted, autotune_lowered
        selector = Counted()
        result = autotune_lowered(selector, open(sys.argv[1]).read())
        print(result.entries[0].cfg.factor, result.entries[0].call_key, result.skipped)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "program.txt")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    wanted = SCALE.bind(X).differentiate().key.call_key
    assert done.stdout.split()[:2] == [str(TRAINING), wanted]


class ModuleScale(ByResiduals):
    pass


SCALE = ModuleScale("module_scale")


@pytest.mark.parametrize("stored", ["training", "forward"])
def test_strict_mode_wants_what_the_program_runs(kernel, tmp_path, stored):
    inv = kernel.bind(X)
    asked = inv.differentiate() if stored == "training" else inv
    PersistentCache(tmp_path).put(asked.key, Factor(FORWARD))
    chain = ConfigSelectorChain(policy=AutotunePolicy(strict=True), persistent=tmp_path)
    set_default_executor(Executor(chain))
    forward, training = programs(kernel)
    runs, fails = (training, forward) if stored == "training" else (forward, training)
    for _ in range(2):
        np.testing.assert_allclose(runs(X)[0], FORWARD)
        with pytest.raises(StrictMiss, match="strict mode: no config is stored for scale@v1"):
            fails(X)
    other = inv if stored == "training" else inv.differentiate()
    PersistentCache(tmp_path).put(other.key, Factor(TRAINING))
    np.testing.assert_allclose(fails(X)[0], TRAINING)


def test_a_miss_without_jit_is_an_error_too(kernel):
    set_default_executor(Executor(ConfigSelectorChain(policy=AutotunePolicy(strict=True))))
    with jax.disable_jit(), pytest.raises(StrictMiss):
        kernel(X)


# --- the policy -----------------------------------------------------------------------------------


def test_validate_backward_asks_for_training_whatever_the_program_does(kernel):
    selector = Counted(policy=AutotunePolicy(validate_backward=True))
    executor = Executor(selector)
    assert executor.choose_config(kernel, X) == Factor(TRAINING)
    assert float(jax.grad(lambda x: executor(kernel, x).sum())(X)[0]) == TRAINING
    assert selector.runs == 1
    with policy_override(selector, validate_backward=False):
        assert executor.choose_config(kernel, X) == Factor(FORWARD)
    result = autotune_lowered(selector, programs(kernel)[0].lower(X))
    with result:  # what was tuned for a program runs in it
        assert factors(kernel) == (TRAINING, HEURISTIC)


def test_forward_autotune_only_asks_for_the_forward_pass(kernel):
    selector = Counted()
    executor = Executor(selector)
    with forward_autotune_only():
        assert float(jax.grad(lambda x: executor(kernel, x).sum())(X)[0]) == FORWARD
    assert selector.runs == 1
    assert float(jax.grad(lambda x: executor(kernel, x).sum())(X)[0]) == TRAINING
