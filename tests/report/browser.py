"""A real browser for tests: Debian's chromium, headless, spoken to over two pipes.

Chromium's own protocol needs nothing but JSON and two file descriptors; no driver is installed.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pathlib
import select
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 60.0


def find_browser() -> str | None:
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Browser:
    """One headless browser; `open` gives pages."""

    def __init__(self, program: str) -> None:
        self._folder = tempfile.mkdtemp(prefix="ejkernel-browser-")
        inside_read, self._to = os.pipe()
        self._from, inside_write = os.pipe()
        options = (
            "--headless --remote-debugging-pipe --no-sandbox --disable-gpu --hide-scrollbars "
            "--no-first-run --disable-extensions --disable-background-networking "
            "--disable-component-update --disable-sync --mute-audio --disable-dev-shm-usage "
            "--force-prefers-reduced-motion --font-render-hinting=none "
            "--disable-features=IsolateSandboxedIframes"  # frames of a page answer with it
        )
        # The browser reads commands from descriptor 3 and answers on 4.
        script = f'exec "$0" {options} "$@" 3<&{inside_read} 4>&{inside_write}'
        command = ["bash", "-c", script, program, f"--user-data-dir={self._folder}", "about:blank"]
        self._log = open(pathlib.Path(self._folder) / "log", "w+b")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            pass_fds=(inside_read, inside_write),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        os.close(inside_read)
        os.close(inside_write)
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Do what a method of the protocol says, and give its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            answer = self._read(deadline)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)
        raise TimeoutError(f"{method} was not answered within {SECONDS} s")

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._from], [], [], max(left, 0))
            if not ready:
                raise TimeoutError(f"the browser is silent: {self._said()}")
            data = os.read(self._from, 1 << 16)
            if not data:
                raise RuntimeError(f"the browser ended: {self._said()}")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-2000:]

    def open(
        self, file: pathlib.Path | str, *, width: int = 1100, height: int = 900, dark: bool = False
    ) -> Page:
        return Page(self, file, width, height, dark)

    def close(self) -> None:
        with contextlib.suppress(OSError, RuntimeError, TimeoutError):
            self.call("Browser.close")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def running_browser() -> Iterator[Browser]:
    """A browser for a fixture; without one, the tests that need it are skipped, and say so."""
    program = find_browser()
    if program is None:
        message = (
            "NOT TESTED: pages in a browser. No chromium was found on the PATH; on Debian: "
            "apt-get install chromium"
        )
        warnings.warn(message, stacklevel=1)
        pytest.skip(message)
    running = Browser(program)
    yield running
    running.close()


class Page:
    """A page of its own, with everything that its console said and everything it asked for."""

    def __init__(
        self, browser: Browser, file: pathlib.Path | str, width: int, height: int, dark: bool
    ) -> None:
        self._browser = browser
        # A context of its own: what one page keeps, another does not see.
        context = browser.call("Target.createBrowserContext")["browserContextId"]
        target = browser.call("Target.createTarget", url="about:blank", browserContextId=context)[
            "targetId"
        ]
        self._session = browser.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        url = file if isinstance(file, str) else file.resolve().as_uri()
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def ask(self, expression: str, context: int | None = None) -> Any:
        """The value of a JavaScript expression, or of its promise; in another frame's context."""
        more = {} if context is None else {"contextId": context}
        answer = self.call(
            "Runtime.evaluate",
            expression=expression,
            returnByValue=True,
            awaitPromise=True,
            **more,
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not self.ask(expression):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{expression} did not become true")
            time.sleep(0.05)

    def place(self, selector: str) -> tuple[float, float]:
        """The middle of an element, scrolled into view."""
        found = self.ask(
            f"(async () => {{ const e = document.querySelector({json.dumps(selector)});"
            "if (!e) return null; e.scrollIntoView({block: 'center'});"
            # What scrolling sets off is over after two frames.
            "for (const _ of [1, 2]) await new Promise(requestAnimationFrame);"
            "const b = e.getBoundingClientRect();"
            "return [b.left + b.width / 2, b.top + b.height / 2, b.width, b.height]; })()"
        )
        assert found is not None, f"there is no {selector}"
        assert found[2] > 0, f"{selector} is not visible"
        assert found[3] > 0, f"{selector} is not visible"
        return found[0], found[1]

    def hover(self, selector: str) -> None:
        x, y = self.place(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        x, y = self.place(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def shows(self, selector: str) -> bool:
        return bool(
            self.ask(
                f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
                "return !!e && e.getClientRects().length > 0; })()"
            )
        )

    def count(self, selector: str) -> int:
        return int(self.ask(f"document.querySelectorAll({json.dumps(selector)}).length"))

    def screenshot(self, file: pathlib.Path, *, whole: bool = False) -> None:
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(answer["data"]))

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, uncaught exceptions, and what the policy refused."""
        self.ask("1")  # whatever is on its way arrives before the answer
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            params = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(params["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded":
                found.append(params["entry"]["text"])
            elif event["method"] == "Runtime.consoleAPICalled":
                found.append(json.dumps(params["args"]))
        return found

    def frames(self) -> list[int]:
        """The contexts of the page and of the frames in it, in the order of their making."""
        return [
            event["params"]["context"]["id"]
            for event in self._browser.events
            if event.get("sessionId") == self._session
            and event["method"] == "Runtime.executionContextCreated"
        ]

    def requests(self) -> list[str]:
        """Every address that the page asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self._browser.events
            if event.get("sessionId") == self._session
            and event["method"] == "Network.requestWillBeSent"
        ]
