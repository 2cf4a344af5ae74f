"""Section 2 of the contract: what a kernel author writes, and what comes of it."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import pickle
import types
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import ConfigSelectorChain, Executor, Invocation, Kernel, default_executor


@dataclasses.dataclass(frozen=True)
class Block:
    size: int = 1


@dataclasses.dataclass(frozen=True)
class OtherConfig:
    size: int = 1


class Mode(enum.Enum):
    FAST = 1


class Double(Kernel[Block, jax.Array]):
    def run(self, x, *, cfg):
        return x * 2


@pytest.fixture
def pretend(monkeypatch):
    """`pretend("gpu")`: kernels are chosen as on that kind of device."""

    def set_kind(kind):
        for module in ("implementation", "kernel", "requirements"):
            monkeypatch.setattr(f"ejkernel.ops.core.{module}.device_kind", lambda: kind)

    return set_kind


def assert_trees_close(got, want, rtol=1e-5, atol=1e-6):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        np.testing.assert_allclose(
            np.asarray(mine, np.float32), np.asarray(theirs, np.float32), rtol=rtol, atol=atol
        )


# --- construction and identity -------------------------------------------------------------------


def test_a_name_may_be_given_by_keyword_by_position_or_as_op_id():
    assert Double(name="twice").op_id == "twice"
    assert Double("twice").op_id == "twice"
    assert Double(op_id="twice").op_id == "twice"
    assert Double("twice", op_id="twice").op_id == "twice"


def test_super_init_takes_all_three_spellings():
    class ByKeyword(Double):
        def __init__(self):
            super().__init__(name="spelled")

    class ByPosition(Double):
        def __init__(self):
            super().__init__("spelled")

    class ByOpId(Double):
        def __init__(self):
            super().__init__(op_id="spelled")

    assert [cls().op_id for cls in (ByKeyword, ByPosition, ByOpId)] == ["spelled"] * 3


@pytest.mark.parametrize(
    ("class_name", "expected"),
    [
        ("FlashAttention", "flash_attention"),
        ("FlashAttentionKernel", "flash_attention"),
        ("MatMul", "mat_mul"),
        ("RMSNorm", "rms_norm"),
        ("Kernel", "kernel"),
    ],
)
def test_without_a_name_it_is_derived_from_the_class(class_name, expected):
    assert type(class_name, (Double,), {})().op_id == expected


def test_a_kernel_whose_init_forgets_super_still_has_a_name_and_runs():
    class Forgetful(Double):
        def __init__(self):
            self.note = "no super().__init__()"

    kernel = Forgetful()
    assert kernel.op_id == "forgetful"
    assert kernel(jnp.ones(2)).tolist() == [2.0, 2.0]


def test_the_version_is_one_unless_the_class_or_the_constructor_says_otherwise():
    class Third(Double):
        version = "3"

    assert Double().version == "1"
    assert Third().version == "3"
    assert Double(version="2.1").version == "2.1"
    assert Third(version="4").version == "4"
    assert Third.version == "3"


def test_the_full_operation_id_joins_name_and_version():
    kernel = Double("matmul")
    assert kernel.bind(jnp.ones(2)).key.op_id == "matmul@v1"
    assert Double("matmul", version="7").bind(jnp.ones(2)).key.op_id == "matmul@v7"
    assert "matmul@v1" in repr(kernel)


def test_the_version_separates_cache_keys_and_the_call_key_stays():
    one, two = (Double("matmul", version=v).bind(jnp.ones(2)) for v in ("1", "2"))
    assert one.key != two.key
    assert one.call_key == two.call_key


def test_two_different_names_are_refused():
    with pytest.raises(TypeError, match=r"Double.*name='a'.*op_id='b'"):
        Double(name="a", op_id="b")


@pytest.mark.parametrize("name", ["two words", "mat@v2", "a:b", "a#b", "ü", "tab\t"])
def test_a_name_that_cannot_stand_in_a_label_is_refused(name):
    with pytest.raises(ValueError) as error:
        Double(name)
    assert "Double" in str(error.value)
    assert repr(name) in str(error.value)


def test_a_version_that_cannot_stand_in_a_label_is_refused():
    with pytest.raises(ValueError, match=r"Double.*version 'one:two'"):
        Double(version="one:two")


def test_the_config_class_is_inherited_also_through_generic_bases():
    C = TypeVar("C")

    class Base(Kernel[C, jax.Array], Generic[C]):
        def run(self, x, *, cfg):
            return x * cfg.size

    class Leaf(Base[Block]):
        pass

    class Grandchild(Leaf):
        def heuristic_cfg(self, inv):
            return Block(3)

    assert Leaf()(jnp.ones(1), cfg=Block(5)).tolist() == [5.0]
    assert Grandchild()(jnp.ones(1)).tolist() == [3.0]
    with pytest.raises(TypeError, match="grandchild@v1"):
        Grandchild()(jnp.ones(1), cfg=OtherConfig())


# --- which run method ----------------------------------------------------------------------------

ORDER = {
    "gpu": ("run_triton", "run_gpu", "run", "run_xla"),
    "tpu": ("run_pallas", "run_tpu", "run", "run_xla"),
    "cpu": ("run_cpu", "run_xla", "run"),
}
FOREIGN = {
    "gpu": ("run_pallas", "run_tpu", "run_cpu"),
    "tpu": ("run_triton", "run_gpu", "run_cpu"),
    "cpu": ("run_triton", "run_pallas", "run_gpu", "run_tpu"),
}


def which_ran(kernel):
    (tag,) = kernel(jnp.ones(1))
    return tag


def kernel_class(namespace, base=Kernel[Block, Any]):
    return types.new_class("Tagged", (base,), {}, lambda body: body.update(namespace))


def tagged(methods):
    """A kernel that answers with the name of the method that ran."""

    def method(tag):
        return lambda self, x, *, cfg: {tag: x}

    return kernel_class({tag: method(tag) for tag in methods})("tagged")


@pytest.mark.parametrize(
    ("kind", "first"), [(kind, i) for kind, order in ORDER.items() for i in range(len(order))]
)
def test_the_most_specific_run_method_that_exists_serves_the_device(pretend, kind, first):
    pretend(kind)
    kernel = tagged([*ORDER[kind][first:], *FOREIGN[kind]])
    assert which_ran(kernel) == ORDER[kind][first]


@pytest.mark.parametrize("kind", ["gpu", "tpu", "cpu"])
def test_a_kernel_for_other_devices_only_says_which_it_has(pretend, kind):
    pretend(kind)
    with pytest.raises(NotImplementedError) as error:
        tagged(FOREIGN[kind])(jnp.ones(1))
    message = str(error.value)
    assert "tagged@v1" in message
    assert kind in message
    assert all(name.removeprefix("run_") in message for name in FOREIGN[kind])


def test_an_inherited_specific_method_still_comes_before_run(pretend):
    pretend("gpu")

    class Parent(Kernel[Block, Any]):
        def run_gpu(self, x, *, cfg):
            return {"run_gpu": x}

    class Child(Parent):
        def run(self, x, *, cfg):
            return {"run": x}

    assert which_ran(Child()) == "run_gpu"


# --- suffixes on the other methods ---------------------------------------------------------------


class Suffixed(Kernel[Block, jax.Array]):
    def run(self, x, *, cfg):
        return x * cfg.size

    def heuristic_cfg(self, inv):
        return Block(1)

    def heuristic_cfg_gpu(self, inv):
        return Block(2)

    def heuristic_cfg_triton(self, inv):
        return Block(3)

    def heuristic_cfg_tpu(self, inv):
        return Block(4)

    def heuristic_cfg_xla(self, inv):
        return Block(5)

    def candidate_cfgs(self, inv):
        return [Block(10)]

    def candidate_cfgs_pallas(self, inv):
        return [Block(20)]

    def candidate_cfgs_cpu(self, inv):
        return [Block(30)]


@pytest.mark.parametrize(("kind", "size"), [("gpu", 3), ("tpu", 4), ("cpu", 5)])
def test_heuristic_cfg_may_carry_a_suffix(pretend, kind, size):
    pretend(kind)
    assert Suffixed()(jnp.ones(1)).tolist() == [size]


@pytest.mark.parametrize(("kind", "size"), [("gpu", 10), ("tpu", 20), ("cpu", 30)])
def test_candidate_cfgs_may_carry_a_suffix(pretend, kind, size):
    pretend(kind)
    kernel = Suffixed()
    assert kernel.candidates(kernel.bind(jnp.ones(1)))[1:] == [Block(size)]


def test_a_config_space_for_the_device_comes_before_general_candidates(pretend):
    class Both(Double):
        def candidate_cfgs(self, inv):
            return [Block(10)]

        def config_space_gpu(self, inv):
            return [Block(20)]

    pretend("gpu")
    kernel = Both()
    assert kernel.candidates(kernel.bind(jnp.ones(1))) == [Block(1), Block(20)]


def gradient_kernel(**rules):
    """x³ with rules that multiply the true gradient by a factor, to see which rule ran."""

    def custom(factor):
        return lambda self, primals, cfg, kwargs, cotangents: (
            factor * 3 * primals[0] ** 2 * cotangents[0],
        )

    def forward(factor):
        return lambda self, x, *, cfg: (x**3, factor * x)

    def backward(factor):
        return lambda self, saved, out, dout, x, *, cfg: (factor * 3 * saved * x * dout,)

    makers = {"custom_vjp": custom, "fwd_with_residuals": forward, "vjp": backward}
    methods = {"run": lambda self, x, *, cfg: x**3}
    for name, factor in rules.items():
        base = next(base for base in makers if name == base or name.startswith(f"{base}_"))
        methods[name] = makers[base](factor)
    return kernel_class(methods)("cube")


def factor_of(kernel):
    return float(jax.grad(lambda x: kernel(x).sum())(jnp.float32(2.0)) / 12)


@pytest.mark.parametrize(("kind", "factor"), [("gpu", 2), ("tpu", 3), ("cpu", 5)])
def test_custom_vjp_may_carry_a_suffix(pretend, kind, factor):
    pretend(kind)
    kernel = gradient_kernel(custom_vjp=3, custom_vjp_triton=2, custom_vjp_xla=5)
    assert factor_of(kernel) == factor


@pytest.mark.parametrize(("kind", "factor"), [("gpu", 6), ("tpu", 20), ("cpu", 42)])
def test_both_methods_of_the_residual_form_may_carry_suffixes(pretend, kind, factor):
    pretend(kind)
    kernel = gradient_kernel(
        fwd_with_residuals=2,
        vjp=3,
        fwd_with_residuals_pallas=4,
        vjp_tpu=5,
        fwd_with_residuals_cpu=6,
        vjp_cpu=7,
    )
    assert factor_of(kernel) == factor


def test_a_residual_rule_for_the_device_comes_before_a_general_custom_vjp(pretend):
    kernel = gradient_kernel(custom_vjp=1, fwd_with_residuals_gpu=2, vjp_gpu=3)
    pretend("gpu")
    assert factor_of(kernel) == 6


def test_a_rule_for_another_device_leaves_differentiation_to_jax(pretend):
    pretend("cpu")
    assert factor_of(gradient_kernel(custom_vjp_gpu=2)) == 1


# --- configs -------------------------------------------------------------------------------------


def configs_of(kernel, *args):
    inv = kernel.bind(*(args or (jnp.ones(4),)))
    return kernel, inv


@pytest.mark.parametrize("method", ["config_space", "candidate_cfgs"])
def test_either_name_of_the_space_is_seen_by_both_callers(method):
    cls = kernel_class({method: lambda self, inv: [Block(7), Block(8)]}, Double)
    kernel, inv = configs_of(cls())
    assert list(kernel.config_space(inv)) == [Block(7), Block(8)]
    assert list(kernel.candidate_cfgs(inv)) == [Block(7), Block(8)]
    assert kernel.candidates(inv) == [Block(1), Block(7), Block(8)]


def test_without_a_space_the_heuristic_config_is_the_only_candidate():
    class Alone(Double):
        def heuristic_cfg(self, inv):
            return Block(9)

    kernel, inv = configs_of(Alone())
    assert list(kernel.config_space(inv)) == [Block(9)]
    assert list(kernel.candidate_cfgs(inv)) == [Block(9)]
    assert kernel.candidates(inv) == [Block(9)]


@pytest.mark.parametrize("method", ["config_space", "candidate_cfgs"])
@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ([], [1]),
        ([2, 3], [1, 2, 3]),
        ([3, 1, 2], [1, 3, 2]),
        ([2, 2, 1, 1], [1, 2]),
    ],
)
def test_the_heuristic_config_is_always_among_the_candidates_once(method, listed, expected):
    cls = kernel_class({method: lambda self, inv: (Block(n) for n in listed)}, Double)
    kernel, inv = configs_of(cls())
    assert kernel.candidates(inv) == [Block(n) for n in expected]


def test_a_subclass_that_uses_the_other_name_replaces_its_parents_space():
    class Parent(Double):
        def candidate_cfgs(self, inv):
            return [Block(2)]

    class Child(Parent):
        def config_space(self, inv):
            return [Block(3)]

    kernel, inv = configs_of(Child())
    assert kernel.candidates(inv) == [Block(1), Block(3)]
    assert list(kernel.candidate_cfgs(inv)) == [Block(3)]
    assert list(kernel.config_space(inv)) == [Block(3)]


def test_a_space_may_extend_the_inherited_one():
    class Wider(Double):
        def config_space(self, inv):
            return [*super().config_space(inv), Block(6)]

    kernel, inv = configs_of(Wider())
    assert kernel.candidates(inv) == [Block(1), Block(6)]


def test_the_heuristic_reads_shapes_from_the_invocation():
    class ByShape(Double):
        def run(self, x, *, cfg):
            return x * cfg.size

        def heuristic_cfg(self, inv):
            return Block(inv.args[0].shape[0])

    assert ByShape()(jnp.ones(3)).tolist() == [3.0] * 3
    assert jax.jit(ByShape())(jnp.ones(2)).tolist() == [2.0] * 2


def test_without_a_heuristic_the_config_class_with_its_defaults_is_used():
    kernel, inv = configs_of(Double())
    assert default_executor().choose_config(kernel, jnp.ones(4)) == Block(1)
    assert kernel.candidates(inv) == [Block(1)]


def test_a_config_may_hold_nested_dataclasses_tuples_enums_dtypes_and_none():
    @dataclasses.dataclass(frozen=True)
    class Rich:
        inner: Block = Block(4)
        shape: tuple[int, ...] = (1, 2)
        mode: Mode = Mode.FAST
        dtype: Any = jnp.bfloat16
        nothing: int | None = None

    class Casts(Kernel[Rich, jax.Array]):
        def run(self, x, *, cfg):
            return (x * cfg.inner.size).astype(cfg.dtype)

        def candidate_cfgs(self, inv):
            return [Rich(dtype=jnp.float16), Rich(nothing=3), Rich()]

    kernel, inv = configs_of(Casts())
    assert kernel(jnp.ones(1)).dtype == jnp.bfloat16
    assert kernel(jnp.ones(1), cfg=Rich(dtype=np.dtype("float16"))).dtype == jnp.float16
    assert set(kernel.candidates(inv)) == {Rich(), Rich(dtype=jnp.float16), Rich(nothing=3)}


# --- prepare -------------------------------------------------------------------------------------


class Prepared(Kernel[Block, jax.Array]):
    """A scale that may be left out, and a vector that may be a scalar."""

    def prepare(self, x, scale=None, *, mode="plain"):
        scale = jnp.ones((), jnp.float32) if scale is None else scale
        return (jnp.atleast_1d(x), scale), {"mode": mode.lower()}

    def heuristic_cfg(self, inv):
        return Block(inv.args[0].shape[0])

    def run(self, x, scale, *, mode, cfg):
        return x * scale * cfg.size + (1 if mode == "plus" else 0)


def test_prepare_normalises_before_run_and_before_the_heuristic():
    assert Prepared()(jnp.float32(3)).tolist() == [3.0]
    assert Prepared()(jnp.ones(2), jnp.float32(2), mode="PLUS").tolist() == [5.0, 5.0]


def test_prepare_normalises_before_the_key_is_made():
    kernel = Prepared()
    short, long = (
        kernel.bind(jnp.float32(3)),
        kernel.bind(jnp.ones(1), jnp.float32(1), mode="Plain"),
    )
    assert short.args[0].shape == (1,)
    assert short.kwargs == {"mode": "plain"}
    assert short.call_key == long.call_key


def test_gradients_pass_through_prepare():
    got = jax.grad(lambda x, s: Prepared()(x, s).sum(), argnums=(0, 1))(2.0, 5.0)
    assert [float(g) for g in got] == [5.0, 2.0]


@pytest.mark.parametrize("result", [None, (1,), "ab", ((), ()), (1, {})])
def test_a_prepare_that_returns_something_else_is_refused(result):
    kernel = kernel_class({"prepare": lambda self, *args, **kwargs: result}, Double)()
    for call in (kernel, kernel.bind):
        with pytest.raises(TypeError, match=r"tagged@v1.*prepare"):
            call(jnp.ones(1))


# --- calling and binding -------------------------------------------------------------------------


def test_calling_a_kernel_runs_it_with_the_heuristic_config():
    class Scale(Double):
        def run(self, x, *, cfg, times=1):
            return x * cfg.size * times

        def heuristic_cfg(self, inv):
            return Block(3)

    assert Scale()(jnp.ones(2)).tolist() == [3.0, 3.0]
    assert Scale()(jnp.ones(2), times=2).tolist() == [6.0, 6.0]
    assert Scale()(jnp.ones(2), times=2, cfg=Block(5)).tolist() == [10.0, 10.0]


def test_bind_gives_the_invocation_of_a_call():
    kernel, x = Double("doubled"), jnp.ones(2)
    inv = kernel.bind(x, flag=True, cfg=Block(4))
    assert isinstance(inv, Invocation)
    assert inv.kernel is kernel
    assert inv.args == (x,)
    assert inv.kwargs == {"flag": True}
    assert inv.op_id == "doubled"
    assert inv.override_cfg == Block(4)
    assert kernel.bind(x).override_cfg is None


# --- gradients -----------------------------------------------------------------------------------


class Ruled(Kernel[Block, Any]):
    """`function(*args, **kwargs)` with a rule `gradients(args, kwargs, cotangents)`."""

    def __init__(self, function, gradients):
        super().__init__("ruled")
        self.function, self.gradients, self.used = function, gradients, 0

    def run(self, *args, cfg, **kwargs):
        return self.function(*args, **kwargs)

    def use(self, args, cfg, kwargs, cotangents):
        assert cfg == Block(1)
        assert isinstance(cotangents, tuple)
        self.used += 1
        return self.gradients(args, kwargs, cotangents)


class SimpleForm(Ruled):
    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        assert isinstance(primals, tuple)
        return self.use(primals, cfg, kwargs, cotangents)


class ResidualForm(Ruled):
    def fwd_with_residuals(self, *args, cfg, **kwargs):
        return self.function(*args, **kwargs), {"args": args}

    def vjp(self, residuals, out, dout, *args, cfg, **kwargs):
        assert jax.tree.structure(out) == jax.tree.structure(dout)
        cotangents = dout if isinstance(dout, tuple) else (dout,)
        return self.use(residuals["args"], cfg, kwargs, cotangents)


both_forms = pytest.mark.parametrize("form", [SimpleForm, ResidualForm])


def loss(call, **kwargs):
    """A scalar whose cotangents differ at every output element."""

    def scalar(*args):
        return sum(
            jnp.sum(jnp.sin(leaf.astype(jnp.float32) + 0.1 * i))
            for i, leaf in enumerate(jax.tree.leaves(call(*args, **kwargs)))
        )

    return scalar


def loss_of(kernel):
    return lambda x: jnp.sum(kernel(x))


def trace_gradient(function, *args, argnums=0):
    """Everything that differentiation does before compiling: where wrong rules must be refused."""
    return jax.eval_shape(jax.grad(function, argnums=argnums), *args)


def assert_same_gradients(kernel, *args, argnums=None, atol=1e-6, **kwargs):
    argnums = tuple(range(len(args))) if argnums is None else argnums
    calls = (kernel, kernel.function)
    # One program for both: compiling is what takes the time here.
    got, want = jax.jit(lambda: [jax.grad(loss(f, **kwargs), argnums)(*args) for f in calls])()
    assert_trees_close(got, want, atol=atol)
    assert kernel.used > 0, "the kernel's own rule did not run"


def tanh_layer(x, w):
    return jnp.tanh(x @ w)


def tanh_gradients(args, kwargs, cotangents):
    x, w = args
    inner = cotangents[0] * (1 - tanh_layer(x, w) ** 2)
    return inner @ w.T, x.reshape(-1, w.shape[0]).T @ inner.reshape(-1, w.shape[1])


XS = jnp.linspace(-1, 1, 12, dtype=jnp.float32).reshape(3, 2, 2)
W = jnp.array([[0.5, -0.3], [0.2, 0.8]], jnp.float32)


def scanned(call):
    def run(xs, w):
        def step(carry, x):
            carry = call(carry, w) + x
            return carry, call(x, w)

        return jax.lax.scan(step, xs[0], xs)

    return run


def branched(call):
    def run(xs, w):
        return jax.lax.cond(xs[0, 0, 0] < 0, call, lambda xs, w: xs, xs, w)

    return run


def gradient(call):
    return jax.grad(loss(call), argnums=(0, 1))


def looped(call):
    return lambda xs, w: jax.lax.fori_loop(0, 3, lambda i, x: call(x, w), xs)


# What the reference and the kernel go through alike; those without "jit" run eagerly outside.
TRANSFORMS = {
    "grad": gradient,
    "jit of grad": lambda call: jax.jit(gradient(call)),
    "grad of jit": lambda call: gradient(jax.jit(call)),
    "value_and_grad": lambda call: jax.jit(jax.value_and_grad(loss(call), argnums=(0, 1))),
    "jit of remat": lambda call: jax.jit(gradient(jax.checkpoint(call))),
    "jit of scan": lambda call: jax.jit(gradient(scanned(call))),
    "scan of remat": lambda call: jax.jit(gradient(scanned(jax.checkpoint(call)))),
    "remat of scan": lambda call: jax.jit(gradient(jax.checkpoint(scanned(call)))),
    "static fori_loop": lambda call: jax.jit(gradient(looped(call))),
    "cond": lambda call: jax.jit(gradient(branched(call))),
    "vmap of grad": lambda call: jax.vmap(gradient(call), in_axes=(0, None)),
    "jit of vmap of grad": lambda call: jax.jit(jax.vmap(gradient(call), in_axes=(0, None))),
    "grad of jit of vmap": lambda call: gradient(jax.jit(jax.vmap(call, in_axes=(0, None)))),
    "vmap of remat": lambda call: jax.jit(
        gradient(jax.vmap(jax.checkpoint(call), in_axes=(0, None)))
    ),
    "vmap over another axis": lambda call: jax.jit(
        gradient(jax.vmap(call, in_axes=(2, None), out_axes=1))
    ),
    "nested vmap": lambda call: jax.jit(
        gradient(jax.vmap(jax.vmap(lambda x, w: call(x[None], w), (0, None)), (0, None)))
    ),
    "second derivative in jit": lambda call: jax.jit(
        jax.grad(lambda xs, w: sum(jnp.sum(g**2) for g in gradient(call)(xs, w)), argnums=(0, 1))
    ),
}


@functools.cache
def jax_gives(transform):
    """What JAX computes for the plain function; compiled once for all kernels."""
    return TRANSFORMS[transform](tanh_layer)(XS, W)


A_FEW = ("grad", "jit of remat", "jit of scan", "jit of vmap of grad", "cond")


@both_forms
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_the_rule_equals_jax_under(transform, form):
    kernel = form(tanh_layer, tanh_gradients)
    assert_trees_close(TRANSFORMS[transform](kernel)(XS, W), jax_gives(transform))
    assert kernel.used > 0


@both_forms
def test_the_rule_runs_under_vmap_with_two_batched_arguments(form):
    kernel, ws = form(tanh_layer, tanh_gradients), jnp.stack([W, 2 * W, W.T])
    got = jax.jit(jax.vmap(gradient(kernel)))(XS, ws)
    assert_trees_close(got, jax.vmap(gradient(tanh_layer))(XS, ws))
    assert kernel.used > 0


@both_forms
def test_without_differentiation_the_output_is_that_of_run(form):
    kernel = form(tanh_layer, tanh_gradients)
    np.testing.assert_allclose(kernel(XS, W), tanh_layer(XS, W), rtol=1e-6)
    assert kernel.used == 0


@both_forms
def test_a_none_gradient_is_zero(form):
    kernel = form(tanh_layer, lambda *call: (tanh_gradients(*call)[0], None))
    dx, dw = gradient(kernel)(XS, W)
    assert_trees_close(dx, gradient(tanh_layer)(XS, W)[0])
    assert_trees_close(dw, jnp.zeros_like(W))


@both_forms
def test_differentiating_one_argument_alone_is_right(form):
    for argnums in (0, 1):
        assert_same_gradients(form(tanh_layer, tanh_gradients), XS, W, argnums=(argnums,))


class Params(NamedTuple):
    w: Any
    extra: Any


@both_forms
def test_pytree_arguments_have_pytree_gradients(form):
    def function(params, x):
        bias, (scale,) = params.extra["bias"], params.extra["scales"]
        return x @ params.w * scale + bias

    def gradients(args, kwargs, cotangents):
        params, x = args
        (dout,) = cotangents
        (scale,) = params.extra["scales"]
        extra = {
            "bias": dout.sum(0),
            "scales": [jnp.sum(dout * (x @ params.w))],
        }
        return Params(x.T @ dout * scale, extra), dout @ params.w.T * scale

    params = Params(W, {"bias": jnp.array([0.1, 0.2]), "scales": [jnp.float32(1.5)]})
    assert_same_gradients(form(function, gradients), params, XS[0])


@both_forms
def test_inside_a_pytree_a_none_gradient_is_zero(form):
    def function(params, x):
        return x * params["a"] + params["b"]

    def gradients(args, kwargs, cotangents):
        return {"a": None, "b": cotangents[0].sum()}, cotangents[0] * args[0]["a"]

    kernel, params = form(function, gradients), {"a": jnp.float32(2), "b": jnp.float32(3)}
    got, _ = jax.grad(loss(kernel), argnums=(0, 1))(params, XS)
    want, _ = jax.grad(loss(function), argnums=(0, 1))(params, XS)
    assert_trees_close(got, {"a": jnp.zeros(()), "b": want["b"]})


@both_forms
@pytest.mark.parametrize(
    "for_integers",
    [
        lambda indices: None,
        lambda indices: indices,
        lambda indices: np.zeros(indices.shape, jax.dtypes.float0),
        lambda indices: jnp.zeros(indices.shape),
    ],
    ids=["None", "integers", "float0", "float zeros"],
)
def test_integer_arguments_need_no_gradient(form, for_integers):
    def gradients(args, kwargs, cotangents):
        table, indices = args
        return jnp.zeros_like(table).at[indices].add(cotangents[0]), for_integers(indices)

    table, indices = jnp.arange(6.0).reshape(3, 2), jnp.array([2, 0, 2])
    kernel = form(lambda table, indices: table[indices], gradients)
    assert_same_gradients(kernel, table, indices, argnums=(0,))
    _, pull_back = jax.vjp(kernel, table, indices)
    assert pull_back(jnp.ones((3, 2)))[1].dtype == jax.dtypes.float0


@both_forms
def test_tuple_outputs_give_one_cotangent_each(form):
    def gradients(args, kwargs, cotangents):
        (x,), (da, db) = args, cotangents
        return (2 * x * da + jnp.cos(x) * db,)

    kernel = form(lambda x: (x**2, jnp.sin(x)), gradients)
    assert_same_gradients(kernel, XS)


@both_forms
def test_an_output_that_is_not_used_has_a_zero_cotangent_array(form):
    seen = []

    def gradients(args, kwargs, cotangents):
        (x,), (da, db) = args, cotangents
        seen.append(all(isinstance(d, jax.Array) and d.shape == x.shape for d in cotangents))
        return (2 * x * da + jnp.cos(x) * db,)

    kernel = form(lambda x: (x**2, jnp.sin(x)), gradients)
    got = jax.grad(lambda x: jnp.sum(kernel(x)[1] ** 2))(XS)
    assert_trees_close(got, jax.grad(lambda x: jnp.sum(jnp.sin(x) ** 2))(XS))
    assert seen == [True]


@both_forms
def test_a_dictionary_output_is_one_cotangent(form):
    def gradients(args, kwargs, cotangents):
        (x,), (dout,) = args, cotangents
        return (2 * x * dout["square"] + dout["same"],)

    assert_same_gradients(form(lambda x: {"square": x**2, "same": x}, gradients), XS)


@both_forms
def test_an_integer_output_beside_a_float_one_does_not_disturb_the_rule(form):
    def gradients(args, kwargs, cotangents):
        return (2 * args[0] * cotangents[0],)

    kernel = form(lambda x: (x**2, jnp.argmax(x, axis=0)), gradients)
    got = jax.grad(lambda x: jnp.sum(kernel(x)[0] ** 2))(XS)
    assert_trees_close(got, 4 * XS**3)


@both_forms
def test_bfloat16_gradients_come_back_as_bfloat16(form):
    x, w = XS.astype(jnp.bfloat16), W.astype(jnp.bfloat16)
    kernel = form(tanh_layer, tanh_gradients)
    assert_same_gradients(kernel, x, w, atol=0.02)


@both_forms
def test_a_rule_may_accumulate_in_float32_for_bfloat16_arguments(form):
    def gradients(args, kwargs, cotangents):
        wide = jax.tree.map(lambda a: a.astype(jnp.float32), (args, cotangents))
        return tanh_gradients(wide[0], kwargs, wide[1])

    kernel = form(tanh_layer, gradients)
    assert_same_gradients(kernel, XS.astype(jnp.bfloat16), W.astype(jnp.bfloat16), atol=0.02)


def biased(x, *, bias, scale=1.0):
    return x * scale + bias["b"] * bias["c"]


def biased_gradients(args, kwargs, cotangents):
    (dout,), bias = cotangents, kwargs["bias"]
    b = (dout * bias["c"]).reshape(-1, 2).sum(0)
    keywords = {"bias": {"b": b, "c": jnp.sum(dout * bias["b"])}}
    return dout * kwargs["scale"], keywords


BIAS = {"b": jnp.array([0.3, -0.2]), "c": jnp.float32(1.7)}


@both_forms
def test_keyword_arrays_get_their_gradients_from_a_dict_after_the_others(form):
    kernel = form(biased, biased_gradients)

    def total(call):
        return lambda x, bias: jnp.sum(jnp.sin(call(x, bias=bias, scale=2.5)))

    for wrap in (lambda f: f, jax.jit, lambda f: jax.jit(jax.vmap(f, in_axes=(0, None)))):
        got = wrap(jax.grad(total(kernel), argnums=(0, 1)))(XS, BIAS)
        want = wrap(jax.grad(total(biased), argnums=(0, 1)))(XS, BIAS)
        assert_trees_close(got, want)
    assert kernel.used > 0


@both_forms
def test_a_keyword_array_that_is_not_differentiated_needs_no_gradient(form):
    def only_positional(args, kwargs, cotangents):
        return (cotangents[0] * kwargs["scale"],)

    kernel = form(biased, only_positional)
    for bias in (BIAS, jax.lax.stop_gradient(BIAS)):
        got = jax.grad(lambda x, bias=bias: jnp.sum(kernel(x, bias=bias, scale=2.0) ** 2))(XS)
        assert_trees_close(got, 4 * biased(XS, bias=BIAS, scale=2.0))


def test_a_rule_that_asks_is_told_which_keywords_are_differentiated():
    told = []

    class Told(Kernel[Block, jax.Array]):
        def run(self, x, *, bias, scale, cfg):
            return biased(x, bias=bias, scale=scale)

        def heuristic_cfg(self, inv):
            return Block()

        def fwd_with_residuals(self, x, *, bias, scale, cfg):
            return biased(x, bias=bias, scale=scale), None

        def vjp(self, residuals, out, dout, x, *, bias, scale, cfg, differentiated):
            told.append(differentiated)
            return biased_gradients((x,), {"bias": bias, "scale": scale}, (dout,))

    kernel = Told()

    def total(x, bias, scale):
        return jnp.sum(jnp.sin(kernel(x, bias=bias, scale=scale)))

    def plain(x, bias, scale):
        return jnp.sum(jnp.sin(biased(x, bias=bias, scale=scale)))

    for argnums, names in ((0, set()), (1, {"bias"}), ((0, 1), {"bias"})):
        for wrap in (lambda f: f, jax.jit, jax.checkpoint):
            got = wrap(jax.grad(total, argnums))(XS, BIAS, 2.5)
            assert_trees_close(got, jax.grad(plain, argnums)(XS, BIAS, 2.5))
            assert told[-1] == names
    half = {**BIAS, "b": jax.lax.stop_gradient(BIAS["b"])}
    jax.grad(lambda c: total(XS, {**half, "c": c}, 2.5))(BIAS["c"])
    assert told[-1] == {"bias"}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint, jax.vmap])
def test_a_rule_is_told_of_its_own_call_not_of_another_one(wrap):
    """JAX traces the forward pass of a rule once for each set of differentiated arrays."""

    class Told(Kernel[Block, jax.Array]):
        def run(self, x, *, bias, cfg):
            return x * bias

        def heuristic_cfg(self, inv):
            return Block()

        def fwd_with_residuals(self, x, *, bias, cfg):
            return x * bias, None

        def vjp(self, residuals, out, dout, x, *, bias, cfg, differentiated):
            return dout * bias, {"bias": dout * x if "bias" in differentiated else None}

    kernel, x, bias = Told(), jnp.ones(3), jnp.full(3, 2.0)

    def learned(x, bias):
        return jnp.sum(kernel(x, bias=bias))

    def both(x, bias):
        return learned(x, bias) + learned(x, jax.lax.stop_gradient(bias))

    def reversed_order(x, bias):
        return learned(x, jax.lax.stop_gradient(bias)) + learned(x, bias)

    for total in (both, reversed_order):
        dx, dbias = wrap(jax.grad(total, (0, 1)))(x, bias)
        assert dx.tolist() == [4, 4, 4]
        assert dbias.tolist() == [1, 1, 1]
    for argnums in (0, 1, 0, 1):  # one after the other
        gradient = wrap(jax.grad(learned, argnums))(x, bias)
        assert gradient.tolist() == ([2, 2, 2], [1, 1, 1])[argnums]


@both_forms
def test_an_explicit_none_for_a_keyword_array_is_zero(form):
    kernel = form(biased, lambda args, kwargs, cotangents: (cotangents[0], {"bias": None}))
    got = jax.grad(lambda bias: jnp.sum(kernel(XS, bias=bias, scale=1.0)))(BIAS)
    assert_trees_close(got, jax.tree.map(jnp.zeros_like, BIAS))


@both_forms
def test_an_integer_keyword_array_needs_no_gradient(form):
    def function(table, *, indices):
        return table[indices]

    def gradients(args, kwargs, cotangents):
        return (jnp.zeros_like(args[0]).at[kwargs["indices"]].add(cotangents[0]),)

    kernel = form(function, gradients)
    assert_same_gradients(kernel, jnp.arange(4.0), indices=jnp.array([1, 1, 3]))


@both_forms
def test_static_keywords_reach_the_rule(form):
    def function(x, *, power, mode):
        return x**power if mode == "power" else x

    def gradients(args, kwargs, cotangents):
        assert kwargs == {"power": 3, "mode": "power"}
        return (3 * args[0] ** 2 * cotangents[0],)

    assert_same_gradients(form(function, gradients), XS, power=3, mode="power")


@both_forms
def test_positional_values_that_are_no_data_take_none(form):
    def gradients(args, kwargs, cotangents):
        assert args[1:] == ("square", None)
        return 2 * args[0] * cotangents[0], None, None

    kernel = form(lambda x, mode, nothing: x**2 if mode == "square" else x, gradients)
    assert_same_gradients(kernel, XS, "square", None, argnums=(0,))


@both_forms
def test_a_random_key_argument_takes_none(form):
    def function(x, key):
        return x * jax.random.uniform(key, x.shape)

    def gradients(args, kwargs, cotangents):
        x, key = args
        return cotangents[0] * jax.random.uniform(key, x.shape), None

    kernel = form(function, gradients)
    keys = jax.random.split(jax.random.key(4), 3)
    got = jax.jit(jax.vmap(jax.grad(loss(kernel))))(XS, keys)
    assert_trees_close(got, jax.jit(jax.vmap(jax.grad(loss(function))))(XS, keys))
    assert kernel.used > 0


@both_forms
def test_python_scalars_are_differentiated_like_arrays(form):
    def gradients(args, kwargs, cotangents):
        x, factor = args
        return cotangents[0] * factor, jnp.sum(cotangents[0] * x)

    kernel = form(lambda x, factor: x * factor, gradients)
    assert_same_gradients(kernel, XS, 2.5)


class StaticResiduals(Kernel[Block, jax.Array]):
    """Saves a config, sizes, a name, a dtype and None beside arrays, and checks them later."""

    def run(self, x, w, *, cfg):
        return tanh_layer(x, w)

    def fwd_with_residuals(self, x, w, *, cfg):
        out = tanh_layer(x, w)
        static = {"cfg": cfg, "rank": x.ndim, "mode": "tanh", "dtype": x.dtype, "none": None}
        return out, (1 - out**2, static, 0.5)

    def vjp(self, residuals, out, dout, x, w, *, cfg):
        slope, static, half = residuals
        assert static == {
            "cfg": cfg,
            "rank": x.ndim,
            "mode": "tanh",
            "dtype": x.dtype,
            "none": None,
        }
        assert type(static["rank"]) is int
        assert half == 0.5
        # `out` and the residual agree: half of the slope from each.
        inner = dout * (half * slope + half * (1 - out**2))
        return inner @ w.T, x.reshape(-1, 2).T @ inner.reshape(-1, 2)


@pytest.mark.parametrize("transform", A_FEW)
def test_residuals_may_hold_configs_sizes_and_strings_under(transform):
    assert_trees_close(TRANSFORMS[transform](StaticResiduals())(XS, W), jax_gives(transform))


def test_residuals_may_be_none_or_numpy_arrays():
    class Saves(Kernel[Block, jax.Array]):
        def __init__(self, saved):
            super().__init__()
            self.saved = saved

        def run(self, x, *, cfg):
            return x * 3

        def fwd_with_residuals(self, x, *, cfg):
            return x * 3, self.saved

        def vjp(self, residuals, out, dout, x, *, cfg):
            return (dout * 3 if residuals is None else dout * residuals,)

    for saved in (None, np.float32(3), np.full((2, 2), 3.0, np.float32), 3, 3.0):
        got = jax.grad(loss_of(Saves(saved)))(XS)
        assert_trees_close(got, jnp.full_like(XS, 3))


def test_residuals_may_hold_what_cannot_be_hashed():
    class Saves(Double):
        def fwd_with_residuals(self, x, *, cfg):
            return x * 2, {"names": {"a", "set"}}

        def vjp(self, residuals, out, dout, x, *, cfg):
            assert residuals == {"names": {"a", "set"}}
            return (2 * dout,)

    for wrap in (lambda f: f, jax.jit, jax.checkpoint):
        got = jax.grad(wrap(loss_of(Saves())))(XS)
        assert_trees_close(got, jnp.full_like(XS, 2))


def test_a_kernel_without_a_rule_is_differentiated_through_run():
    class Plain(Kernel[Block, jax.Array]):
        def run(self, x, w, *, cfg):
            return tanh_layer(x, w)

    kernel = Plain()
    for transform in A_FEW:
        assert_trees_close(TRANSFORMS[transform](kernel)(XS, W), jax_gives(transform))
    got = jax.jvp(kernel, (XS, W), (XS, W))
    assert_trees_close(got, jax.jvp(tanh_layer, (XS, W), (XS, W)))


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    ["run_cuda", "heuristic_cfg_rocm", "candidate_cfgs_metal", "custom_vjp_cuda", "vjp_h100"],
)
def test_a_method_with_an_unknown_suffix_is_refused_when_the_class_is_made(method):
    with pytest.raises(TypeError) as error:
        kernel_class({method: lambda self, *args, **kwargs: None}, Double)
    message = str(error.value)
    assert "Tagged" in message
    assert method in message
    assert "triton" in message


def test_names_that_only_look_like_methods_are_allowed():
    class Fine(Double):
        run_limit = 3

        def running(self):
            return "fine"

        def _run_helper(self):
            return "fine"

    assert Fine()(jnp.ones(1)).tolist() == [2.0]


def test_a_kernel_without_any_run_method_is_refused():
    class Empty(Kernel[Block, jax.Array]):
        def heuristic_cfg(self, inv):
            return Block()

    with pytest.raises(TypeError, match=r"'nothing'.*Empty.*run"):
        Empty("nothing")


@pytest.mark.parametrize("cfg", ["big", 3, {"size": 1}, OtherConfig(), Block])
def test_a_config_of_the_wrong_type_is_refused_by_name(cfg):
    with pytest.raises(TypeError) as error:
        Executor(ConfigSelectorChain(autotune=False))(Double(), jnp.ones(1), cfg=cfg)
    message = str(error.value)
    assert "double@v1" in message
    assert "cfg" in message
    assert "Block" in message


@pytest.mark.parametrize("cfg", ["big", None, OtherConfig()])
def test_a_heuristic_of_the_wrong_type_is_refused_by_name(cfg):
    kernel = kernel_class({"heuristic_cfg": lambda self, inv: cfg}, Double)("double")
    with pytest.raises(TypeError, match=r"double@v1.*heuristic_cfg"):
        kernel(jnp.ones(1))


@pytest.mark.parametrize("method", ["config_space", "candidate_cfgs"])
def test_a_candidate_of_the_wrong_type_is_refused_by_name(method):
    cls = kernel_class({method: lambda self, inv: [Block(2), "big"]}, Double)
    kernel, inv = configs_of(cls("double"))
    with pytest.raises(TypeError, match=rf"double@v1.*{method}.*'big'"):
        kernel.candidates(inv)


@pytest.mark.parametrize(
    ("have", "lack"), [("vjp", "fwd_with_residuals"), ("fwd_with_residuals", "vjp")]
)
@pytest.mark.parametrize("suffix", ["", "_gpu"])
def test_half_of_the_residual_form_is_refused(have, lack, suffix):
    cls = kernel_class({have + suffix: lambda self, *args, **kwargs: None}, Double)
    with pytest.raises(TypeError, match=rf"'half'.*defines {have} without {lack}"):
        cls("half")


def gradient_error(form, gradients, kind=TypeError, argnums=(0, 1)):
    kernel = form(tanh_layer, gradients)
    rule = "custom_vjp" if form is SimpleForm else "vjp"
    with pytest.raises(kind) as error:
        trace_gradient(loss(kernel), XS, W, argnums=argnums)
    message = str(error.value)
    assert "ruled@v1" in message
    assert rule in message
    return message


@both_forms
@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_wrong_number_of_gradients_is_refused(form, count):
    message = gradient_error(form, lambda args, kwargs, cotangents: (None,) * count)
    assert f"{count} gradients for 2 arguments" in message


@both_forms
@pytest.mark.parametrize("result", [None, "text", 3])
def test_gradients_that_are_no_tuple_are_refused(form, result):
    message = gradient_error(form, lambda args, kwargs, cotangents: result)
    assert type(result).__name__ in message


@both_forms
def test_a_bare_array_instead_of_a_tuple_is_refused(form):
    gradient_error(
        form, lambda args, kwargs, cotangents: tanh_gradients(args, kwargs, cotangents)[0]
    )


@both_forms
def test_a_gradient_of_the_wrong_shape_is_refused_with_its_argument(form):
    message = gradient_error(
        form, lambda args, kwargs, cotangents: (None, jnp.zeros((2, 3))), kind=ValueError
    )
    assert "argument 1" in message
    assert "(2, 3)" in message
    assert "(2, 2)" in message


@both_forms
def test_gradients_in_the_wrong_order_are_refused_when_the_shapes_say_so(form):
    message = gradient_error(
        form, lambda *call: tuple(reversed(tanh_gradients(*call))), kind=ValueError
    )
    assert "argument 0" in message


@both_forms
@pytest.mark.parametrize(
    "wrong",
    [{"a": 1.0}, {"a": 1.0, "b": 2.0, "c": 3.0}, [1.0, 2.0], jnp.ones(())],
    ids=["a key missing", "a key too many", "a list", "an array"],
)
def test_a_gradient_of_the_wrong_structure_is_refused_with_its_argument(form, wrong):
    kernel = form(
        lambda x, params: x * params["a"] + params["b"],
        lambda args, kwargs, cotangents: (cotangents[0], wrong),
    )
    params = {"a": jnp.float32(1), "b": jnp.float32(2)}
    with pytest.raises(TypeError, match=r"ruled@v1.*argument 1.*structure"):
        trace_gradient(loss(kernel), XS, params, argnums=(0, 1))


@both_forms
def test_a_wrong_keyword_gradient_is_refused_with_its_keyword(form):
    kernel = form(biased, lambda args, kwargs, cotangents: (cotangents[0], {"bias": {"b": 1.0}}))
    with pytest.raises(TypeError, match=r"ruled@v1.*'bias'"):
        trace_gradient(lambda bias: jnp.sum(kernel(XS, bias=bias)), BIAS)


@both_forms
def test_a_gradient_for_a_keyword_that_the_call_lacks_is_refused(form):
    kernel = form(biased, lambda args, kwargs, cotangents: (cotangents[0], {"bais": None}))
    with pytest.raises(TypeError, match=r"ruled@v1.*bais"):
        trace_gradient(lambda x: jnp.sum(kernel(x, bias=BIAS)), XS)


@both_forms
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_differentiated_keyword_array_without_a_gradient_is_refused(form, wrap):
    kernel = form(biased, lambda args, kwargs, cotangents: (cotangents[0],))
    with pytest.raises(TypeError, match=r"ruled@v1.*keyword 'bias'.*differentiated"):
        trace_gradient(wrap(lambda bias: jnp.sum(kernel(XS, bias=bias))), BIAS)


@both_forms
def test_the_keyword_without_a_gradient_is_the_one_that_is_named(form):
    def function(x, *, alpha, omega):
        return x * alpha + omega

    kernel = form(function, lambda args, kwargs, cotangents: (None, {"alpha": jnp.float32(0)}))
    with pytest.raises(TypeError, match=r"keyword 'omega'"):
        jax.grad(lambda o: jnp.sum(kernel(XS, omega=o, alpha=jnp.float32(1))))(jnp.float32(2))


@pytest.mark.parametrize("result", [None, jnp.ones(2), (jnp.ones(2),), (1, 2, 3)])
def test_a_forward_that_does_not_return_a_pair_is_refused(result):
    class Forward(Double):
        def fwd_with_residuals(self, x, *, cfg):
            return result

        def vjp(self, residuals, out, dout, x, *, cfg):
            return (dout,)

    with pytest.raises(TypeError, match=r"forward@v1.*fwd_with_residuals.*\(out, residuals\)"):
        trace_gradient(loss_of(Forward()), XS)


def test_an_error_inside_run_reaches_the_caller_unchanged():
    class Broken(Double):
        def run(self, x, *, cfg):
            raise ZeroDivisionError("inside run")

    for call in (Broken(), jax.jit(Broken())):
        with pytest.raises(ZeroDivisionError, match="inside run"):
            call(jnp.ones(1))


def test_kernels_can_be_copied_and_pickled():
    kernel = Double("copied", version="7")
    for twin in (copy.copy(kernel), copy.deepcopy(kernel), pickle.loads(pickle.dumps(kernel))):
        assert twin.full_op_id == "copied@v7"
        assert twin(jnp.ones(3)).tolist() == kernel(jnp.ones(3)).tolist()
