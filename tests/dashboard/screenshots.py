"""Pictures of the dashboard while a model is tuned: `python tests/dashboard/screenshots.py FOLDER`.

Two small models are tuned before, so that there is something recorded.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "report"))

from browser import Browser, find_browser  # noqa: E402
from dashboards import running_dashboard, wait_for  # noqa: E402

PATH = "/home/me/.cache/ejkernel/configs"  # shown instead of the temporary one


def tune(name, *arguments):
    command = [sys.executable, "-m", "ejkernel", "tune", f"transformer:{name}", "--no-bench"]
    return subprocess.Popen([*command, *arguments], cwd=HERE)


def take(folder: pathlib.Path) -> None:
    program = find_browser()
    if program is None:
        raise SystemExit("no chromium was found on the PATH")
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("feed_forward", "norms"):
        assert tune(name, "--effort", "quick").wait() == 0
    browser = Browser(program)
    try:
        with running_dashboard() as dashboard:
            pages = {
                "light": browser.open(dashboard.url, width=1100, height=760),
                "dark": browser.open(dashboard.url, width=1100, height=760, dark=True),
                "phone": browser.open(dashboard.url, width=390, height=844),
            }
            process = tune("language_model")
            # Something leads the second operation already.
            led = "/operation [2-9]/.test(document.querySelector('#live').textContent) && " \
                "/[0-9] [µm]s, /.test(document.querySelector('#live').textContent)"  # fmt: skip
            wait_for(lambda: all(page.ask(led) for page in pages.values()), seconds=600)
            for name, page in pages.items():
                page.ask(f"document.querySelector('main > .soft code').textContent = {PATH!r}")
                page.screenshot(folder / f"dashboard-{name}.png")
            process.kill()
            process.wait()
    finally:
        browser.close()


if __name__ == "__main__":
    os.environ["EJKERNEL_CACHE_DIR"] = tempfile.mkdtemp(prefix="ejkernel-dashboard-")
    take(pathlib.Path(sys.argv[1]))
