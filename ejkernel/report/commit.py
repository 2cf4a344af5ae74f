"""The commit of the working directory, if it is in a repository: what a run was made of."""

from __future__ import annotations

import re
import subprocess

SECONDS = 5.0  # a large repository on a slow disk is not waited for any longer


def commit_here() -> str | None:
    """The commit that is checked out here, and whether files differ from it; None without one."""
    commit = _git("rev-parse", "--verify", "HEAD")
    if commit is None or not re.fullmatch("[0-9a-f]{40,64}", commit):
        return None
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return f"{commit} with uncommitted changes" if changes else commit


def _git(*arguments: str) -> str | None:
    """What git answers, or None. No program that a repository names is run, and nothing written."""
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, ValueError, subprocess.TimeoutExpired):  # no git, or an answer that is no text
        return None
    return done.stdout.strip() if done.returncode == 0 else None
