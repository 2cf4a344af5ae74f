"""Real JAX processes on this machine, which would each choose another config, and agree."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap

import pytest
from jobs import ROOT, free_port, run_job

LIMIT = 8.0


@pytest.fixture(scope="module")
def agreeing(tmp_path_factory):
    """What the four processes of `agreeing.py` reported, each as a dict by scenario."""
    reports, codes, output = run_job("agreeing.py", tmp_path_factory.mktemp("agreeing"))
    assert codes == [0, 0, 0, 0], output
    assert [report["process_count"] for report in reports] == [4, 4, 4, 4]
    return reports


def told(reports, scenario, field=None):
    """What each process reported of a scenario."""
    found = [report[scenario] for report in reports]
    return found if field is None else [one[field] for one in found]


def all_equal(values):
    return all(value == values[0] for value in values)


def test_fifty_keys_one_answer_though_measurements_disagree(agreeing):
    chosen = told(agreeing, "measurements_disagree", "chosen")
    assert all_equal(chosen)
    assert len(chosen[0]) == 50
    alone = told(agreeing, "measurements_disagree", "alone")
    for key in chosen[0]:  # each would have chosen something else, and one of them did
        assert len({one[key] for one in alone}) == 4
        assert chosen[0][key] in {one[key] for one in alone}


def test_each_key_is_decided_once_and_the_work_is_spread(agreeing):
    tuned = told(agreeing, "measurements_disagree", "tuned")
    assert sum(tuned) == 50
    assert sum(count > 0 for count in tuned) >= 2
    for number, report in enumerate(agreeing):
        reasons = report["measurements_disagree"]["reasons"]
        agreed = [reason for reason in reasons.values() if reason]
        assert len(agreed) == 50 - tuned[number]
        assert all(reason.startswith("agreed: decided by process ") for reason in agreed)


def test_compiled_programs_are_identical(agreeing):
    lowered = told(agreeing, "programs_are_identical", "lowered")
    compiled = told(agreeing, "programs_are_identical", "compiled")
    assert "ejkernel_ops#programs@v1" in lowered[0]
    assert all_equal(lowered)
    assert all_equal(compiled)


def test_forward_and_training_are_agreed_on_apart(agreeing):
    found = told(agreeing, "forward_and_training_are_agreed_on_apart")
    for field in ("lowered", "chosen", "keys"):
        assert all_equal([one[field] for one in found]), field
    forward, training = found[0]["keys"]
    assert forward != training
    assert sorted(key for one in found for key in one["tuned"]) == sorted([forward, training])


def test_a_real_measurement_happens_once_and_is_read_by_all(agreeing):
    one = told(agreeing, "really_measured")
    assert [report["started"] for report in one] == [0, 0, 1, 0]
    assert [report["stored"] for report in one] == [0, 0, 1, 0]
    assert one[2]["measured"] >= 2
    assert all_equal([report["rows"] for report in one])
    assert [report["again"] for report in one] == [report["rows"] for report in one]
    assert [report["tier"] for report in one] == ["autotune"] * 4
    assert "agreed: decided by process 2: measured " in one[0]["explained"]
    assert "before   memory in process 2: not among its 0 configs" in one[0]["explained"]


def test_differing_stores_and_memories_give_one_answer(agreeing):
    chosen = told(agreeing, "stores_and_memories_differ", "chosen")
    assert all_equal(chosen)
    assert len(chosen[0]) == 8
    for report in agreeing:  # and no memory says anything else than what runs
        scenario = report["stores_and_memories_differ"]
        for runs, held in zip(scenario["chosen"], scenario["in_memory"], strict=True):
            assert held == runs or (held is None and runs == 1)


def test_the_answer_does_not_depend_on_the_model_of_a_device(agreeing):
    devices = told(agreeing, "devices_differ", "device")
    assert len(set(devices)) == 4
    assert all_equal(told(agreeing, "devices_differ", "rows"))


def test_only_some_processes_trace(agreeing):
    chosen = told(agreeing, "only_some_trace")
    assert (chosen[0], chosen[2]) == (None, None)
    assert chosen[1] == chosen[3]
    assert chosen[1] in (1, 2, 4, 8)


def test_threads_of_one_process_ask_together(agreeing):
    chosen = told(agreeing, "many_threads_ask_once", "chosen")
    assert [len(one) for one in chosen] == [4, 4, 4, 4]
    assert len({rows for one in chosen for rows in one}) == 1
    assert sum(told(agreeing, "many_threads_ask_once", "tuned")) == 1


def test_overrides_and_overlays_are_the_programs_own(agreeing):
    for found in told(agreeing, "the_program_itself_is_not_asked_about"):
        assert found == [2, "override", 4, "overlay", 2]


def test_what_was_agreed_holds_until_the_program_installs_something(agreeing):
    found = told(agreeing, "changes_of_the_program")
    assert all_equal([one["before"] for one in found])
    heuristic, tuned = found[0]["before"]
    assert heuristic == 1
    assert [one["held"] for one in found] == [[tuned] * n for n in (1, 2, 1, 2)]
    assert all_equal([one["installed"] for one in found])
    assert found[0]["installed"] in (16, 32)


def test_offline_tuning_gives_one_result(agreeing):
    configs = told(agreeing, "offline_tuning_agrees", "configs")
    assert len(configs[0]) == 2
    assert all_equal(configs)
    assert told(agreeing, "offline_tuning_agrees", "skipped") == [[], [], [], []]


def test_a_decider_that_raises_is_named_everywhere(agreeing):
    found = told(agreeing, "the_deciding_process_fails")
    assert found[1]["first"] == "ArithmeticError: the table is gone"
    for number, one in enumerate(found):
        for text in (one["again"],) if number == 1 else (one["first"], one["again"]):
            assert text.startswith(
                "AgreementError: process 1 failed to decide the config of spoilt"
            )
            assert "ArithmeticError: the table is gone" in text


def test_nothing_found_is_an_answer_too(agreeing):
    for one in told(agreeing, "nobody_has_a_config"):
        assert one["error"] == "ConfigMiss"
        assert "heuristics" in one["message"]
        assert "allow_heuristics=False" in one["message"]


def test_a_config_that_does_not_fit_is_refused(agreeing):
    found = told(agreeing, "code_differs")
    assert [one.get("chosen") for one in found[:3]] == [2, 2, 2]
    assert found[3]["error"] == "AgreementError"
    assert "OtherConfig has no field 'rows'" in found[3]["message"]


def test_kernels_in_kernels(agreeing):
    lowered = told(agreeing, "kernels_in_kernels", "lowered")
    assert "nested@v1" in lowered[0]
    assert all_equal(lowered)


def test_what_was_traced_while_tuning_is_not_served_afterwards(agreeing):
    found = told(agreeing, "what_tuning_traced_is_not_served")
    assert found[0]["measured_with"] == [1]  # process 0's own taste at this size
    assert [one["rows"] for one in found] == [8, 8, 8, 8]  # process 3's
    assert all_equal([one["lowered"] for one in found])


def test_tuned_inside_shard_map_over_all_processes(agreeing):
    totals = told(agreeing, "over_the_whole_mesh", "total")
    assert totals == pytest.approx([256 * 0.46211716] * 4, rel=1e-5)
    events = told(agreeing, "over_the_whole_mesh", "events")
    assert sorted(events) == [[], [], [], ["autotune_start", "autotune_finish"]]
    assert all_equal(told(agreeing, "over_the_whole_mesh", "lowered"))


def test_what_spans_processes_is_not_measured(agreeing):
    for one in told(agreeing, "what_spans_processes_is_not_measured"):
        assert one["tier"] == "heuristics"
        assert any("sharded over devices of several processes" in why for why in one["misses"])


# --- when it goes wrong --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    folder = tmp_path_factory.mktemp("failing")
    reports, codes, output = run_job("failing.py", folder, EJKERNEL_AGREEMENT_SECONDS=f"{LIMIT:g}")
    assert codes == [0, 0, -9, 0], output
    assert reports[2] is None, output
    return [reports[number] for number in (0, 1, 3)]


def waited(one):
    """How long a process waited, as its error says."""
    return float(re.search(r"process \d waited (\d+\.\d) s", one["message"])[1])


def test_different_settings_are_refused(failing):
    found = failing[2]["settings_differ"]
    assert found["error"] == "AgreementError"
    assert "EJKERNEL_OPS_STAMP is 'hash' in process" in found["message"]
    assert "'json' in process 3" in found["message"]
    assert all_equal(told(failing, "settings_no_longer_differ", "rows"))


def test_a_slow_decider_gives_a_clear_error_in_time(failing):
    waiting = [failing[0]["slow"], failing[2]["slow"]]
    for one in waiting:
        assert one["error"] == "AgreementTimeout"
        assert LIMIT <= waited(one) <= LIMIT + 1
        for part in ("slow@v1(float32[8])", "which process 1 is deciding", "is alive"):
            assert part in one["message"]
        assert "Set EJKERNEL_AGREEMENT_SECONDS (now 8) higher" in one["message"]
    assert "error" not in failing[1]["slow"]


def test_a_killed_decider_is_noticed_before_the_limit(failing):
    for number, one in zip((0, 1, 3), told(failing, "dying"), strict=True):
        assert one["error"] == "AgreementTimeout"
        assert f"process {number} waited" in one["message"]
        assert "dying@v1(float32[8]), key " in one["message"]
        assert "process 2 has given no heartbeat for" in one["message"]
        assert "EJKERNEL_AGREEMENT_SECONDS=8" in one["message"]
        assert LIMIT / 2 <= waited(one) < LIMIT


# --- one process ---------------------------------------------------------------------------------


def test_a_run_of_one_process_loads_nothing_of_it():
    code = """
        import sys
        import jax.numpy as jnp
        from ejkernel.modules import flash_attention

        q = jnp.ones((1, 8, 1, 4))
        flash_attention(q, q, q)
        print([name for name in sys.modules if name.startswith("ejkernel.fleet")])
    """
    assert _printed(code) == "[]\n"


def test_a_job_of_one_process_asks_nobody():
    code = f"""
        import jax, jax.numpy as jnp
        from ejkernel.fleet.agreement import job_agreement
        from ejkernel.modules import flash_attention

        jax.distributed.initialize("127.0.0.1:{free_port()}", 1, 0)
        q = jnp.ones((1, 8, 1, 4))
        flash_attention(q, q, q)
        print(job_agreement())
    """
    assert _printed(code) == "None\n"


def _printed(code):
    command = [sys.executable, "-c", textwrap.dedent(code)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout
