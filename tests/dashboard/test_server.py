"""The dashboard over real HTTP: its pages, what it refuses, how it begins and ends."""

from __future__ import annotations

import os
import pathlib
import pwd
import signal
import socket
import subprocess
import sys
import urllib.parse

import pytest
from dashboards import put_record, wait_for
from sample_runs import HOSTILE, hostile_run, plain_run

from ejkernel.cli import run
from ejkernel.ops import PersistentCache
from ejkernel.report import Run
from ejkernel.report.runs import runs_folder

TOKEN = "a-token-of-a-test-0123456789"


def put_config(device="tpu|tpu-v9", op_id="matmul@v2") -> None:
    about = {"seconds": 1e-3, "heuristic_seconds": 2e-3, "when": "2026-01-01T00:00:00+00:00"}
    PersistentCache().put(device, op_id, "0123456789abcdef", {"block": 64}, about=about)


def test_with_nothing_there_it_says_so(started):
    dashboard = started()
    page = dashboard.get("/")
    assert page.status == 200
    for words in ("No tuning run is under way", "No run is recorded yet", "Nothing is stored yet"):
        assert words in page.text
    store = dashboard.get("/store")
    assert (store.status, "Nothing is stored yet" in store.text) == (404, True)
    assert dashboard.get("/index.json").data["runs"] == []
    assert not os.path.exists(runs_folder().parent)  # looking makes nothing


def test_pages_and_json_of_runs_and_of_the_store(started):
    put_record("20260101T000000-older", Run("An older run", "cpu|x", "2026-01-01T00:00:00+00:00"))
    put_record("20260201T000000-newer", plain_run())
    put_config()
    put_config("cpu|x")
    dashboard = started()
    index = dashboard.get("/").text
    assert index.index("20260201T000000-newer") < index.index("20260101T000000-older")
    data = dashboard.get("/index.json").data
    assert [run["title"] for run in data["runs"]] == [plain_run().title, "An older run"]
    assert data["runs"][0]["device"] == plain_run().device
    assert data["runs"][0]["created"] == plain_run().created
    assert data["runs"][0]["speedup"] in index
    assert [found["device"] for found in data["store"]["devices"]] == ["cpu|x", "tpu|tpu-v9"]

    page = dashboard.get("/runs/20260201T000000-newer")
    assert page.status == 200
    assert f"Tuning report: {plain_run().title}" in page.text
    assert 'href="/"' in page.text
    text = dashboard.get("/runs/20260201T000000-newer.json").text
    assert Run.loads(text) == Run.loads(plain_run().dumps())

    for device in (None, "tpu|tpu-v9"):
        query = f"?{urllib.parse.urlencode({'device': device})}" if device else ""
        assert dashboard.get(f"/store{query}").status == 200
        stored = Run.loads(dashboard.get(f"/store.json{query}").text)
        assert stored.device == (device or "cpu|x")
        assert [operation.op_id for operation in stored.operations] == ["matmul@v2"]
        assert "backend" not in stored.environment
    assert dashboard.get("/store?device=nobody").status == 404


def test_a_new_record_and_a_new_config_are_seen(started):
    dashboard = started()
    versions = [dashboard.get("/live.json").data["version"]]
    put_record("20260101T000000-new", plain_run())
    versions.append(dashboard.get("/live.json").data["version"])
    put_config()
    versions.append(dashboard.get("/live.json").data["version"])
    assert len(set(versions)) == 3
    assert dashboard.get("/live.json").data["version"] == versions[-1]
    assert len(dashboard.get("/index.json").data["runs"]) == 1
    put_record("20260101T000000-new", Run("Another", "cpu|x", "2026-01-01"))  # written anew
    assert dashboard.get("/index.json").data["runs"][0]["title"] == "Another"


def test_a_damaged_record_is_a_message_and_takes_no_other_with_it(started):
    put_record("20260101T000000-good", plain_run())
    put_record("20260102T000000-bad", "{")
    dashboard = started()
    assert dashboard.get("/").status == 200
    bad, good = dashboard.get("/index.json").data["runs"]
    assert "is not the record of a tuning run" in bad["error"]
    assert good["error"] == ""
    page = dashboard.get("/runs/20260102T000000-bad")
    assert page.status == 500
    assert "is not the record of a tuning run" in page.text
    assert "error" in dashboard.get("/runs/20260102T000000-bad.json").data


