"""list, show, explain, diff."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from ...markup import one_line
from .. import options
from ..exits import Exit
from ..loading import import_modules, load
from ..output import State, brief, counted, inert, milliseconds, ratio, table
from ..programs import invocations_of, operations_of
from ..stores import Entry, find_entry, open_place

if TYPE_CHECKING:
    from ...ops import Decision

_KEY = re.compile(r"[0-9a-f]{4,16}")
_LABEL = re.compile(r"([\w.-]+#)?[\w./-]+@v[\w.]+:[0-9a-f]+")


@click.command("list")
@options.store
@options.operation
@options.device
@options.common
@options.with_state
def list_(state: State, source: str | None, op: str | None, device: str | None) -> None:
    """List the entries of a store or a bundle."""
    place = open_place(source, or_nowhere=True)
    entries = place.entries(op, device)
    rows = [
        (
            entry["key"][1],
            entry["key"][2],
            _about(entry, "signature"),
            brief(entry["config"]),
            milliseconds(entry["about"].get("seconds")),
            ratio(entry["about"].get("seconds"), entry["about"].get("heuristic_seconds")),
            remark(entry),
            entry["key"][0],
        )
        for entry in entries
    ]
    header = ("operation", "key", "call", "config", "time", "speedup", "", "device")
    data = {"place": place.shown, "entries": [as_data(entry) for entry in entries]}
    count = f"{counted(len(entries), 'entry')} in {place.shown}"
    if entries:
        state.result(data, table(header, rows, right=(4, 5)), count)
    else:
        state.result(data, f"{count}; tune something with `ejkernel tune module:function`")


@click.command()
@click.argument("key", metavar="KEY")
@options.store
@options.common
@options.with_state
def show(state: State, key: str, source: str | None) -> None:
    """Show an entry with all its candidates.

    KEY is what `configs list` shows, or its beginning, a label, or the name of an operation.
    """
    place = open_place(source)
    entry = find_entry(place, key)
    trials = place.trials(entry)
    data = {"place": place.shown, **as_data(entry), "trials": trials}
    state.result(data, facts(entry), *_candidates(entry, trials))


@click.command()
@click.argument("what", metavar="KEY|MODULE:FUNCTION")
@options.store
@options.imports
@options.common
@options.with_state
def explain(state: State, what: str, source: str | None, modules: tuple[str, ...]) -> None:
    """Say which config is used and why.

    For MODULE:FUNCTION (see `ejkernel tune --help`): what each of its operations would run with,
    and why not with something else. For the KEY of an entry: how sure it is, and whether it is
    still good; give --import MODULE if its kernel is one of your own.
    """
    if _is_key(what):
        _explain_entry(state, what, source, modules)
    else:
        _explain_function(state, what, source, modules)


def _explain_function(
    state: State, name: str, source: str | None, modules: tuple[str, ...]
) -> None:
    from ...ops import AutotunePolicy, ConfigCache, ConfigSelectorChain

    place = open_place(source, or_nowhere=True)
    if place.is_bundle:
        raise click.UsageError(
            "--store: a call is explained with a store; name a bundle in EJKERNEL_CONFIG_PATH"
        )
    import_modules(modules)
    found = operations_of(load(name).lower(), name)
    policy = AutotunePolicy(allow_autotune=False, strict=False)
    selector = ConfigSelectorChain(ConfigCache(), policy, persistent=place.store)
    decisions: list[Decision[Any]] = []
    for inv in invocations_of(found):
        assert inv.kernel is not None
        decisions.append(selector.decide(inv, inv.kernel))
    data = [
        {
            "op_id": decision.key.op_id,
            "call_key": decision.key.call_key,
            "device": decision.key.device,
            "signature": decision.signature,
            "config": str(decision.cfg),
            "tier": decision.tier,
            "reason": decision.reason,
            "misses": [{"tier": m.tier, "reason": m.explain()} for m in decision.misses],
        }
        for decision in decisions
    ]
    skipped = [{"label": skip.label, "reason": skip.reason} for _, skip in found if skip]
    shown = [decision.explain() for decision in decisions]
    shown += [f"{skip['label']}\n  not known: {one_line(skip['reason'])}" for skip in skipped]
    state.result({"decisions": data, "skipped": skipped}, "\n\n".join(shown))


def _explain_entry(state: State, key: str, source: str | None, modules: tuple[str, ...]) -> None:
    from ...ops.core.kernel import kernel_named
    from ...ops.core.types import ConfigKey

    place = open_place(source)
    entry = find_entry(place, key)
    trials = place.trials(entry)
    import_modules(modules)
    kernel = kernel_named(entry["key"][1])
    if kernel is None:
        now = (
            "not known: its kernel is not loaded; --import MODULE loads it, and then it can be "
            "said whether its source changed"
        )
    else:
        from ...ops.config.freshness import judge

        freshness = judge(entry["about"], kernel, ConfigKey(*entry["key"]))
        now = freshness.reason or "fresh: neither its kernel nor the compiler changed"
    story = _story(entry, trials)
    data = {"place": place.shown, **as_data(entry), "story": story, "now": now}
    shown = [facts(entry), *(f"  {line}" for line in story), f"  today     {now}"]
    state.result(data, *shown, *_candidates(entry, trials))


def _story(entry: Entry, trials: list[dict[str, Any]]) -> list[str]:
    """How an entry came about, in sentences."""
    about = inert(entry["about"])
    if about.get("estimated"):
        return ["estimate  ranked by a compiler's figures for " + str(about.get("target", "?"))]
    if about.get("seconds") is None:
        return ["origin    put there by hand: nothing was measured"]
    measured = [trial for trial in trials if trial["verdict"] == "measured"]
    rest = len(trials) - len(measured)
    lines = [f"measured  {about.get('measured') or 'forward'}, by the {_clock(about)} clock"]
    if trials:
        lines.append(f"against   {len(measured) - 1} others; {rest} more could not be used")
    elif about.get("tried"):
        lines.append(f"against   {about['tried']} candidates in all")
    sure = "the winner was sure" if about.get("sure") else "the rounds ran out: others are near"
    lines.append(f"certainty {sure}")
    if about.get("incomplete"):
        lines.append(f"incomplete {about['incomplete']}; tuning it again goes on from there")
    lines += [f"note      {text}" for text in about.get("notes") or ()]
    return lines


def _clock(about: Any) -> str:
    return "device's own" if about.get("clock") == "device" else "wall"


@click.command()
@click.argument("first", metavar="PLACE")
@click.argument("second", metavar="PLACE")
@options.operation
@options.device
@options.common
@options.with_state
def diff(state: State, first: str, second: str, op: str | None, device: str | None) -> int:
    """Compare two stores or bundles. Ends with 1 if they differ."""
    places = [open_place(name) for name in (first, second)]
    left, right = (
        {tuple(entry["key"]): entry for entry in place.entries(op, device)} for place in places
    )
    rows, data = [], []
    for key in sorted({*left, *right}, key=lambda key: (key[1], key[0], key[2])):
        one, other = left.get(key), right.get(key)
        if one is not None and other is not None and one["config"] == other["config"]:
            continue
        present = one if one is not None else other
        assert present is not None
        what = "config" if one and other else f"only in {places[0 if one else 1].shown}"
        cells = [
            "-" if entry is None else f"{brief(entry['config'])} ({_time(entry)})"
            for entry in (one, other)
        ]
        rows.append((key[1], key[2], _about(present, "signature"), what, *cells, key[0]))
        data.append(
            {
                "key": list(key),
                "first": one and as_data(one),
                "second": other and as_data(other),
            }
        )
    same = len({*left, *right}) - len(rows)
    counts = f"{len(rows)} different, {same} the same"
    answer = {"first": places[0].shown, "second": places[1].shown, "same": same, "differ": data}
    header = ("operation", "key", "call", "difference", "first", "second", "device")
    state.result(answer, *([table(header, rows)] if rows else []), counts)
    return Exit.NOT_WELL if rows else Exit.OK


# --- one entry -----------------------------------------------------------------------------------


def as_data(entry: Entry) -> dict[str, Any]:
    """An entry for JSON."""
    device, op_id, call_key = entry["key"]
    return {
        "device": device,
        "op_id": op_id,
        "call_key": call_key,
        "config": entry["config"],
        "config_type": entry["config_type"],
        "about": {name: value for name, value in entry["about"].items() if name != "trials"},
    }


def remark(entry: Entry) -> str:
    """What a person should know about an entry, in a word or two."""
    about = entry["about"]
    if about.get("estimated"):
        return "estimate"
    return "interrupted" if about.get("incomplete") else ""


def facts(entry: Entry) -> str:
    """An entry in a few lines."""
    entry = inert(entry)
    device, op_id, call_key = entry["key"]
    about = entry["about"]
    seconds, heuristic = about.get("seconds"), about.get("heuristic_seconds")
    faster = ratio(seconds, heuristic)
    speed = f", {faster} the heuristic's speed" if faster != "-" else ""
    versions = about.get("versions") if isinstance(about.get("versions"), dict) else {}
    lines = [
        f"{op_id}({about.get('signature', '')})",
        f"  device    {device}",
        f"  key       {call_key}",
        f"  config    {brief(entry['config'])}",
        f"  time      {milliseconds(seconds)}{speed}",
        f"  stored    {about.get('when', '?')} on {about.get('where') or '?'}",
    ]
    if versions:
        lines.append("  versions  " + ", ".join(f"{k} {v}" for k, v in versions.items()))
    return "\n".join(lines)


def _candidates(entry: Entry, trials: list[dict[str, Any]]) -> list[Any]:
    if not trials:
        return []
    best = entry["about"].get("seconds")
    ranked = sorted(trials, key=lambda trial: trial["seconds"] or float("inf"))
    rows = [
        (
            brief(trial["config"]),
            milliseconds(trial["seconds"]) if trial["seconds"] else trial["verdict"],
            f"{trial['seconds'] / best:.3f}" if trial["seconds"] and best else "",
            f"{len(trial['samples_ns'])} samples" if trial["samples_ns"] else "",
            "chosen" if trial["config"] == entry["config"] else trial["reason"],
        )
        for trial in ranked
    ]
    return ["", table(("candidate", "time", "ratio", "", ""), rows, right=(1, 2))]


def _about(entry: Entry, name: str) -> str:
    return str(entry["about"].get(name) or "")


def _time(entry: Entry) -> str:
    return milliseconds(entry["about"].get("seconds"))


def _is_key(what: str) -> bool:
    if _LABEL.fullmatch(what) or _KEY.fullmatch(what):
        return True
    return ":" not in what
