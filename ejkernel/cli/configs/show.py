"""list, show, explain, diff."""

from __future__ import annotations

import re
from typing import Any

import click

from ...formatting import counted, described, duration, lasting, shortened, speedup, times
from ...markup import one_line
from ...speedup import Gain, PlainJax, against_heuristic
from .. import options
from ..exits import Exit, Failure
from ..loading import import_modules, load
from ..output import State, fields_of, table
from ..programs import invocations_of, operations_of, skipped_of
from ..stores import Entry, find_entry, open_place

_LABEL = re.compile(r"([\w.-]+#)?[\w./-]+@v[\w.]+:[0-9a-f]+")


@click.command("list")
@options.store
@options.filters
@options.with_state
def list_(state: State, source: str | None, op: str | None, device: str | None) -> None:
    """List the entries of a store or a bundle."""
    place = open_place(source, or_nowhere=True)
    entries = place.entries(op, device)
    rows = [
        (
            entry["key"][1],
            entry["key"][2],
            duration(entry["about"].get("seconds")),
            speedup(entry["about"].get("heuristic_seconds"), entry["about"].get("seconds")),
            "–"
            if (plain := _plain(entry)) is None
            else plain.faster(entry["about"].get("seconds")),
            described(entry["config"]),
            shortened(entry["about"].get("signature") or ""),
            entry["key"][0],
            remark(entry),
        )
        for entry in entries
    ]
    header = (
        *("operation", "key", "time", "over default", "over plain"),
        *("config", "call", "device", ""),
    )
    data = {"place": place.shown, "entries": [as_data(entry) for entry in entries]}
    count = f"{counted(len(entries), 'entry')} in {place.shown}"
    hint = "" if entries else "; tune something with `ejkernel tune module:function`"
    state.result(data, table(header, rows, right=(2, 3, 4), details=4), f"{count}{hint}")


@click.command()
@click.argument("key", metavar="KEY")
@options.store
@click.option("--as-code", "code", is_flag=True, help="Show it as Python text to paste.")
@options.imports
@options.with_state
def show(state: State, key: str, source: str | None, code: bool, modules: tuple[str, ...]) -> None:
    """Show an entry with all its candidates.

    KEY is what `configs list` shows, or its beginning, a label, or the name of an operation. For
    --as-code its kernel must be known: give --import MODULE if it is one of your own.
    """
    place = open_place(source)
    entry = find_entry(place, key)
    if code:
        import_modules(modules)
        text = _code(entry)
        state.result({"place": place.shown, **as_data(entry), "code": text}, text)
        return
    trials = place.trials(entry)
    data = {"place": place.shown, **as_data(entry), "trials": trials}
    state.result(data, facts(entry), *_candidates(entry, trials))


def _code(entry: Entry) -> str:
    from ...ops import Entry as TunedEntry
    from ...ops.core.kernel import kernel_named
    from ...tuning.code import as_code

    device, op_id, call_key = entry["key"]
    kernel = kernel_named(op_id)
    if kernel is None:
        raise Failure(
            f"the kernel of {op_id} is not loaded, so the class of its config is not known; "
            "--import MODULE loads it"
        )
    try:
        cfg = kernel.config_from_plain(entry["config"], entry["config_type"])
    except (TypeError, ValueError) as error:
        raise Failure(f"the config of {op_id} does not fit its kernel: {error}") from error
    about = entry["about"]
    times = (about.get("seconds"), about.get("heuristic_seconds"))
    signature = one_line(about.get("signature", ""))
    return as_code(one_line(device), [TunedEntry(op_id, call_key, cfg, signature, *times)])


@click.command()
@click.argument("what", metavar="KEY|MODULE:FUNCTION")
@options.store
@options.imports
@options.with_state
def explain(state: State, what: str, source: str | None, modules: tuple[str, ...]) -> None:
    """Say which config is used and why.

    For MODULE:FUNCTION (see `ejkernel tune --help`): what each of its operations would run with,
    and why not with something else. For the KEY of an entry: how sure it is, and whether it is
    still good; give --import MODULE if its kernel is one of your own.
    """
    is_key = ":" not in what or _LABEL.fullmatch(what)
    (_explain_entry if is_key else _explain_function)(state, what, source, modules)


