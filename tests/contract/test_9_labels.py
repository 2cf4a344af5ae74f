"""SPEC 9: labels say which operations of a program are ours, through every transform."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import json
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel import cli
from ejkernel.cli.programs import not_whole
from ejkernel.ops import (
    LABEL_PREFIXES,
    LABEL_RE,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Kernel,
    PersistentCache,
    Tuner,
    autotune_lowered,
    clear_invocations,
    default_executor,
    device_fingerprint,
    extract_labels_from_hlo_text,
    find_labels_in_lowered,
    from_json,
    label,
    labels_to_configs,
    overlay_cache,
    set_default_executor,
    vmap_with_config,
)
from ejkernel.ops.core.specification import (
    SpecificationError,
    describe_specification,
    read_specification,
)
from ejkernel.ops.utils.meta import find_stamps_in_lowered, find_stamps_in_text, parse_label

KEY = "0123456789abcdef"


@dataclasses.dataclass(frozen=True)
class Config:
    factor: float = 2.0


class Plain(Kernel[Config, jax.Array]):
    """Differentiated by JAX."""

    def run(self, x, *, cfg):
        return jnp.sin(x) * cfg.factor


class Simple(Plain):
    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        (x,) = primals
        return (cotangents[0] * jnp.cos(x) * cfg.factor,)


class Residual(Plain):
    def fwd_with_residuals(self, x, *, cfg):
        return jnp.sin(x) * cfg.factor, jnp.cos(x)

    def vjp(self, residuals, out, dout, x, *, cfg):
        return (dout * residuals * cfg.factor,)


class Inner(Plain):
    pass


class Outer(Kernel[Config, jax.Array]):
    """Calls another kernel inside its run."""

    def __init__(self, inner):
        super().__init__("outer")
        self.inner = inner

    def run(self, x, *, cfg):
        return self.inner(x + 1.0) * cfg.factor


class OnlyInner(Outer):
    """All of its operations are another kernel's."""

    def run(self, x, *, cfg):
        return self.inner(x)


class Anything(Kernel[Config, jax.Array]):
    """Takes any pytrees and any keywords."""

    def run(self, *args, cfg, **kwargs):
        leaves = jax.tree.leaves((args, kwargs))
        arrays = [leaf for leaf in leaves if isinstance(leaf, (jax.Array, np.ndarray))]
        return sum(jnp.sum(array) for array in arrays) * cfg.factor


PLAIN, SIMPLE, RESIDUAL = Plain("plain"), Simple("simple"), Residual("residual")
ANYTHING = Anything("anything")
X = jnp.arange(4.0)


def label_of(kernel, *args, **kwargs) -> str:
    inv = kernel.bind(*args, **kwargs)
    return f"ejkernel_ops#{inv.full_op_id}:{inv.call_key}"


def label_in(transform, kernel) -> str:
    """That of the call with `X` in the program that a transform makes."""
    differentiates = any(word in transform for word in ("grad", "vjp", "jacrev"))
    return training_label_of(kernel, X) if differentiates else label_of(kernel, X)


def training_label_of(kernel, *args) -> str:
    """That of a call in a program that differentiates it."""
    inv = kernel.bind(*args).differentiate()
    return f"ejkernel_ops#{inv.full_op_id}:{inv.call_key}"


def labels(function, *args) -> list[str]:
    return find_labels_in_lowered(jax.jit(function).lower(*args))


# --- the text of a label --------------------------------------------------------------------------


def test_a_label_has_the_documented_format():
    assert label("matmul@v1", KEY) == f"ejkernel_ops#matmul@v1:{KEY}"


def test_a_label_takes_its_prefix_from_the_caller_as_it_stands():
    assert label("matmul@v1", KEY, prefix="p#") == f"p#matmul@v1:{KEY}"
    assert label("matmul@v1", KEY, prefix=None) == f"ejkernel_ops#matmul@v1:{KEY}"
    (found,) = labels_with("p#", label("named", prefix="p#")(jnp.sin))
    assert found.startswith("p#named@v1:")


