"""Section 4 of the contract: executors, in every transform and call form."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import enum
import functools
import re

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Kernel,
    PersistentCache,
    Tuner,
    default_executor,
    overlay_cache,
    policy_override,
    set_default_executor,
)


@dataclasses.dataclass(frozen=True)
class Block:
    size: int = 1


class Mode(enum.Enum):
    PLUS = 1
    MINUS = 2


class MatMul(Kernel[Block, jax.Array]):
    """x @ w. `seen` lists the config of every time Python runs `run`."""

    def __init__(self, name="matmul", **kwargs):
        super().__init__(name, **kwargs)
        self.seen = []

    def run(self, x, w, *, cfg):
        self.seen.append(cfg)
        return x @ w

    def heuristic_cfg(self, inv):
        return Block(inv.args[0].shape[0])

    def candidate_cfgs(self, inv):
        return [Block(2), Block(99)]


class Anything(Kernel[Block, jax.Array]):
    """Returns what `function` gives; keeps what it was called with."""

    def __init__(self, function=lambda x, *rest, **kwargs: x, version=None):
        super().__init__("executes_anything", version=version)
        self.function = function
        self.calls = []

    def run(self, *args, cfg, **kwargs):
        self.calls.append((args, kwargs, cfg))
        return self.function(*args, **kwargs)


class TakeLast(Tuner):
    """A tuner that measures nothing and prefers the last candidate."""

    def __init__(self):
        super().__init__()
        self.asked = 0

    def autotune(self, make_fn, args, kwargs, candidates):
        self.asked += 1
        return list(candidates)[-1]


def quiet(**kwargs):
    """An executor that never tunes."""
    return Executor(ConfigSelectorChain(cache=ConfigCache(), autotune=False, **kwargs))


def close(got, want):
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-5, atol=1e-6)


X = jnp.arange(6.0).reshape(3, 2) / 5
W = jnp.array([[0.5, -0.3], [0.2, 0.8]])


# --- call forms ----------------------------------------------------------------------------------


def test_a_call_selects_a_config_and_runs():
    kernel = MatMul()
    close(quiet()(kernel, X, W), X @ W)
    assert kernel.seen == [Block(3)]


def test_an_explicit_config_is_the_one_that_runs():
    kernel, executor = MatMul(), quiet()
    close(executor(kernel, X, W, cfg=Block(7)), X @ W)
    close(executor(kernel, X, W, cfg=Block(8)), X @ W)
    close(executor(kernel, X, W), X @ W)
    assert kernel.seen == [Block(7), Block(8), Block(3)]


def test_cfg_none_is_the_same_as_no_cfg():
    kernel = MatMul()
    quiet()(kernel, X, W, cfg=None)
    assert kernel.seen == [Block(3)]


def test_the_documented_executor_tunes_on_a_miss():
    kernel, tuner = MatMul(), TakeLast()
    executor = Executor(ConfigSelectorChain(cache=ConfigCache(), tuner=tuner))
    close(executor(kernel, X, W), X @ W)
    assert kernel.seen[-1] == Block(99)
    assert tuner.asked == 1


def test_an_executor_without_a_chooser_has_a_selector_chain():
    executor = Executor()
    assert isinstance(executor.selector, ConfigSelectorChain)
    close(executor(MatMul(), X, W, cfg=Block(1)), X @ W)


def test_choose_config_gives_the_config_without_running():
    kernel, executor = MatMul(), quiet()
    assert executor.choose_config(kernel, X, W) == Block(3)
    assert executor.choose_config(kernel, X, W, cfg=Block(5)) == Block(5)
    abstract = jax.ShapeDtypeStruct((4, 2), jnp.float32)
    assert executor.choose_config(kernel, abstract, W) == Block(4)
    assert kernel.seen == []


def test_choose_config_agrees_with_the_call_in_every_tier():
    kernel, cache = MatMul(), ConfigCache()
    executor = Executor(ConfigSelectorChain(cache=cache, autotune=False))
    key = kernel.bind(X, W).key

    def both():
        executor(kernel, X, W)
        return executor.choose_config(kernel, X, W), kernel.seen[-1]

    assert both() == (Block(3), Block(3))
    with overlay_cache({key: Block(11)}):
        assert both() == (Block(11), Block(11))
    assert executor.choose_config(kernel, X, W) == Block(3)


def test_choose_config_reads_static_keywords():
    kernel = Anything()
    executor = quiet()
    cache = executor.selector.cache
    cache.put(kernel.bind(X, mode="a").key, Block(5))
    assert executor.choose_config(kernel, X, mode="a") == Block(5)
    assert executor.choose_config(kernel, X, mode="b") == Block(1)


def tier_in(explanation):
    return re.search(r"chosen\s+by (\w+)", explanation)[1]


def test_explain_names_operation_tier_key_and_config():
    kernel, executor = MatMul(), quiet()
    inv = kernel.bind(X, W)
    text = executor.explain(kernel, X, W)
    for part in ("matmul@v1", "float32[3,2]", inv.call_key, inv.device_fingerprint, str(Block(3))):
        assert part in text
    assert tier_in(text) == "heuristics"
    assert tier_in(executor.explain(kernel, X, W, cfg=Block(6))) == "override"
    executor.selector.cache.put(inv.key, Block(12))
    remembered = executor.explain(kernel, X, W)
    assert tier_in(remembered) == "memory"
    assert str(Block(12)) in remembered


def test_explain_says_why_earlier_tiers_had_nothing():
    text = quiet().explain(MatMul(), X, W)
    for tier in ("override", "overlay", "memory", "persistent"):
        assert tier in text


# --- compile -------------------------------------------------------------------------------------


def test_compile_gives_a_callable_for_these_shapes():
    kernel = MatMul()
    compiled = quiet().compile(kernel, X, W)
    close(compiled(X, W), X @ W)
    close(compiled(X + 1, 2 * W), (X + 1) @ (2 * W))
    assert kernel.seen == [Block(3)]


def test_compile_takes_abstract_arguments():
    compiled = quiet().compile(
        MatMul(),
        jax.ShapeDtypeStruct((3, 2), jnp.float32),
        jax.ShapeDtypeStruct((2, 2), jnp.float32),
    )
    close(compiled(X, W), X @ W)
    close(compiled(np.asarray(X), np.asarray(W)), X @ W)


def test_compile_builds_static_keywords_in():
    kernel = Anything(lambda x, *, power, bias=0.0: x**power + bias)
    executor = quiet()
    compiled = executor.compile(kernel, X, power=2, bias=X)
    close(compiled(X, bias=X + 1), X**2 + X + 1)
    close(compiled(X, bias=X, power=2), X**2 + X)
    with pytest.raises(ValueError, match=r"executes_anything@v1.*power=2"):
        compiled(X, bias=X, power=3)


def test_compile_takes_abstract_keyword_arrays_and_an_explicit_config():
    kernel = Anything(lambda x, *, bias: x + bias)
    compiled = quiet().compile(
        kernel, X, bias=jax.ShapeDtypeStruct((2,), jnp.float32), cfg=Block(4)
    )
    close(compiled(X, bias=W[0]), X + W[0])
    assert kernel.calls[-1][2] == Block(4)


def test_compile_takes_positional_strings():
    kernel = Anything(lambda x, mode: -x if mode == "negative" else x)
    close(quiet().compile(kernel, X, "negative")(X, "negative"), -X)


def test_a_compiled_call_refuses_other_shapes():
    compiled = quiet().compile(MatMul(), X, W)
    with pytest.raises((TypeError, ValueError)):
        compiled(jnp.ones((5, 2)), W)


# --- transforms ----------------------------------------------------------------------------------


def product(x, w):
    return x @ w


def total(call):
    return lambda x, w: jnp.sum(jnp.sin(call(x, w)))


def over_scan(call):
    def run(x, w):
        return jax.lax.scan(lambda c, row: (c + call(row[None], w)[0], call(row[None], w)), x[0], x)

    return run


def over_while(call):
    def run(x, w):
        return jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, call(s[1], w)), (0, x))[
            1
        ]

    return run


TRANSFORMS = {
    "nothing": lambda call: call,
    "jit": jax.jit,
    "nested jit": lambda call: jax.jit(lambda x, w: jax.jit(call)(x, w) + call(x, w)),
    "grad": lambda call: jax.grad(total(call), argnums=(0, 1)),
    "jit of grad": lambda call: jax.jit(jax.grad(total(call), argnums=(0, 1))),
    "vmap": lambda call: jax.vmap(lambda row, w: call(row[None], w), in_axes=(0, None)),
    "jit of vmap of grad": lambda call: jax.jit(
        jax.vmap(jax.grad(total(lambda row, w: call(row[None], w))), in_axes=(0, None))
    ),
    "scan": over_scan,
    "jit of scan": lambda call: jax.jit(over_scan(call)),
    "while_loop": over_while,
    "map": lambda call: lambda x, w: jax.lax.map(lambda row: call(row[None], w), x),
    "cond": lambda call: lambda x, w: jax.lax.cond(w[0, 0] > 0, call, lambda x, w: x, x, w),
    "switch": lambda call: lambda x, w: jax.lax.switch(1, [product, call], x, w),
    "remat": lambda call: jax.jit(jax.grad(total(jax.checkpoint(call)))),
    "jvp": lambda call: lambda x, w: jax.jvp(call, (x, w), (x + 1, w)),
    "linearize": lambda call: lambda x, w: jax.linearize(lambda x: call(x, w), x)[1](x),
    "hessian": lambda call: jax.jit(jax.hessian(total(call), argnums=1)),
    "make_jaxpr and eval": lambda call: (
        lambda x, w: jax.extend.core.jaxpr_as_fun(jax.make_jaxpr(call)(x, w))(x, w)[0]
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_an_executor_works_under(transform):
    executor, kernel = quiet(), MatMul()
    make = TRANSFORMS[transform]
    got, want = make(functools.partial(executor, kernel))(X, W), make(product)(X, W)
    jax.tree.map(close, got, want)
    assert len(kernel.seen) >= 1


@pytest.mark.parametrize("transform", ["jit", "vmap", "jit of grad", "scan"])
def test_an_explicit_config_reaches_run_under(transform):
    executor, kernel = quiet(), MatMul()
    call = TRANSFORMS[transform](lambda x, w: executor(kernel, x, w, cfg=Block(42)))
    jax.tree.map(close, call(X, W), TRANSFORMS[transform](product)(X, W))
    assert set(kernel.seen) == {Block(42)}


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_an_executor_works_in_shard_map(kind, wrap):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(getattr(jax.sharding.AxisType, kind),))
    executor, kernel = quiet(), MatMul()
    rows = PartitionSpec("d", None)
    x = jax.device_put(jnp.arange(32.0).reshape(16, 2), NamedSharding(mesh, rows))
    w = jax.device_put(W, NamedSharding(mesh, PartitionSpec()))
    mapped = jax.shard_map(
        lambda x, w: executor(kernel, x, w),
        mesh=mesh,
        in_specs=(rows, PartitionSpec()),
        out_specs=rows,
    )
    close(wrap(mapped)(x, w), np.asarray(x) @ np.asarray(W))
    assert set(kernel.seen) == {Block(2)}, "the config must be for the shapes of one device"


def test_gradients_pass_through_shard_map():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    kernel, rows = MatMul(), PartitionSpec("d", None)
    x = jnp.arange(16.0).reshape(8, 2) / 7
    mapped = jax.shard_map(
        functools.partial(quiet(), kernel),
        mesh=mesh,
        in_specs=(rows, PartitionSpec()),
        out_specs=rows,
    )
    got = jax.jit(jax.grad(total(mapped), argnums=(0, 1)))(x, W)
    jax.tree.map(close, got, jax.grad(total(product), argnums=(0, 1))(x, W))


def test_a_rule_of_ones_own_sums_the_gradient_of_a_replicated_argument():
    class WithRule(MatMul):
        def fwd_with_residuals(self, x, w, *, cfg):
            return x @ w, None

        def vjp(self, _, out, dout, x, w, *, cfg):
            return dout @ w.T, x.T @ dout

    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = PartitionSpec("d", None)
    x = jnp.arange(16.0).reshape(8, 2) / 7
    mapped = jax.shard_map(
        functools.partial(quiet(), WithRule()),
        mesh=mesh,
        in_specs=(rows, PartitionSpec()),
        out_specs=rows,
    )
    got = jax.jit(jax.grad(total(mapped), argnums=(0, 1)))(x, W)
    jax.tree.map(close, got, jax.grad(total(product), argnums=(0, 1))(x, W))


def test_sharded_arrays_give_a_sharded_result():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("d"))
    x = jax.device_put(jnp.ones((8, 2)), sharding)
    out = quiet()(Anything(lambda x: x * 2), x)
    close(out, 2 * np.ones((8, 2)))
    assert out.sharding.is_equivalent_to(sharding, out.ndim)


def test_inside_vmap_the_heuristic_sees_one_example():
    executor, kernel = quiet(), MatMul()
    jax.vmap(lambda x: executor(kernel, x, W))(jnp.ones((5, 4, 2)))
    assert kernel.seen == [Block(4)]


# --- arguments -----------------------------------------------------------------------------------


def test_pytree_arguments_and_outputs():
    kernel = Anything(lambda tree, x: {"out": (tree["w"] @ tree["b"][0], [x])})
    tree = {"w": X, "b": [W, None]}
    for call in (quiet(), jax.jit(quiet(), static_argnums=0)):
        out = call(kernel, tree, X)
        assert jax.tree.structure(out) == jax.tree.structure({"out": (1, [1])})
        close(out["out"][0], X @ W)


STATIC = {
    "str": ("a", "b"),
    "bool": (True, False),
    "int": (1, 2),
    "float": (0.5, 1.5),
    "None": (None, "x"),
    "tuple": ((1, "a", None), (2, "a", None)),
    "enum": (Mode.PLUS, Mode.MINUS),
    "dtype": (jnp.bfloat16, np.dtype("float16")),
    "function": (jnp.sin, jnp.cos),
    "dataclass": (Block(1), Block(2)),
    "look-alikes": (1, True),
}


@pytest.mark.parametrize("what", STATIC)
def test_static_keywords_reach_run_as_they_are(what):
    kernel, executor = Anything(lambda x, *, option: x), quiet()
    for value in STATIC[what]:
        executor(kernel, X, option=value)
        got = kernel.calls[-1][1]["option"]
        assert got == value
        assert type(got) is type(value)
    assert len(kernel.calls) == 2, "every value has a program of its own"
    for value in STATIC[what]:
        executor(kernel, X, option=value)
    assert len(kernel.calls) == 2, "and no more than one"


def test_static_keywords_work_in_transforms():
    kernel = Anything(lambda x, *, mode, scale: x * scale if mode is Mode.PLUS else -x * scale)

    def call(x, mode):
        return quiet()(kernel, x, mode=mode, scale=3.0)

    for mode, sign in ((Mode.PLUS, 3.0), (Mode.MINUS, -3.0)):
        close(jax.jit(call, static_argnums=1)(X, mode), sign * X)
        close(jax.vmap(lambda x, mode=mode: call(x, mode))(X), sign * X)
        close(jax.grad(lambda x, mode=mode: call(x, mode).sum())(X), jnp.full_like(X, sign))


def test_keyword_arrays_are_traced_beside_static_keywords():
    kernel, executor = Anything(lambda x, *, bias, mode: x + bias["b"] if mode else x), quiet()
    for n in range(3):
        close(executor(kernel, X, bias={"b": W[0] * n}, mode="add"), X + W[0] * n)
    assert len(kernel.calls) == 1
    assert isinstance(kernel.calls[0][1]["bias"]["b"], jax.core.Tracer)
    assert kernel.calls[0][1]["mode"] == "add"


def test_keyword_arrays_are_differentiated_and_batched():
    kernel = Anything(lambda x, *, bias: x * bias)
    executor = quiet()
    got = jax.grad(lambda b: executor(kernel, X, bias=b).sum())(W[0])
    close(got, X.sum(0))
    close(jax.vmap(lambda b: executor(kernel, X, bias=b))(W), jax.vmap(lambda b: X * b)(W))


def test_a_keyword_may_mix_arrays_and_static_values():
    kernel = Anything(lambda x, *, options: x + options["bias"] if options["mode"] == "add" else x)
    close(quiet()(kernel, X, options={"bias": W[0], "mode": "add"}), X + W[0])


def test_keywords_may_come_in_any_order_and_be_left_out():
    kernel, executor = Anything(lambda x, *, a=1, b=2: x * a + b), quiet()
    close(executor(kernel, X, a=3, b=4), 3 * X + 4)
    close(executor(kernel, X, b=4, a=3), 3 * X + 4)
    close(executor(kernel, X, b=4), X + 4)
    close(executor(kernel, X), X + 2)


def test_positional_strings_and_functions_are_built_in():
    kernel = Anything(lambda x, mode, function: function(x) if mode == "apply" else x)
    executor = quiet()
    for call in (executor, lambda k, *a: jax.jit(lambda x: executor(k, x, *a[1:]))(a[0])):
        close(call(kernel, X, "apply", jnp.sin), jnp.sin(X))
        close(call(kernel, X, "apply", jnp.cos), jnp.cos(X))
        close(call(kernel, X, "keep", jnp.cos), X)


def test_positional_strings_stand_beside_keywords_and_configs():
    kernel = Anything(lambda x, mode, *, bias, scale: (-x if mode == "minus" else x) * scale + bias)
    executor = quiet()
    close(executor(kernel, X, "minus", bias=W[0], scale=2.0, cfg=Block(9)), -2 * X + W[0])
    assert kernel.calls[-1][2] == Block(9)


def test_strings_inside_a_pytree_argument_are_built_in():
    kernel = Anything(lambda tree: tree["x"] * 2 if tree["mode"] == "double" else tree["x"])
    executor = quiet()
    close(executor(kernel, {"x": X, "mode": "double"}), 2 * X)
    close(executor(kernel, {"x": X, "mode": "single"}), X)


def test_calls_with_positional_strings_are_traced_once():
    kernel, executor = Anything(lambda x, mode: x), quiet()
    for _ in range(3):
        executor(kernel, X, "a")
    assert len(kernel.calls) == 1


def test_none_is_an_argument_like_any_other():
    kernel = Anything(lambda x, mask, other: x if mask is None else x * mask)
    close(quiet()(kernel, X, None, None), X)
    close(quiet()(kernel, X, X, None), X * X)


def test_numpy_arguments_work_and_share_the_program_of_jax_arrays():
    kernel, executor = MatMul(), quiet()
    close(executor(kernel, np.asarray(X), np.asarray(W)), X @ W)
    close(executor(kernel, X, W), X @ W)
    close(executor(kernel, np.asarray(X, np.float64), W), X @ W)
    assert len(kernel.seen) == 1


def test_python_scalars_are_data_and_share_one_program():
    kernel, executor = Anything(lambda x, factor: x * factor), quiet()
    for factor in (2.0, 3.0, -1.5):
        close(executor(kernel, X, factor), X * factor)
    assert len(kernel.calls) == 1
    close(executor(kernel, X, 2), X * 2)
    assert executor(kernel, X.astype(jnp.bfloat16), 2.0).dtype == jnp.bfloat16


def test_random_keys_are_data():
    kernel = Anything(lambda x, key, *, other: x + jax.random.normal(key, x.shape))
    executor = quiet()
    for seed in (0, 1):
        key = jax.random.key(seed)
        want = X + jax.random.normal(key, X.shape)
        close(executor(kernel, X, key, other=key), want)
        close(jax.jit(lambda x, k: executor(kernel, x, k, other=k))(X, key), want)
    keys = jax.random.split(jax.random.key(2), 3)
    got = jax.vmap(lambda x, k: executor(kernel, x, k, other=k))(X, keys)
    close(got, X + jax.vmap(lambda k: jax.random.normal(k, (2,)))(keys))


def test_random_keys_can_be_tuned_with():
    kernel, tuner = Anything(lambda x, key: x + jax.random.normal(key, x.shape)), TakeLast()
    executor = Executor(ConfigSelectorChain(tuner=tuner))
    key = jax.random.key(0)
    close(executor(kernel, X, key), X + jax.random.normal(key, X.shape))
    assert tuner.asked == 1


def test_a_config_that_cannot_be_hashed_works():
    @dataclasses.dataclass
    class Loose:
        sizes: list

    class Loosely(Kernel[Loose, jax.Array]):
        def run(self, x, *rest, cfg):
            return x * cfg.sizes[0]

        def heuristic_cfg(self, inv):
            return Loose([1])

    executor, kernel = quiet(), Loosely()
    close(executor(kernel, X), X)
    close(executor(kernel, X, cfg=Loose([2])), 2 * X)
    close(executor(kernel, X, cfg=Loose([3])), 3 * X)
    close(executor(kernel, X, "text", cfg=Loose([4])), 4 * X)


def test_arguments_are_not_changed_by_a_call():
    kernel, options = Anything(), {"cfg": Block(3), "mode": "a"}
    quiet()(kernel, X, **options)
    assert options == {"cfg": Block(3), "mode": "a"}


@pytest.mark.parametrize("name", ["kernel", "executor", "args", "kwargs", "static", "inv"])
def test_a_keyword_may_have_any_name(name):
    kernel = Anything(lambda x, **kwargs: x + kwargs[name])
    for call in (functools.partial(quiet(), kernel), kernel):
        close(call(X, **{name: 3}), X + 3)
        close(call(X, **{name: X}), X + X)


# --- how often Python runs -----------------------------------------------------------------------


def test_one_trace_per_shape():
    kernel, executor = MatMul(), quiet()
    for n in range(4):
        executor(kernel, X + n, W)
    assert len(kernel.seen) == 1
    for n in range(4):
        executor(kernel, jnp.ones((5, 2)) * n, W)
    assert kernel.seen == [Block(3), Block(5)]
    executor(kernel, X.astype(jnp.bfloat16), W)
    assert len(kernel.seen) == 3


def test_one_trace_with_explicit_configs_of_equal_content():
    kernel, executor = MatMul(), quiet()
    for _ in range(3):
        executor(kernel, X, W, cfg=Block(6))
    assert kernel.seen == [Block(6)]


def test_a_jitted_function_traces_its_kernels_once():
    kernel, executor = MatMul(), quiet()

    @jax.jit
    def function(x, w):
        return executor(kernel, x, w) + executor(kernel, x, 2 * w)

    for n in range(3):
        close(function(X + n, W), 3 * (X + n) @ W)
    assert len(kernel.seen) == 1, "two equal calls in one program share a trace"


def test_selection_happens_once_per_trace_not_per_call():
    asked = []

    class Counting:
        def choose(self, inv, kernel):
            asked.append(inv.call_key)
            return Block(1)

    executor, kernel = Executor(Counting()), MatMul()
    for _ in range(5):
        executor(kernel, X, W)
    assert len(asked) == 1


def test_two_executors_do_not_share_programs():
    kernel = MatMul()
    one, other = quiet(), quiet()
    other.selector.cache.put(kernel.bind(X, W).key, Block(50))
    one(kernel, X, W)
    other(kernel, X, W)
    one(kernel, X, W)
    assert kernel.seen == [Block(3), Block(50)]


def test_two_kernels_of_one_name_do_not_share_programs():
    executor = quiet()
    close(executor(Anything(lambda x: x + 1), X), X + 1)
    close(executor(Anything(lambda x: x + 2), X), X + 2)


# --- other choosers ------------------------------------------------------------------------------


class Always:
    def __init__(self, cfg):
        self.cfg = cfg
        self.asked = []

    def choose(self, inv, kernel):
        self.asked.append((inv, kernel))
        return inv.override_cfg or self.cfg


def test_anything_with_choose_is_a_chooser():
    kernel, chooser = MatMul(), Always(Block(77))
    executor = Executor(chooser)
    close(executor(kernel, X, W), X @ W)
    assert executor.choose_config(kernel, X, W) == Block(77)
    executor(kernel, X, W, cfg=Block(78))
    assert kernel.seen == [Block(77), Block(78)]
    inv, asked_kernel = chooser.asked[0]
    assert asked_kernel is kernel
    assert inv.op_id == "matmul"
    assert inv.call_key == kernel.bind(X, W).call_key
    close(executor.compile(kernel, X, W)(X, W), X @ W)


def test_an_executor_with_another_chooser_works_in_transforms():
    executor, kernel = Executor(Always(Block(5))), MatMul()
    call = functools.partial(executor, kernel)
    got = jax.jit(jax.grad(total(call), argnums=(0, 1)))(X, W)
    jax.tree.map(close, got, jax.grad(total(product), argnums=(0, 1))(X, W))


def test_asking_another_chooser_for_reasons_says_what_it_is():
    executor = Executor(Always(Block(5)))
    with pytest.raises(TypeError, match="Always"):
        executor.explain(MatMul(), X, W)
    with pytest.raises(TypeError, match="Always"):
        _ = executor.selector


def test_a_chooser_that_returns_no_config_is_refused_with_the_kernel():
    for wrong in (None, "big", 3):
        executor = Executor(Always(wrong))
        with pytest.raises(TypeError, match=r"matmul@v1.*chooser"):
            executor(MatMul(), X, W)


@pytest.mark.parametrize("wrong", [3, "selector", object(), ConfigCache(), AutotunePolicy()])
def test_an_executor_refuses_what_cannot_choose(wrong):
    with pytest.raises(TypeError, match=r"choose\(inv, kernel\)"):
        Executor(wrong)


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [[1, 2], {"a": 1}, {1, 2}], ids=["list", "dict", "set"])
@pytest.mark.parametrize("through", ["executor", "kernel", "jit"])
def test_an_unhashable_static_keyword_is_refused_by_name(value, through):
    kernel, executor = Anything(), quiet()
    call = {
        "executor": functools.partial(executor, kernel),
        "kernel": kernel,
        "jit": lambda x, **kwargs: jax.jit(lambda x: executor(kernel, x, **kwargs))(x),
    }[through]
    with pytest.raises(TypeError) as error:
        call(X, other="fine", option=value)
    message = str(error.value)
    assert "executes_anything@v1" in message
    assert "'option'" in message
    assert "hashable" in message


def test_arrays_on_different_devices_are_refused_with_their_places():
    one, two = jax.devices()[:2]
    x, w = jax.device_put(X, one), jax.device_put(W, two)
    with pytest.raises(ValueError) as error:
        quiet()(MatMul(), x, w)
    message = str(error.value)
    assert "matmul@v1" in message
    assert f"argument 0 on {one}" in message
    assert f"argument 1 on {two}" in message
    with pytest.raises(ValueError, match=r"args\[0\] of matmul.*args\[1\] of matmul"):
        MatMul()(x, w)  # JAX's own words


def test_a_keyword_array_on_another_device_is_refused_with_its_name():
    one, two = jax.devices()[:2]
    kernel = Anything(lambda x, *, bias: x + bias["b"])
    bias = {"b": jax.device_put(W[0], two)}
    with pytest.raises(ValueError, match=r"anything@v1.*keyword 'bias'\['b'\] on"):
        quiet()(kernel, jax.device_put(X, one), bias=bias)


def test_arrays_on_one_other_device_run_there():
    device = jax.devices()[3]
    out = quiet()(MatMul(), jax.device_put(X, device), jax.device_put(W, device))
    assert out.devices() == {device}


@pytest.mark.parametrize("wrong", [MatMul, "matmul", None, len])
def test_an_executor_refuses_what_is_not_a_kernel(wrong):
    executor = quiet()
    for call in (executor, executor.compile, executor.choose_config):
        with pytest.raises(TypeError, match=r"(?i)kernel"):
            call(wrong, X, W)


def test_an_error_of_the_kernel_is_not_hidden_by_the_call_form():
    def broken(x, *rest, **kwargs):
        raise TypeError("my own mistake")

    kernel = Anything(broken)
    for args, kwargs in (((X,), {}), ((X,), {"mode": "a"}), ((X, "text"), {}), ((X,), {"b": X})):
        with pytest.raises(TypeError, match="my own mistake"):
            quiet()(kernel, *args, **kwargs)


# --- the default executor ------------------------------------------------------------------------


def test_the_default_executor_uses_heuristics_first():
    kernel = MatMul()
    close(kernel(X, W), X @ W)
    assert kernel.seen == [Block(3)]
    assert default_executor().choose_config(kernel, X, W) == Block(3)
    assert tier_in(default_executor().explain(kernel, X, W)) == "heuristics"


def test_the_default_executor_never_tunes_by_itself(monkeypatch):
    def forbidden(self, *args, **kwargs):
        raise AssertionError("tuned without being asked")

    monkeypatch.setattr(Tuner, "tune", forbidden)
    kernel = MatMul()
    for call in (
        kernel,
        jax.jit(kernel),
        jax.grad(total(kernel)),
        jax.vmap(kernel, (None, None), axis_size=2),
    ):
        call(X, W)
    assert set(kernel.seen) == {Block(3)}


def test_the_default_executor_writes_nothing_to_disk():
    kernel = MatMul()
    kernel(X, W)
    kernel(X, W, cfg=Block(4))
    assert len(PersistentCache()) == 0


def test_the_default_executor_reads_the_store():
    kernel = MatMul()
    PersistentCache().put(kernel.bind(X, W).key, Block(64))
    assert tier_in(default_executor().explain(kernel, X, W)) == "persistent"
    kernel(X, W)
    assert kernel.seen == [Block(64)]


def candidates_seen(kernel):
    return {cfg.size for cfg in kernel.seen}


def test_the_environment_variable_makes_the_default_executor_tune(monkeypatch):
    monkeypatch.setenv("EJKERNEL_AUTOTUNE", "1")
    kernel = MatMul()
    close(kernel(X, W), X @ W)
    assert candidates_seen(kernel) == {2, 3, 99}
    assert len(PersistentCache()) == 1


def test_the_environment_variable_off_means_heuristics(monkeypatch):
    monkeypatch.setenv("EJKERNEL_AUTOTUNE", "0")
    kernel = MatMul()
    kernel(X, W)
    assert candidates_seen(kernel) == {3}


def test_a_policy_override_makes_the_default_executor_tune_for_a_while():
    kernel, later = MatMul("first"), MatMul("second")
    with policy_override(autotune=True):
        close(kernel(X, W), X @ W)
    later(X, W)
    assert candidates_seen(kernel) == {2, 3, 99}
    assert candidates_seen(later) == {3}


def test_a_policy_override_reaches_functions_jitted_and_called_before():
    kernel = MatMul()
    function = jax.jit(lambda x, w: kernel(x, w) + 1)
    close(function(X, W), X @ W + 1)
    assert candidates_seen(kernel) == {3}
    with policy_override(autotune=True):
        close(function(X, W), X @ W + 1)
    assert candidates_seen(kernel) == {2, 3, 99}


def test_after_tuning_what_is_chosen_is_what_runs():
    set_default_executor(
        Executor(ConfigSelectorChain(policy=AutotunePolicy.tuning(False), tuner=TakeLast()))
    )
    kernel = MatMul()
    function = jax.jit(lambda x, w: jnp.sum(kernel(x, w)))
    function(X, W)
    kernel(X, W)
    with policy_override(autotune=True):
        assert default_executor().choose_config(kernel, X, W) == Block(99)
    kernel.seen.clear()
    assert default_executor().choose_config(kernel, X, W) == Block(99)
    function(X, W)
    kernel(X, W)
    assert set(kernel.seen) == {Block(99)}, "the earlier program still runs the heuristic config"


def test_a_config_put_into_the_cache_later_is_what_runs_next():
    kernel, executor = MatMul(), quiet()
    function = jax.jit(lambda x, w: jnp.sum(executor(kernel, x, w)))
    function(X, W)
    executor(kernel, X, W)
    executor.selector.cache.put(kernel.bind(X, W).key, Block(50))
    assert executor.choose_config(kernel, X, W) == Block(50)
    kernel.seen.clear()
    function(X, W)
    executor(kernel, X, W)
    assert set(kernel.seen) == {Block(50)}, "the earlier program still runs the heuristic config"


def test_set_default_executor_changes_what_kernels_use():
    kernel, tuner = MatMul(), TakeLast()
    executor = Executor(ConfigSelectorChain(tuner=tuner))
    set_default_executor(executor)
    assert default_executor() is executor
    kernel(X, W)
    assert kernel.seen == [Block(99)]
    assert tuner.asked == 1


def test_set_default_executor_affects_functions_jitted_before():
    kernel = MatMul()
    inner = jax.jit(lambda x, w: kernel(x, w))
    outer = jax.jit(lambda x, w: inner(x, w) * 2)
    for call in (kernel, inner, outer):
        call(X, W)
    assert candidates_seen(kernel) == {3}
    set_default_executor(Executor(Always(Block(70))))
    for call in (outer, inner, kernel):
        kernel.seen.clear()
        call(X, W)
    assert default_executor().choose_config(kernel, X, W) == Block(70)
    kernel.seen.clear()
    set_default_executor(Executor(Always(Block(71))))
    close(outer(X, W), 2 * X @ W)
    assert kernel.seen == [Block(71)]


def test_set_default_executor_none_returns_to_heuristics():
    kernel = MatMul()
    set_default_executor(Executor(Always(Block(70))))
    kernel(X, W)
    set_default_executor(None)
    kernel(X, W)
    assert kernel.seen == [Block(70), Block(3)]


@pytest.mark.parametrize("wrong", [3, ConfigSelectorChain, "executor"])
def test_set_default_executor_refuses_anything_else(wrong):
    with pytest.raises(TypeError, match="Executor"):
        set_default_executor(wrong)


def test_a_store_that_cannot_be_opened_does_not_stop_a_call(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(blocked))
    kernel = MatMul()
    close(kernel(X, W), X @ W)
    assert kernel.seen == [Block(3)]


def test_a_kernel_can_be_called_from_many_threads():
    kernel = MatMul()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        outs = list(pool.map(lambda n: kernel(X + n, W), range(16)))
    for n, out in enumerate(outs):
        close(out, (X + n) @ W)
