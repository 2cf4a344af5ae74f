"""One chart per operation: how many times as fast as each peer, with the spread of the rounds."""

from __future__ import annotations

import math
import pathlib
from typing import Any

from ejkernel.markup import tag

WIDTH, ROW, TOP, BOTTOM, CHARACTER = 720, 17, 34, 26, 6.9
COLOURS = ("#3f51b5", "#c4681a", "#2e7d5b")
TEXT, GRID = "#737880", "#8a8f9740"  # readable on light and on dark pages


def is_timed(row: dict[str, Any]) -> bool:
    """Whether a row compares times of runs: not memory, not the time of tracing."""
    return "MiB" not in row["name"] and not row["name"].startswith("tracing")


def speedups(row: dict[str, Any]) -> tuple[float, float, float]:
    """The median speedup over the peer (its time / ours), and its quartiles."""
    low, high = row["quartiles"]
    return 1 / row["median"], 1 / high, 1 / low


def chart(rows: list[dict[str, Any]], title: str) -> str:
    """An SVG picture: a line for each call, a mark for each peer, on a logarithmic axis."""
    rows = [row for row in rows if is_timed(row)]
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    calls = list(dict.fromkeys(row["name"] for row in rows))
    labels = 16 + CHARACTER * max(map(len, calls))
    ends = [end for row in rows for end in speedups(row)[1:]]
    least, most = math.log2(min(*ends, 0.8)), math.log2(max(*ends, 2.0))

    def across(speedup: float) -> float:
        return labels + (math.log2(speedup) - least) / (most - least) * (WIDTH - labels - 20)

    height = TOP + ROW * len(calls) + BOTTOM
    parts = []
    for i, peer in enumerate(peers):
        x = labels + 170 * i
        parts.append(_shape("circle", cx=x, cy=12, r=4, fill=COLOURS[i % 3]))
        parts.append(_text(x + 9, 16, f"versus {peer}"))
    for power in range(math.ceil(least), math.floor(most) + 1):
        x = across(2.0**power)
        stroke = TEXT if power == 0 else GRID
        parts.append(_shape("line", x1=x, x2=x, y1=TOP - 8, y2=height - BOTTOM + 4, stroke=stroke))
        parts.append(_text(x, height - 8, f"{2.0**power:g}×", anchor="middle"))
    for row in rows:
        y = TOP + ROW * (calls.index(row["name"]) + 0.5)
        colour = COLOURS[peers.index(row["peer"]) % 3]
        middle, low, high = speedups(row)
        drawn = [
            _shape("line", x1=across(low), x2=across(high), y1=y, y2=y, stroke=colour, width=2),
            _shape("circle", cx=across(middle), cy=y, r=4, fill=colour),
        ]
        said = f"{row['name']}: {middle:.2f}× ({low:.2f}–{high:.2f}) versus {row['peer']}"
        parts.append(tag("g", tag("title", said), *drawn))
    parts.append(_text(labels - 12, height - 8, "its time / ours", anchor="end"))
    for i, call in enumerate(calls):
        parts.append(_text(labels - 12, TOP + ROW * (i + 0.5) + 4, call, anchor="end"))
    return str(
        tag(
            "svg",
            tag("title", f"{title}: speedup over each peer"),
            *parts,
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {WIDTH} {height}",
            width=str(WIDTH),
            height=str(height),
            role="img",
        )
    )


def _shape(name: str, *, width: float | None = None, **attributes: Any) -> Any:
    given = {key: f"{v:.1f}" if isinstance(v, float) else str(v) for key, v in attributes.items()}
    return tag(name, **given, **({} if width is None else {"stroke-width": str(width)}))


def _text(x: float, y: float, text: str, anchor: str = "start") -> Any:
    fixed = {"font-family": "system-ui, sans-serif", "font-size": "12", "text-anchor": anchor}
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", fill=TEXT, **fixed)


def write(rows: list[dict[str, Any]], folder: pathlib.Path) -> list[str]:
    """A chart for each operation, as a file; the operations' names."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(row["operation"] for row in rows))
    for name in names:
        mine = [row for row in rows if row["operation"] == name]
        (folder / f"{name}.svg").write_text(chart(mine, name) + "\n", encoding="utf-8")
    return names
