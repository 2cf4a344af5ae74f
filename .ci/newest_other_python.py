"""Print the newest Python on this machine that is newer than the one running this; or nothing."""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys


def candidates() -> set[str]:
    """Interpreters on the PATH and in the usual places of version managers."""
    found = {shutil.which(f"python3.{minor}") for minor in range(12, 20)}
    for pattern in (
        "~/.pyenv/versions/3.*/bin/python",
        "~/.local/share/uv/python/*/bin/python3",
        "/opt/python/*/bin/python3",
    ):
        found.update(glob.glob(os.path.expanduser(pattern)))
    return {path for path in found if path}


def version(path: str) -> tuple[int, ...] | None:
    """The version of an interpreter that starts and can make environments, else None."""
    code = "import sys, venv, ensurepip as _; v = sys.version_info; print(*v[:3], v.releaselevel)"
    try:
        out = subprocess.run([path, "-c", code], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if out.returncode != 0 or not out.stdout.endswith("final\n"):
        return None
    return tuple(map(int, out.stdout.split()[:3]))


def main() -> None:
    """Print the path, or an empty line."""
    versions = {path: version(path) for path in candidates()}
    newer = {p: v for p, v in versions.items() if v is not None and v[:2] > sys.version_info[:2]}
    print(max(newer, key=lambda path: newer[path]) if newer else "")


if __name__ == "__main__":
    main()
