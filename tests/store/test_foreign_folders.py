"""Native libraries, the crash journal and records: nobody else's, private, and what was checked.

Everything is tried with real users; without root there are none to try it with.
"""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import warnings

import pytest

from ejkernel.native import Library, building, loading, toolchain
from ejkernel.ops.tuner.isolation.journal import Journal
from ejkernel.report import Run
from ejkernel.store.private import FolderRefused, PrivateFolder

ROOT = pathlib.Path(__file__).parents[2]
ALICE, MALLORY = 12345, 23456
SOURCE = """
extern "C" __attribute__((visibility("default"))) int which() {{ return {}; }}
"""

if os.name != "posix" or os.geteuid() != 0:
    message = "NOT TESTED: folders of other users. Only root can make some"
    warnings.warn(message, stacklevel=1)
    pytest.skip(message, allow_module_level=True)


@pytest.fixture
def anywhere():
    """A folder that every user can reach: pytest's own are closed to others."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="ejkernel-test-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def compiler():
    found = toolchain.find_compiler()
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.fixture
def library(tmp_path):
    """One that compiles at once, and says which one it is."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "tiny.cc").write_text(SOURCE.format(1))
    return Library("tiny", folder / "tiny.cc", ("which",))


def another(compiler, folder):
    """A library that says that it is another one."""
    (folder / "planted.cc").write_text(SOURCE.format(666))
    command = [*compiler.command, "-shared", "-fPIC", "planted.cc", "-o", "planted.so"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "planted.so"


def modes(folder):
    """What is in a folder, and what others may do with it."""
    found = {p.relative_to(folder).as_posix(): p.lstat().st_mode for p in folder.rglob("*")}
    found["."] = folder.stat().st_mode
    return {name: oct(stat.S_IMODE(mode)) for name, mode in found.items()}


# --- the folder ----------------------------------------------------------------------------------

SITUATIONS = {
    "a folder above of somebody else": lambda cache, place: os.chown(cache, ALICE, ALICE),
    "one with the sticky bit": lambda cache, place: (
        os.chown(cache, ALICE, ALICE),
        cache.chmod(0o1777),
    ),
    "a folder of somebody else": lambda cache, place: os.chown(place, ALICE, ALICE),
    "a folder of somebody else, closed": lambda cache, place: (
        os.chown(place, ALICE, ALICE),
        place.chmod(0o700),
    ),
    "a folder that everyone may write": lambda cache, place: place.chmod(0o777),
    "a folder that everyone may write, sticky": lambda cache, place: place.chmod(0o1777),
    "a link of somebody else": lambda cache, place: (
        place.rename(cache / "real"),
        place.symlink_to(cache / "real"),
        os.lchown(place, ALICE, ALICE),
    ),
    "a link of somebody else two folders above": lambda cache, place: (
        cache.parent.rename(cache.parent.with_name("real")),
        cache.parent.symlink_to("real"),
        os.lchown(cache.parent, ALICE, ALICE),
    ),
    "a link of ours to a folder of somebody else": lambda cache, place: (
        place.rename(cache / "real"),
        place.symlink_to(cache / "real"),
        os.chown(cache / "real", ALICE, ALICE),
    ),
}


@pytest.mark.parametrize("situation", SITUATIONS.values(), ids=SITUATIONS)
def test_a_foreign_folder_is_refused(situation, tmp_path):
    cache = tmp_path / "above" / "cache"
    with PrivateFolder.open(cache / "place", create=True) as folder:
        folder.write("mine", b"1")
        assert folder.read("mine") == b"1"
    situation(cache, cache / "place")
    for create in (False, True):
        with pytest.raises(FolderRefused, match="EJKERNEL_CACHE_DIR"):
            PrivateFolder.open(cache / "place", create=create)


def test_a_link_of_ones_own_to_a_folder_of_ones_own_is_used(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with PrivateFolder.open(tmp_path / "link") as folder:
        folder.write("a", b"1")
    assert (tmp_path / "real" / "a").read_bytes() == b"1"


def test_a_folder_that_is_swapped_after_the_check_is_not_written(tmp_path):
    place, theirs = tmp_path / "place", tmp_path / "theirs"
    theirs.mkdir()
    with PrivateFolder.open(place, create=True) as folder:
        place.rename(tmp_path / "moved")
        place.symlink_to(theirs)
        folder.write("a", b"1")
        with folder.inner("inside", create=True) as inside:
            inside.write("b", b"2")
        assert folder.names() == ["a", "inside"]
    assert list(theirs.iterdir()) == []


PLANTED = {
    "of somebody else": lambda file, target: (file.write_text("x"), os.chown(file, ALICE, ALICE)),
    "writable for everyone": lambda file, target: (file.write_text("x"), file.chmod(0o666)),
    "a link": lambda file, target: file.symlink_to(target),
    "a pipe": lambda file, target: os.mkfifo(file),
    "a folder": lambda file, target: file.mkdir(),
    "a device": lambda file, target: os.mknod(file, stat.S_IFCHR | 0o600, os.makedev(1, 5)),
}


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_a_planted_file_is_not_read(plant, tmp_path):
    (tmp_path / "target").write_text("secret")
    with PrivateFolder.open(tmp_path / "place", create=True) as folder:
        try:
            plant(tmp_path / "place" / "file", tmp_path / "target")
        except PermissionError:
            pytest.skip("NOT TESTED: devices cannot be made here")
        with pytest.raises((OSError, ValueError)):
            folder.read("file")
        if not (tmp_path / "place" / "file").is_dir():
            with pytest.raises(FolderRefused):
                folder.inner("file")
    assert (tmp_path / "target").read_text() == "secret"


# --- the umask -----------------------------------------------------------------------------------

MAKE = """
import os, pathlib, sys
from ejkernel.native import Library, building
from ejkernel.ops import PersistentCache
from ejkernel.ops.tuner.isolation.journal import Journal
from ejkernel.report import Run
from ejkernel.cli.records import save_record
library = Library("tiny", pathlib.Path(sys.argv[1]), ("which",))
alive = []

def use(cache):
    os.environ["EJKERNEL_CACHE_DIR"] = cache
    alive.append(PersistentCache())
    alive[-1].put("key", {"a": 1})
    journal = Journal()
    alive.append(journal.about_to_run("k", "c"))
    alive[-1].__enter__()
    assert journal.culprits() == []
    assert save_record(Run("t", "d", "now"), None)
    assert building.build_library(library) == building.find(library)
    assert PersistentCache().get("key") == {"a": 1}

use(sys.argv[2])  # everything is imported: others cannot read all of it
os.setgroups([]), os.setgid(23456), os.setuid(23456)
for umask in ("000", "022", "277", "777"):
    os.umask(int(umask, 8))
    use(f"{sys.argv[3]}/{umask}/.cache/ejkernel")
os._exit(0)  # with notes that stand and stores that are open: their logs are there to be seen
"""


def test_everything_is_private_whatever_the_umask(anywhere, library, compiler, tmp_path):
    os.chown(anywhere, MALLORY, MALLORY)
    source = anywhere / "source" / "tiny.cc"
    source.parent.mkdir()
    shutil.copy(library.source, source)
    source.chmod(0o644)
    done = subprocess.run(
        [sys.executable, "-c", MAKE, str(source), str(tmp_path), str(anywhere)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "TMPDIR": "/tmp"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    for umask in ("000", "022", "277", "777"):
        found = modes(anywhere / umask)
        for kind in ("configs/configs.sqlite3-wal", "runs/", "native/tiny", "journal/running/"):
            assert any(name.startswith(f".cache/ejkernel/{kind}") for name in found), kind
        assert set(found.values()) <= {"0o700", "0o600"}, found


# --- the journal ---------------------------------------------------------------------------------


def note(**changes):
    about = {"key": "k", "config": "c", "when": "2026-01-01T00:00:00+00:00", "host": "h"}
    return json.dumps({**about, "pid": 1, "started": "", "boot": "", "namespace": "", **changes})


def test_a_link_in_the_place_of_running_moves_nothing_of_anybody(tmp_path):
    other = tmp_path / "other program"
    other.mkdir()
    for name in ("1.json", "2.json", ".writing-old"):
        (other / name).write_text("damaged" if name == "1.json" else note())
        os.utime(other / name, (0, 0))
    journal = Journal(tmp_path / "journal")
    (tmp_path / "journal").mkdir()
    for inner in ("running", "crashed", "damaged"):
        (tmp_path / "journal" / inner).symlink_to(other)
    before = {path.name: path.read_text() for path in other.iterdir()}
    with pytest.warns(RuntimeWarning, match="not used"):
        assert journal.culprits() == []
    ran = []
    with (
        pytest.warns(RuntimeWarning, match="cannot be written"),
        Journal(tmp_path / "journal").about_to_run("k", "c"),
    ):
        ran.append(1)
    assert ran == [1]
    assert journal.crashed("k", "c") is None
    assert journal.crash_files() == []
    assert {path.name: path.read_text() for path in other.iterdir()} == before


def test_links_among_the_damaged_and_the_crashed_are_not_followed(tmp_path):
    """The folder of the notes is sound; those where they go are links."""
    other = tmp_path / "other program"
    other.mkdir()
    journal = Journal(tmp_path / "journal")
    with journal.about_to_run("k", "c"):
        pass
    for inner in ("crashed", "damaged"):
        (tmp_path / "journal" / inner).symlink_to(other)
    (tmp_path / "journal" / "running" / "1-a.json").write_text("damaged")
    (tmp_path / "journal" / "running" / "1-b.json").write_text(note())
    with pytest.warns(RuntimeWarning, match="not used"):
        assert journal.culprits() == []
    assert list(other.iterdir()) == []


def test_a_note_of_somebody_else_blames_nobody(tmp_path):
    journal = Journal(tmp_path / "journal")
    with journal.about_to_run("k", "c"):
        pass
    planted = tmp_path / "journal" / "running" / "1-a.json"
    planted.write_text(note())
    os.chown(planted, ALICE, ALICE)
    (tmp_path / "secret").write_text(note())
    (tmp_path / "journal" / "running" / "1-b.json").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "journal" / "running" / "1-c.json")
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert journal.culprits() == []
    assert journal.crashed("k", "c") is None
    assert (tmp_path / "secret").read_text() == note()


def test_a_journal_of_somebody_else_is_left_alone(anywhere):
    theirs = anywhere / "journal"
    with Journal(theirs).about_to_run("k", "c"):
        (theirs / "running" / "1-a.json").write_text(note())
    for path in (theirs, *theirs.rglob("*")):
        os.chown(path, ALICE, ALICE)
    before = modes(theirs)
    journal = Journal(theirs)
    with pytest.warns(RuntimeWarning, match="belongs to another user"):
        assert journal.culprits() == []
    assert modes(theirs) == before


# --- records -------------------------------------------------------------------------------------


def test_records_of_others_are_not_shown(monkeypatch, tmp_path, capsys):
    from ejkernel.cli import run
    from ejkernel.cli.records import save_record
    from ejkernel.report.runs import record_names, runs_folder

    mine = save_record(Run("mine", "cpu", "2026"), None)
    assert record_names() == [mine.name]
    planted = runs_folder() / "9999-planted.json"
    planted.write_text(Run("planted", "cpu", "2026").dumps())
    os.chown(planted, ALICE, ALICE)
    assert run(["report", "--list"]) == 0
    said = capsys.readouterr().out
    assert "mine" in said
    assert "belongs to another" in " ".join(said.split())
    assert run(["report"]) == 3
    planted.unlink()
    (runs_folder() / "9999-link.json").symlink_to("/etc/passwd")
    assert run(["report"]) == 3
    os.chown(runs_folder(), ALICE, ALICE)
    assert run(["report", "--list"]) == 3
    assert "is not used" in capsys.readouterr().err
    assert save_record(Run("mine", "cpu", "2026"), None) is None
    assert "the record of the run is not stored" in capsys.readouterr().err


# --- native libraries ----------------------------------------------------------------------------


@pytest.fixture
def loads(monkeypatch, library):
    """Load a file as the library; which one it was, or why it was not loaded."""
    monkeypatch.setattr(loading.jax.ffi, "register_ffi_target", lambda *_, **__: None)
    monkeypatch.setattr(loading.jax.ffi, "pycapsule", lambda function: found.append(function()))
    found: list[int] = []

    def load(file):
        found.clear()
        monkeypatch.setattr(loading, "_loaded", {})
        problem = loading.load(library, file)
        return problem if problem is not None else found[0]

    return load


def test_a_library_is_the_one_that_was_checked(library, compiler, loads, tmp_path, monkeypatch):
    """Its name leads to another one by the time the loader opens it."""
    file = building.build_library(library)
    planted = another(compiler, tmp_path)
    real = ctypes.CDLL

    def late(path, *args, **kwargs):
        os.replace(planted, file)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(ctypes, "CDLL", late)
    assert loads(file) == 1


def test_two_libraries_in_turn_are_two(library, compiler, loads, tmp_path):
    file = building.build_library(library)
    assert loads(file) == 1
    planted = another(compiler, tmp_path)
    planted.chmod(0o700)
    os.replace(planted, file)  # ours: an upgrade
    assert loads(file) == 666


PLANTS = {
    "of somebody else": lambda file: os.chown(file, ALICE, ALICE),
    "writable for the group": lambda file: file.chmod(0o770),
    "writable for everyone": lambda file: file.chmod(0o777),
    "a link": lambda file: (
        file.rename(file.with_suffix(".real")),
        file.symlink_to(file.with_suffix(".real")),
    ),
    "in a folder of somebody else": lambda file: os.chown(file.parent, ALICE, ALICE),
    "in a folder that everyone may write": lambda file: file.parent.chmod(0o1777),
    "in a cache folder of somebody else": lambda file: os.chown(file.parent.parent, ALICE, ALICE),
    "in a sticky cache folder of somebody else": lambda file: (
        os.chown(file.parent.parent, ALICE, ALICE),
        file.parent.parent.chmod(0o1777),
    ),
}


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)
def test_a_library_that_others_could_have_put_there_is_not_loaded(plant, library, compiler, loads):
    file = building.build_library(library)
    assert building.find(library) == file
    plant(file)  # after it was found, before it is loaded
    problem = loads(file)
    assert isinstance(problem, str), problem
    assert str(file) in problem
    assert building.find(library) is None
    if "cache folder" in problem or "folder" in problem:
        assert "is not used" in problem


def test_no_race_makes_a_foreign_library_load(library, compiler, loads, tmp_path):
    """Somebody swaps the file all the time; what is loaded is ours or nothing."""
    file = building.build_library(library)
    good, planted = file.read_bytes(), another(compiler, tmp_path)
    theirs = planted.read_bytes()
    done = threading.Event()

    def swap():
        while not done.is_set():
            for content, owner in ((theirs, ALICE), (good, 0)):
                new = file.with_name("swap")
                new.write_bytes(content)
                new.chmod(0o700)
                os.chown(new, owner, owner)
                os.replace(new, file)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        results = [loads(file) for _ in range(200)]
    finally:
        done.set()
        thread.join()
    assert 666 not in results
    assert 1 in results


def test_the_status_says_that_a_folder_is_not_used(monkeypatch, anywhere):
    os.chown(anywhere, ALICE, ALICE)
    anywhere.chmod(0o1777)
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(anywhere))
    monkeypatch.setenv("EJKERNEL_NATIVE", "auto")
    found = building.status()
    assert not found.available
    assert "belongs to another user" in found.reason


# --- all of it, as another user ------------------------------------------------------------------

USE = """
import json, logging, os, warnings
said = []
class Collect(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("ejkernel").addHandler(Collect(logging.WARNING))
warnings.showwarning = lambda message, *rest, **more: said.append(str(message))
import jax.numpy as jnp
from ejkernel.modules import rms_norm
import ejkernel.ops as ops

def use(size):
    with ops.policy_override(autotune=True):
        return float(rms_norm(jnp.ones((4, size)), jnp.ones(size)).sum())

use(4)  # everything is imported: others cannot read all of it
os.setgroups([]), os.setgid(23456), os.setuid(23456)
os.environ["EJKERNEL_CACHE_DIR"] = os.environ["FOREIGN"]
ops.set_default_executor(None)
said.clear()
print(json.dumps([use(8), said]))
"""


def test_a_program_in_a_cache_folder_of_somebody_else_works_without_it(anywhere):
    cache = anywhere / "cache"
    cache.mkdir()
    os.chown(cache, ALICE, ALICE)
    cache.chmod(0o1777)
    done = subprocess.run(
        [sys.executable, "-c", USE],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "FOREIGN": str(cache),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": "",
        },
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    total, said = json.loads(done.stdout.splitlines()[-1])
    assert total == pytest.approx(32, rel=1e-3)
    assert said
    assert all("belongs to another user" in message for message in said), said
    assert list(cache.iterdir()) == []
