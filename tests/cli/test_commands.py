"""Tune, bench, report, check, labels, doctor: what each does when all is well."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import pytest
import small_model
from small_model import row_sum

from ejkernel.ops import PersistentCache, StrictMiss, policy_override, set_default_executor


@pytest.fixture
def tuned(ej):
    done = ej("tune", "small_model:tuned", "--effort", "quick", "--json")
    assert done.code == 0, done.err
    return done


def test_tune_keeps_the_config_and_writes_a_record(ej, tuned, cache):
    (operation,) = tuned.data["operations"]
    key = row_sum.bind(jnp.ones((32, 4))).key
    assert operation["call_key"] == key.call_key
    assert PersistentCache().entry(key)["config"] == operation["config"]
    assert operation["calls"] == 1
    assert operation["share"] == pytest.approx(operation["seconds"] / tuned.data["step_seconds"])
    assert re.search(r"\[1/1\] small_row_sum@v1: .* \(2 of 2 measured, .*\)", tuned.err)
    assert tuned.data["record"].startswith(str(cache / "runs"))
    again = ej("tune", "small_model:tuned", "--no-bench")
    assert again.code == 0
    assert "known already (persistent)" in again.err
    assert "1 of 1 operation stored in" in again.out


def test_what_was_tuned_serves_in_strict_mode(ej, cache, monkeypatch):
    monkeypatch.setenv("EJKERNEL_STRICT", "1")
    set_default_executor(None)
    x = jnp.ones((32, 4))
    try:
        with pytest.raises(StrictMiss, match="ejkernel tune MODULE:FUNCTION"):
            small_model.model(x)
        assert ej("tune", "small_model:tuned", "--effort", "quick", "--no-bench").code == 0
        set_default_executor(None)
        small_model.model(x)
    finally:
        set_default_executor(None)


def test_what_is_gained_over_plain_jax_is_stored_and_shown(ej, tuned):
    (operation,) = tuned.data["operations"]
    assert operation["plain"]["name"] == "reference"
    stored = PersistentCache().entry(row_sum.bind(jnp.ones((32, 4))).key)["about"]
    assert stored["plain"]["seconds"] == operation["plain"]["seconds"]
    shown = ej("configs", "show", "small_row_sum").out
    assert "plain JAX (reference): " in shown
    assert "default   " in shown
    assert "interval" in shown
    assert "over plain" in ej("configs", "list").out


def test_bench_against_plain_times_each_call(ej, tuned):
    before = PersistentCache().entry(row_sum.bind(jnp.ones((32, 4))).key)
    done = ej("bench", "small_model:tuned", "--against", "plain", "--rounds", "3")
    assert done.code == 0, done.err
    for name in ("plain JAX", "default", "tuned", "over plain", "over default"):
        assert name in done.out.splitlines()[0]
    (operation,) = ej(
        "bench", "small_model:tuned", "--against", "plain", "--rounds", "3", "--json"
    ).data["operations"]
    assert operation["plain"]["name"] == "reference"
    assert operation["seconds"] > 0
    assert PersistentCache().entry(row_sum.bind(jnp.ones((32, 4))).key) == before
    wrong = ej("bench", "small_model:tuned", "--against", "numpy")
    assert wrong.code == 2
    assert "'heuristic', 'plain'" in wrong.err


def test_report_of_the_newest_run_and_of_the_store(ej, tuned, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = ej("report")
    assert done.code == 0, done.err
    assert "<html" in (tmp_path / "ejkernel-report.html").read_text().lower()
    assert ej("report", "--format", "md").out.startswith("# ")
    assert json.loads(ej("report", "--json").out)["title"] == "small_model:tuned"
    assert ej("report", "-o", tmp_path / "x.md").code == 0
    assert (tmp_path / "x.md").read_text().startswith("# ")
    assert r"row\_sum" in ej("report", "--from-store", "--format", "md").out
    (listed,) = ej("report", "--list", "--json").data
    assert listed["title"] == "small_model:tuned"
    assert ej("report", listed["record"], "--format", "json").code == 0


def test_report_compares_two_runs(ej, tuned, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (listed,) = ej("report", "--list", "--json").data
    both = (listed["record"], listed["record"])
    done = ej("report", "--diff", *both)
    assert "ejkernel-diff.html" in done.out
    assert "as fast in B as in A" in done.out
    assert "<html" in (tmp_path / "ejkernel-diff.html").read_text().lower()
    assert ej("report", "--diff", *both, "--format", "md").out.startswith("# Two runs compared")
    assert len(ej("report", "--diff", *both, "--json").data["pairs"]) == 1
    assert ej("report", "--diff", *both, "-o", tmp_path / "x.md").code == 0
    assert "## Machines, versions and commits" in (tmp_path / "x.md").read_text()


def test_tune_writes_a_report_at_once_and_a_record_where_told(ej, tuned, tmp_path):
    page, record = tmp_path / "r.html", tmp_path / "record.json"
    done = ej("tune", "small_model:tuned", "--report", page, "--record", record, "--no-bench")
    assert done.code == 0
    assert page.exists()
    assert json.loads(record.read_text())["ejkernel_run"] == 1


def test_a_record_shows_no_password():
    from ejkernel.cli.records import _without_password

    url = "postgresql://me:hunter22@host/db"
    typed = ["tune", "a:b", "--store", url, f"--store={url}", "--effort=quick"]
    shown = _without_password(typed)
    assert "hunter22" not in " ".join(shown)
    assert shown[3] == "postgresql+psycopg://me:***@host/db"
    assert shown[4] == f"--store={shown[3]}"
    assert shown[5] == "--effort=quick"


def test_tune_a_program_of_another_run(ej, tmp_path):
    file = tmp_path / "program.mlir"
    file.write_text(small_model.lowered().as_text())
    listed = ej("labels", file, "--json").data["labels"]
    assert [label["op_id"] for label in listed] == ["small_row_sum@v1"]
    assert listed[0]["signature"] == "float32[32,4]"
    assert listed[0]["config"] is None
    done = ej("tune", "--hlo", file, "--effort", "quick")
    assert done.code == 0, done.err
    assert ej("labels", file, "--json").data["labels"][0]["config"] is not None
    assert "1 of them stored" in ej("labels", file).out


def test_labels_of_a_program_without_any(ej, tmp_path):
    file = tmp_path / "program.mlir"
    file.write_text(jax.jit(jnp.tanh).lower(jnp.ones(3)).as_text())
    done = ej("labels", file)
    assert done.code == 1
    assert done.out.startswith("0 operations")


@pytest.mark.parametrize("name", ["lowered", "with_keywords"])
def test_tune_what_a_function_may_return(ej, name):
    done = ej("tune", f"small_model:{name}", "--effort", "quick", "--no-bench", "--json")
    assert done.code == 0, done.err
    assert len(done.data["operations"]) == 1


def test_an_operation_that_cannot_be_tuned_is_said_and_counts(ej, tmp_path):
    text = small_model.lowered().as_text().replace("small_model:SmallRowSum", "small_model:NoSuch")
    file = tmp_path / "program.mlir"
    file.write_text(text.replace("small_row_sum@v1", "row_max@v1"))
    done = ej("tune", "--hlo", file)
    assert done.code == 1
    assert "not tuned: ejkernel_ops#row_max@v1" in done.out


def test_bench_compares_heuristic_and_stored_configs(ej, cache):
    done = ej("bench", "small_model:tuned")
    assert done.code == 1
    assert "run `ejkernel tune small_model:tuned` first" in done.err
    store = PersistentCache()
    store.put(row_sum.bind(jnp.ones((32, 4))).key, small_model.Config(16))
    data = ej("bench", "small_model:tuned", "--rounds", "3", "--json").data
    assert len(data["before"]) == len(data["after"]) == 3
    assert data["operations"][0]["config"] == {"rows": 16}
    assert data["difference"] < 1e-5
    assert "speedup" in ej("bench", "small_model:tuned", "--rounds", "3").out
    assert len(store) == 1  # nothing was tuned


def test_check_lowers_without_compilers_and_says_what_is_missing(ej):
    done = ej("check", "small_model:tuned", "-t", "tpu-v5e", "-t", "cpu", "--lower-only")
    assert done.code == 0, done.err
    assert "2 of 2 compile" in done.out
    checks = ej("check", "small_model:tuned", "-t", "tpu-v5e", "--lower-only", "--json").data
    assert [c["compiles"] for c in checks["checks"][0]["configs"]] == [True, True]
    listed = ej("check", "--json").data
    assert listed[-1]["target"] == "cpu"
    lacking = [entry for entry in listed if not entry["usable"]]
    if lacking:
        done = ej("check", "small_model:tuned", "-t", lacking[0]["target"])
        assert done.code == 5
        assert "pip install '.[" in done.err


def test_doctor_says_what_is_there(ej, cache):
    done = ej("doctor")
    assert done.code == 0, done.out
    assert "fingerprint" in done.out
    assert "nothing was tuned yet" in done.out
    assert not cache.exists()
    areas = {finding["area"] for finding in ej("doctor", "--json").data["findings"]}
    assert {"versions", "device", "store", "extras", "targets"} <= areas


def test_doctor_warns_of_crashed_candidates(ej, cache):
    (cache / "journal" / "crashed").mkdir(parents=True)
    (cache / "journal" / "crashed" / "x.json").write_text("{}")
    done = ej("doctor")
    assert done.code == 0
    assert "1 warning" in done.out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(ej, shell):
    done = ej("completion", shell)
    assert done.code == 0
    assert "_EJKERNEL_COMPLETE" in done.out


def test_every_command_has_help_json_and_debug(ej):
    import click

    from ejkernel.cli.app import app

    def walk(command, path):
        if isinstance(command, click.Group):
            for name, inner in command.commands.items():
                yield from walk(inner, (*path, name))
        else:
            yield path

    paths = list(walk(app, ()))
    assert len(paths) >= 18
    for path in paths:
        text = ej(*path, "--help").out
        assert "--json" in text
        assert "--debug" in text


def test_a_budget_cuts_short_and_the_next_run_goes_on(ej):
    first = ej("tune", "small_model:tuned", "--evaluations", "1", "--no-bench")
    assert first.code == 0, first.err
    assert "interrupted by a limit" in first.out
    second = ej("tune", "small_model:tuned", "--no-bench", "--json")
    assert second.data["operations"][0]["incomplete"] == ""


def test_policy_blocks_of_the_caller_do_not_matter(ej):
    with policy_override(strict=True):
        done = ej("tune", "small_model:tuned", "--effort", "quick", "--no-bench")
    assert done.code == 0, done.err


def test_native_kernels_are_told_about(ej, monkeypatch):
    monkeypatch.setenv("EJKERNEL_NATIVE", "off")
    done = ej("native", "status")
    assert done.code == 1
    assert "turned off" in done.out
    assert ej("native", "status", "--json").data["available"] is False
    findings = ej("doctor", "--json").data["findings"]
    assert any(finding["area"] == "native" for finding in findings)


def test_native_kernels_without_a_compiler(ej, monkeypatch):
    monkeypatch.setattr(
        "ejkernel.native.building.find_compiler", lambda: "there is no C++ compiler"
    )
    done = ej("native", "build")
    assert done.code == 5
    assert "there is no C++ compiler" in done.err


def test_a_training_program_and_a_forward_program_are_measured_apart(ej, cache):
    call = row_sum.bind(jax.ShapeDtypeStruct((32, 4), jnp.float32))

    def known_before(*arguments):
        done = ej("tune", *arguments, "--effort", "quick", "--no-bench")
        assert done.code == 0, done.err
        return "known already" in done.err

    def measured(inv):
        entry = PersistentCache().entry(inv.key)
        return entry and entry["about"]["measured"]

    assert not known_before("small_model:training")
    assert measured(call) is None
    assert measured(call.differentiate()) == "forward and backward"
    assert not known_before("small_model:tuned")
    assert measured(call) == "forward"
    assert known_before("small_model:training")
    assert known_before("small_model:tuned")
    assert known_before("small_model:tuned", "--backward")  # the training program's question


def test_force_measures_again_and_what_is_known_says_so(ej, tuned):
    again = ej("tune", "small_model:tuned", "--no-bench")
    assert "known already, not measured: all of 1 operation; to measure again: --force" in again.out
    forced = ej("tune", "small_model:tuned", "--no-bench", "--force", "--effort", "quick")
    assert forced.code == 0, forced.err
    assert "known already" not in forced.out + forced.err
    assert "(2 of 2 measured, " in forced.err


def test_against_plain_jax(ej):
    arguments = ("tune", "small_model:ones", "--effort", "quick", "--against")
    data = ej(*arguments, "small_model:in_plain_jax", "--json").data
    assert data["plain"]["baseline"] == "plain JAX"
    assert "plain JAX" in data["verdict"]
    other = ej(*arguments, "small_model:something_else")
    assert other.code == 0
    assert "not compared with plain JAX" in other.out


def test_a_model_that_prints_and_a_model_that_fails_while_it_runs(ej):
    done = ej("tune", "small_model:fails_when_run", "--effort", "quick", "--json")
    assert done.code == 0, done.err
    assert "not compared before and after" in done.data["notes"][0]


def test_backward_alone_is_stored_where_training_finds_it(ej, cache):
    done = ej("tune", "small_model:tuned", "--effort", "quick", "--no-bench", "--backward")
    assert done.code == 0, done.err
    call = row_sum.bind(jax.ShapeDtypeStruct((32, 4), jnp.float32)).differentiate()
    assert PersistentCache().entry(call.key) is not None
