"""The dashboard's own pages: the index, its live part, and messages; in the report's style."""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import re
import time
import urllib.parse
from importlib import resources
from typing import Any

from .. import __version__
from ..formatting import counted, duration, shortened, speedup
from ..markup import Markup, joined, tag
from ..ops.tuner.progress_file import TuningProgress
from ..report import Run, render
from ..report.widgets import card, chip
from .contents import Contents, RecordedRun, StoredDevice, attempt

COMMON_POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
LONGEST_SIGNATURE = 160
MOST_NAMES = 6  # operations of a device that are named


@dataclasses.dataclass(frozen=True)
class Page:
    """A document, and the policy that lets it do what it needs and nothing else."""

    html: str
    policy: str = COMMON_POLICY


# --- pages ---------------------------------------------------------------------------------------


def index(contents: Contents) -> Page:
    """What runs now, what ran before, and what is stored."""
    runs, no_runs = attempt(contents.runs)
    devices, no_store = attempt(contents.devices)
    place = "no store" if contents.store is None else str(contents.store.path)
    return _document(
        "Tuning runs",
        tag("p", "Stored in ", tag("code", place), class_="soft"),
        live(contents),
        tag("section", _runs(runs, no_runs), id="runs"),
        tag("section", _stored(devices, no_store), id="stored"),
        script=_file("dashboard", "live.js"),
    )


def live(contents: Contents) -> Markup:
    """The part of the index that its script asks for again and again."""
    now = time.time()
    progress = contents.running()
    shown = [progress_card(each, now) for each in progress] or [
        tag("p", "No tuning run is under way.", class_="soft idle")
    ]
    version, _ = attempt(lambda: [contents.version()])
    return tag("section", *shown, id="live", data_version="".join(version))


def report(run: Run) -> Page:
    """The report of a run, with a way back to the index."""
    html = render(run, "html")
    back = tag("p", tag("a", "← All runs", href="/"), class_="soft")
    # The report says itself what it may do, before anything that somebody else has named.
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    own = policy[1].replace("&#x27;", "'") if policy else "default-src 'none'"
    return Page(html.replace("<body>", f"<body>{back}", 1), f"{own}; frame-ancestors 'none'")


def message(title: str, text: str) -> Page:
    """A page that says one thing."""
    return _document(title, card(None, tag("p", text), tag("p", tag("a", "All runs", href="/"))))


def _document(title: str, *content: Any, script: str = "") -> Page:
    style = _file("report", "page.css") + _file("dashboard", "index.css")
    scripts = [_file("report", "page.js"), *filter(None, [script])]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", f"{title} · ejkernel"),
        tag("style", Markup(style)),
    )
    theme = tag(
        "button",
        "◐",
        type="button",
        id="theme",
        aria_label="Change between light and dark",
        title="Light or dark",
    )
    heading = tag("div", tag("p", "ejkernel · dashboard", class_="brand"), tag("h1", title))
    body = tag(
        "body",
        tag("header", heading, theme),
        tag("main", *content),
        tag("footer", f"ejkernel {__version__}"),
        tag("div", id="tip", role="tooltip", hidden=True),
        *(tag("script", Markup(each)) for each in scripts),
    )
    policy = (
        f"{COMMON_POLICY}; img-src data:; connect-src 'self'; style-src {_hash(style)}; "
        f"script-src {' '.join(map(_hash, scripts))}"
    )
    return Page(f"<!doctype html>\n{tag('html', head, body, lang='en')}\n", policy)


@functools.cache
def _file(package: str, name: str) -> str:
    return resources.files(f"ejkernel.{package}").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# --- parts of the index --------------------------------------------------------------------------


