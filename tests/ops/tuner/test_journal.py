"""The journal of what was running: real processes that really die."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from ejkernel.ops.tuner import session
from ejkernel.ops.tuner.isolation import journal as journal_module
from ejkernel.ops.tuner.isolation.journal import Journal, Note, default_folder

ROOT = pathlib.Path(journal_module.__file__).parents[4]
RUNNING = """
import sys, time
from ejkernel.ops.tuner.isolation.journal import Journal
with Journal(sys.argv[1]).about_to_run("matmul(8,8)", '{"block": 3}'):
    print("running", flush=True)
    time.sleep(600)
"""


def start(folder):
    process = subprocess.Popen(
        [sys.executable, "-c", RUNNING, str(folder)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout.readline() == b"running\n"
    return process


def end(process, how=signal.SIGKILL):
    process.send_signal(how)
    process.wait()
    process.stdout.close()


def notes(folder):
    return list((folder / "running").iterdir())


def test_a_killed_process_leaves_a_culprit_and_a_living_one_does_not(tmp_path):
    dying, living = start(tmp_path), start(tmp_path)
    journal = Journal(tmp_path)
    assert journal.culprits() == []
    assert len(notes(tmp_path)) == 2
    os.kill(dying.pid, signal.SIGKILL)
    os.waitid(os.P_PID, dying.pid, os.WEXITED | os.WNOWAIT)  # dead, but a zombie still
    [culprit] = journal.culprits()
    assert (culprit.key, culprit.config, culprit.pid) == (
        "matmul(8,8)",
        '{"block": 3}',
        dying.pid,
    )
    assert len(notes(tmp_path)) == 1
    assert journal.culprits() == []

    later = Journal(tmp_path)  # as the next process sees it
    reason = later.crashed("matmul(8,8)", '{"block": 3}')
    assert culprit.host in reason
    assert culprit.when in reason
    assert later.crashed("matmul(8,8)", '{"block": 4}') is None
    assert later.crashed("matmul(8,9)", '{"block": 3}') is None
    [record] = (tmp_path / "crashed").iterdir()
    assert json.loads(record.read_text())["config"] == '{"block": 3}'
    assert str(record) in reason
    record.unlink()
    assert later.crashed("matmul(8,8)", '{"block": 3}') is None
    end(dying)
    end(living)


def test_success_and_exceptions_leave_nothing(tmp_path):
    journal = Journal(tmp_path)
    with journal.about_to_run("k", "c"):
        assert len(notes(tmp_path)) == 1
        with journal.about_to_run("k", "d"):  # as from another thread
            assert len(notes(tmp_path)) == 2
    with pytest.raises(KeyboardInterrupt), journal.about_to_run("k", "c"):
        raise KeyboardInterrupt
    assert notes(tmp_path) == []
    assert journal.culprits() == []
    assert journal.crashed("k", "c") is None


def edited_note(tmp_path, **changes):
    """A note of this process, with some fields changed."""
    journal = Journal(tmp_path)
    with journal.about_to_run("k", "c"):
        [file] = notes(tmp_path)
        content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, **changes}))
    return journal


def test_a_process_id_used_again_does_not_protect_a_note(tmp_path):
    journal = edited_note(tmp_path, started="1")
    assert [culprit.pid for culprit in journal.culprits()] == [os.getpid()]


def test_another_start_of_the_machine_is_over(tmp_path):
    assert len(edited_note(tmp_path, boot="another").culprits()) == 1


@pytest.mark.parametrize("field", ["host", "namespace"])
def test_other_machines_and_containers_are_given_a_day(tmp_path, field):
    assert edited_note(tmp_path, **{field: "another"}).culprits() == []
    [file] = notes(tmp_path)
    file.unlink()
    old = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=25)
    journal = edited_note(tmp_path, **{field: "another"}, when=old.isoformat())
    assert len(journal.culprits()) == 1


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"\xff\xfe", b"[]", b"null", b'{"key": "k"}', b'{"pid": "x"}', b"[" * 100_000),
        json.dumps(
            {
                **dict.fromkeys(("key", "config", "host", "started", "boot", "namespace"), ""),
                "pid": 1,
                "when": "0001-01-01T00:00:00+14:00",
            }
        ).encode(),
    ],
)
def test_damaged_notes_are_set_aside(tmp_path, content):
    good = edited_note(tmp_path, started="1")
    (tmp_path / "running" / "1-a.json").write_bytes(content)
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert len(good.culprits()) == 1
    assert good.culprits() == []
    assert (tmp_path / "damaged" / "1-a.json").read_bytes() == content


def test_a_damaged_record_of_a_crash_still_counts(tmp_path):
    journal = edited_note(tmp_path, started="1")
    journal.culprits()
    [record] = (tmp_path / "crashed").iterdir()
    for content in ("", "[]", "{}"):
        record.write_text(content)
        assert "it ended its process" in journal.crashed("k", "c")


def test_what_was_never_finished_is_removed_after_a_while(tmp_path):
    journal = Journal(tmp_path)
    with journal.about_to_run("k", "c"):
        pass
    old, new = tmp_path / "running" / ".writing-old", tmp_path / "running" / ".writing-new"
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    assert journal.culprits() == []
    assert notes(tmp_path) == [new]


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "file").touch()
    journal = Journal(tmp_path / "file")
    ran = []
    with (
        pytest.warns(RuntimeWarning, match="cannot be written"),
        journal.about_to_run("k", "c"),
    ):
        ran.append(1)
    assert ran == [1]
    assert journal.culprits() == []
    assert journal.crashed("k", "c") is None


def test_nothing_is_created_before_it_is_needed(tmp_path):
    journal = Journal()
    assert journal.folder == default_folder() == tmp_path / "ejkernel-cache" / "journal"
    assert journal.culprits() == []
    assert journal.crashed("k", "c") is None
    assert not journal.folder.exists()


def run_many(folder, number, found):
    """Run candidates and look for culprits, as every process does."""
    journal = Journal(folder)
    for round_ in range(20):
        with journal.about_to_run(f"key {number}", f"config {round_}"):
            found.put([culprit.key for culprit in journal.culprits()])
    found.put(None)


def test_many_processes_at_once(tmp_path):
    journal = edited_note(tmp_path, started="1")
    [file] = notes(tmp_path)
    content = file.read_text()
    for copy in range(10):
        note = {**json.loads(content), "key": f"dead {copy}"}
        (tmp_path / "running" / f"1-{copy}.json").write_text(json.dumps(note))
    file.unlink()
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    processes = [context.Process(target=run_many, args=(tmp_path, n, found)) for n in range(3)]
    for process in processes:
        process.start()
    keys, ended = [], 0
    while ended < len(processes):
        item = found.get(timeout=60)
        if item is None:
            ended += 1
        else:
            keys += item
    for process in processes:
        process.join()
    assert sorted(keys) == [f"dead {copy}" for copy in range(10)]  # each told once, none invented
    assert notes(tmp_path) == []
    assert journal.crashed("key 0", "config 0") is None


def test_a_culprit_is_a_plain_value():
    assert Note("k", "c", "now", "here", 1) == Note("k", "c", "now", "here", 1)


def test_a_long_run_in_this_process_is_announced_with_what_to_do(caplog):
    with session._saying_that_it_hangs("op key", "the config", seconds=0.05):
        time.sleep(0.3)
    [message] = [record.getMessage() for record in caplog.records]
    assert "the config" in message
    assert "op key" in message
    assert "isolation='process'" in message
    with session._saying_that_it_hangs("op key", "the config", seconds=0.2):
        pass
    time.sleep(0.3)
    assert len(caplog.records) == 1
