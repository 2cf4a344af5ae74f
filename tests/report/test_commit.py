"""The commit of the working directory in the record of a run."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from ejkernel.ops import AutotuningResult
from ejkernel.report import Run
from ejkernel.report.commit import commit_here

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git here")


def git(*arguments, folder):
    name = ("-c", "user.name=x", "-c", "user.email=x@example.com")
    done = subprocess.run(
        ["git", *name, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    git("init", "-q", folder=tmp_path)
    (tmp_path / "file").write_text("one")
    git("add", "file", folder=tmp_path)
    git("commit", "-qm", "first", folder=tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_commit_and_whether_something_was_changed(repository):
    commit = git("rev-parse", "HEAD", folder=repository)
    assert commit_here() == commit
    assert Run.of(AutotuningResult()).environment["commit"] == commit
    (repository / "new").write_text("not part of it")
    assert commit_here() == commit
    (repository / "file").write_text("two")
    assert commit_here() == f"{commit} with uncommitted changes"


def test_no_program_of_a_repository_is_run(repository):
    hook = repository / "hook.sh"
    hook.write_text(f"#!/bin/sh\ntouch {repository}/ran\n")
    hook.chmod(0o755)
    git("config", "core.fsmonitor", str(hook), folder=repository)
    assert commit_here() is not None
    assert not (repository / "ran").exists()


def test_without_a_repository_or_git_there_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit_here() is None
    assert "commit" not in Run.of(AutotuningResult()).environment
    monkeypatch.setenv("PATH", "")
    assert commit_here() is None


def test_a_repository_without_a_commit_has_none(tmp_path, monkeypatch):
    git("init", "-q", folder=tmp_path)
    monkeypatch.chdir(tmp_path)
    assert commit_here() is None
