"""A dashboard in a process of its own, and a tuning run in another one."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "report")]

from browser import running_browser  # noqa: E402
from dashboards import put_record, running_dashboard  # noqa: E402
from sample_runs import plain_run  # noqa: E402


@pytest.fixture(scope="session")
def browser():
    with running_browser() as running:
        yield running


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
