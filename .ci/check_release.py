"""Build the wheel and the sdist, check them, and install the wheel into an empty environment.

python .ci/check_release.py        (make release)
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tarfile
import tempfile
import venv

ROOT = pathlib.Path(__file__).resolve().parents[1]

PROBE = """
import sys
import ejkernel.ops, ejkernel.modules
assert "jax._src.xla_bridge" not in sys.modules or not sys.modules["jax._src.xla_bridge"]._backends
import jax
q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 64, 2, 16))
assert ejkernel.modules.flash_attention(q, k, v, causal=True).shape == q.shape
print("ejkernel", ejkernel.__version__, "works with jax", jax.__version__)
"""


def run(*command: object, cwd: pathlib.Path = ROOT) -> str:
    """What a command prints; if it fails, everything it said, and the end."""
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def top_level_names(site: pathlib.Path) -> set[str]:
    """What stands in a site-packages folder."""
    return {path.name for path in site.iterdir()}


def main() -> None:
    """Build, check, install, try."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "dist")
        run(sys.executable, "-m", "build", "--outdir", out)
        wheel, sdist = next(out.glob("*.whl")), next(out.glob("*.tar.gz"))
        print(run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist).strip())
        check_sdist(sdist)

        environment = pathlib.Path(folder, "empty")
        venv.create(environment, with_pip=True)
        python = environment / "bin" / "python"
        site = pathlib.Path(
            run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        )
        before = top_level_names(site)
        run(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel)
        added = {n for n in top_level_names(site) - before if not n.endswith(".dist-info")}
        if added != {"ejkernel"}:
            sys.exit(f"the wheel puts {sorted(added)} into site-packages; only ejkernel may be")
        print("site-packages gets ejkernel and nothing else")

        run(python, "-m", "pip", "install", "--quiet", wheel)  # now with what it needs
        print(run(python, "-c", PROBE, cwd=pathlib.Path(folder)).strip())
        print(run(environment / "bin" / "ejkernel", "--version", cwd=pathlib.Path(folder)).strip())


def check_sdist(sdist: pathlib.Path) -> None:
    """Raise unless the sdist has what a distributor needs."""
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    for needed in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "ejkernel/__init__.py",
        "tests/conftest.py",
    ):
        if needed not in names:
            sys.exit(f"the sdist lacks {needed}")


if __name__ == "__main__":
    main()
