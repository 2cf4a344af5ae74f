"""A store whose rows, or whose very bytes, somebody changed: calls are served all the same, with a
config that fits."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import pathlib
import sqlite3
import tempfile
import warnings

import jax.numpy as jnp
from fuzzing import JSON, KERNEL, SCALARS, Blocks, as_text, at_length, changed, damaged, quickly
from hypothesis import strategies as st

from ejkernel.dashboard.pages import progress_card
from ejkernel.ops import (
    ConfigCache,
    ConfigSelectorChain,
    PersistentCache,
    export_bundle,
    verify_bundle,
)
from ejkernel.ops.config.freshness import made_by
from ejkernel.ops.core.requirements import reasons_against_config
from ejkernel.ops.tuner.isolation.journal import Journal, _crash_name
from ejkernel.ops.tuner.progress_file import TuningProgress, running
from ejkernel.ops.utils.processes import ProcessIdentity
from ejkernel.report import Run, render
from ejkernel.store import StoreError
from ejkernel.store.bundle import BundleError

INV = KERNEL.bind(jnp.arange(4.0))
OTHER = KERNEL.bind(jnp.arange(8.0))
TABLES = {
    "ejkernel_entries": (
        *("id", "device", "op_id", "call_key", "config", "config_type", "signature", "call"),
        *("measured", "seconds", "heuristic_seconds", "incomplete", "source", "versions", "when"),
        *("where", "about"),
    ),
    "ejkernel_trials": (
        *("id", "entry_id", "candidate", "origin", "config", "verdict", "seconds", "samples_ns"),
        *("reason", "when", "about"),
    ),
    "ejkernel_meta": ("name", "value"),
}


@functools.cache
def pristine() -> bytes:
    """The file of a good store."""
    with tempfile.TemporaryDirectory() as folder:
        store = PersistentCache(folder)
        trials = [
            {"config": {"rows": 8}, "verdict": "measured", "seconds": 1e-3, "samples_ns": [1, 2]},
            {"config": {"rows": 2}, "verdict": "failed", "reason": "it is too small"},
        ]
        for inv in (INV, OTHER):
            about = {**made_by(inv, KERNEL), "seconds": 1e-3, "heuristic_seconds": 2e-3}
            store.put(inv.key, Blocks(8), about={**about, "trials": trials, "notes": ["a note"]})
        store.put("a key of one text", {"any": "thing"})
        store.close()
        (file,) = pathlib.Path(folder).glob("*.sqlite3")
        with contextlib.closing(sqlite3.connect(file)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            connection.execute("PRAGMA journal_mode = DELETE")
        return file.read_bytes()


def use(folder):
    """Everything that reads a store: it answers, or says what is wrong with the store."""
    store = PersistentCache(folder)
    try:
        selector = ConfigSelectorChain(ConfigCache(), autotune=False, persistent=store)
        for inv in (INV, OTHER, KERNEL.bind(jnp.arange(5.0))):
            decision = selector.decide(inv, KERNEL)
            assert type(decision.cfg) is Blocks
            assert not reasons_against_config(KERNEL, decision.cfg, inv)
            assert decision.explain()
            with contextlib.suppress(StoreError):
                store.explain_miss(inv)
        with contextlib.suppress(StoreError):
            for key in store.keys():  # noqa: SIM118  a store, not a dictionary
                store.get(key)
                store.entry(key)
                store.trials(key)
            assert len(store) >= 0
            store.related(limit=100)
            selector.known_config("fuzzed@v1", INV.call_key)
            render(Run.of_store(store), "md")
            with contextlib.suppress(BundleError):
                verify_bundle(export_bundle(store))
        with contextlib.suppress(StoreError):
            store.put(INV.key, Blocks(16))
            # It may have been refused, with a warning; it is never something else.
            assert store.get(INV.key) in (Blocks(16), None)
    finally:
        store.close()


@st.composite
def changes(draw):
    """Updates of rows: any value in any column."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        table = draw(st.sampled_from([*TABLES, "ejkernel_entries", "ejkernel_entries"]))
        column = draw(st.sampled_from(TABLES[table]))
        about = {
            "when": "x",
            "seconds": 1.0,
            "notes": ["n"],
            "trials": [],
            "versions": {"jax": "1"},
        }
        config = {"rows": 4, "scale": 1.0, "part": {"size": 8}, "sizes": [1]}
        value = draw(
            changed(config).map(as_text)
            | changed(about).map(as_text)
            | JSON.map(as_text)
            | SCALARS
            | st.binary(max_size=20)
        )
        found.append((table, column, value))
    return found