def progress_card(progress: TuningProgress, now: float) -> Markup:
    """A run under way: what it tunes, how far it is, what leads, how long it will take."""
    operation, _, call = progress.name.partition("(")
    call = shortened(call.removesuffix(")"))
    if len(call) > LONGEST_SIGNATURE:
        call = f"{call[:LONGEST_SIGNATURE]}…"
    name = operation.partition("@v")[0] or "A tuning run"
    number = f"operation {progress.operation} of {progress.operations}"
    facts = [
        ("doing", progress.phase),
        ("candidates tried", f"{progress.tried} of {progress.candidates}"),
        ("running for", _whole(max(1.0, now - progress.began))),
        ("time left", _left(progress.seconds_left(now))),
        ("best so far", _best(progress)),
    ]
    bar = tag(
        "progress",
        max=progress.steps or None,
        value=progress.done if progress.steps else None,
        aria_label=f"{name}: {progress.phase}",
    )
    where = f"process {progress.process.pid} on {progress.process.host}"
    return card(
        None,
        tag(
            "h2",
            tag("span", class_="pulse", aria_hidden="true"),
            name,
            " ",
            tag("span", number if progress.operation else "", class_="soft"),
        ),
        tag("p", tag("code", call)) if call else None,
        bar,
        tag("dl", *(tag("div", tag("dt", key), tag("dd", value)) for key, value in facts)),
        tag("p", tag("code", progress.best)) if progress.best else None,
        tag("p", tag("code", progress.device), " · ", where, class_="soft"),
    )


def _left(seconds: float | None) -> str:
    if seconds is None:
        return "not known yet"
    return "about a second" if seconds < 1.5 else f"about {_whole(seconds)}"


def _whole(seconds: float) -> str:
    return f"{round(seconds)} s" if seconds < 59.5 else duration(seconds)


def _best(progress: TuningProgress) -> str:
    if progress.seconds is None:
        return "nothing measured yet"
    gain = speedup(progress.heuristic_seconds, progress.seconds)
    return f"{duration(progress.seconds)}, speedup {gain}"


def _table(columns: tuple[tuple[str, str | None], ...], rows: list[Markup]) -> Markup:
    head = tag("tr", *(tag("th", name, scope="col", class_=kind) for name, kind in columns))
    return tag("table", tag("thead", head), tag("tbody", *rows), class_="overview")


def _row(columns: tuple[tuple[str, str | None], ...], first: Any, *cells: Any) -> Markup:
    return tag(
        "tr",
        tag("th", first, scope="row"),
        *(
            tag("td", cell, class_=kind, data_label=label)
            for cell, (label, kind) in zip(cells, columns[1:], strict=True)
        ),
    )


RUN_COLUMNS = (
    ("run", None),
    ("speedup", "number"),
    ("how sure", None),
    ("operations", "number"),
    ("when (UTC)", None),
    ("device", "config"),
)


def _runs(runs: list[RecordedRun], trouble: str) -> Markup:
    if trouble:
        return card("Recorded runs", tag("p", f"They cannot be read: {trouble}"))
    if not runs:
        words = "No run is recorded yet. `ejkernel tune MODULE:FUNCTION` writes a record."
        return card("Recorded runs", tag("p", words))
    return card("Recorded runs", _table(RUN_COLUMNS, [_run(run) for run in runs]))


def _run(run: RecordedRun) -> Markup:
    link = tag("a", run.title or run.name, href=run.url)
    if run.how_sure is None:
        note = joined([link, tag("small", run.error)])
        return _row(RUN_COLUMNS, note, "–", "", "", "", "")
    return _row(
        RUN_COLUMNS,
        link,
        tag("b", run.speedup),
        chip(run.how_sure),
        run.operations,
        run.created[:16].replace("T", " "),
        tag("code", run.device),
    )


STORE_COLUMNS = (("device", None), ("configs", "number"), ("operations", "config"))


def _stored(devices: list[StoredDevice], trouble: str) -> Markup:
    if trouble:
        return card("Stored configs", tag("p", f"The store cannot be read: {trouble}"))
    if not devices:
        return card("Stored configs", tag("p", "Nothing is stored yet."))
    rows = [
        _row(
            STORE_COLUMNS,
            tag("a", tag("code", device.device), href=f"/store?{_query(device.device)}"),
            device.configs,
            _named(device.operations),
        )
        for device in devices
    ]
    return card("Stored configs", _table(STORE_COLUMNS, rows))


def _query(device: str) -> str:
    return urllib.parse.urlencode({"device": device})


def _named(names: tuple[str, ...]) -> str:
    more = len(names) - MOST_NAMES
    shown = ", ".join(names[:MOST_NAMES])
    return f"{shown} and {counted(more, 'other')}" if more > 0 else shown