def test_a_store_that_breaks_takes_nothing_else_with_it(started):
    put_record("20260101T000000-good", plain_run())
    put_config()
    dashboard = started()
    for file in pathlib.Path(PersistentCache().path).iterdir():
        file.write_bytes(b"no database" * 1000)
    page = dashboard.get("/")
    assert page.status == 200
    assert "The store cannot be read" in page.text or "Nothing is stored yet" in page.text
    assert "20260101T000000-good" in page.text
    assert dashboard.get("/store").status in (404, 500)
    assert dashboard.get("/live").status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/runs/..", "/runs/../secret", "/runs/..%2fsecret", "/runs/%2e%2e%2fsecret",
        "/runs/%2fetc%2fpasswd", "/runs//etc/passwd", "/runs/secret%00", "/runs/", "/secret.json",
        "/runs/..%5csecret", "/runs/.writing-1", "//evil.example/", "/static/page.css",
    ],
)  # fmt: skip
def test_nothing_else_is_served(shared, path):
    for ending in ("", ".json"):
        answer = shared.get(path + ending)
        assert answer.status == 404, answer.text
        assert plain_run().title not in answer.text


def test_links_in_the_runs_folder_are_not_followed(shared):
    answer = shared.get("/runs/link")
    assert answer.status == 500
    assert plain_run().title not in answer.text


def test_hostile_names_stay_text(started):
    put_record("hostile", hostile_run())
    put_config(HOSTILE[0], f"{HOSTILE[1]}@v1")
    dashboard = started()
    for path in ("/", "/runs/hostile", "/store"):
        text = dashboard.get(path).text
        assert "<script>alert" not in text
        assert "<img" not in text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "X"])
def test_only_reading(shared, method):
    answer = shared.get("/", method)
    assert answer.status in (400, 405)


def test_head_has_the_headers_and_no_text(shared):
    head, get = shared.get("/", "HEAD"), shared.get("/")
    assert (head.status, head.text) == (200, "")
    assert head.headers["Content-Type"] == get.headers["Content-Type"]


def test_headers(shared):
    for path in ("/", "/runs/good", "/live", "/index.json", "/nothing"):
        headers = shared.get(path, Origin="http://evil.example").headers
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'")
        assert "frame-ancestors 'none'" in policy
        scripts = policy.partition("script-src ")[2].partition(";")[0]
        assert "unsafe" not in scripts
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
        assert not [name for name in headers if name.lower().startswith("access-control")]
        assert "Server" not in headers
    assert "unsafe" not in shared.get("/").headers["Content-Security-Policy"]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("LOCALHOST:1234", 200), ("127.0.0.1:80", 200), ("[::1]:80", 200),
        ("evil.example", 421), ("evil.example:8417", 421), ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example", 421), ("localhost@evil.example", 421), ("", 421),
        ("evil.example#localhost", 421), ("[::1", 421), ("localhost/..", 421),
    ],
)  # fmt: skip
def test_a_name_of_somebody_else_is_refused(shared, host, status):
    assert shared.get("/", Host=host).status == status


def test_with_a_token(started):
    put_record("good", plain_run())
    dashboard = started("--token", TOKEN)
    assert dashboard.url.endswith(f"/?token={TOKEN}")
    for path in ("/", "/live", "/index.json", "/runs/good", "/nothing", f"/?token={TOKEN[:-1]}"):
        refused = dashboard.get(path)
        assert refused.status == 401
        assert plain_run().title not in refused.text
    assert dashboard.get("/", Cookie="ejkernel-dashboard=x", Authorization="Bearer").status == 401
    assert dashboard.get("/", Authorization=f"Bearer {TOKEN}").status == 200
    first = dashboard.get(f"/store?token={TOKEN}&device=a%26b")
    assert (first.status, first.headers["Location"]) == (303, "/store?device=a%26b")
    cookie = first.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert dashboard.get("/", Cookie=cookie.partition(";")[0]).status == 200
    elsewhere = dashboard.get(f"//evil.example/?token={TOKEN}").headers["Location"]
    assert elsewhere == "/evil.example/"


def test_another_host_makes_a_token(started):
    dashboard = started("--host", "0.0.0.0")
    token = urllib.parse.parse_qs(urllib.parse.urlsplit(dashboard.url).query)["token"][0]
    assert len(token) >= 24
    port = urllib.parse.urlsplit(dashboard.url).port
    here = type(dashboard)(dashboard.process, f"http://127.0.0.1:{port}/")
    assert here.get("/").status == 401
    assert here.get("/", Authorization=f"Bearer {token}").status == 200
    name = socket.gethostname()
    assert here.get("/", Host=name, Authorization=f"Bearer {token}").status == 200
    assert here.get("/", Host="evil.example", Authorization=f"Bearer {token}").status == 421


