"""Folders and URLs; passwords that nobody reads; servers that do not answer."""

from __future__ import annotations

import importlib.util
import logging
import pathlib
import socket
import subprocess
import sys
import traceback
import urllib.parse

import pytest
from conftest import PASSWORD

from ejkernel.ops import ConfigCache, ConfigSelectorChain, PersistentCache, default_executor
from ejkernel.store import ServerLocation, StoreError, locate

ROOT = pathlib.Path(__file__).resolve().parents[2]
ENCODED = urllib.parse.quote(PASSWORD, safe="")


def everything_said(error):
    """All that a traceback, a log or a debugger would show of an exception."""
    texts = ["".join(traceback.format_exception(error)), str(error), repr(error), repr(error.args)]
    for chained in (error.__cause__, error.__context__):
        if chained is not None:
            texts.append(everything_said(chained))
    return "\n".join(texts)


def shows_password(text):
    parts = (PASSWORD, ENCODED, "s3cret", urllib.parse.quote_plus(PASSWORD), repr(PASSWORD)[1:-1])
    return any(part in text for part in parts)


# --- folders -------------------------------------------------------------------------------------


def test_nothing_is_imported_or_touched_to_find_nothing(tmp_path):
    code = """
import sys
from ejkernel.ops import PersistentCache
cache = PersistentCache(sys.argv[1])
assert cache.get("cpu|x", "op@v1", "0" * 16) is None
assert "key" not in cache
assert (len(cache), cache.keys(), cache.trials("key")) == (0, [], [])
cache.clear()
print(sorted({"sqlalchemy", "sqlite3", "psycopg"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "a" / "b"],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
    )
    assert done.stdout == "[]\n"
    assert list(tmp_path.iterdir()) == []


def test_a_url_of_an_sqlite_file(tmp_path):
    cache = PersistentCache(f"sqlite:///{tmp_path}/my configs.db")
    cache.put("key", 1)
    assert cache.path == tmp_path
    assert (tmp_path / "my configs.db").exists()
    assert PersistentCache(f"sqlite:///{tmp_path}/my configs.db").get("key") == 1
    assert PersistentCache(tmp_path).get("key") is None


def test_without_a_home_the_default_store_says_what_to_set(monkeypatch, caplog):
    def nowhere(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("EJKERNEL_CACHE_DIR")
    monkeypatch.setattr(pathlib.Path, "expanduser", nowhere)
    with pytest.raises(StoreError, match="set EJKERNEL_CACHE_DIR"):
        PersistentCache()
    assert default_executor().selector.persistent is None
    assert len(caplog.records) == 1


@pytest.mark.parametrize("folder", ["a b", "a?b=c", "a#b", "a%20b", "ä☃"])
def test_any_name_can_be_a_folder(tmp_path, folder):
    PersistentCache(tmp_path / folder).put("key", 1)
    assert PersistentCache(tmp_path / folder).get("key") == 1
    assert [p.name for p in tmp_path.iterdir()] == [folder]


# --- URLs that are not understood ----------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql+psycopg://me:{PASSWORD}@host:port/db",
        "postgresql+psycopg://me:s3cret@host:s3cret/db",
        "mysql://me:s3cret@host/db",
        "postgresql+asyncpg://me:s3cret@host/db",
        "://s3cret",
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:////a?password=s3cret",
    ],
)
def test_a_url_that_is_not_understood_is_refused_without_its_password(url):
    with pytest.raises(ValueError, match="PersistentCache") as caught:
        PersistentCache(url)
    assert not shows_password(everything_said(caught.value))


def test_a_missing_driver_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"psycopg.*\[postgres\]"):
        PersistentCache("postgresql+psycopg://me@host/db")


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_the_usual_schemes_mean_the_one_driver(scheme):
    location = locate(f"{scheme}://me@host/db")
    assert isinstance(location, ServerLocation)
    assert location.url.drivername == "postgresql+psycopg"


# --- passwords -----------------------------------------------------------------------------------


def test_a_password_is_shown_nowhere():
    url = f"postgresql+psycopg://me:{ENCODED}@host/db?sslpassword={ENCODED}&sslmode=require"
    cache = PersistentCache(url)
    location = locate(url)
    for text in (repr(cache), str(cache.path), repr(location), str(location), location.shown):
        assert not shows_password(text)
        assert "me" in text
        assert "host" in text
    assert location.shown == ("postgresql+psycopg://me:***@host/db?sslmode=require&sslpassword=***")


@pytest.mark.parametrize(
    ("password", "text", "expected"),
    [
        ("hunter22", "login hunter22 failed: xhunter22x", "login *** failed: x***x"),
        ("a", "a man a plan", "*** man *** plan"),
        ("p@ss word", "p%40ss%20word or p%40ss+word or p@ss word", "*** or *** or ***"),
        ("quo'te", 'got "quo\'te"', 'got "***"'),
    ],
)
def test_what_a_server_says_is_scrubbed(password, text, expected):
    location = locate(f"postgresql+psycopg://me:{urllib.parse.quote(password, safe='')}@host/db")
    assert location.scrub(text) == expected


def closed_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def unreachable(server):
    return f"postgresql+psycopg://tuner:{ENCODED}@127.0.0.1:{closed_port()}/postgres"


def wrong_password(server):
    return f"postgresql+psycopg://tuner:{ENCODED}x@127.0.0.1:{server.port}/postgres"


def no_such_database(server):
    return f"postgresql+psycopg://tuner:{ENCODED}@127.0.0.1:{server.port}/nowhere"


def no_such_parameter(server):
    return f"{server.new_url()}&no_such_parameter={ENCODED}&sslpassword={ENCODED}"


def no_such_host(server):
    return f"postgresql+psycopg://tuner:{ENCODED}@no-such-host.invalid/db"


@pytest.mark.parametrize(
    "broken", [unreachable, wrong_password, no_such_database, no_such_parameter, no_such_host]
)
def test_a_server_that_cannot_be_used_costs_one_warning(server, broken, caplog):
    cache = PersistentCache(broken(server))
    with caplog.at_level(logging.DEBUG):
        assert cache.get("key") is None
        assert cache.get("key") is None
        assert (len(cache), cache.keys(), cache.trials("key")) == (0, [], [])
        with pytest.raises(StoreError) as caught:
            cache.put("key", 1)
        cache.warn(caught.value, "again")
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "***" in warnings[0].getMessage()
    assert not shows_password(everything_said(caught.value))
    assert not shows_password("\n".join(r.getMessage() for r in caplog.records))
    cache.close()


def test_nobody_waits_twice_for_a_server_that_does_not_answer(caplog):
    with socket.socket() as silent:  # accepts nobody, answers nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen(1)
        port = silent.getsockname()[1]
        cache = PersistentCache(f"postgresql+psycopg://me@127.0.0.1:{port}/db?connect_timeout=2")
        assert cache.get("key") is None
        silent.close()
        assert [cache.get("key") for _ in range(100)] == [None] * 100
    assert len(caplog.records) == 1


# --- servers -------------------------------------------------------------------------------------


def test_a_read_makes_no_tables(server):
    url = server.new_url()
    cache = PersistentCache(url)
    assert cache.get("key") is None
    assert len(cache) == 0
    cache.clear()
    assert tables(server, url) == set()
    cache.put("key", 1)
    assert tables(server, url) == {"ejkernel_meta", "ejkernel_entries", "ejkernel_trials"}
    cache.close()


def schema_of(url):
    return url.rpartition("search_path%3D")[2]


def tables(server, url):
    found = server.execute(
        "SELECT table_name FROM information_schema.tables WHERE table_schema = %s", schema_of(url)
    )
    return {name for (name,) in found}


def test_a_connection_that_the_server_ended_is_made_again(server, caplog):
    cache = PersistentCache(server.new_url())
    cache.put("key", 1)
    for value in (2, 3):
        server.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'ejkernel'"
        )
        assert cache.get("key") == value - 1
        server.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'ejkernel'"
        )
        cache.put("key", value)
    assert cache.get("key") == 3
    assert caplog.records == []
    cache.close()


def test_tables_that_were_dropped_are_made_again(server, caplog):
    url = server.new_url()
    cache = PersistentCache(url)
    cache.put("key", 1)
    for table in ("trials", "entries", "meta"):
        server.execute(f"DROP TABLE {schema_of(url)}.ejkernel_{table}")
    assert cache.get("key") is None
    cache.put("key", 2)
    assert cache.get("key") == 2
    assert caplog.records == []
    cache.close()


def test_a_user_who_may_only_read_reads(server, caplog):
    url = server.new_url()
    PersistentCache(url).put("key", 1)
    schema = schema_of(url)
    server.execute("DROP ROLE IF EXISTS guest")
    server.execute("CREATE ROLE guest LOGIN PASSWORD 'guest'")
    server.execute(f"GRANT USAGE ON SCHEMA {schema} TO guest")
    server.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO guest")
    cache = PersistentCache(url.replace(f"tuner:{ENCODED}", "guest:guest"))
    assert cache.get("key") == 1
    with pytest.raises(StoreError, match="permission denied") as caught:
        cache.put("key", 2)
    assert type(caught.value).__name__ == "StoreReadOnly"
    assert cache.get("key") == 1
    assert caplog.records == []
    cache.close()


def test_a_selector_takes_a_url(server):
    url = server.new_url()
    selector = ConfigSelectorChain(ConfigCache(), persistent=url)
    selector.persistent.put("cpu|x", "op@v1", "0" * 16, {"a": 1})
    assert selector.known_config("op@v1", "0" * 16, "cpu|x") == {"a": 1}
    assert not shows_password(repr(selector.persistent))
    selector.persistent.close()
