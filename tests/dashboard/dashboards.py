"""A dashboard in a process of its own, spoken to over HTTP."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import re
import signal
import subprocess
import sys
import time
import urllib.parse

from ejkernel.report.runs import runs_folder

SECONDS = 30.0


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


def put_record(name, run, folder=None):
    folder = folder or runs_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    text = run if isinstance(run, str) else run.dumps()
    (folder / f"{name}.json").write_text(text, encoding="utf-8")


def wait_for(condition, seconds=SECONDS):
    """The first true answer of a condition that is asked again and again."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, "it did not become true"
        time.sleep(0.05)
    return answer
