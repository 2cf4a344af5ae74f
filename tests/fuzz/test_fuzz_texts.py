"""Bundles, records, results, programs and configs that anybody may have written: each is read, or
refused in one sentence; what was read can be used."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import pytest
from fuzzing import (
    KERNEL,
    TEXTS,
    Blocks,
    Part,
    as_text,
    at_length,
    changed,
    damaged,
    documents,
    places,
    quickly,
)
from hypothesis import strategies as st

from ejkernel.cli.programs import not_whole
from ejkernel.ops import (
    AutotuningResult,
    ConfigCache,
    ConfigSelectorChain,
    Entry,
    Tuner,
    autotune_lowered,
    clear_invocations,
    extract_labels_from_hlo_text,
    from_json,
    to_json,
    verify_bundle,
)
from ejkernel.ops.config.tiers.stored import reload_bundles
from ejkernel.ops.core.requirements import reasons_against_config
from ejkernel.ops.core.specification import (
    SpecificationError,
    describe_specification,
    read_specification,
)
from ejkernel.ops.utils.meta import find_stamps_in_text, parse_label
from ejkernel.report import Diff, NotARun, Run, render
from ejkernel.store import Bundle
from ejkernel.store.bundle import BundleError

X = jnp.arange(4.0)
INV = KERNEL.bind(X)
CONFIG = {"rows": 4, "scale": 1.0, "part": {"size": 8, "name": None}, "sizes": [1, 2]}
ABOUT = {
    "signature": "float32[4]",
    "when": "2026-01-01T00:00:00+00:00",
    "where": "tower",
    "seconds": 1e-3,
    "heuristic_seconds": 2e-3,
    "versions": {"jax": "0.10.2"},
    "notes": ["a note"],
    "call": {"args": [["float32[4]"]], "kwargs": {}, "structure": ["*"]},
}


def check_refusal(error):
    """A refusal is a sentence or two, not a copy of what was refused, and a terminal shows it."""
    text = str(error)
    if not 0 < len(text) < 3000 or not text.replace("\n", " ").isprintable():
        raise AssertionError(f"a text of {len(text)} characters: {text[:300]!r}") from error


def decided(selector):
    """Selection answers with a config that fits, whatever was stored."""
    decision = selector.decide(INV, KERNEL)
    assert type(decision.cfg) is Blocks
    assert not reasons_against_config(KERNEL, decision.cfg, INV)
    assert decision.explain()
    return decision


# --- bundles --------------------------------------------------------------------------------------

BUNDLE = {
    "format": "ejkernel-configs",
    "version": 1,
    "entries": [
        {"key": list(INV.key), "config": CONFIG, "config_type": "fuzzing:Blocks", "about": ABOUT},
        {"key": ["tpu|x", "other@v1", "0" * 16], "config": 7, "config_type": "x", "about": {}},
    ],
}
BUNDLES = documents(BUNDLE)


def bundles(text):
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        file = pathlib.Path(folder) / "bundle.json"
        file.write_bytes(data)
        try:
            bundle = Bundle.load(file)
        except BundleError as error:
            check_refusal(error)
        else:
            assert Bundle.loads(bundle.dumps()) == bundle
            for problem in verify_bundle(bundle):
                assert str(problem).isprintable()
            bundle.merge(bundle)
        patch.setenv("EJKERNEL_CONFIG_PATH", os.fspath(file))
        reload_bundles()
        decided(ConfigSelectorChain(ConfigCache(), autotune=False))
        reload_bundles()


test_bundles = quickly(BUNDLES)(bundles)
test_bundles_at_length = at_length(BUNDLES)(bundles)


def test_the_bundle_that_is_changed_is_a_good_one():
    assert len(Bundle.loads(as_text(BUNDLE))) == 2


# --- records --------------------------------------------------------------------------------------

OPERATION = {
    "op_id": "matmul@v1",
    "call_key": "0" * 16,
    "signature": "float32[8,8]",
    "config": {"rows": 8, "part": {"size": 4}},
    "heuristic": {"rows": 4},
    "seconds": 1e-3,
    "heuristic_seconds": 2e-3,
    "gain": {"times": 2.0, "low": 1.9, "high": 2.1},
    "lead": {"times": 1.2, "low": 0.9, "high": 1.3},
    "candidates": [
        {"config": {"rows": 8}, "verdict": "measured", "seconds": 1e-3, "samples": [1e-3, 2e-3]},
        {"config": {"rows": 4}, "verdict": "measured", "seconds": 2e-3, "samples": [2e-3]},
        {"config": {"rows": 2}, "verdict": "failed", "reason": "too large", "order": 1},
        *(
            {
                "config": {"rows": rows, "part": part},
                "verdict": "measured",
                "seconds": 1e-3 * rows,
                "samples": [1e-3 * rows] * 3,
                "order": 2 + rows + 10 * part,
            }
            for rows in (1, 2, 3, 4)
            for part in (1, 2)
        ),
    ],
    "work": {"flops": 1e9, "bytes": 1e6, "dtype": "float32"},
    "notes": ["a note"],
    "versions": {"jax": "0.10.2"},
}
RECORD = {
    "ejkernel_run": 1,
    "title": "a run",
    "device": "cpu|x",
    "created": "2026-01-01T00:00:00+00:00",
    "seconds": 3.0,
    "operations": [OPERATION],
    "not_tuned": [{"label": "ejkernel_ops#a@v1:" + "0" * 16, "reason": "gone"}],
    "model": {
        "what": "the model",
        "before": [2.0, 2.1],
        "after": [1.0, 1.1],
        "gain": {"times": 2.0, "low": 1.9, "high": 2.1},
        "difference": 1e-7,
    },
    "environment": {"jax": "0.10.2"},
    "roofline": {"device": "cpu|x", "flops": {"float32": 1e11}, "bytes": 1e10, "when": "2026"},
}
RECORDS = documents(RECORD)
GOOD = Run.loads(as_text(RECORD))


def records(text):
    try:
        run = Run.loads(text)
    except NotARun as error:
        check_refusal(error)
        return
    assert Run.loads(run.dumps()) == run
    for form, shown in itertools.product(("html", "md", "json"), (run, Diff.of(run, GOOD))):
        page = render(shown, form)
        assert not [c for c in page if not c.isprintable() and c not in "\n\t"]


test_records = quickly(RECORDS)(records)
test_records_at_length = at_length(RECORDS)(records)


def test_the_record_that_is_changed_is_a_good_one():
    run = Run.loads(as_text(RECORD))
    assert run.operations[0].candidates
    assert run.model is not None


# --- results of tuning ----------------------------------------------------------------------------

RESULT = {
    "ejkernel_result": 1,
    "device": "cpu|x",
    "entries": [
        {
            "op_id": "fuzzed@v1",
            "call_key": INV.call_key,
            "signature": "float32[4]",
            "seconds": 1e-3,
            "heuristic_seconds": 2e-3,
            "config": CONFIG,
            "config_type": "fuzzing:Blocks",
        }
    ],
}
RESULTS = documents(RESULT).filter(lambda text: isinstance(text, str))


def results(text):
    try:
        result = AutotuningResult.loads(text)
    except ValueError as error:
        check_refusal(error)
        return
    assert str(result).replace("\n", "").isprintable()
    assert AutotuningResult.loads(result.dumps()) == result
    assert all(isinstance(entry, Entry) for entry in result)


test_results = quickly(RESULTS)(results)
test_results_at_length = at_length(RESULTS)(results)


# --- programs -------------------------------------------------------------------------------------

PROGRAM = jax.jit(lambda x: KERNEL(x) + 1).lower(X).as_text()
((LABEL, SPEC),) = find_stamps_in_text(PROGRAM)


@st.composite
def specifications(draw):
    """A specification of anything, in single quotes, as programs have it."""
    plain = draw(
        changed(
            {
                "op": "fuzzed@v1",
                "kernel": "fuzzing:Fuzzed",
                "args": [{"$array": "float32[4]"}, {"$tuple": [1, {"$list": [None]}]}],
                "kwargs": {"mode": {"$dict": {"a": 1}}, "dtype": {"$dtype": "float32"}},
                "batch": {"transform": "vmap", "in_axes": {"$tuple": [0, None]}, "size": 4},
            }
        )
    )
    text = as_text(plain).replace("'", "\\u0027").replace('"', "'")
    return PROGRAM.replace(SPEC, text.replace("\\", "\\\\"))


PROGRAMS = damaged(PROGRAM) | specifications() | damaged(f'ejkernel = "{LABEL} {SPEC}"') | TEXTS


class First(Tuner):
    """Measures nothing."""

    def autotune(self, make_fn, args, kwargs, candidates):
        return candidates[0]


def programs(text):
    not_whole(text)
    labels = extract_labels_from_hlo_text(text)
    stamps = find_stamps_in_text(text)
    assert [found for found, _ in stamps][: len(labels)] == labels
    for found, spec in stamps:
        parse_label(found)
        if spec is not None:
            assert describe_specification(spec).keys() <= {"kernel", "signature"}
            try:
                read_specification(spec)
            except SpecificationError as error:
                check_refusal(error)
    clear_invocations()
    result = autotune_lowered(ConfigSelectorChain(ConfigCache(), tuner=First()), text)
    assert len(result) + len(result.skipped) == len(stamps)
    for skipped in result.skipped:
        assert skipped.reason.replace("\n", " ").isprintable()


test_programs = quickly(PROGRAMS)(programs)
test_programs_at_length = at_length(PROGRAMS, share=0.5)(programs)


def test_the_program_that_is_damaged_is_a_good_one():
    assert not_whole(PROGRAM) == ""
    result = autotune_lowered(ConfigSelectorChain(ConfigCache(), tuner=First()), PROGRAM)
    assert [entry.call_key for entry in result] == [INV.call_key]


# --- configs --------------------------------------------------------------------------------------

CONFIGS = documents(CONFIG)
FITTING = st.builds(
    Blocks,
    rows=st.integers(),
    scale=st.floats(allow_nan=False),
    part=st.builds(Part, size=st.integers(), name=st.none() | TEXTS),
    sizes=st.lists(st.integers(), max_size=4).map(tuple),
    implementation=st.none() | TEXTS,
)


def configs(text):
    for kind in (Blocks, Part):
        try:
            config = from_json(text, kind)
        except (ValueError, TypeError) as error:
            check_refusal(error)
        else:
            assert type(config) is kind
            assert from_json(to_json(config), kind) == config or config != config  # a NaN in it
    with contextlib.suppress(ValueError, TypeError):
        from_json(text)


def fitting_configs(config):
    assert from_json(to_json(config), Blocks) == config


test_configs = quickly(CONFIGS)(configs)
test_configs_at_length = at_length(CONFIGS)(configs)
test_fitting_configs = quickly(FITTING)(fitting_configs)
test_fitting_configs_at_length = at_length(FITTING)(fitting_configs)


# --- every place, one after the other -------------------------------------------------------------

HOSTILE = "\x1b]0;x\x07\x1b[2J\u202e\0\r\x9b"
DOCUMENTS = {
    "bundle": (BUNDLE, bundles),
    "record": (RECORD, records),
    "result": (RESULT, results),
    "config": (CONFIG, configs),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_hostile_name_in_every_place_is_shown_and_not_obeyed(name):
    document, target = DOCUMENTS[name]
    for number in range(len(places(document))):
        for change in ("value", "name", "list"):
            plain = copy.deepcopy(document)
            holder, place = places(plain)[number]
            if change == "value":
                holder[place] = HOSTILE
            elif change == "list":
                holder[place] = [HOSTILE, {HOSTILE: HOSTILE}]
            elif isinstance(holder, dict):
                holder[HOSTILE] = holder.pop(place)
            target(as_text(plain))
    target(as_text(everywhere(document)))


def everywhere(plain):
    """A document all of whose texts are hostile, but for what says that it is such a document."""
    if isinstance(plain, dict):
        return {
            name: value if name == "format" else everywhere(value) for name, value in plain.items()
        }
    if isinstance(plain, list):
        return [everywhere(value) for value in plain]
    return HOSTILE if isinstance(plain, str) else plain
