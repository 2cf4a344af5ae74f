"""Whatever names a store, a bundle, a record or a program holds: a terminal shows them, a log has
them in one line, and nobody obeys them."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import sys

import jax
import jax.numpy as jnp
import pytest
import small_model
from small_model import row_sum

from ejkernel.cli.output import State, rendered, styled, table
from ejkernel.markup import escaped_markdown, one_line, printable
from ejkernel.ops import (
    AutotuningResult,
    ConfigCache,
    ConfigSelectorChain,
    Entry,
    PersistentCache,
    device_fingerprint,
    import_bundle,
    verify_bundle,
)
from ejkernel.ops.config.outcome import Outcome, Trial, Verdict
from ejkernel.ops.execution.results import Skipped
from ejkernel.report import Operation, Run, render
from ejkernel.store import Bundle

FORGED = "FORGED: all is well"
PIECES = {
    "colours": "\x1b[31;1m",
    "screen": "\x1b[2J\x1b[H\x1bc",
    "title": "\x1b]0;pwned\x07",
    "link": "\x1b]8;;http://evil.example\x1b\\click\x1b]8;;\x1b\\",
    "csi of one byte": "\x9b31m\x90q\x9c",
    "back": "\x08\x08\r\x0b\x0c\x7f\x00",
    "bidi": "\u202e\u2066\u2069\u200f\u061c",
    "invisible": "\u200b\u2060\ufeff\u00ad\U000e0041",
    "lines": f"\n{FORGED}\r\n{FORGED}\x85{FORGED}\u2028{FORGED}",
    "surrogate": "\ud800",
    "rich": "[red]x[/red] [link=http://evil.example]y[/link] [/] :smile:",
    "html": "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "markdown": "|a|b| [t](javascript:x) ![i](x) `c` # h\n- l http://evil.example www.evil.example",
}
EVIL = "evil " + "".join(PIECES.values())


def check(*texts):
    for text in texts:
        lines = text.split("\n")
        bad = [line for line in lines if not line.replace("\t", " ").isprintable()]
        assert not bad
        if not text.startswith("<"):  # the lines of HTML are nobody's lines
            assert not [line for line in lines if line.strip().startswith(FORGED)]


def key(name=EVIL, device=None):
    return (device or device_fingerprint(), f"{name}@v1", "0123456789abcdef")


ABOUT = {
    "signature": EVIL,
    "when": EVIL,
    "where": EVIL,
    "versions": {"jax": EVIL, "jaxlib": EVIL, EVIL: EVIL},
    "notes": [EVIL],
    "incomplete": EVIL,
    "seconds": 1e-3,
    "heuristic_seconds": 2e-3,
    "measured": EVIL,
    "call": {"args": [[EVIL]], "kwargs": {EVIL: EVIL}, "structure": [EVIL]},
}


def entry(name=EVIL, device=None, config=None):
    return {
        "key": key(name, device),
        "config": {EVIL: EVIL, "rows": EVIL} if config is None else config,
        "config_type": EVIL,
        "about": ABOUT,
    }


@pytest.fixture
def hostile(cache):
    """The usual store, full of hostile texts."""
    store = PersistentCache()
    trials = [{"config": {EVIL: EVIL}, "verdict": "measured", "seconds": 1e-3, "samples_ns": [1]}]
    trials.append({"config": {"a": EVIL}, "verdict": EVIL, "reason": EVIL})
    for made in (entry(), entry(device=EVIL), entry("small_row_sum")):
        about = {**ABOUT, "trials": trials}
        store.put_plain(made["key"], made["config"], made["config_type"], about=about)
    return store


@pytest.fixture
def bundle(tmp_path):
    file = tmp_path / "bundle.json"
    own = {**entry("small_row_sum"), "config": {"rows": EVIL}}
    own["key"] = row_sum.bind(jnp.ones((32, 4))).key
    # As text: a bundle that is written by us might refuse some of it.
    entries = [entry(), entry(device="other"), {**own, "key": tuple(own["key"])}]
    Bundle(entries).save(file)
    return file


def all_checked(done):
    check(done.out, done.err)
    return done


@pytest.mark.parametrize(
    "command",
    [
        ("configs", "list"),
        ("configs", "show", "evil*"),
        ("configs", "show", "0123456789abcdef"),
        ("configs", "explain", "small_row_sum"),
        ("configs", "explain", "small_model:tuned"),
        ("configs", "verify"),
        ("configs", "verify", "--import", "small_model"),
        ("configs", "prune", "--incomplete", "--dry-run"),
        ("configs", "prune", "--suspect", "--stale", "--dry-run", "--import", "small_model"),
        ("configs", "prune", "--older-than", "1d", "--dry-run"),
        ("configs", "export", "-"),
        ("report", "--from-store", "--format", "md", "-o", "-"),
        ("report", "--from-store", "--format", "html", "-o", "-"),
        ("report", "--from-store", "--format", "json", "-o", "-"),
        ("bench", "small_model:tuned", "--rounds", "2"),
        ("doctor",),
    ],
    ids=" ".join,
)
def test_commands_with_a_hostile_store(ej, hostile, command):
    all_checked(ej(*command))
    json_done = ej(*command, "--json") if command[0] == "configs" else None
    if json_done is not None and json_done.out:
        check(json_done.out)
        json.loads(json_done.out)


def test_a_terminal_gets_no_escape_of_theirs(hostile, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    text = rendered(table(("a", "b"), [(EVIL, styled(EVIL, "red"))]), styled(EVIL, "bold"), EVIL)
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)  # Rich's own colours; theirs are `\x1b` in letters
    assert "\\x1b[31;1m" in text.replace("\n", "")
    assert not [c for c in text if not c.isprintable() and c != "\n"]


@pytest.mark.parametrize(
    "command",
    [
        ("configs", "list", "--store", "BUNDLE"),
        ("configs", "diff", "BUNDLE", "STORE"),
        ("configs", "import", "BUNDLE"),
        ("configs", "merge", "BUNDLE", "STORE", "-o", "MERGED"),
        ("configs", "verify", "--store", "BUNDLE", "--import", "small_model"),
        ("configs", "show", "small_row_sum", "--store", "BUNDLE"),
        ("configs", "explain", "small_model:tuned"),
        ("doctor",),
    ],
    ids=" ".join,
)
def test_commands_with_a_hostile_bundle(ej, hostile, bundle, command, monkeypatch, tmp_path):
    monkeypatch.setenv("EJKERNEL_CONFIG_PATH", str(bundle))
    names = {"BUNDLE": bundle, "STORE": hostile.path, "MERGED": tmp_path / "merged.json"}
    all_checked(ej(*(names.get(word, word) for word in command)))


def hostile_program(spec_key="0" * 16):
    escaped = json.dumps(EVIL).replace("'", "\\u0027").replace('"', "'").replace("\\", "\\\\")
    spec = f"{{'op':{escaped},'kernel':{escaped},'args':[{escaped}],'kwargs':{{{escaped}:1}}}}"
    stamp = f"ejkernel_ops#gone@v1:{spec_key} {spec}"
    return f'module @m {{ func.func @f() {{ejkernel = "{stamp}"}} }}'


@pytest.mark.parametrize("command", [("labels",), ("tune", "--hlo"), ("labels", "--json")])
def test_commands_with_a_hostile_program(ej, tmp_path, command, hostile):
    file = tmp_path / "program.mlir"
    file.write_text(hostile_program())
    done = all_checked(ej(*command, file))
    assert "gone@v1" in done.out + done.err


@pytest.mark.parametrize(
    "command",
    [
        ("labels", "NAME"),
        ("tune", "NAME"),
        ("tune", "--hlo", "NAME"),
        ("tune", "NAME:f"),
        ("bench", "NAME"),
        ("check", "NAME:f"),
        ("report", "NAME"),
        ("report", "--from-store", "--store", "NAME"),
        ("configs", "list", "--store", "NAME"),
        ("configs", "list", "--store", "NAME.json"),
        ("configs", "list", "--op", "NAME", "--device", "NAME"),
        ("configs", "show", "NAME"),
        ("configs", "explain", "NAME:f"),
        ("configs", "diff", "NAME", "NAME.json"),
        ("configs", "export", "NAME"),
        ("configs", "import", "NAME.json"),
        ("configs", "verify", "--import", "NAME"),
        ("configs", "prune", "--older-than", "NAME"),
        ("configs", "merge", "NAME", "-o", "NAME.json"),
        ("completion", "NAME"),
        ("NAME",),
        ("doctor", "--NAME"),
    ],
    ids=" ".join,
)
def test_names_that_a_script_passed_on(ej, store, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = EVIL.replace("\0", "").replace("/", "").replace("\ud800", "")
    done = ej(*(word.replace("NAME", name) for word in command))
    printed = done.out + done.err
    assert not [c for c in printed if not c.isprintable() and c not in "\n\t"]


def test_files_with_hostile_names_and_records_with_hostile_titles(ej, cache, tmp_path):
    name = EVIL.replace("\0", "").replace("/", "").replace("\ud800", "")[:80]
    folder = cache / "runs"
    folder.mkdir(parents=True, mode=0o700)
    cache.chmod(0o700)
    operation = Operation(EVIL, EVIL, EVIL, {EVIL: EVIL}, incomplete=EVIL, origin=EVIL)
    Run(EVIL, EVIL, EVIL, operations=(operation,)).save(folder / f"{name}.json")
    (folder / f"damaged {name}.json").write_text(json.dumps({EVIL: EVIL}))
    all_checked(ej("report", "--list"))
    for file in folder.iterdir():
        all_checked(ej("report", file, "-o", tmp_path / f"{name}.html"))
        all_checked(ej("report", file, "--format", "md", "-o", "-"))


# --- the library ----------------------------------------------------------------------------------


def test_log_lines(cache, hostile, bundle, caplog, monkeypatch, tmp_path):
    damaged = tmp_path / f"{one_line(EVIL)[:40]}\x1b.json"
    damaged.write_text(json.dumps({EVIL: EVIL}))
    monkeypatch.setenv("EJKERNEL_CONFIG_PATH", f"{bundle}:{damaged}")
    selector = ConfigSelectorChain(ConfigCache(), autotune=False, persistent=hostile)
    inv = row_sum.bind(jnp.ones((32, 4)))
    for config, about in (
        ({"rows": EVIL}, {}),
        ({EVIL: 1}, ABOUT),
        ({"rows": 8}, {"when": EVIL, "where": EVIL, "source": EVIL}),
        ({"rows": 8}, {"when": EVIL, "where": EVIL, "versions": {"jaxlib": EVIL}}),
        ({"rows": 8}, {"when": EVIL, "where": EVIL}),
    ):
        with caplog.at_level(logging.DEBUG, "ejkernel"):
            hostile.put_plain(inv.key, config, EVIL, about=about)
            decision = ConfigSelectorChain(
                ConfigCache(), autotune=False, persistent=PersistentCache()
            ).decide(inv, row_sum)
        check(decision.explain(), str(decision), decision._repr_markdown_())
    decision = selector.decide(row_sum.bind(jnp.ones((48, 4))), row_sum)
    check(decision.explain())
    assert caplog.records
    check(*(record.getMessage() for record in caplog.records))


@dataclasses.dataclass(frozen=True)
class Named:
    name: str = EVIL


def test_texts_of_results(hostile, bundle):
    result = AutotuningResult(
        EVIL, [Entry(EVIL, "0" * 16, Named(), EVIL, 1e-3, 2e-3)], [Skipped(EVIL, EVIL)]
    )
    trials = (Trial(Named(), Verdict.FAILED, reason=EVIL), Trial(Named("b"), Verdict.MEASURED, 1.0))
    outcome = Outcome(Named("b"), trials)
    imported = import_bundle(hostile, Bundle.load(bundle))
    check(str(result), outcome.explain(), str(imported))
    check(*map(str, verify_bundle(bundle)))
    for thing in (result, outcome):
        check(thing._repr_markdown_(), thing._repr_html_())
        assert "<script" not in thing._repr_html_()


def test_reports():
    operation = Operation(EVIL, EVIL, EVIL, {EVIL: EVIL}, incomplete=EVIL, origin=EVIL)
    run = Run(EVIL, EVIL, EVIL, operations=(operation,), environment={EVIL: EVIL})
    for form in ("html", "md", "json"):
        check(render(run, form))


# --- the pieces -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PIECES)
def test_every_piece_is_shown(name):
    piece = PIECES[name]
    assert printable(piece).isprintable()
    assert one_line(piece).isprintable()
    assert printable("plain é 字 😀") == "plain é 字 😀"
    assert printable("two\nlines", keep="\n") == "two\nlines"
    assert escaped_markdown(piece).isprintable()
    shown = rendered(table(("",), [(piece,)]))
    assert shown.count("\n") <= 2
    if piece.isprintable():
        assert " ".join(piece.split()) in shown  # as it is: no markup of Rich, no emoji


@pytest.mark.parametrize(
    ("given", "escaped"),
    [
        ("http://a.b", r"http\://a.b"),
        ("www.a.b", r"www\.a.b"),
        ("WWW.a.b", r"WWW\.a.b"),
        ("@user", r"\@user"),
        ("matmul@v1", "matmul@v1"),
        ("- item", r"\- item"),
        ("+ item", r"\+ item"),
        ("=====", r"\====="),
        ("-----", r"\-----"),
        ("1. item", r"1\. item"),
        ("123) item", r"123\) item"),
        ("0.50", "0.50"),
        ("-", "-"),
        ("-3", "-3"),
        ("a - b = 1.5", "a - b = 1.5"),
        ("[t](u)", r"\[t\](u)"),
        ("\x1b[1m", r"\\x1b\[1m"),
    ],
)
def test_markdown_makes_no_links_and_no_lists_of_a_text(given, escaped):
    assert escaped_markdown(given) == escaped


def test_answers_of_commands(capsys):
    State().result({}, EVIL, table(("x",), [(EVIL,)]))
    printed = capsys.readouterr().out
    assert not [c for c in printed if not c.isprintable() and c != "\n"]


def test_the_program_of_the_tests_is_a_whole_one():
    from ejkernel.cli.programs import not_whole

    assert not_whole(hostile_program()) == ""
    assert jax.jit(small_model.tuned) is not None