def test_a_label_takes_its_prefix_from_the_environment_as_it_stands(monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_PREFIX", "team#")
    assert label("matmul@v1", KEY) == f"team#matmul@v1:{KEY}"
    assert label("matmul@v1", KEY, prefix="mine#") == f"mine#matmul@v1:{KEY}"
    monkeypatch.setenv("EJKERNEL_OPS_PREFIX", "")
    assert label("matmul@v1", KEY) == f"ejkernel_ops#matmul@v1:{KEY}"


def labels_with(prefix, function):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EJKERNEL_OPS_PREFIX", prefix)
        return labels(function, X)


BAD_PREFIXES = ["", "mine", "#", "mine##", "a#b#", "1p#", "-p#", "mine #", " mine#", "mine#\n"]
BAD_PREFIXES += ["mi+ne#", "(mine#", "[a-z]+#", ".*#", "a|b#", "^mine#", "mine$#", "a/b#", "a:b#"]
BAD_PREFIXES += ['mi"ne#', "mi'ne#", "mi\\ne#", "mi\x1b[31mne#", "mi\u202ene#", "miné#", "{p}#"]


@pytest.mark.parametrize("bad", [*BAD_PREFIXES, "mi\0ne#", b"mine#", 7])
def test_a_prefix_that_could_not_be_found_again_is_refused(bad):
    for call in (
        lambda: label("matmul@v1", KEY, prefix=bad),
        lambda: label("named", prefix=bad),
    ):
        with pytest.raises(ValueError, match=r"label: the prefix .* ends in '#'") as caught:
            call()
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("bad", [bad for bad in BAD_PREFIXES if bad])
def test_the_same_prefixes_are_refused_in_the_environment(bad, monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_PREFIX", bad)
    for call in (
        lambda: label("matmul@v1", KEY),
        lambda: extract_labels_from_hlo_text("module {}"),
        lambda: find_stamps_in_text("module {}"),
        lambda: Plain("badly_prefixed")(X),
    ):
        with pytest.raises(ValueError, match=r"EJKERNEL_OPS_PREFIX=.* ends in '#'"):
            call()


@pytest.mark.parametrize(
    "prefix", ["p#", "_#", "Team-7.x_#", "ejkernel#", "ejkernel_ops.mine#", "a" * 200 + "#"]
)
def test_every_reader_finds_labels_with_another_prefix(prefix, monkeypatch, tmp_path, capsys):
    kernel = Plain("prefixed")
    key = kernel.bind(X).call_key
    monkeypatch.setenv("EJKERNEL_OPS_PREFIX", prefix)
    expected = f"{prefix}prefixed@v1:{key}"
    lowered = jax.jit(lambda x: kernel(x) + 1).lower(X)
    match = LABEL_RE.fullmatch(expected)
    assert (match["prefix"], match["op_id"], match["call_key"]) == (prefix, "prefixed@v1", key)
    assert parse_label(expected) == ("prefixed@v1", key)
    ((found, spec),) = find_stamps_in_text(lowered.as_text())
    assert found == expected
    assert read_specification(spec).call_key == key
    for text in (lowered.as_text(), lowered.compile().as_text()):
        assert extract_labels_from_hlo_text(text) == [expected]
    assert find_labels_in_lowered(lowered) == [expected]
    assert [text for text, _ in find_stamps_in_lowered(lowered)] == [expected]
    selector = ConfigSelectorChain(ConfigCache(), tuner=Tuner(warmup=0, iters=1))
    clear_invocations()
    result = autotune_lowered(selector, lowered.as_text())
    assert [(entry.op_id, entry.call_key) for entry in result] == [("prefixed@v1", key)]
    assert labels_to_configs(lowered, selector) == [(expected, Config())]
    assert labels_to_configs([expected], selector) == [(expected, Config())]
    with overlay_cache({expected: Config(0.0)}):
        assert not kernel(X).any()
    (tmp_path / "program.mlir").write_text(lowered.as_text())
    assert cli.run(["labels", str(tmp_path / "program.mlir"), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["labels"]
    assert (row["label"], row["op_id"], row["call_key"]) == (expected, "prefixed@v1", key)
    monkeypatch.delenv("EJKERNEL_OPS_PREFIX")
    assert extract_labels_from_hlo_text(lowered.as_text()) == []


def test_a_longer_prefix_is_not_mistaken_for_ours(monkeypatch):
    for before in ("x", "7", "_", ".", "-", "X."):
        assert extract_labels_from_hlo_text(before + label("matmul@v1", KEY)) == []
    for before in (" ", '"', ",", "(", "{", "=", "/", ":", "\n", "…", "#"):
        assert len(extract_labels_from_hlo_text(before + label("matmul@v1", KEY))) == 1
    monkeypatch.setenv("EJKERNEL_OPS_PREFIX", "ops#")
    text = f"{label('a@v1', KEY)} {label('b@v1', KEY, prefix='ejkernel_ops#')} {label('a@v1', KEY)}"
    assert extract_labels_from_hlo_text(text) == [f"ops#a@v1:{KEY}", f"ejkernel_ops#b@v1:{KEY}"]


@pytest.mark.parametrize(
    "bad", ["", "0123", KEY.upper(), KEY + "0", "0123456789abcdeg", f" {KEY}", KEY + "\n", 7]
)
def test_a_hash_that_is_not_sixteen_hexadecimal_digits_is_refused(bad):
    with pytest.raises(ValueError, match=r"16.*hex"):
        label("matmul@v1", bad)


@pytest.mark.parametrize(
    "bad", ["", "matmul", "@v1", "mat mul@v1", "matmul@v", "a#b@v1", "a:b@v1", "matmul@v1\n", 7]
)
def test_an_op_id_without_a_version_or_with_odd_characters_is_refused(bad):
    with pytest.raises(ValueError, match="op_id"):
        label(bad, KEY)


def test_the_label_expression_names_its_parts():
    match = LABEL_RE.fullmatch(f"ejkernel_ops#group/flash-attention.fwd@v2.1:{KEY}")
    assert match is not None
    assert match["prefix"] == "ejkernel_ops#"
    assert match["op_id"] == "group/flash-attention.fwd@v2.1"
    assert match["call_key"] == KEY


@pytest.mark.parametrize(
    "text",
    [
        f"ejkernel_ops#matmul:{KEY}",
        f"ejkernel_ops@matmul@v1:{KEY}",
        "ejkernel_ops#matmul@v1",
        f"ejkernel_ops#matmul@v1:{KEY[:-1]}",
        f"ejkernel_ops#matmul@v1:{KEY}0",
    ],
)
def test_the_label_expression_refuses_what_is_not_a_label(text):
    assert LABEL_RE.fullmatch(text) is None


def test_the_default_prefix_is_among_the_known_prefixes():
    assert LABEL_PREFIXES == ("ejkernel_ops#",)


# --- reading text ---------------------------------------------------------------------------------


def test_labels_are_read_from_text_in_order_and_once():
    first, second = label("b@v1", "f" * 16), label("a@v1", "0" * 16)
    text = f'x {{l = "{first}"}}\ny "{second}" and {first},{second}'
    assert extract_labels_from_hlo_text(text) == [first, second]


def test_a_text_without_labels_gives_an_empty_list():
    assert extract_labels_from_hlo_text("") == []
    assert extract_labels_from_hlo_text("module @jit_f {}") == []


def test_another_tools_prefix_is_not_ours_unless_the_environment_says_so(monkeypatch):
    theirs = label("matmul@v1", KEY, prefix="theirs#")
    assert extract_labels_from_hlo_text(theirs) == []
    monkeypatch.setenv("EJKERNEL_OPS_PREFIX", "theirs#")
    both = f"{theirs} {label('matmul@v1', KEY, prefix='ejkernel_ops#')}"
    assert len(extract_labels_from_hlo_text(both)) == 2


@pytest.mark.parametrize("wrong", [None, 3, b"text", ["text"], jax.jit(jnp.sin).lower(1.0)])
def test_extracting_from_something_else_than_text_is_a_type_error(wrong):
    with pytest.raises(TypeError, match="text"):
        extract_labels_from_hlo_text(wrong)


@pytest.mark.parametrize("wrong", [None, 3, "text", jnp.sin])
def test_finding_in_something_else_than_a_lowered_computation_is_a_type_error(wrong):
    with pytest.raises(TypeError, match="lower"):
        find_labels_in_lowered(wrong)


def test_a_program_without_kernels_has_no_labels():
    assert labels(jnp.sin, X) == []


# --- any text, in linear time ---------------------------------------------------------------------

HOSTILE = [
    *("a", "0123456789abcdef", "A.", "a#", "a#b@v1", "a#b@v1:", "é", "\n", " ", "\t\n", "\f"),
    *('"', '\\"', "\\", "\\\n", "'", "{", "[", "(", "{'a':", "[{", "}", "module {\n", 'module "\\'),
    *("ejkernel", "ejkernel_ops#", "ejkernel_ops#a", "ejkernel_ops#a@v1", "ejkernel_ops#a@v1:0"),
    *('ejkernel="', 'ejkernel = "\\', 'ejkernel="ejkernel_ops#', "ejkernel ", "ejkernel = "),
    f"ejkernel_ops#m@v1:{KEY}",
    f"ejkernel_ops#m@v1:{KEY} ",
    f'ejkernel="ejkernel_ops#m@v1:{KEY} ',
    f'ejkernel="ejkernel_ops#m@v1:{KEY} "',
]
IN_A_STAMP = f'module @m {{ func.func ejkernel = "ejkernel_ops#m@v1:{KEY} '


@pytest.mark.parametrize("unit", HOSTILE)
def test_megabytes_of_any_text_are_read_in_linear_time(unit):
    text = unit * (2**20 // len(unit))
    for program in (text, IN_A_STAMP + text, IN_A_STAMP + text + '"}'):
        began = time.process_time()
        extract_labels_from_hlo_text(program)
        for _, spec in find_stamps_in_text(program):
            if spec is not None:
                describe_specification(spec)
                with contextlib.suppress(SpecificationError):
                    read_specification(spec)
        LABEL_RE.search(program)
        not_whole(program)
        # Quadratic code would take hours: 2**40 steps.
        assert time.process_time() - began < 10


def test_a_program_with_a_large_constant_is_read_in_milliseconds():
    table = np.random.default_rng(0).standard_normal(2**17, dtype=np.float32)
    lowered = jax.jit(lambda x: PLAIN(x) + jnp.sum(jnp.asarray(table) * x[0])).lower(X)
    text = lowered.as_text()
    assert len(text) > 2**20
    began = time.process_time()
    ((found, spec),) = find_stamps_in_text(text)
    assert time.process_time() - began < 1
    assert found == label_of(PLAIN, X)
    assert read_specification(spec).call_key == PLAIN.bind(X).call_key


@pytest.mark.parametrize("depth", [900, 10_000, 1_000_000])
@pytest.mark.parametrize("unit", ["[", "{'$tuple':[", "{'$dict':{'a':", "{'a':"])
def test_a_specification_that_is_nested_without_end_is_damaged(unit, depth):
    closing = "".join({"[": "]", "{": "}"}.get(c, "") for c in reversed(unit))
    for nested in (unit * depth, unit * depth + "1" + closing * depth):
        spec = f"{{'op':'gone@v1','kernel':'no.such:Kernel','args':[{nested}]}}"
        with pytest.raises(SpecificationError):
            read_specification(spec)
        assert describe_specification(spec).keys() <= {"kernel", "signature"}


def test_a_specification_of_a_call_that_cannot_be_is_skipped(tmp_path, monkeypatch):
    """It asks for an implementation that does not exist, or for a module that ends the process."""
    (tmp_path / "a_script_that_ends.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(str(tmp_path))
    norm = "ejkernel.kernels.norm.kernel:RmsNorm"
    arrays = "{'$array':'float32[4,8]'},{'$array':'float32[8]'}"
    for op_id, kernel, keywords in (
        ("rms_norm@v1", norm, "{'implementation':'nosuch'}"),
        ("rms_norm@v1", norm, "{'implementation':3}"),
        ("gone@v1", "a_script_that_ends:Kernel", "{}"),
    ):
        spec = f"{{'op':'{op_id}','kernel':'{kernel}','args':[{arrays}],'kwargs':{keywords}}}"
        text = f'ejkernel = "ejkernel_ops#{op_id}:{KEY} {spec}"'
        result = autotune_lowered(ConfigSelectorChain(ConfigCache()), text)
        assert len(result.skipped) == 1
        with pytest.raises(SpecificationError):
            read_specification(spec)


# --- every transform ------------------------------------------------------------------------------

KERNELS = {"plain": PLAIN, "custom_vjp": SIMPLE, "residuals": RESIDUAL}
ONE = jnp.float32(1.0)


def total(kernel):
    return lambda x: jnp.sum(kernel(x))


def through_scan(kernel):
    def function(x):
        return jax.lax.scan(lambda carry, _: (kernel(carry), None), x, None, length=3)[0]

    return function


def through_while(kernel):
    def function(x):
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, kernel(c[1])), (0, x))[1]

    return function


def through_shard_map(kernel):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(kernel, mesh=mesh, in_specs=P("d"), out_specs=P("d"))


def over(function):
    """Over a batch of one example's shape."""
    return lambda x: function(jnp.stack([x, x]))


TRANSFORMS = {
    "plain": lambda k: k,
    "nested jit": lambda k: jax.jit(jax.jit(k)),
    "grad": lambda k: jax.grad(total(k)),
    "value_and_grad": lambda k: jax.value_and_grad(total(k)),
    "vjp": lambda k: lambda x: jax.vjp(k, x)[1](x)[0],
    "jacrev": lambda k: jax.jacrev(k),
    "vmap": lambda k: over(jax.vmap(k)),
    "vmap of grad": lambda k: over(jax.vmap(jax.grad(total(k)))),
    "grad of vmap": lambda k: jax.grad(lambda x: jnp.sum(over(jax.vmap(k))(x))),
    "scan": through_scan,
    "grad of scan": lambda k: jax.grad(total(through_scan(k))),
    "while_loop": through_while,
    "fori_loop": lambda k: lambda x: jax.lax.fori_loop(0, 3, lambda _, c: k(c), x),
    "map": lambda k: over(lambda xs: jax.lax.map(k, xs)),
    "cond": lambda k: lambda x: jax.lax.cond(x[0] > 0, k, jnp.cos, x),
    "grad of cond": lambda k: jax.grad(lambda x: jnp.sum(jax.lax.cond(x[0] > 0, k, jnp.cos, x))),
    "switch": lambda k: lambda x: jax.lax.switch(1, [jnp.cos, k], x),
    "remat": lambda k: jax.checkpoint(k),
    "grad of remat": lambda k: jax.grad(total(jax.checkpoint(k))),
    "scan of remat": lambda k: through_scan(jax.checkpoint(k)),
    "grad of scan of remat": lambda k: jax.grad(total(through_scan(jax.checkpoint(k)))),
    "shard_map": through_shard_map,
    "grad of shard_map": lambda k: jax.grad(total(through_shard_map(k))),
    "jit of vmap of grad of remat": lambda k: over(
        jax.jit(jax.vmap(jax.grad(total(jax.checkpoint(k)))))
    ),
}


@pytest.mark.parametrize("form", KERNELS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_the_label_is_found_through_every_transform(transform, form):
    kernel = KERNELS[form]
    assert labels(TRANSFORMS[transform](kernel), X) == [label_in(transform, kernel)]


def test_the_label_is_found_through_forward_mode():
    assert labels(lambda x: jax.jvp(PLAIN, (x,), (x,))[1], X) == [training_label_of(PLAIN, X)]
    assert labels(jax.jacfwd(PLAIN), X) == [training_label_of(PLAIN, X)]
    assert labels(jax.hessian(total(PLAIN)), X) == [training_label_of(PLAIN, X)]


def test_the_label_is_found_in_a_program_for_several_devices():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(PLAIN, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    # One shard's shape is what the kernel sees.
    assert labels(mapped, jnp.arange(8.0)) == [label_of(PLAIN, jnp.arange(2.0))]


def test_the_label_is_found_when_the_kernel_runs_in_pmap():
    mapped = jax.pmap(PLAIN)
    found = find_labels_in_lowered(mapped.lower(jnp.ones((2, 4))))
    assert found == [label_of(PLAIN, X)]


@pytest.mark.parametrize("form", KERNELS)
def test_the_label_is_found_when_only_the_gradient_is_used(form):
    # The forward output is dead: a custom rule's forward operations are removed with their label.
    kernel = KERNELS[form]

    def backward_only(x):
        return jax.vjp(kernel, x)[1](jnp.ones_like(x))[0]

    assert labels(backward_only, X) == [training_label_of(kernel, X)]


@pytest.mark.parametrize("form", KERNELS)
def test_the_label_stands_on_the_backward_operations_too(form):
    kernel = KERNELS[form]
    lowered = jax.jit(jax.grad(total(kernel))).lower(X)
    marked = [
        line for line in lowered.as_text().splitlines() if training_label_of(kernel, X) in line
    ]
    assert any("cosine" in line for line in marked) or any("multiply" in line for line in marked)


def test_an_explicit_executor_labels_as_the_default_one_does():
    executor = Executor(ConfigSelectorChain(cache=ConfigCache(), autotune=False))
    assert labels(lambda x: executor(PLAIN, x), X) == [label_of(PLAIN, X)]


def test_two_shapes_of_one_kernel_are_two_labels_in_the_order_of_the_program():
    y = jnp.arange(6.0)
    found = labels(lambda x, y: (PLAIN(x), PLAIN(y), PLAIN(x + 1)), X, y)
    assert found == [label_of(PLAIN, X), label_of(PLAIN, y)]


def test_several_kernels_are_several_labels():
    found = labels(lambda x: RESIDUAL(PLAIN(SIMPLE(x))), X)
    assert set(found) == {label_of(SIMPLE, X), label_of(PLAIN, X), label_of(RESIDUAL, X)}


def test_a_kernel_with_platform_methods_is_labelled():
    class Platform(Kernel[Config, jax.Array]):
        def run_xla(self, x, *, cfg):
            return x * cfg.factor

    kernel = Platform("platform", version="7")
    (found,) = labels(kernel, X)
    assert found == label_of(kernel, X)
    assert LABEL_RE.fullmatch(found)["op_id"] == "platform@v7"


def test_a_kernel_that_returns_its_argument_is_labelled_or_leaves_no_operation():
    class Same(Kernel[Config, jax.Array]):
        def run(self, x, *, cfg):
            return x

    kernel = Same("same")
    assert labels(lambda x: kernel(x) + 1, X) in ([label_of(kernel, X)], [])


@pytest.mark.parametrize("transform", ["plain", "grad", "vmap", "scan", "grad of remat"])
@pytest.mark.parametrize("form", KERNELS)
def test_kernels_inside_kernels_are_both_labelled(transform, form):
    inner = KERNELS[form]
    outer = Outer(inner)
    found = labels(TRANSFORMS[transform](outer), X)
    assert set(found) == {label_in(transform, outer), label_in(transform, inner)}


@pytest.mark.parametrize("transform", ["plain", "grad", "vmap", "scan"])
def test_a_kernel_all_of_whose_operations_are_another_kernels_is_labelled(transform):
    inner = Inner("inner")
    outer = OnlyInner(inner)
    found = labels(TRANSFORMS[transform](outer), X)
    assert set(found) == {label_in(transform, outer), label_in(transform, inner)}


def test_the_inner_kernels_specification_is_its_own():
    inner = Inner("inner")
    outer = Outer(inner)
    stamps = dict(find_stamps_in_lowered(jax.jit(outer).lower(X)))
    assert read_specification(stamps[label_of(inner, X)]).kernel is inner
    assert read_specification(stamps[label_of(outer, X)]).kernel is outer


def test_operations_outside_the_kernel_carry_no_label():
    lowered = jax.jit(lambda x: jnp.tanh(PLAIN(jnp.exp(x)))).lower(X)
    lines = lowered.as_text().splitlines()
    outside = [line for line in lines if "stablehlo.tanh" in line or "stablehlo.exp" in line]
    assert len(outside) == 2
    assert not any("ejkernel" in line for line in outside)


def test_the_labels_hash_is_the_bound_calls_key():
    (found,) = labels(lambda x: ANYTHING(x, flag=True), X)
    match = LABEL_RE.fullmatch(found)
    assert match["call_key"] == ANYTHING.bind(X, flag=True).call_key
    assert match["call_key"] != ANYTHING.bind(X, flag=False).call_key


def test_the_label_follows_prepare():
    class Prepared(Plain):
        def prepare(self, x):
            return (x.reshape(-1),), {}

    kernel = Prepared("prepared")
    assert labels(kernel, X.reshape(2, 2)) == [label_of(PLAIN, X).replace("plain", "prepared")]


def test_the_label_of_a_kernel_with_a_key_builder_is_the_builders_key():
    class Bucketed(Plain):
        def key_builder(self, inv):
            return "large" if inv.args[0].size > 100 else "small"

    kernel = Bucketed("bucketed")
    small, also_small = labels(kernel, X), labels(kernel, jnp.arange(5.0))
    assert small == also_small == [label("bucketed@v1", kernel.bind(X).key.call_key)]
    assert labels(kernel, jnp.zeros(101)) != small


def test_labels_stand_in_the_compiled_program_too():
    text = jax.jit(PLAIN).lower(X).compile().as_text()
    assert extract_labels_from_hlo_text(text) == [label_of(PLAIN, X)]


def test_labels_stand_in_every_text_form_of_a_lowered_program():
    lowered = jax.jit(PLAIN).lower(X)
    expected = [label_of(PLAIN, X)]
    assert extract_labels_from_hlo_text(lowered.as_text()) == expected
    assert extract_labels_from_hlo_text(lowered.as_text(debug_info=True)) == expected
    assert extract_labels_from_hlo_text(lowered.as_text(dialect="hlo")) == expected


def test_a_cached_trace_is_labelled_when_lowered_again():
    jitted = jax.jit(lambda x: PLAIN(x) + PLAIN(x))
    jitted(X)
    PLAIN(X)
    assert find_labels_in_lowered(jitted.lower(X)) == [label_of(PLAIN, X)]
    assert find_labels_in_lowered(jitted.lower(X)) == [label_of(PLAIN, X)]


def test_labels_do_not_change_values():
    expected = np.sin(np.arange(4.0, dtype=np.float32)) * 2
    np.testing.assert_allclose(jax.jit(PLAIN)(X), expected, rtol=1e-6)
    for kernel in KERNELS.values():
        np.testing.assert_allclose(jax.grad(total(kernel))(X), np.cos(X) * 2, rtol=1e-5)


# --- label as a decorator -------------------------------------------------------------------------


def test_a_decorated_function_is_found_by_its_name():
    @label("my_attention")
    def attention(q, k):
        """Doc."""
        return q @ k

    (found,) = labels(attention, jnp.ones((2, 2)), jnp.ones((2, 2)))
    match = LABEL_RE.fullmatch(found)
    assert match["prefix"] == "ejkernel_ops#"
    assert match["op_id"] == "my_attention@v1"
    assert attention.__name__ == "attention"
    assert attention.__doc__ == "Doc."


def test_a_decorated_function_computes_the_same():
    @label("twice")
    def twice(x, *, by=2):
        return x * by

    np.testing.assert_array_equal(twice(X, by=3), X * 3)
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(twice(x)))(X), jnp.full(4, 2.0))


def test_a_decorated_functions_label_differs_by_shape_and_not_by_value():
    named = label("named")(jnp.sin)
    assert labels(named, X) == labels(named, X + 1)
    assert labels(named, X) != labels(named, jnp.arange(5.0))


def test_a_decorator_keeps_a_version_that_is_given():
    (found,) = labels(label("named@v3")(jnp.sin), X)
    assert LABEL_RE.fullmatch(found)["op_id"] == "named@v3"


@pytest.mark.parametrize("transform", ["grad", "vmap", "scan", "remat"])
def test_a_decorated_function_is_found_through_transforms(transform):
    found = labels(TRANSFORMS[transform](label("named")(jnp.sin)), X)
    assert [LABEL_RE.fullmatch(text)["op_id"] for text in found] == ["named@v1"]


def test_a_kernel_inside_a_decorated_function_keeps_its_own_label():
    named = label("named")(lambda x: PLAIN(x) + 1)
    found = labels(named, X)
    assert label_of(PLAIN, X) in found
    assert len(found) == 2


def test_a_decorated_function_takes_static_values_that_are_not_arrays():
    named = label("named")(lambda x, mode, fn=None: x * 2 if mode == "double" else fn(x))
    assert len(labels(lambda x: named(x, "double", fn=jnp.sin), X)) == 1


@pytest.mark.parametrize("bad", ["", "my attention", "a#b", "a:b", "@v1"])
def test_a_decorators_name_must_fit_in_a_label(bad):
    with pytest.raises(ValueError, match="label"):
        label(bad)


# --- environment ----------------------------------------------------------------------------------


def test_the_prefix_variable_changes_the_labels_in_programs(monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_PREFIX", "team.ops#")
    kernel = Plain("prefixed")
    (found,) = labels(kernel, X)
    assert found == f"team.ops#prefixed@v1:{kernel.bind(X).call_key}"


def test_stamp_none_leaves_the_program_untouched(monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", "none")
    lowered = jax.jit(Plain("unstamped")).lower(X)
    assert find_labels_in_lowered(lowered) == []
    assert "ejkernel" not in lowered.as_text()


def test_stamp_hash_is_the_default(monkeypatch):
    default = jax.jit(Plain("stamped")).lower(X).as_text()
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", "hash")
    assert jax.jit(Plain("stamped")).lower(X).as_text() == default
    assert "ejkernel_ops#stamped@v1" in default


@pytest.mark.parametrize("transform", ["plain", "grad", "vmap", "scan", "grad of remat"])
@pytest.mark.parametrize("form", KERNELS)
def test_stamp_json_says_operation_arguments_and_config(transform, form, monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", "json")
    kernel = type(KERNELS[form])(f"json_{form}")
    with overlay_cache({f"json_{form}": Config(5.0)}):
        lowered = jax.jit(TRANSFORMS[transform](kernel)).lower(X)
    ((found, spec),) = find_stamps_in_lowered(lowered)
    assert found == label_in(transform, kernel)
    said = from_json(spec.replace("'", '"'))
    assert said["op"] == f"json_{form}@v1"
    assert "float32[4]" in str(said["args"])
    assert said["config"] == {"factor": 5.0}


def test_an_unknown_stamp_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", "everything")
    with pytest.raises(ValueError, match="EJKERNEL_OPS_STAMP"):
        jax.jit(Plain("refused")).lower(X)


# --- labels to configs ----------------------------------------------------------------------------


def test_labels_to_configs_reads_memory_overlay_and_store(tmp_path):
    store = PersistentCache(tmp_path / "store")
    selector = ConfigSelectorChain(ConfigCache(), persistent=store, autotune=False)
    lowered = jax.jit(lambda x: PLAIN(x) + SIMPLE(x) + RESIDUAL(x) + ANYTHING(x)).lower(X)
    device = device_fingerprint()
    selector.cache.put(device, "plain@v1", PLAIN.bind(X).call_key, Config(3.0))
    store.put(device, "simple@v1", SIMPLE.bind(X).call_key, Config(4.0))
    with overlay_cache({label_of(RESIDUAL, X): Config(5.0)}):
        answer = labels_to_configs(lowered, selector)
    assert [text for text, _ in answer] == find_labels_in_lowered(lowered)
    assert dict(answer) == {
        label_of(PLAIN, X): Config(3.0),
        label_of(SIMPLE, X): Config(4.0),
        label_of(RESIDUAL, X): Config(5.0),
        label_of(ANYTHING, X): None,
    }


def test_labels_to_configs_of_a_list_asks_the_default_executor():
    default_executor().selector.cache.put(
        device_fingerprint(), "plain@v1", PLAIN.bind(X).call_key, Config(3.0)
    )
    unknown = label("nobody@v1", KEY)
    answer = labels_to_configs([unknown, label_of(PLAIN, X)])
    assert answer == [(unknown, None), (label_of(PLAIN, X), Config(3.0))]


def test_labels_to_configs_of_a_list_takes_a_selector_too():
    selector = ConfigSelectorChain(ConfigCache())
    selector.cache.put(device_fingerprint(), "plain@v1", PLAIN.bind(X).call_key, Config(3.0))
    assert labels_to_configs([label_of(PLAIN, X)], selector)[0][1] == Config(3.0)


def test_labels_to_configs_never_tunes():
    events = []
    selector = ConfigSelectorChain(ConfigCache(), on_event=lambda event, **_: events.append(event))
    set_default_executor(Executor(ConfigSelectorChain(autotune=False)))
    assert labels_to_configs(jax.jit(PLAIN).lower(X), selector) == [(label_of(PLAIN, X), None)]
    assert events == []
    assert len(selector.cache) == 0


def test_labels_to_configs_refuses_a_single_string_and_a_bad_label():
    with pytest.raises(TypeError, match="list"):
        labels_to_configs(label_of(PLAIN, X))
    with pytest.raises(ValueError, match="label"):
        labels_to_configs(["not a label"])


# --- the specification ----------------------------------------------------------------------------


class Mode(enum.Enum):
    FAST = "fast"


def specification_of(function, *args) -> tuple[str, str | None]:
    """Label and specification, read from the program's text as another process would."""
    lowered = jax.jit(function).lower(*args)
    (from_text,) = find_stamps_in_text(lowered.as_text())
    (from_module,) = find_stamps_in_lowered(lowered)
    assert from_text == from_module
    return from_text


WRITABLE = {
    "one array": ((X,), {}),
    "numpy array": ((np.ones((2, 3), np.int32),), {}),
    "no elements": ((jnp.ones((0, 3)),), {}),
    "a scalar": ((jnp.float32(1.0), X), {}),
    "python numbers": ((1, 2.5, True, X), {}),
    "bfloat16 and int8": ((jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.int8)), {}),
    "eight-bit floats": ((jnp.ones(2, jnp.float8_e4m3fn),), {}),
    "tuple": (((X, (X, X)),), {}),
    "list": (([X, [X]],), {}),
    "dict": (({"b": X, "a": {"c": X}},), {}),
    "mixed pytree": (({"w": [X, (X, None)]}, X), {}),
    "empty containers": (((), [], {}, X), {}),
    "None argument": ((X, None), {}),
    "flag keyword": ((X,), {"causal": True}),
    "numbers as keywords": ((X,), {"window": 128, "scale": 0.1, "top": float("inf")}),
    "None keyword": ((X,), {"mask": None}),
    "text with quotes": ((X,), {"mode": """it's "quoted" 'twice' \\" and \\' """}),
    "text with backslashes": ((X,), {"mode": "a\\b\\\\c\\n\\u0027\\22"}),
    "text with line breaks": ((X,), {"mode": "a\nb\tc\r"}),
    "text beyond ascii": ((X,), {"mode": "größe × 漢字 😀"}),
    "text like a tag": ((X,), {"mode": "{'$array':'float32[4]'}"}),
    "dtype keyword": ((X,), {"dtype": jnp.bfloat16}),
    "numpy dtype keyword": ((X,), {"dtype": np.dtype("float16")}),
    "numpy scalar type keyword": ((X,), {"dtype": np.float32}),
    "tuple keyword": ((X,), {"blocks": (16, (32, None))}),
    "array keyword": ((X,), {"mask": jnp.ones(3, bool)}),
    "pytree keyword": ((X,), {"extra": {"a": X, "b": (X, X)}}),
}


@pytest.mark.parametrize("case", WRITABLE)
def test_a_specification_describes_the_same_call(case):
    args, kwargs = WRITABLE[case]
    arrays, structure = jax.tree.flatten(args)

    def function(*arrays):
        return ANYTHING(*jax.tree.unflatten(structure, arrays), **kwargs)

    found, spec = specification_of(function, *arrays)
    assert spec is not None
    assert LABEL_RE.fullmatch(found)["call_key"] == ANYTHING.bind(*args, **kwargs).call_key
    clear_invocations()
    inv = read_specification(spec)
    assert inv.kernel is ANYTHING
    assert label("anything@v1", inv.call_key) == found
    assert set(inv.kwargs) == set(kwargs)
    for name, value in kwargs.items():
        if not any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(value)):
            assert inv.kwargs[name] == value


def test_a_weak_type_is_part_of_label_and_specification():
    weak, weak_spec = specification_of(ANYTHING, 1.0)
    strong, _ = specification_of(ANYTHING, jnp.float32(1.0))
    assert weak != strong
    inv = read_specification(weak_spec)
    assert inv.args[0].weak_type
    assert label("anything@v1", inv.call_key) == weak


@pytest.mark.parametrize(
    ("in_axes", "shapes"),
    [
        (0, [(3, 4), (3, 5)]),
        ((0, None), [(3, 4), (5,)]),
        ((None, -1), [(4,), (5, 3)]),
        ([0, 1], [(3, 4), (5, 3)]),
    ],
)
def test_a_batch_is_part_of_label_and_specification(in_axes, shapes):
    arrays = [jnp.ones(shape) for shape in shapes]
    found, spec = specification_of(vmap_with_config(ANYTHING, in_axes=in_axes), *arrays)
    inv = read_specification(spec)
    assert label("anything@v1", inv.call_key) == found
    assert [arg.shape for arg in inv.args] == [(4,), (5,)]


def test_a_batch_over_pytrees_is_part_of_label_and_specification():
    axes = ({"a": 0, "b": None}, (0, None))
    mapped = vmap_with_config(ANYTHING, in_axes=axes)

    def function(a, b, c, d):
        return mapped({"a": a, "b": b}, (c, d))

    found, spec = specification_of(function, jnp.ones((3, 4)), X, jnp.ones((3, 2)), X)
    assert label("anything@v1", read_specification(spec).call_key) == found


def captured_by(value):
    return lambda x: x * value


@pytest.mark.parametrize(
    "value",
    [jnp.tanh, lambda x: x, functools.partial(jnp.sum, axis=0), captured_by(2), jax.jit(jnp.sin)],
    ids=["function", "lambda", "partial", "closure", "jitted"],
)
def test_a_function_valued_keyword_gives_a_label_without_a_specification(value):
    found, spec = specification_of(lambda x: ANYTHING(x, activation=value), X)
    assert found == label_of(ANYTHING, X, activation=value)
    assert spec is None


@pytest.mark.parametrize(
    "kwargs",
    [
        {"mode": Mode.FAST},
        {"shape": frozenset({1, 2})},
        {"config": Config(3.0)},
        {"number": 1 + 2j},
        {"raw": b"bytes"},
        {"window": range(3)},
    ],
    ids=["enum", "set", "dataclass", "complex", "bytes", "range"],
)
def test_a_static_value_is_described_faithfully_or_not_at_all(kwargs):
    found, spec = specification_of(lambda x: ANYTHING(x, **kwargs), X)
    assert found == label_of(ANYTHING, X, **kwargs)
    if spec is not None:
        assert label("anything@v1", read_specification(spec).call_key) == found


class Pair:
    """A pytree node of the user's own."""

    def __init__(self, a, b):
        self.a, self.b = a, b


jax.tree_util.register_pytree_node(Pair, lambda p: ((p.a, p.b), None), lambda _, ab: Pair(*ab))


@pytest.mark.parametrize(
    "tree",
    [
        lambda x: {1: x, 2: x},
        lambda x: {(0, 1): x},
        lambda x: {"$tuple": x},
        lambda x: Pair(x, x),
        lambda x: jax.random.key(0),
    ],
    ids=["integer keys", "tuple keys", "a key like a tag", "custom node", "random key"],
)
def test_an_unusual_argument_is_described_faithfully_or_not_at_all(tree):
    class Leaves(Kernel[Config, jax.Array]):
        def run(self, tree, x, *, cfg):
            return x * cfg.factor

    kernel = Leaves("leaves")
    found, spec = specification_of(lambda x: kernel(tree(x), x), X)
    assert found == label_of(kernel, tree(X), X)
    if spec is not None:
        assert label("leaves@v1", read_specification(spec).call_key) == found


class Layer(Kernel[Config, jax.Array]):
    """A body of a realistic length."""

    def run(self, x, w, *, cfg, causal):
        scores = x @ w
        scores = jnp.where(scores > 0, scores, -1.0) if causal else scores
        scores = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
        return scores / jnp.sum(scores, axis=-1, keepdims=True) * cfg.factor


def outputs(kernel):
    return lambda xs, ws: [kernel(x, w, causal=True) for x, w in zip(xs, ws, strict=True)]


def gradients(kernel):
    return jax.grad(lambda xs, ws: sum(jnp.sum(out) for out in outputs(kernel)(xs, ws)))


@pytest.mark.parametrize("program", [outputs, gradients])
@pytest.mark.parametrize("sizes", [[4] * 32, range(1, 33)], ids=["one shape", "all different"])
def test_thirty_two_labelled_calls_at_most_double_the_text(program, sizes, monkeypatch):
    def lowered_text():
        kernel = Layer("layer")
        xs, ws = [jnp.ones((4, n)) for n in sizes], [jnp.ones((n, 4)) for n in sizes]
        return jax.jit(program(kernel)).lower(xs, ws).as_text()

    labelled = lowered_text()
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", "none")
    bare = lowered_text()
    assert len(extract_labels_from_hlo_text(labelled)) == len(set(sizes))
    assert extract_labels_from_hlo_text(bare) == []
    assert len(labelled) <= 2 * len(bare)


@pytest.mark.parametrize("transform", ["plain", "grad", "vmap", "scan", "remat", "grad of remat"])
def test_the_specification_stands_on_few_operations(transform):
    kernel = Layer("layer")
    w = jnp.ones((4, 4))
    function = TRANSFORMS[transform](lambda x: kernel(x, w, causal=True))
    text = jax.jit(function).lower(X).as_text()
    # Once per piece (forward, backward, recomputation); it is ten times longer than a label.
    assert 1 <= text.count("'op':'layer@v1'") <= 4


def test_the_label_is_one_word_in_the_program():
    (found,) = labels(PLAIN, X)
    assert re.fullmatch(r"[\w#@:./-]+", found)
