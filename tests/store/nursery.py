"""A process that has imported everything and forks: each child starts in milliseconds.

Tests run code in such children when it must be killed, lose its rights, or run many times at once.
The code runs with `args` and the names below at hand; what it assigns to `result` comes back, with
the warnings that ejkernel logged.
"""

from __future__ import annotations

import json
import logging
import os
import pathlib
import subprocess
import sys
import textwrap
import traceback
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Nursery:
    """The parent's end."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str, *, uid: int | None = None, **args: Any) -> Outcome:
        """Run code in a child; `uid` makes it another user (only root can ask for that)."""
        job = {"code": textwrap.dedent(code), "args": args, "uid": uid}
        self.process.stdin.write(json.dumps(job, default=str) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        assert answer["error"] is None, answer["error"]
        return Outcome(answer)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(30)


class Outcome:
    def __init__(self, answer: dict[str, Any]) -> None:
        self.result = answer["result"]
        self.warnings: list[str] = answer["warnings"]


# --- the other end -------------------------------------------------------------------------------


def _serve() -> None:
    import random
    import resource
    import signal
    import time

    import ejkernel.ops
    import ejkernel.store.backends
    from ejkernel.ops import FwdParams, PersistentCache
    from ejkernel.store import StoreError

    names = {
        "FwdParams": FwdParams,
        "PersistentCache": PersistentCache,
        "StoreError": StoreError,
        "json": json,
        "ops": ejkernel.ops,
        "os": os,
        "pathlib": pathlib,
        "random": random,
        "resource": resource,
        "signal": signal,
        "time": time,
    }
    for line in sys.stdin:
        job = json.loads(line)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            answer = _live(job, names)
            with os.fdopen(writing, "w") as stream:
                stream.write(json.dumps(answer, default=str))
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as stream:
            text = stream.read()
        os.waitpid(child, 0)
        died = {"result": None, "warnings": [], "error": "the child died without an answer"}
        print(json.dumps(json.loads(text) if text else died), flush=True)


def _live(job: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    warnings: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    logging.getLogger("ejkernel").addHandler(Collect(logging.WARNING))
    space = {**names, "args": job["args"], "warnings": warnings, "result": None}
    error = None
    try:
        if job["uid"] is not None:
            os.setgroups([])
            os.setgid(job["uid"])
            os.setuid(job["uid"])
        exec(compile(job["code"], "<nursery>", "exec"), space)
    except BaseException:  # noqa: BLE001  it goes to the test
        error = traceback.format_exc()
    return {"result": space["result"], "warnings": warnings, "error": error}


if __name__ == "__main__":
    _serve()
