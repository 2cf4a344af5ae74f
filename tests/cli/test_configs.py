"""`ejkernel configs`: over stores and bundles, for people and for programs."""

from __future__ import annotations

import json

import jax.numpy as jnp
import pytest
from small_model import Config, row_sum

from ejkernel.ops import PersistentCache
from ejkernel.store import Bundle

KEY = row_sum.bind(jnp.ones((32, 4))).key


@pytest.fixture
def bundle(ej, store, tmp_path):
    file = tmp_path / "configs.json"
    assert ej("configs", "export", file).code == 0
    return file


def test_list_shows_each_entry(ej, store):
    done = ej("configs", "list")
    assert done.code == 0
    assert "3 entries in" in done.out
    lines = done.out.splitlines()
    (row,) = [line for line in lines if KEY.call_key in line]
    assert "small_row_sum@v1" in row
    assert "float32[32,4]" in row
    assert "rows=16" in row
    assert "1.00 ms" in row
    assert "2.00×" in row
    assert any("interrupted" in line for line in lines)
    assert "\x1b" not in done.out  # no colours in a pipe


def test_list_filters_and_gives_json(ej, store):
    entries = ej("configs", "list", "--json", "--op", "small_row_sum").data["entries"]
    assert {entry["op_id"] for entry in entries} == {"small_row_sum@v1"}
    (entry,) = ej("configs", "list", "--json", "--device", "tpu").data["entries"]
    assert entry["config"] == {"block": 64}
    assert ej("configs", "list", "--json", "--device", "here").data["entries"][0]["device"] == (
        KEY.device
    )
    assert ej("configs", "list", "--op", "nothing").out.startswith("0 entries")


def test_an_empty_store_says_what_to_do(ej):
    done = ej("configs", "list")
    assert done.code == 0
    assert "ejkernel tune module:function" in done.out


def test_show_finds_an_entry_by_key_beginning_label_and_name(ej, store):
    for wanted in (
        KEY.call_key,
        KEY.call_key[:6],
        f"small_row_sum@v1:{KEY.call_key}",
        f"ejkernel_ops#small_row_sum@v1:{KEY.call_key}",
    ):
        done = ej("configs", "show", wanted, "--json")
        assert done.code == 0, done.err
        assert done.data["call_key"] == KEY.call_key
    text = ej("configs", "show", KEY.call_key).out
    assert "it did not compile" in text
    assert "chosen" in text
    assert ej("configs", "show", "matmul").code == 0


def test_show_says_when_it_does_not_know_which(ej, store):
    done = ej("configs", "show", "small_row_sum")
    assert done.code == 2
    assert "fits 2 entries" in done.err
    done = ej("configs", "show", "softmax")
    assert done.code == 2
    assert "has no entry 'softmax'" in done.err


def test_explain_an_entry(ej, store):
    text = ej("configs", "explain", KEY.call_key).out
    assert "the winner was sure" in text
    assert "fresh" in text
    assert ej("configs", "explain", "matmul", "--json").data["now"].startswith("not known")


def test_explain_a_function(ej, store):
    done = ej("configs", "explain", "small_model:tuned")
    assert done.code == 0, done.err
    assert "chosen   by persistent" in done.out
    assert "this is printed" not in done.out  # what the user's code prints is no answer
    (decision,) = ej("configs", "explain", "small_model:tuned", "--json").data["decisions"]
    assert decision["tier"] == "persistent"
    assert decision["misses"][0]["tier"] == "override"


def test_export_import_and_diff(ej, store, bundle, tmp_path):
    assert len(Bundle.load(bundle)) == 3
    other = tmp_path / "other"
    done = ej("configs", "import", bundle, "--store", other, "--json")
    assert done.data["imported"][0]["added"] == 3
    same = ej("configs", "diff", bundle, other)
    assert same.code == 0
    assert "0 different, 3 the same" in same.out
    PersistentCache(other).put(KEY, {"rows": 8})
    PersistentCache(other).remove(("tpu|tpu-v9", "matmul@v2", "0123456789abcdef"))
    done = ej("configs", "diff", bundle, other)
    assert done.code == 1
    assert "2 different, 1 the same" in done.out
    assert f"only in {bundle}" in done.out
    assert "rows=8" in done.out
    data = ej("configs", "diff", bundle, other, "--json").data
    assert [entry["second"] is None for entry in data["differ"]] == [True, False]


