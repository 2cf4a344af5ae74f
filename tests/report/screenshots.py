"""Pictures of a report: `python tests/report/screenshots.py REPORT.html FOLDER [NAME]`.

NAME is what the names of the pictures begin with: `report`, or `diff` for a comparison.
"""

from __future__ import annotations

import pathlib
import sys

from browser import Browser, find_browser

# name, part, width, height, dark
PICTURES = (
    ("light", "summary", 1100, 900, False),
    ("dark", "operations", 1100, 2180, True),
    ("phone", "summary", 390, 844, False),
)


def take(report: pathlib.Path, folder: pathlib.Path, prefix: str = "report") -> None:
    program = find_browser()
    if program is None:
        raise SystemExit("no chromium was found on the PATH")
    folder.mkdir(parents=True, exist_ok=True)
    browser = Browser(program)
    try:
        for name, part, width, height, dark in PICTURES:
            page = browser.open(report, width=width, height=height, dark=dark)
            page.click(f"#tab-{part}")
            page.hover("#theme")
            page.ask("scrollTo(0, 0)")
            page.screenshot(folder / f"{prefix}-{name}.png")
    finally:
        browser.close()


if __name__ == "__main__":
    take(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), *sys.argv[3:])
