"""Whatever is given: one readable message, a code that is not zero, and no traceback."""

from __future__ import annotations

import json
import sqlite3
import sys

import pytest
import small_model

from ejkernel.cli import app, run
from ejkernel.cli.programs import not_whole

WHOLE = "module @jit_f {\n  func.func public @main() {\n    return\n  }\n}\n"


def refused(done, code):
    assert done.code == code, (done.code, done.err)
    assert "Traceback" not in done.err
    assert sum(line.startswith("error: ") for line in done.err.splitlines()) == 1
    return done.err


@pytest.mark.parametrize(
    "line",
    [
        ("no-such-command", "--json"),
        ("configs", "no-such-command", "--json"),
        ("tune", "--json", "--no-such-option"),
        ("report", "--diff", "--json"),
    ],
)
def test_a_line_that_cannot_be_parsed_is_answered_in_json_too(ej, line):
    done = ej(*line)
    refused(done, 2)
    answer = json.loads(done.out)
    assert answer["exit_code"] == 2
    assert answer["error"].splitlines()[0] in done.err


# --- module:function -----------------------------------------------------------------------------


@pytest.mark.parametrize("command", [("tune",), ("bench",), ("configs", "explain")])
def test_a_module_that_is_not_there(ej, command):
    text = refused(ej(*command, "no_such_module:f"), 3)
    assert "there is no module 'no_such_module'" in text


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("small_model:tunde", "did you mean tuned?"),
        ("small_model:not_callable", "is no function but 3 (int)"),
        ("small_model:returns_none", "returned None; it has to return the function to tune"),
        ("small_model:returns_an_array", "returned an array (float32[32, 4]) as the arguments"),
        ("small_model:returns_no_function", "returned 'model' (str) first, which is no function"),
        ("small_model:raises", "raised ValueError: the checkpoint is missing ("),
        ("small_model:needs_arguments", "needs arguments (size)"),
        ("small_model:cannot_be_traced", "lowering its function with its example arguments raised"),
        ("small_model:nothing_of_ours", "there is no operation of ejkernel in the program"),
        ("no/such/file.py:f", "there is no file 'no/such/file.py'"),
    ],
)
def test_a_function_that_is_of_no_use(ej, cache, name, says):
    assert says in refused(ej("tune", name), 3)
    assert not cache.exists()  # nothing was made for it


def test_a_name_without_a_function(ej):
    assert "write module:function" in refused(ej("tune", "small_model"), 2)
    assert "either MODULE:FUNCTION or --hlo" in refused(ej("tune"), 2)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import no_such_package\n", "raised ModuleNotFoundError"),
        ("def f(:\n", "raised SyntaxError"),
        ("raise SystemExit(7)\n", 'put what a script does under `if __name__ == "__main__":`'),
        ("1 / 0\n", "raised ZeroDivisionError: division by zero ("),
    ],
)
def test_a_file_that_cannot_be_imported(ej, tmp_path, monkeypatch, text, says):
    name = f"broken_{abs(hash(text)) % 10**8}"
    (tmp_path / f"{name}.py").write_text(text)
    assert says in refused(ej("tune", f"{tmp_path / name}.py:f"), 3)
    monkeypatch.chdir(tmp_path)
    assert "raised" in refused(ej("tune", f"{name}:f"), 3) or "SystemExit" in text


def test_the_traceback_is_there_when_asked_for(ej):
    done = ej("tune", "small_model:raises", "--debug")
    assert done.code == 3
    assert "Traceback" in done.err
    assert 'raise ValueError("the checkpoint is missing")' in done.err


def test_an_error_is_json_too_when_asked_for(ej):
    done = ej("tune", "small_model:raises", "--json")
    assert done.data["exit_code"] == 3
    assert "the checkpoint is missing" in done.data["error"]


# --- programs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [("tune", "--hlo"), ("labels",)])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (WHOLE[:40].encode(), "was it cut off?"),
        (b'module @m { "abc', "in the middle of a string"),
        (b"", "it is empty"),
        (b"\x00\xff\xfe", "is no text"),
        (b"just some words", "neither a `module`"),
        (b"HloModule jit_f, entry={}\n\n%add { }\n", "no ENTRY computation"),
        (b"HloModule jit_f\n", "after its first line"),
    ],
)
def test_a_program_that_is_not_whole(ej, tmp_path, command, content, says):
    file = tmp_path / "program.txt"
    file.write_bytes(content)
    assert says in refused(ej(*command, file), 3)