def rows(updates):
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "configs.sqlite3"
        file.write_bytes(pristine())
        with contextlib.closing(sqlite3.connect(file)) as connection:
            connection.execute("PRAGMA ignore_check_constraints = ON")
            for table, column, value in updates:
                # Another program may write what ours would not; SQLite itself refuses some.
                with contextlib.suppress(sqlite3.Error, OverflowError, UnicodeEncodeError):
                    connection.execute(f'UPDATE {table} SET "{column}" = ?', (value,))
            connection.commit()
        use(folder)


def files(data):
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "configs.sqlite3").write_bytes(data)
        use(folder)


FILES = st.deferred(lambda: damaged(pristine()) | st.binary(max_size=60))

test_rows = quickly(changes(), examples=20)(rows)
test_rows_at_length = at_length(changes(), share=0.1)(rows)
test_files = quickly(FILES, examples=20)(files)
test_files_at_length = at_length(FILES, share=0.1)(files)


def test_the_store_that_is_changed_is_a_good_one(tmp_path):
    (tmp_path / "configs.sqlite3").write_bytes(pristine())
    store = PersistentCache(tmp_path)
    assert len(store) == 3
    assert store.get(INV.key) == Blocks(8)
    assert len(store.trials(INV.key)) == 2


# --- the journal of crashes -----------------------------------------------------------------------

NOTE = {
    "key": "a key",
    "config": "a config",
    "when": "2026-01-01T00:00:00+00:00",
    "host": "tower",
    "pid": 999999,
    "started": "1",
    "boot": "2",
    "namespace": "3",
}
NOTES = (
    (changed(NOTE) | JSON).map(lambda plain: json.dumps(plain).encode())
    | damaged(json.dumps(NOTE).encode())
    | st.binary(max_size=30)
)


def notes(data):
    with tempfile.TemporaryDirectory() as folder:
        for place in (
            pathlib.Path(folder) / "running" / "1-a.json",
            pathlib.Path(folder) / "crashed" / _crash_name("a key", "a config"),
        ):
            place.parent.mkdir(mode=0o700)
            place.write_bytes(data)
        journal = Journal(folder)
        reason = journal.crashed("a key", "a config")
        assert reason is not None
        assert reason.isprintable()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # that it was set aside
            for culprit in journal.culprits():
                assert isinstance(culprit.key, str)
        assert journal.crashed("a key", "another config") is None


test_notes = quickly(NOTES)(notes)
test_notes_at_length = at_length(NOTES)(notes)


# --- the progress of runs -------------------------------------------------------------------------

PROGRESS = {
    "name": "matmul@v1(float32[8], causal=True)",
    "device": "cpu|x",
    "phase": "racing 2 candidates",
    "operation": 1,
    "operations": 2,
    "tried": 4,
    "candidates": 4,
    "done": 10,
    "steps": 40,
    "best": "Blocks(8)",
    "seconds": 1e-3,
    "heuristic_seconds": 2e-3,
    "limit": 60.0,
    "began": 100.0,
    "operation_began": 110.0,
    "phase_began": 120.0,
    "when": 130.0,
    "process": dataclasses.asdict(ProcessIdentity.here()),
}
PROGRESSES = (
    (changed(PROGRESS) | JSON).map(lambda plain: json.dumps(plain).encode())
    | damaged(json.dumps(PROGRESS).encode())
    | st.binary(max_size=30)
)


def progresses(data):
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "a-1.json").write_bytes(data)
        for progress in running(pathlib.Path(folder)):
            left = progress.seconds_left(140.0)
            assert left is None or 0 <= left < 1e26
    try:
        progress = TuningProgress.loads(data)
    except ValueError:
        return
    assert progress.process.is_running() in (True, False, None)
    progress_card(progress, 140.0).encode()


test_progresses = quickly(PROGRESSES)(progresses)
test_progresses_at_length = at_length(PROGRESSES)(progresses)
