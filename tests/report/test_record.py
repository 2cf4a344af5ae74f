"""Runs are saved and loaded without loss; what is no run is refused with a sentence."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from sample_runs import empty_run, hostile_run, large_run, plain_run

from ejkernel.report import Candidate, Gain, NotARun, Operation, Run, render, write


@pytest.mark.parametrize("make", [plain_run, hostile_run, large_run, empty_run])
def test_a_run_comes_back_as_it_was(make, tmp_path):
    run = make()
    assert Run.load(run.save(tmp_path / "folder" / "run.json")) == run


def test_numbers_that_json_lacks_do_not_make_a_file_that_cannot_be_read():
    run = Run("t", "d", "c", seconds=float("nan"), operations=(_operation(seconds=float("inf")),))
    again = Run.loads(run.dumps())
    assert again.seconds is None
    assert again.operations[0].seconds is None


def _operation(**fields):
    return Operation("op@v1", "key", "sig", {"rows": 1}, **fields)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: "", "cut off"),
        (lambda text: text[: len(text) // 2], "cut off"),
        (lambda text: "[1, 2]", "no 'ejkernel_run'"),
        (lambda text: '{"ejkernel_result": 1}', "no 'ejkernel_run'"),
        (lambda text: '{"ejkernel_run": NaN}', "NaN"),
        (lambda text: "[" * 100_000, "cut off"),
        (lambda text: _changed(text, ejkernel_run=99), "newer ejkernel"),
        (lambda text: _changed(text, ejkernel_run="1"), "schema is '1'"),
        (lambda text: _changed(text, ejkernel_run=True), "schema is True"),
        (lambda text: _changed(text, device=7), "device must be a str, got 7"),
        (lambda text: _changed(text, operations="none"), "operations must be a list"),
        (lambda text: _changed(text, operations=[{}]), "operations[0].op_id is missing"),
        (lambda text: _changed(text, environment={"jax": 1}), "environment.jax must be a str"),
        (lambda text: _changed(text, model={"what": "x"}), "model.before is missing"),
        (lambda text: _changed(text, seconds=True), "seconds must be a float"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused_in_one_sentence(change, says, tmp_path):
    file = tmp_path / "run.json"
    file.write_text(change(plain_run().dumps()))
    with pytest.raises(NotARun, match=r"run\.json") as refused:
        Run.load(file)
    assert says in str(refused.value)
    assert len(str(refused.value)) < 400


def _changed(text, **fields):
    return json.dumps({**json.loads(text), **fields})


def test_a_file_that_is_missing_or_no_text_is_refused(tmp_path):
    with pytest.raises(NotARun, match="cannot be read"):
        Run.load(tmp_path / "nothing.json")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(NotARun, match="no text"):
        Run.load(tmp_path / "image.png")


def test_fields_that_a_later_version_adds_do_no_harm():
    run = plain_run()
    assert Run.loads(_changed(run.dumps(), colour="blue")) == run


def test_the_ending_of_the_path_decides_the_format(tmp_path):
    run = plain_run()
    assert write(run, tmp_path / "a.html").read_text().startswith("<!doctype html>")
    assert write(run, tmp_path / "a.md").read_text().startswith("# ")
    assert Run.load(write(run, tmp_path / "a.json")) == run
    assert write(run, tmp_path / "a").read_text().startswith("<!doctype html>")
    assert write(run, tmp_path / "a.txt", "md").read_text().startswith("# ")
    with pytest.raises(ValueError, match="one of html, md, json"):
        render(run, "pdf")


def test_a_record_is_shown_without_jax(tmp_path):
    file = plain_run().save(tmp_path / "run.json")
    code = (
        "import sys; from ejkernel.report import Run, render\n"
        f"run = Run.load({str(file)!r})\n"
        "for kind in ('html', 'md', 'json'): render(run, kind)\n"
        "assert not {'jax', 'numpy', 'sqlalchemy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_small_questions_about_an_operation():
    operation = _operation(
        heuristic={"rows": 1},
        candidates=(
            Candidate({"rows": 1}, "measured", 2.0),
            Candidate({"rows": 2}, "measured", 1.0),
            Candidate({"rows": 3}, "wrong"),
        ),
    )
    assert operation.heuristic_stays
    assert operation.name == "op"
    assert [c.config["rows"] for c in operation.with_verdict("measured")] == [2, 1]
    assert operation.of({"rows": 3}).verdict == "wrong"
    assert operation.of({"rows": 4}) is None
    assert Gain(1.1, 0.9, 1.2).is_real is False