def test_every_cut_of_a_real_program_is_noticed():
    text = small_model.lowered().as_text().rstrip()
    assert not_whole(text) == ""
    for end in range(1, len(text), max(1, len(text) // 200)):
        assert not_whole(text[:end]), text[:end][-80:]


def test_a_program_that_is_not_there(ej, tmp_path):
    assert "cannot be read" in refused(ej("labels", tmp_path / "none"), 3)
    assert "cannot be read" in refused(ej("labels", tmp_path), 3)


# --- stores --------------------------------------------------------------------------------------


def test_a_store_that_is_not_there(ej, tmp_path):
    for command in (("configs", "list"), ("bench", "small_model:tuned")):
        text = refused(ej(*command, "--store", tmp_path / "nowhere"), 4)
        assert "there is no store" in text
    assert not (tmp_path / "nowhere").exists()


def test_an_unreachable_database(ej):
    url = "postgresql+psycopg://tuner:hunter22@127.0.0.1:9/configs?connect_timeout=2"
    for command in (("configs", "list"), ("tune", "small_model:tuned")):
        text = refused(ej(*command, "--store", url), 4)
        assert "hunter22" not in text
        assert "127.0.0.1" in text
    done = ej("doctor", "--store", url, "--json")
    assert done.code == 1
    (finding,) = [f for f in done.data["findings"] if f["area"] == "store"]
    assert finding["status"] == "error"
    assert "hunter22" not in done.out


def test_a_url_that_nobody_understands(ej):
    assert "is not supported" in refused(ej("configs", "list", "--store", "mysql://x/y"), 2)


def test_a_locked_store(ej, store, monkeypatch, tmp_path):
    bundle = tmp_path / "b.json"
    assert ej("configs", "export", bundle).code == 0
    monkeypatch.setattr("ejkernel.store.sqlite_file.PATIENCE", 0.2)
    file = store.path / "configs.sqlite3"
    store.close()
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        assert "locked" in refused(ej("configs", "import", bundle), 4)
        assert "locked" in refused(ej("tune", "small_model:tuned"), 4)
        assert "locked" in refused(ej("configs", "prune", "--all", "--yes"), 4)
        assert ej("configs", "list").code == 0  # reading waits for nobody
    finally:
        other.execute("ROLLBACK")
        other.close()


def test_a_store_that_is_no_store_is_said_by_the_doctor(ej, store):
    file = store.path / "configs.sqlite3"
    store.close()
    for companion in store.path.glob("configs.sqlite3-*"):
        companion.unlink()
    file.write_bytes(b"this is no database " * 100)
    done = ej("doctor", "--json")
    assert done.code == 1
    (finding,) = [f for f in done.data["findings"] if f["area"] == "store"]
    assert finding["status"] == "error"
    assert file.exists()  # looking changes nothing


def test_a_bundle_that_is_none(ej, tmp_path):
    file = tmp_path / "b.json"
    assert "there is no bundle" in refused(ej("configs", "list", "--store", file), 3)
    file.write_text('{"format": "ejkernel-configs", "version": 1, "entri')
    assert "is not JSON" in refused(ej("configs", "import", file), 3)
    file.write_text("{}")
    assert "is no bundle of configs" in refused(ej("configs", "diff", file, file), 3)
    assert "ends with .json" in refused(ej("configs", "export", tmp_path / "b.txt"), 2)
    file.write_text('{"format": "ejkernel-configs", "version": 1, "entries": []}')
    done = ej("tune", "small_model:tuned", "--store", file)
    assert "a bundle is a file to look at" in refused(done, 2)


# --- the rest ------------------------------------------------------------------------------------


def test_targets(ej):
    text = refused(ej("check", "small_model:tuned", "--target", "tpu-v99"), 2)
    assert "target 'tpu-v99' is not known: did you mean tpu-v" in text
    assert "Known are tpu-v4" in text
    assert "say for which device" in refused(ej("check", "small_model:tuned"), 2)


def test_numbers_and_choices(ej):
    assert "must be more than 0" in refused(ej("tune", "small_model:tuned", "--seconds", "0"), 2)
    assert "--effort" in refused(ej("tune", "small_model:tuned", "--effort", "much"), 2)
    assert "--rounds" in refused(ej("bench", "small_model:tuned", "--rounds", "0"), 2)
    assert "No such command" in refused(ej("tuna"), 2)
    assert "No such option" in refused(ej("doctor", "--fix"), 2)


def test_a_cluster_that_does_not_answer(ej):
    pytest.importorskip("ray")
    done = ej("tune", "small_model:tuned", "--ray-address", "127.0.0.1:9")
    assert "no cluster answers there" in refused(done, 3)


def test_an_environment_variable_that_is_not_understood(ej, monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", "perhaps")
    assert "EJKERNEL_OPS_STAMP='perhaps'" in refused(ej("tune", "small_model:tuned"), 2)
    done = ej("doctor", "--json")
    assert done.code == 1
    assert any(
        f["name"] == "EJKERNEL_OPS_STAMP" and f["status"] == "error" for f in done.data["findings"]
    )


@pytest.mark.parametrize(
    ("name", "value"), [("EJKERNEL_OPS_PREFIX", "team"), ("EJKERNEL_AGREEMENT_SECONDS", "soon")]
)
def test_the_doctor_reads_a_setting_as_whoever_needs_it(ej, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    (found,) = (f for f in ej("doctor", "--json").data["findings"] if f["name"] == name)
    assert found["status"] == "error"
    assert repr(value) in str(found)


def test_records_that_are_none(ej, tmp_path):
    assert "there is no record of a run" in refused(ej("report"), 3)
    assert "cannot be read" in refused(ej("report", tmp_path / "none.json"), 3)
    (tmp_path / "x.json").write_text("{}")
    assert "is not the record of a tuning run" in refused(ej("report", tmp_path / "x.json"), 3)
    two = (tmp_path / "x.json", tmp_path / "none.json")
    assert "is not the record of a tuning run" in refused(ej("report", "--diff", *two), 3)
    assert "cannot be read" in refused(ej("report", "--diff", *two[::-1]), 3)
    assert "requires 2 arguments" in refused(ej("report", "--diff", "only-one.json"), 2)
    assert "no other RECORD" in refused(ej("report", "x.json", "--diff", *two), 2)
    assert "no store" in refused(ej("report", "--from-store", "--diff", *two), 2)


def test_a_bug_of_ours_is_said_to_be_one(ej, monkeypatch, capsys):
    def broken(*_, **__):
        raise ArithmeticError("impossible")

    monkeypatch.setattr(sys.modules["ejkernel.cli.configs.show"], "open_place", broken)
    text = refused(ej("configs", "list"), 70)
    assert "ArithmeticError: impossible" in text
    assert "--debug" in text


def test_interrupted_anywhere(ej, monkeypatch):
    def broken(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["ejkernel.cli.configs.show"], "open_place", broken)
    done = ej("configs", "list")
    assert (done.code, done.err.strip()) == (130, "ejkernel: interrupted")


def test_the_log_is_given_back_after_a_command(ej):
    import logging

    logger = logging.getLogger("ejkernel")
    before = (logger.level, logger.propagate, list(logger.handlers))
    assert run(["--version"]) == 0
    assert (logger.level, logger.propagate, list(logger.handlers)) == before
    assert app.NAME == "ejkernel"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("small_model:tuned", "--against", "small_model:nowhere"), 3, "has no 'nowhere'"),
        (("small_model:tuned", "--against", "small_model:lowered"), 3, "--against cannot run"),
        (("small_model:lowered", "--against", "small_model:tuned"), 3, "--against cannot run"),
        (("small_model:tuned", "--no-bench", "--against", "small_model:tuned"), 2, "--no-bench"),
        (("--hlo", "program.txt", "--against", "small_model:tuned"), 2, "--hlo runs none"),
    ],
)
def test_nothing_to_compare_against(ej, arguments, code, says):
    assert says in refused(ej("tune", *arguments), code)