def test_loopback_is_the_default_and_needs_no_token(started):
    assert urllib.parse.urlsplit(started().url).hostname == "127.0.0.1"
    assert "token" not in started("--host", "localhost").url


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_cleanly(started, number):
    dashboard = started()
    where = urllib.parse.urlsplit(dashboard.url)
    with socket.create_connection((where.hostname, where.port)):  # a reader who says nothing
        assert dashboard.get("/").status == 200
        code, out, err = dashboard.end(number)
    assert code == (0 if number == signal.SIGINT else -number)
    assert out == ""
    assert err == "Ctrl-C ends it\n"


def test_a_port_in_use_and_other_bad_input_is_one_message(shared, capsys):
    port = urllib.parse.urlsplit(shared.url).port
    for arguments, words in (
        (["--port", str(port)], f"--port {port}: cannot listen there: Address already in use"),
        (["--host", "no such host"], "--host no such host"),
        (["--host", "203.0.113.7", "--port", "0"], "cannot listen there"),
        (["--port", "70000"], "--port"),
        (["--token", "short"], "--token: give at least 16"),
        (["--store", "bundle.json"], "there is no bundle"),
        (["--store", "/nowhere/at/all"], "there is no store"),
    ):
        code, said = run(["dashboard", *arguments]), capsys.readouterr()
        assert code in (2, 3, 4), said
        assert words in said.err
        assert "Traceback" not in said.err
        assert said.out == ""


def test_without_the_extra_it_says_what_to_install():
    code = (
        "import sys; sys.modules['uvicorn'] = None\n"
        "from ejkernel.cli import run; sys.exit(run(['dashboard']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 5
    assert "pip install starlette uvicorn" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_line_imports_none_of_it():
    code = (
        "import sys; from ejkernel.cli import run; run(['dashboard', '--help'])\n"
        "assert not {'starlette', 'uvicorn', 'jax'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_json_says_where_it_is():
    command = [sys.executable, "-m", "ejkernel", "dashboard", "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        lines = [process.stdout.readline() for _ in range(3)]
        assert '"url": "http://127.0.0.1:' in lines[1]
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 0


# --- live ----------------------------------------------------------------------------------------


def test_a_run_of_another_process_appears_advances_and_ends(started, tuning):
    dashboard = started()
    process = tuning()
    seen = []

    def over():
        seen.extend(dashboard.get("/live.json").data["running"])
        return process.poll() is not None

    wait_for(lambda: dashboard.get("/live.json").data["running"])
    page = dashboard.get("/").text
    assert "No tuning run is under way" not in page
    assert "<progress" in page
    wait_for(over)
    assert process.returncode == 0
    assert {progress["process"]["pid"] for progress in seen} == {process.pid}
    assert {progress["operations"] for progress in seen} == {2}
    where = [(progress["operation"], progress["tried"]) for progress in seen]
    assert where == sorted(where)
    assert len(set(where)) >= 5
    assert {progress["candidates"] for progress in seen if progress["operation"]} == {6}
    assert all(progress["name"].startswith("slow_row_sum@v1(") for progress in seen
               if progress["operation"])  # fmt: skip
    assert any(progress["seconds_left"] for progress in seen)
    data = dashboard.get("/index.json").data
    assert data["running"] == []
    assert [run["title"] for run in data["runs"]] == ["slow_model:example"]
    assert data["store"]["devices"][0]["configs"] == 2


def test_a_run_that_was_killed_disappears(started, tuning):
    dashboard = started()
    process = tuning()
    wait_for(lambda: dashboard.get("/live.json").data["running"])
    process.kill()
    process.wait()
    wait_for(lambda: not dashboard.get("/live.json").data["running"], seconds=5)


def test_ctrl_c_of_the_run_removes_it(started, tuning):
    dashboard = started()
    process = tuning()
    wait_for(lambda: dashboard.get("/live.json").data["running"])
    process.send_signal(signal.SIGINT)
    process.wait(60)
    assert dashboard.get("/live.json").data["running"] == []
    folder = runs_folder().parent / "progress"
    assert os.listdir(folder) == []


# --- without a place for anything ----------------------------------------------------------------


def test_a_user_without_a_home_folder_gets_a_page(monkeypatch):
    from ejkernel.dashboard import pages
    from ejkernel.dashboard.contents import Contents

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("EJKERNEL_CACHE_DIR")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    page = pages.index(Contents(None)).html
    assert "there is no home folder" in page
    assert "EJKERNEL_CACHE_DIR" in page
    assert "No tuning run is under way" in page


def test_a_user_whose_home_cannot_be_used_gets_a_dashboard(monkeypatch, started):
    monkeypatch.delenv("EJKERNEL_CACHE_DIR")
    monkeypatch.setenv("HOME", "/proc/nonexistent")
    dashboard = started()
    assert dashboard.get("/").status == 200
    assert dashboard.get("/live.json").data["running"] == []
    assert dashboard.get("/store").status == 404