def _explain_function(
    state: State, name: str, source: str | None, modules: tuple[str, ...]
) -> None:
    from ...ops import AutotunePolicy, ConfigCache, ConfigSelectorChain

    place = open_place(source, or_nowhere=True)
    if place.file is not None:
        raise click.UsageError(
            "--store: a call is explained with a store; name a bundle in EJKERNEL_CONFIG_PATH"
        )
    import_modules(modules)
    found = operations_of(load(name).lower(), name)
    policy = AutotunePolicy(allow_autotune=False, strict=False)
    selector = ConfigSelectorChain(ConfigCache(), policy, persistent=place.store)
    decisions = [selector.decide(inv, inv.kernel) for inv in invocations_of(found) if inv.kernel]
    data = [
        {
            **decision.key._asdict(),
            "signature": decision.signature,
            "config": lasting(str(decision.cfg)),
            "tier": decision.tier,
            "reason": decision.reason,
            "misses": [{"tier": m.tier, "reason": m.explain()} for m in decision.misses],
        }
        for decision in decisions
    ]
    skipped = fields_of(skipped_of(found), "label", "reason")
    shown = [str(decision.explain()) for decision in decisions]
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
    about = entry["about"]
    if about.get("estimated"):
        return [
            one_line(f"estimate  ranked by a compiler's figures for {about.get('target', '?')}")
        ]
    if about.get("seconds") is None:
        return ["origin    put there by hand: nothing was measured"]
    measured = [trial for trial in trials if trial["verdict"] == "measured"]
    rest = len(trials) - len(measured)
    clock = "device's own" if about.get("clock") == "device" else "wall"
    lines = [f"measured  {about.get('measured') or 'forward'}, by the {clock} clock"]
    if trials:
        lines.append(f"against   {len(measured) - 1} others; {rest} more could not be used")
    elif about.get("tried"):
        lines.append(f"against   {about['tried']} candidates in all")
    sure = "the winner was sure" if about.get("sure") else "the rounds ran out: others are near"
    lines.append(f"certainty {sure}")
    if about.get("incomplete"):
        lines.append(f"incomplete {about['incomplete']}; tuning it again goes on from there")
    lines += [f"note      {text}" for text in about.get("notes") or ()]
    return [one_line(line) for line in lines]


@click.command()
@click.argument("first", metavar="PLACE")
@click.argument("second", metavar="PLACE")
@options.filters
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
        present = one or other
        assert present is not None
        what = "config" if one and other else f"only in {places[0 if one else 1].shown}"
        call = shortened(present["about"].get("signature") or "")
        rows.append((key[1], key[2], what, _config(one), _config(other), call, key[0]))
        both = {"first": one and as_data(one), "second": other and as_data(other)}
        data.append({"key": list(key), **both})
    same = len({*left, *right}) - len(rows)
    counts = f"{len(rows)} different, {same} the same"
    answer = {"first": places[0].shown, "second": places[1].shown, "same": same, "differ": data}
    header = ("operation", "key", "difference", "first", "second", "call", "device")
    state.result(answer, table(header, rows, details=4), counts)
    return Exit.NOT_WELL if rows else Exit.OK


def _config(entry: Entry | None) -> str:
    if entry is None:
        return "–"
    return f"{described(entry['config'])} ({duration(entry['about'].get('seconds'))})"


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
    device, op_id, call_key = entry["key"]
    about = entry["about"]
    seconds, heuristic = about.get("seconds"), about.get("heuristic_seconds")
    gain, plain = Gain.from_plain(about.get("speedup")), _plain(entry)
    ratio = heuristic / seconds if seconds and heuristic else None
    factor, between = against_heuristic(gain, ratio, chosen=True)
    compared = [
        f"  default   {duration(heuristic)}; speedup of tuned {factor}"
        + (f" ({between})" if between else "")
    ]
    if plain is not None:
        words = plain.sentence(seconds, duration).removeprefix("plain JAX").lstrip(": ")
        compared.append(f"  plain JAX {words}")
    versions = about.get("versions") if isinstance(about.get("versions"), dict) else {}
    lines = [
        f"{op_id}({shortened(about.get('signature') or '')})",
        f"  device    {device}",
        f"  key       {call_key}",
        f"  config    {described(entry['config'])}",
        f"  time      {duration(seconds)}",
        *(compared if ratio else compared[1:]),
        f"  stored    {about.get('when', '?')} on {about.get('where') or '?'}",
    ]
    if versions:
        lines.append("  versions  " + ", ".join(f"{k} {v}" for k, v in versions.items()))
    return "\n".join(one_line(line) for line in lines)


def _candidates(entry: Entry, trials: list[dict[str, Any]]) -> list[Any]:
    if not trials:
        return []
    base, heuristic = entry["about"].get("heuristic_seconds"), entry["about"].get("heuristic")
    ranked = sorted(trials, key=lambda trial: trial["seconds"] or float("inf"))
    rows = [
        (
            described(trial["config"]),
            duration(trial["seconds"]) if trial["seconds"] else trial["verdict"],
            *_against_heuristic(trial, base, entry["config"], heuristic),
            f"{len(trial['samples_ns'])} samples" if trial["samples_ns"] else "",
            "chosen" if trial["config"] == entry["config"] else trial["reason"],
        )
        for trial in ranked
    ]
    return ["", table(("candidate", "time", "speedup", "interval", "", ""), rows, right=(1, 2))]


def _against_heuristic(
    trial: dict[str, Any], base: float | None, config: Any, heuristic: Any
) -> tuple[str, str]:
    if not trial["seconds"]:
        return "", ""
    if heuristic is not None and trial["config"] == heuristic:
        return times(1.0), ""
    ratio = base / trial["seconds"] if base else None
    gain = Gain.from_plain(trial.get("speedup"))
    return against_heuristic(gain, ratio, chosen=trial["config"] == config)


def _plain(entry: Entry) -> PlainJax | None:
    return PlainJax.from_plain(entry["about"].get("plain"))
