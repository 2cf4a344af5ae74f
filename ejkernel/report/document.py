"""An HTML page that needs nothing else: no network, no other file, not even scripts.

Scripts add tabs, tooltips and the choice of theme. The page's own policy lets no other script run
and nothing be loaded, so that a text that slipped through unescaped could not do anything.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources

from ..markup import Markup, tag

THEME_BUTTON = tag(
    "button",
    "◐",
    type="button",
    id="theme",
    aria_label="Change between light and dark",
    title="Light or dark",
)


def document(
    title: str, header: Sequence[Markup], panels: Sequence[tuple[str, str, Markup]], footer: str
) -> str:
    """The whole document: a header, and panels under tabs, each `(id, title, content)`."""
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
        tag("title", title),
        tag("style", Markup(style)),
    )
    tabs = [
        tag(
            "button",
            name,
            type="button",
            role="tab",
            id=f"tab-{identity}",
            aria_controls=identity,
            aria_selected="true" if i == 0 else "false",
            tabindex="0" if i == 0 else "-1",
        )
        for i, (identity, name, _) in enumerate(panels)
    ]
    sections = [
        tag("section", content, id=identity, role="tabpanel", aria_labelledby=f"tab-{identity}")
        for identity, _, content in panels
    ]
    body = tag(
        "body",
        tag("header", tag("div", *header), THEME_BUTTON),
        tag("nav", tag("div", *tabs, role="tablist", aria_label="Parts of the report")),
        tag("main", *sections),
        tag("footer", footer),
        tag("div", id="tip", role="tooltip", hidden=True),
        tag("script", Markup(script)),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
