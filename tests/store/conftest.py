"""A PostgreSQL server of our own, a process that forks, and stores of both kinds."""

from __future__ import annotations

import glob
import os
import pathlib
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.parse
import uuid
import warnings

import pytest
from nursery import Nursery

from ejkernel.ops import PersistentCache

PASSWORD = "s3cret p@ss:w/rd%41#?&"  # everything that a URL has to escape


class Server:
    """A private PostgreSQL on the loopback interface."""

    def __init__(self, binaries: pathlib.Path) -> None:
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="ejkernel-postgres-"))
        self.port = _free_port()
        self._identity = {}
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            user = _unprivileged_user()
            self._identity = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
            os.chown(self.folder, user.pw_uid, user.pw_gid)
        password = self.folder / "password"
        password.write_text(PASSWORD)
        password.chmod(0o644)
        self._run(
            *(binaries / "initdb", "-D", self.folder / "data", "-U", "tuner", "-E", "UTF8"),
            *("--auth=scram-sha-256", f"--pwfile={password}", "--no-sync"),
        )
        password.unlink()
        self._start(binaries)

    def _run(self, *command: object) -> None:
        done = subprocess.run(
            list(map(str, command)), cwd="/", capture_output=True, text=True, **self._identity
        )
        assert done.returncode == 0, done.stderr

    def _start(self, binaries: pathlib.Path) -> None:
        self._log = open(self.folder / "log", "w")  # noqa: SIM115  closed in stop
        # Stopped even if this process is killed, where the system can do that.
        wrapper = ["setpriv", "--pdeathsig", "INT"] if shutil.which("setpriv") else []
        self.process = subprocess.Popen(
            [
                *wrapper,
                *(binaries / "postgres", "-D", self.folder / "data", "-k", self.folder),
                *("-h", "127.0.0.1", "-p", str(self.port), "-c", "fsync=off"),
            ],
            cwd="/",
            stdout=self._log,
            stderr=self._log,
            **self._identity,
        )
        import psycopg

        for _ in range(300):
            try:
                psycopg.connect(self.address()).close()
                return
            except psycopg.OperationalError:
                time.sleep(0.1)
        raise AssertionError((self.folder / "log").read_text())

    def address(self, database: str = "postgres") -> str:
        password = urllib.parse.quote(PASSWORD, safe="")
        return f"postgresql://tuner:{password}@127.0.0.1:{self.port}/{database}"

    def execute(self, statement: str, *parameters: object) -> list[tuple]:
        import psycopg

        with psycopg.connect(self.address(), autocommit=True) as connection:
            cursor = connection.execute(statement, parameters or None)
            return cursor.fetchall() if cursor.description else []

    def new_url(self) -> str:
        """The URL of a place with nothing in it."""
        name = f"test_{uuid.uuid4().hex}"
        self.execute(f"CREATE SCHEMA {name}")
        path = urllib.parse.quote(f"-csearch_path={name}")
        return f"{self.address().replace('postgresql', 'postgresql+psycopg')}?options={path}"

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _unprivileged_user() -> pwd.struct_passwd:
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    return pwd.getpwuid(65534)


def find_binaries() -> pathlib.Path | None:
    on_path = shutil.which("initdb")
    places = [pathlib.Path(on_path).resolve().parent] if on_path else []
    places += map(pathlib.Path, sorted(glob.glob("/usr/lib/postgresql/*/bin"), reverse=True))
    return next((p for p in places if (p / "initdb").exists() and (p / "postgres").exists()), None)


@pytest.fixture(scope="session")
def server():
    binaries = find_binaries()
    if binaries is None:
        message = (
            "NOT TESTED: stores on PostgreSQL. No server was found (initdb and postgres, on the "
            "PATH or in /usr/lib/postgresql/*/bin); on Debian: apt-get install postgresql"
        )
        warnings.warn(message, stacklevel=1)
        pytest.skip(message)
    running = Server(binaries)
    yield running
    running.stop()


@pytest.fixture(scope="session")
def nursery():
    started = Nursery()
    yield started
    started.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request, tmp_path):
    """What `PersistentCache` takes: a folder, or a URL."""
    if request.param == "sqlite":
        return tmp_path / "store"
    return request.getfixturevalue("server").new_url()


@pytest.fixture
def cache(place):
    opened = PersistentCache(place)
    yield opened
    opened.close()


@pytest.fixture
def anywhere():
    """A folder that every user can reach: pytest's own are closed to others."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="ejkernel-test-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)
