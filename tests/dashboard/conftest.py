"""A dashboard in a process of its own, and a tuning run in another one."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import urllib.parse

import pytest

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "report")]

from browser import Browser, find_browser, running_browser  # noqa: E402, F401
from sample_runs import plain_run  # noqa: E402

from ejkernel.cli.records import runs_folder  # noqa: E402

SECONDS = 30.0


@pytest.fixture(scope="session")
def browser():
    with running_browser() as running:
        yield running


@dataclasses.dataclass(frozen=True)
class Answer:
    status: int
    headers: http.client.HTTPMessage
    text: str

    @property
    def data(self):
        return json.loads(self.text)


@dataclasses.dataclass(frozen=True)
class Dashboard:
    process: subprocess.Popen
    url: str

    def get(self, path="/", method="GET", **headers) -> Answer:
        """What is answered; nothing is followed, and a path is sent as it is."""
        where = urllib.parse.urlsplit(self.url)
        connection = http.client.HTTPConnection(where.hostname, where.port, timeout=SECONDS)
        try:
            names = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, headers=names)
            answer = connection.getresponse()
            return Answer(answer.status, answer.headers, answer.read().decode())
        finally:
            connection.close()

    def end(self, number=signal.SIGINT):
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, out, err


@contextlib.contextmanager
def running_dashboard(*arguments, **options):
    """A dashboard in a process of its own."""
    command = [sys.executable, "-m", "ejkernel", "dashboard", "--port", "0", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, **options) as process:
        try:
            line = process.stdout.readline()
            match = re.fullmatch(r"dashboard: (\S+)\n", line)
            assert match, (line, process.stderr.read())
            yield Dashboard(process, match[1])
        finally:
            process.kill()


@pytest.fixture
def started():
    """`started("--token", …)` starts a dashboard; it ends with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(running_dashboard(*arguments))


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One dashboard for the tests that only ask, with a record `good` and what is not its."""
    folder = tmp_path_factory.mktemp("cache")
    put_record("good", plain_run(), folder / "runs")
    put_record("secret", plain_run(), folder)
    (folder / "runs" / "link.json").symlink_to(folder / "secret.json")
    with running_dashboard(env={**os.environ, "EJKERNEL_CACHE_DIR": str(folder)}) as dashboard:
        yield dashboard


def put_record(name, run, folder=None):
    folder = folder or runs_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    text = run if isinstance(run, str) else run.dumps()
    (folder / f"{name}.json").write_text(text, encoding="utf-8")


@pytest.fixture
def tuning():
    """`tuning()` starts `ejkernel tune` of a slow model in another process."""
    processes = []

    def start(*arguments):
        command = [sys.executable, "-m", "ejkernel", "tune", "slow_model:example", "--no-bench"]
        process = subprocess.Popen([*command, *arguments], cwd=HERE)
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def wait_for(condition, seconds=SECONDS):
    """The first true answer of a condition that is asked again and again."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, "it did not become true"
        time.sleep(0.05)
    return answer