def test_export_to_the_standard_output_and_of_nothing(ej, store, tmp_path):
    assert json.loads(ej("configs", "export", "-").out)["format"] == "ejkernel-configs"
    done = ej("configs", "export", tmp_path / "none.json", "--op", "nothing")
    assert done.code == 2
    assert not (tmp_path / "none.json").exists()


def test_merge_says_conflicts(ej, store, bundle, tmp_path):
    text = bundle.read_text().replace('"rows": 16', '"rows": 8')
    changed = tmp_path / "changed.json"
    changed.write_text(text)
    out = tmp_path / "merged.json"
    done = ej("configs", "merge", bundle, changed, "-o", out)
    assert done.code == 0, done.err
    assert "3 entries written to" in done.out
    assert done.out.count("conflict:") == 2
    assert Bundle.load(out) == Bundle.load(bundle)
    data = ej("configs", "merge", bundle, changed, "-o", out, "--json").data
    assert len(data["conflicts"]) == 2


def test_verify_names_problems_and_ends_with_one(ej, store):
    done = ej("configs", "verify")
    assert done.code == 1
    assert "its tuning was interrupted" in done.out
    assert "no kernel of this name and version is loaded" in done.out
    assert "3 entries" in done.out
    assert "2 with a problem" in done.out
    good = ej("configs", "verify", "--op", "small_row_sum", "--json").data
    assert [problem["call_key"] for problem in good["problems"]] != [KEY.call_key]


@pytest.mark.parametrize("kind", ["store", "bundle"])
def test_prune_removes_what_fits_and_nothing_else(ej, store, bundle, kind):
    place = ("--store", bundle) if kind == "bundle" else ()
    done = ej("configs", "prune", "--incomplete", "--dry-run", *place)
    assert "1 entry would be removed" in done.out
    assert len(ej("configs", "list", "--json", *place).data["entries"]) == 3
    done = ej("configs", "prune", "--incomplete", "--older-than", "90d", "--yes", *place)
    assert done.code == 0, done.err
    assert "2 entries removed from" in done.out
    (left,) = ej("configs", "list", "--json", *place).data["entries"]
    assert left["call_key"] == KEY.call_key
    if kind == "store":
        assert len(store.trials(KEY)) == 2


def test_prune_stale(ej, store):
    entry = store.entry(KEY)
    store.put(KEY, {"rows": 16}, about={**entry["about"], "source": "of another time"})
    data = ej("configs", "prune", "--stale", "--yes", "--json").data
    assert [entry["call_key"] for entry in data["entries"]] == [KEY.call_key]
    assert "stale" in data["entries"][0]["reason"]


def test_prune_asks_for_a_reason_and_for_leave(ej, store):
    done = ej("configs", "prune")
    assert done.code == 2
    assert "say which: --stale" in done.err
    done = ej("configs", "prune", "--all")
    assert done.code == 2
    assert "--yes" in done.err
    assert len(store) == 3
    for age in ("soon", "99999999d", f"{'9' * 400}w", "9999-99-99"):
        assert ej("configs", "prune", "--older-than", age).code == 2


def test_a_sqlite_file_and_its_url_are_places(ej, store):
    file = store.path / "configs.sqlite3"
    for place in (file, f"sqlite:///{file}", store.path):
        assert len(ej("configs", "list", "--store", place, "--json").data["entries"]) == 3


def test_an_entry_as_code(ej, store):
    key = row_sum.bind(jnp.ones((32, 4))).key
    done = ej("configs", "show", key.call_key, "--as-code")
    assert done.code == 0, done.err
    assert "from small_model import Config" in done.out
    assert "small_row_sum(..., cfg=Config(rows=16))" in done.out
    scope = {}
    exec(done.out, scope)
    assert list(scope["TUNED"].values()) == [Config(16)]
    unknown = ej("configs", "show", "0123456789abcdef", "--as-code")
    assert unknown.code == 3
    assert "--import MODULE" in unknown.err
