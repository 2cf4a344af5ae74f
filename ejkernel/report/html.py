"""A run as one HTML page that needs nothing else: no network, no other file, not even scripts.

Scripts add tabs, tooltips and the choice of theme. The page's own policy lets no other script run
and nothing be loaded, so that a text that slipped through unescaped could not do anything.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from ..markup import Markup, joined, tag
from .certainty import certainty
from .operations import operation_card
from .record import Operation, Run
from .summary import summary
from .widgets import card, facts

OPEN_AT_FIRST = 2  # operations whose candidates are shown without a click


def page(run: Run) -> str:
    """The whole document."""
    style, script = _file("page.css"), _file("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content="ejkernel"),
        tag("link", rel="icon", href="data:,"),
        tag("title", f"Tuning report: {run.title}"),
        tag("style", Markup(style)),
    )
    panels = [
        ("summary", "Summary", summary(run)),
        ("operations", "Operations", _operations(run)),
        ("sure", "How sure", certainty(run)),
        ("environment", "Environment", _environment(run)),
    ]
    tabs = [
        tag(
            "button",
            title,
            type="button",
            role="tab",
            id=f"tab-{name}",
            aria_controls=name,
            aria_selected="true" if i == 0 else "false",
            tabindex="0" if i == 0 else "-1",
        )
        for i, (name, title, _) in enumerate(panels)
    ]
    version = run.environment.get("ejkernel", "")
    body = tag(
        "body",
        _head_of_page(run),
        tag("nav", tag("div", *tabs, role="tablist", aria_label="Parts of the report")),
        tag(
            "main",
            *(
                tag("section", content, id=name, role="tabpanel", aria_labelledby=f"tab-{name}")
                for name, _, content in panels
            ),
        ),
        tag("footer", " ".join(["Made by ejkernel", version, "·", run.created])),
        tag("div", id="tip", role="tooltip", hidden=True),
        tag("script", Markup(script)),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _head_of_page(run: Run) -> Markup:
    return tag(
        "header",
        tag(
            "div",
            tag("p", "ejkernel · tuning report", class_="brand"),
            tag("h1", run.title),
            tag("p", tag("code", run.device), " · ", run.created[:10], class_="soft"),
        ),
        tag(
            "button",
            "◐",
            type="button",
            id="theme",
            aria_label="Change between light and dark",
            title="Light or dark",
        ),
    )


def _operations(run: Run) -> Markup:
    if not run.operations:
        return card(None, tag("p", "No operation was tuned."))
    return joined(
        operation_card(operation, f"operation-{i + 1}", i < OPEN_AT_FIRST)
        for i, operation in enumerate(run.operations)
    )


def _environment(run: Run) -> Markup:
    known = {"created": run.created, "command": run.command, "store": run.store, **run.environment}
    origins = [
        (joined([o.name, tag("small", o.call_key)]), _origin(o, run)) for o in run.operations
    ]
    return joined(
        [
            card(
                "Where it was done", facts((name, value) for name, value in known.items() if value)
            ),
            card("Where each result comes from", facts(origins)) if origins else None,
        ]
    )


def _origin(operation: Operation, run: Run) -> str:
    words = operation.origin or "in the store"
    if operation.when and operation.when not in words:
        words += f"; stored on {operation.when} by {operation.where or 'an unknown host'}"
    other = ", ".join(
        f"{name} {value}"
        for name, value in operation.versions.items()
        if value and run.environment.get(name) not in (None, value)
    )
    return f"{words}; measured with {other}" if other else words
