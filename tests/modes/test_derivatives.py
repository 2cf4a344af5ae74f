"""Derivatives beyond one gradient: right by value, or an error with the name and the way out."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import arrays_of, function_of, loss_of

from ejkernel import modules
from ejkernel.modules import supported
from ejkernel.modules.supported import kernel_of
from ejkernel.ops import (
    ConfigSelectorChain,
    Executor,
    Kernel,
    NotSupported,
    Supports,
    autotune,
    autotune_lowered,
    get_invocations,
)

QUICK = "rms_norm"
OPERATIONS = [
    pytest.param(name, marks=[] if name == QUICK else pytest.mark.long)
    for name in modules.OPERATIONS
]


def by_reference(name):
    return loss_of(name, implementation="reference")


def forward_mode(function, arrays):
    """Every way into forward mode, as functions that compute derivatives."""
    tangents = tuple(map(jnp.cos, arrays))

    def looped(*arrays):
        return jax.lax.scan(lambda c, _: (c + function(*arrays), None), 0.0, None, length=2)[0]

    return {
        "jvp": lambda: jax.jvp(function, arrays, tangents)[1],
        "jitted jvp": lambda: jax.jit(lambda a, t: jax.jvp(function, a, t)[1])(arrays, tangents),
        "jvp of jit": lambda: jax.jvp(jax.jit(function), arrays, tangents)[1],
        "linearize": lambda: jax.linearize(function, *arrays)[1](*tangents),
        "jacfwd": lambda: jax.jacfwd(function, len(arrays) - 1)(*arrays),
        "jacfwd of jit": lambda: jax.jacfwd(jax.jit(function), len(arrays) - 1)(*arrays),
        "jvp of scan": lambda: jax.jvp(looped, arrays, tangents)[1],
        "jvp of checkpoint": lambda: jax.jvp(jax.checkpoint(function), arrays, tangents)[1],
        "jacfwd of jacfwd": lambda: jax.jacfwd(jax.jacfwd(function))(*arrays),
        "jvp of jvp": lambda: jax.jvp(
            lambda *a: jax.jvp(jax.jit(function), a, tangents)[1], arrays, tangents
        )[1],
        "grad of jvp": lambda: jax.grad(lambda *a: jax.jvp(function, a, tangents)[1])(*arrays),
        "jvp of vmap": lambda: jax.jvp(
            lambda *a: jax.vmap(function)(*(x[None] for x in a)).sum(), arrays, tangents
        )[1],
    }


def second_order(function, arrays):
    """The second derivative in one direction: forward over reverse, and reverse over reverse."""
    tangents = tuple(map(jnp.cos, arrays))
    every = tuple(range(len(arrays)))
    gradient = jax.grad(function, every)

    def along(*arrays):
        return sum(map(jnp.vdot, gradient(*arrays), tangents))

    return {
        "forward over reverse": lambda: jax.jit(lambda *a: jax.jvp(gradient, a, tangents)[1])(
            *arrays
        ),
        "reverse over reverse": lambda: jax.jit(jax.grad(along, every))(*arrays),
    }


def agree(got, wanted, tolerance):
    for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        mine, other = np.asarray(mine, np.float64), np.asarray(other, np.float64)
        assert np.isfinite(mine).all()
        assert np.abs(mine - other).max() <= tolerance * max(1.0, np.abs(other).max())


@pytest.mark.parametrize("name", modules.OPERATIONS)
def test_forward_mode_is_refused_by_name_with_the_way_out(name):
    arrays = arrays_of(name)
    ways = forward_mode(loss_of(name), arrays)
    for way in ways if name == QUICK else ("jvp", "jacfwd of jit"):
        derivative = ways[way]
        with pytest.raises(TypeError) as caught:
            jax.block_until_ready(derivative())
        assert f"{name}@v1" in str(caught.value), way
        assert "implementation='reference'" in str(caught.value), way


@pytest.mark.parametrize("name", OPERATIONS)
def test_reverse_mode_is_not_affected(name):
    arrays = arrays_of(name)
    every = tuple(range(len(arrays)))
    loss, truth = loss_of(name), jax.jit(jax.grad(by_reference(name), every))(*arrays)

    def looped(*arrays):
        return jax.lax.scan(lambda c, _: (c + loss(*arrays), None), 0.0, None, length=1)[0]

    def mapped(*arrays):
        return jax.vmap(loss)(*(x[None] for x in arrays)).sum()

    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ways = {
        "checkpoint with a policy": jax.checkpoint(loss, policy=policy),
        "plain": loss,
        "scan": looped,
        "checkpoint": jax.checkpoint(loss),
        "vmap": mapped,
    }
    for way in ways if name == QUICK else ("checkpoint with a policy",):
        agree(jax.jit(jax.grad(ways[way], every))(*arrays), truth, 2e-5)


@pytest.mark.parametrize("implementation", ["cpu", "xla"])
def test_a_bias_is_learned_in_one_layer_and_fixed_in_another(implementation, native_library):
    q, k, v = arrays_of("flash_attention")
    bias = jnp.linspace(-1, 1, 24 * 12).reshape(1, 1, 24, 12)

    def gradient(implementation):
        def layer(bias):
            out = modules.flash_attention(q, k, v, bias=bias, implementation=implementation)
            return jnp.sum(jnp.sin(out))

        def both(bias):
            return layer(bias) + layer(jax.lax.stop_gradient(bias))

        return jax.jit(jax.grad(both))(bias)

    wanted = gradient("reference")
    assert np.abs(wanted).max() > 0.01
    agree(gradient(implementation), wanted, 2e-5)


CANNOT = {
    # Loops whose length is not known while tracing.
    ("grouped_matmul", "reverse over reverse"),
    ("flash_attention", "reverse over reverse"),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_second_derivatives_are_right_or_refused_by_name(name):
    with jax.enable_x64(True):
        arrays = arrays_of(name, "float64")
        wanted = second_order(by_reference(name), arrays)["forward over reverse"]()
        for way, derivative in second_order(loss_of(name), arrays).items():
            if (name, way) in CANNOT:
                with pytest.raises(TypeError, match=rf"{name}@v1: its gradient .*'reference'"):
                    derivative()
            else:
                agree(derivative(), wanted, 1e-5)


@pytest.mark.long
def test_attention_on_xla_is_right_or_refused_by_name_in_every_mode():
    with jax.enable_x64(True):
        arrays = arrays_of("flash_attention", "float64")
        tangents, every = tuple(map(jnp.cos, arrays)), (0, 1, 2)

        def along(function):
            gradient = jax.grad(function, every)
            return lambda *arrays: sum(map(jnp.vdot, gradient(*arrays), tangents))

        right = {
            "hessian": lambda f: jax.hessian(f, 2)(*arrays),
            "jitted hessian": lambda f: jax.jit(jax.hessian(f, 2))(*arrays),
            "jvp of grad": lambda f: jax.jvp(jax.grad(f, every), arrays, tangents)[1],
            "linearize of grad": lambda f: jax.linearize(jax.grad(f, every), *arrays)[1](*tangents),
        }
        refused = {
            "grad of grad": lambda f: jax.grad(along(f), every)(*arrays),
            "jitted grad of grad": lambda f: jax.jit(jax.grad(along(f), every))(*arrays),
            "grad of jitted grad": lambda f: jax.grad(jax.jit(along(f)), every)(*arrays),
            "jacrev of jacrev": lambda f: jax.jacrev(jax.jacrev(f, 2), 2)(*arrays),
        }
        loss = loss_of("flash_attention", implementation="xla")
        for derivative in right.values():
            agree(derivative(loss), derivative(by_reference("flash_attention")), 1e-12)
        refused |= {
            way: lambda _, derivative=derivative: derivative()
            for way, derivative in forward_mode(loss, arrays).items()
        }
        for way, derivative in refused.items():
            with pytest.raises(TypeError) as caught:
                jax.block_until_ready(derivative(loss))
            assert "flash_attention@v1" in str(caught.value), way
            assert "implementation='reference'" in str(caught.value), way


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_reference_has_all_derivatives(name):
    """Compared with differences of the function itself, in float64."""
    with jax.enable_x64(True):
        arrays = arrays_of(name, "float64")
        tangents = tuple(map(jnp.cos, arrays))
        reference = jax.jit(by_reference(name))
        assert reference(*arrays).dtype == jnp.float64
        gradient = jax.jit(jax.grad(reference, argnums=tuple(range(len(arrays)))))

        def moved(step):
            return tuple(x + step * t for x, t in zip(arrays, tangents, strict=True))

        # Decays are brought to float32 (module's own), whatever the rest is.
        step, exact = (1e-3, 1e-3) if name == "gated_linear_attention" else (1e-5, 1e-7)
        slope = (reference(*moved(step)) - reference(*moved(-step))) / (2 * step)
        agree(forward_mode(reference, arrays)["jitted jvp"](), slope, exact)
        agree(sum(map(jnp.vdot, gradient(*arrays), tangents)), slope, exact)
        bend = jax.tree.map(
            lambda a, b: (a - b) / (2 * step), gradient(*moved(step)), gradient(*moved(-step))
        )
        for derivative in second_order(reference, arrays).values():
            agree(derivative(), bend, exact)


@pytest.mark.parametrize("name", modules.OPERATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_gives_what_the_operation_gives(name, dtype):
    arrays = arrays_of(name, dtype)
    agree(
        function_of(name, implementation="reference")(*arrays),
        function_of(name)(*arrays),
        2e-5 if dtype == "float32" else 3e-2,
    )


HIDDEN_ROWS = {
    "causal": {},
    "nothing seen": {"kv_lengths": jnp.array([0, 3])},
    "sinks": {"sinks": jnp.array([0.5, -1.0, 2.0, 0.0]), "q_lengths": jnp.array([2, 24])},
    "cap": {"logits_soft_cap": 3.0, "window": (2, 0)},
}


@pytest.mark.long
@pytest.mark.parametrize("case", HIDDEN_ROWS)
def test_what_is_hidden_leaves_no_nan_in_higher_derivatives(case):
    arrays = arrays_of("flash_attention")
    for derivative in second_order(
        loss_of("flash_attention", implementation="reference", **HIDDEN_ROWS[case]), arrays
    ).values():
        assert all(np.isfinite(np.asarray(x)).all() for x in derivative())


# --- kernels of users ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Choice:
    rows: int = 1


class Cube(Kernel[Choice, jax.Array]):
    def run(self, x, *, cfg, factor=1.0):
        return factor * x**3

    def fwd_with_residuals(self, x, *, cfg, factor=1.0):
        return self.run(x, cfg=cfg, factor=factor), x

    def vjp(self, residuals, out, dout, x, *, cfg, factor=1.0):
        return (3 * factor * residuals**2 * dout,)


class DefinedCube(Cube):
    def reference(self, x, *, factor=1.0):
        return factor * x * x * x


def opaque(x):
    return jax.pure_callback(lambda x: 3 * x**2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


class OpaqueCube(DefinedCube):
    def vjp(self, residuals, out, dout, x, *, cfg, factor=1.0):
        return (factor * opaque(residuals) * dout,)


def test_a_kernel_of_a_user_offers_its_definition():
    kernel = DefinedCube()
    x = jnp.float32(2.0)

    def definition(x):
        return kernel(x, implementation="reference", factor=2.0)

    assert definition(x) == 16.0
    assert jax.jvp(definition, (x,), (x,))[1] == 48.0
    assert jax.hessian(definition)(x) == 24.0
    assert jax.hessian(lambda x: kernel(x, factor=2.0))(x) == 24.0
    assert jax.jacfwd(jax.jacfwd(jax.jacfwd(definition)))(x) == 12.0
    with pytest.raises(TypeError, match=r"defined_cube@v1 .*implementation='reference'"):
        jax.jvp(kernel, (x,), (x,))


def test_a_gradient_without_a_derivative_names_the_operation():
    kernel, x = OpaqueCube(), jnp.float32(2.0)
    assert jax.grad(kernel)(x) == 12.0
    for twice in (jax.hessian(kernel), jax.grad(jax.grad(kernel)), jax.jit(jax.hessian(kernel))):
        with pytest.raises(TypeError, match=r"opaque_cube@v1: its gradient.*'reference'"):
            twice(x)


def test_a_kernel_without_a_definition_says_how_to_have_one():
    x = jnp.float32(2.0)
    with pytest.raises(TypeError, match=r"cube@v1 .*Write `reference"):
        jax.jvp(Cube(), (x,), (x,))
    with pytest.raises(ValueError, match="'reference' does not exist; it has run\n"):
        Cube()(x, implementation="reference")


def test_the_definition_is_never_chosen_by_itself():
    for name in modules.OPERATIONS:
        kernel = kernel_of(name)
        assert "reference" not in [item.name for item in kernel.implementations_here()]

    class Nowhere(DefinedCube):
        supports: ClassVar = {"run": Supports(dtypes=("float16",))}

    with pytest.raises(NotSupported, match="implementation='reference' can"):
        Nowhere()(jnp.float32(2.0))
    with pytest.raises(NotSupported, match="or use 'reference'"):
        Nowhere()(jnp.float32(2.0), implementation="run")
    assert Nowhere()(jnp.float32(2.0), implementation="reference") == 8.0


def test_the_definition_has_no_config_and_is_not_tuned():
    kernel, x = DefinedCube(), jnp.float32(2.0)
    selector = ConfigSelectorChain()
    executor = Executor(selector)
    assert executor(kernel, x, implementation="reference") == 8.0
    assert get_invocations() == []
    lowered = jax.jit(lambda x: executor(kernel, x, implementation="reference")).lower(x)
    result = autotune_lowered(selector, lowered)
    assert not result.entries
    assert not result.skipped
    no_config = "defined_cube@v1: implementation='reference' is the definition"
    for refused in (
        lambda: executor(kernel, x, implementation="reference", cfg=Choice()),
        lambda: executor.choose_config(kernel, x, implementation="reference"),
        lambda: autotune(kernel, x, implementation="reference"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=no_config):
            refused()


def test_the_table_lists_it(capsys):
    supported("rms_norm")
    assert "reference" in capsys.readouterr().out
    supported("rms_norm", jax.ShapeDtypeStruct((2, 8), "float64"))
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("reference")]
    assert line.split() == ["reference", "yes"]
    with pytest.raises(ValueError, match=r"it has .*reference"):
        modules.rms_norm(jnp.ones((2, 8)), implementation="fastest")
