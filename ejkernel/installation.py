"""How to install what is missing: of this project, and not of another one of the same name."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

from . import __version__


def how_to_install(extra: str = "") -> str:
    """What to type to install this project, with one of its extras: from a checkout or a wheel.

    The name alone would make `pip` fetch another project, which has the same name in the public
    index.
    """
    extras = f"[{extra}]" if extra else ""
    folder = f"'.{extras}' in the project's folder"
    if (pathlib.Path(__file__).parent.parent / "pyproject.toml").exists():  # it runs in there
        return f"pip install {folder}"
    return f"pip install 'FILE.whl{extras}' with the project's wheel, or {folder}"


def foreign_distributions() -> Iterator[str]:
    """Each installed distribution that has our name and not our files, in words.

    A checkout that is on the path without being installed, or installed so that it can be edited,
    is ours.
    """
    import importlib.metadata  # 20 ms

    ours = pathlib.Path(__file__).parent.resolve() / "__init__.py"
    seen = set()
    for found in importlib.metadata.distributions(name="ejkernel"):
        theirs = pathlib.Path(str(found.locate_file("ejkernel/__init__.py")))
        other_files = theirs.exists() and theirs.resolve() != ours
        if (found.version != __version__ or other_files) and theirs not in seen:
            seen.add(theirs)
            summary = found.metadata["Summary"] or "no description"
            yield f"{found.version} ({summary}), in {theirs.parent.parent}"
