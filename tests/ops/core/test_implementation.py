"""`Implementation` objects: who serves, whose config it is; suffix methods are the same."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import (
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Implementation,
    Kernel,
    Limit,
    Limits,
    NotSupported,
    PersistentCache,
    Supports,
    autotune,
    overlay_cache,
)
from ejkernel.ops.utils.provenance import source_hash

X = jnp.arange(1.0, 5.0)


@dataclasses.dataclass(frozen=True)
class Chunks:
    chunks: int = 1


@dataclasses.dataclass(frozen=True)
class Rows:
    rows: int = 4


def by_chunks(x, *, cfg, factor=2.0):
    return jnp.concatenate([part * factor for part in jnp.split(x, cfg.chunks)])


def by_rows(x, *, cfg, factor=2.0):
    return jnp.stack([row * factor for row in x.reshape(-1, cfg.rows)]).reshape(x.shape)


def with_residuals(x, *, cfg, factor=2.0):
    return by_rows(x, cfg=cfg, factor=factor), None


def backward(residuals, out, dout, x, *, cfg, factor=2.0):
    assert out is None, "it is not read, so it is not kept"
    return (dout * factor * 10,)  # a gradient that shows whose rule it is


def even(inv):
    return None if inv.args[0].shape[0] % 2 == 0 else "the length is odd"


ROWS = Implementation(
    name="rows",
    config=Rows,
    devices=("cpu",),
    forward=by_rows,
    forward_with_residuals=with_residuals,
    backward=backward,
    reads_out=False,
    heuristic=lambda inv: Rows(2),
    space=lambda inv: [Rows(1), Rows(2)],
    supports=Supports(rules=(even,)),
    limits=Limits({"rows": Limit(minimum=1, maximum=64)}),
)
CHUNKS = Implementation(name="chunks", config=Chunks, forward=by_chunks)
ELSEWHERE = Implementation(name="pallas", devices=("tpu",), config=Chunks, forward=by_chunks)


class Scale(Kernel[Any, jax.Array]):
    implementations = (ELSEWHERE, ROWS, CHUNKS)

    def reference(self, x, factor=2.0):
        return x * factor


def gradient(kernel, x, **options):
    return jax.grad(lambda x: jnp.sum(kernel(x, **options)))(x)


def test_the_first_that_supports_the_call_serves_it():
    kernel = Scale()
    assert kernel.bind(X).handled_by == "rows"
    assert kernel.bind(X[:3]).handled_by == "chunks"
    np.testing.assert_allclose(kernel(X, factor=3.0), 3 * X)
    np.testing.assert_allclose(kernel(X[:3]), 2 * X[:3])
    assert gradient(kernel, X)[0] == 20
    assert gradient(kernel, X[:3])[0] == 2  # JAX differentiates its forward pass


def test_a_config_says_by_its_class_whose_it_is():
    kernel = Scale()
    assert gradient(kernel, X, cfg=Rows(4))[0] == 20
    assert gradient(kernel, X, cfg=Chunks(2))[0] == 2
    with overlay_cache({kernel.bind(X).key: Chunks(2)}):
        assert gradient(kernel, X)[0] == 20  # an overlay of the call without its gradient
        np.testing.assert_allclose(jax.jit(lambda x: kernel(x))(X), 2 * X)


def test_a_request_by_name():
    kernel = Scale()
    assert gradient(kernel, X, implementation="chunks")[0] == 2
    assert gradient(kernel, X, implementation="reference")[0] == 2
    with pytest.raises(NotSupported, match="the length is odd"):
        kernel(X[:3], implementation="rows")
    with pytest.raises(NotSupported, match="it runs on tpu devices, and this is a cpu"):
        kernel(X, implementation="pallas")
    with pytest.raises(ValueError, match="does not exist; it has pallas, rows, chunks, reference"):
        kernel(X, implementation="cuda")


def test_configs_that_fit_nobody_are_refused():
    kernel = Scale()
    with pytest.raises(TypeError, match="configs are Chunks or Rows objects"):
        kernel(X, cfg=7)
    with pytest.raises(TypeError, match="configs for chunks are Chunks objects"):
        kernel(X, implementation="chunks", cfg=Rows(2))
    with pytest.raises(ValueError, match="rows=65 must be a number from 1 to 64, for rows"):
        kernel(X, cfg=Rows(65))
    with pytest.raises(NotSupported, match="the length is odd"):
        kernel(X[:3], cfg=Rows(1))


def test_heuristics_and_candidates_are_of_who_serves():
    kernel = Scale()
    assert kernel.heuristic(kernel.bind(X)) == Rows(2)
    assert kernel.candidates(kernel.bind(X)) == [Rows(2), Rows(1)]
    assert kernel.heuristic(kernel.bind(X[:3])) == Chunks(1)
    assert autotune(kernel, X, num_warmup=1, num_iters=1) in (Rows(1), Rows(2))


def test_implementations_race():
    class Raced(Scale):
        tune_implementations = True
        implementations = (ROWS, CHUNKS)

    kernel = Raced()
    assert kernel.candidates(kernel.bind(X)) == [Rows(2), Rows(1), Chunks(1)]
    assert kernel.bind(X).handled_by is None  # any of them may win


def test_a_store_gives_back_the_class_that_was_stored(tmp_path):
    kernel = Scale()
    store = PersistentCache(tmp_path)
    for cfg, x in ((Chunks(2), X), (Rows(1), X[:2])):
        store.put(kernel.bind(x).key, cfg)
        chain = ConfigSelectorChain(ConfigCache(), persistent=PersistentCache(tmp_path))
        assert Executor(chain).choose_config(kernel, x) == cfg


def test_a_stored_class_that_the_kernel_does_not_have_is_not_used(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Other:
        rows: int = 1

    kernel, store = Scale(), PersistentCache(tmp_path)
    store.put(kernel.bind(X).key, Other())
    chain = ConfigSelectorChain(ConfigCache(), persistent=PersistentCache(tmp_path), autotune=False)
    decision = chain.decide(kernel.bind(X), kernel)
    assert decision.cfg == Rows(2)
    assert "has no configs of the class" in decision.explain()


class BySuffix(Kernel[Rows, jax.Array]):
    """The same as methods."""

    supports = {"cpu": ROWS.supports}  # noqa: RUF012
    limits = {"cpu": ROWS.limits}  # noqa: RUF012

    def run_cpu(self, x, *, cfg, factor=2.0):
        return by_rows(x, cfg=cfg, factor=factor)

    def heuristic_cfg_cpu(self, inv):
        return Rows(2)

    def candidate_cfgs_cpu(self, inv):
        return [Rows(1), Rows(2)]

    def custom_vjp_cpu(self, primals, cfg, kwargs, cotangents):
        return (cotangents[0] * 10 * kwargs.get("factor", 2.0),)


def test_suffix_methods_are_adapted_onto_the_same_thing():
    kernel = BySuffix()
    (adapted,) = kernel.implementations_here()
    assert (adapted.name, adapted.devices, adapted.config) == ("cpu", ("cpu",), Rows)
    assert adapted.unsupported(kernel.bind(X[:3])) == ["the length is odd"]
    assert not adapted.reads_out
    assert kernel.candidates(kernel.bind(X)) == [Rows(2), Rows(1)]
    assert gradient(kernel, X, factor=3.0)[0] == 30


def test_wrong_declarations_are_refused():
    with pytest.raises(TypeError, match="has backward without forward_with_residuals"):
        Implementation(name="a", config=Rows, forward=by_rows, backward=backward)
    with pytest.raises(TypeError, match="limits name chunks, which Rows does not have"):
        dataclasses.replace(ROWS, limits=Limits({"chunks": Limit(minimum=1)}))

    class Both(Scale):
        def run(self, x, *, cfg):
            return x

    with pytest.raises(TypeError, match="has implementations and also run"):
        Both()

    class Twice(Scale):
        implementations = (ROWS, dataclasses.replace(CHUNKS, name="rows"))

    with pytest.raises(TypeError, match="each needs a name of its own"):
        Twice()

    with pytest.raises(TypeError, match="implementations holds"):

        class Wrong(Scale):
            implementations = (by_rows,)


def test_a_changed_pass_makes_entries_stale_and_a_changed_space_does_not():
    class Space(Scale):
        implementations = (dataclasses.replace(ROWS, space=lambda inv: []), CHUNKS)

    class Same(Scale):
        implementations = (ROWS, CHUNKS)

    class Other(Scale):
        implementations = (dataclasses.replace(ROWS, forward=lambda x, *, cfg: x), CHUNKS)

    assert source_hash(Same) == source_hash(Space)
    assert source_hash(Same) != source_hash(Other)


@pytest.mark.parametrize("place", ["overlay", "store"])
def test_the_gradient_is_that_of_the_config_that_was_chosen(place, tmp_path, monkeypatch):
    class Reversed(Scale):
        implementations = (CHUNKS, ROWS)  # the first has no rule of its own

    kernel = Reversed()
    key = kernel.bind(X).differentiate().key
    assert gradient(kernel, X)[0] == 2
    if place == "overlay":
        with overlay_cache({key: Rows(4)}):
            assert gradient(kernel, X)[0] == 20
    else:
        store = PersistentCache(tmp_path)
        store.put(key, Rows(4))
        executor = Executor(ConfigSelectorChain(ConfigCache(), persistent=store, autotune=False))
        assert jax.grad(lambda x: executor(kernel, x).sum())(X)[0] == 20


def test_a_stored_config_of_another_implementation_than_the_requested_is_skipped():
    kernel = Scale()
    for name, wrong in (("rows", Chunks(2)), ("chunks", Rows(4))):
        inv = kernel.bind(X, implementation=name)
        with overlay_cache({inv.key: wrong}):
            np.testing.assert_allclose(kernel(X, implementation=name), 2 * X)
            decision = ConfigSelectorChain(ConfigCache(), autotune=False).decide(inv, kernel)
        assert decision.tier == "heuristics"
        assert f"is no config of {name}" in decision.explain()


def test_a_config_whose_implementation_does_not_support_the_call_says_so():
    with pytest.raises(NotSupported, match="implementation='rows' does not support") as error:
        Scale()(X[:3], cfg=Rows(1))
    assert "use 'chunks'" in str(error.value)

    @dataclasses.dataclass(frozen=True)
    class OnTpu:
        pass

    class Far(Scale):
        implementations = (dataclasses.replace(ELSEWHERE, config=OnTpu), CHUNKS)

    with pytest.raises(NotSupported, match="it runs on tpu devices, and this is a cpu"):
        Far()(X, cfg=OnTpu())


def test_what_is_fixed_in_a_partial_function_is_part_of_the_source():
    import functools

    def of(factor):
        class Fixed(Scale):
            forward = functools.partial(by_chunks, factor=factor)
            implementations = (dataclasses.replace(CHUNKS, forward=forward),)

        return source_hash(Fixed)

    assert of(2.0) == of(2.0) != of(3.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": ""}, "needs a name"),
        ({"config": None}, "needs the class of its configs"),
        ({"space": [Rows(1)]}, "space must be a function"),
        ({"heuristic": Rows(1)}, "heuristic must be a function"),
        ({"devices": "cpu"}, "devices must be a tuple"),
    ],
)
def test_incomplete_implementations_are_refused(change, words):
    with pytest.raises(TypeError, match=words):

        class Wrong(Scale):
            implementations = (dataclasses.replace(ROWS, **change),)


def test_implementations_that_race_must_be_told_apart():
    class Alike(Scale):
        tune_implementations = True
        implementations = (ROWS, dataclasses.replace(ROWS, name="again"))

    with pytest.raises(TypeError, match="field `implementation"):
        Alike()
    with pytest.raises(TypeError, match="must be a list"):

        class Single(Scale):
            implementations = ROWS


class MixedMethods(Kernel[Rows, jax.Array]):
    """Methods of one suffix stand in for those that another lacks, in the order of the device."""

    def run_cpu(self, x, *, cfg):
        return 2 * x

    def run_xla(self, x, *, cfg):
        return 2 * x

    def custom_vjp_xla(self, primals, cfg, kwargs, cotangents):
        return (20 * cotangents[0],)

    def config_space_xla(self, inv):
        return [Rows(1)]

    def config_space(self, inv):
        return [Rows(2)]


def test_methods_are_looked_up_in_the_order_of_the_device():
    kernel = MixedMethods()
    assert gradient(kernel, X)[0] == 20
    assert kernel.candidates(kernel.bind(X)) == [Rows(4), Rows(1)]


def test_a_config_class_that_extends_another_is_for_its_own_implementation():
    @dataclasses.dataclass(frozen=True)
    class MoreRows(Rows):
        pass

    class Extended(Scale):
        implementations = (ROWS, dataclasses.replace(CHUNKS, config=MoreRows, forward=by_rows))

    assert gradient(Extended(), X, cfg=MoreRows())[0] == 2
    assert gradient(Extended(), X, cfg=Rows())[0] == 20


def test_a_call_and_its_config_that_name_two_implementations():
    @dataclasses.dataclass(frozen=True)
    class Named:
        implementation: str | None = None

    class Two(Scale):
        implementations = tuple(
            Implementation(name=name, config=Named, forward=lambda x, *, cfg: x) for name in "ab"
        )

    with pytest.raises(ValueError, match="the call requests implementation='a'"):
        Two()(X, implementation="a", cfg=Named("b"))


@dataclasses.dataclass(frozen=True)
class SelfDescribed:
    rows: Annotated[int, Limit(multiple_of=2)] = 4
    space: int = 0  # a field of this name is no method

    @classmethod
    def heuristic(cls, inv: Any) -> SelfDescribed:
        return cls(rows=inv.args[0].shape[0])

    def unfit(self, inv: Any) -> str | None:
        rows = inv.args[0].shape[0]
        return None if rows % self.rows == 0 else f"rows={self.rows} must divide {rows}"


def test_a_config_class_says_its_own_heuristic_limits_and_what_does_not_fit():
    class Described(Kernel[Any, jax.Array]):
        implementations = (
            Implementation(
                name="xla",
                config=SelfDescribed,
                forward=lambda x, *, cfg: x * cfg.rows,
                limits=Limits({"space": Limit(minimum=0)}),
            ),
        )

    kernel = Described()
    x = jnp.ones(8)
    assert kernel.candidates(kernel.bind(x)) == [SelfDescribed(8)]
    for cfg, words in [
        (SelfDescribed(3), "rows=3 must be a multiple of 2"),
        (SelfDescribed(6), "rows=6 must divide 8"),
        (SelfDescribed(8, space=-1), "space=-1 must be a number of at least 0"),
    ]:
        with pytest.raises(ValueError, match=words):
            kernel(x, cfg=cfg)


@dataclasses.dataclass(frozen=True)
class Nested:
    inner: SelfDescribed = SelfDescribed()


def test_a_config_inside_a_config_declares_its_own_limits():
    item = Implementation(name="xla", config=Nested, forward=lambda x, *, cfg: x)
    assert item.limits.fields == {"inner.rows": Limit(multiple_of=2)}
    assert item.limits.reasons_against_any(Nested(SelfDescribed(3))) == [
        "inner.rows=3 must be a multiple of 2"
    ]
