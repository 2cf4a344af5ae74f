"""`flash_attention` versus the public package of the same name, which has a Python of its own.

    python benchmarks/public_package.py --python .venv-public/bin/python

Two packages of one name cannot share a process: the other one runs under its own Python and times
one call whenever it is asked, between two of ours. Both compute on the same inputs; the sizes of
their results are compared first.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp

from ejkernel.modules import flash_attention

SERVER = pathlib.Path(__file__).parent / "peers" / "public_package.py"


def ours(wanted: dict[str, Any]) -> tuple[Any, tuple[jax.Array, ...]]:
    shape = (3, 1, wanted["length"], wanted["heads"], wanted["head_dim"])
    q, k, v = jax.random.normal(jax.random.key(0), shape)

    def forward(q, k, v):
        return flash_attention(q, k, v, causal=wanted["causal"])

    def both(q, k, v):
        return jax.value_and_grad(lambda *a: jnp.sum(forward(*a) ** 2), (0, 1, 2))(q, k, v)

    function = both if wanted["backward"] else forward
    return jax.jit(function).lower(q, k, v).compile(), (q, k, v)


def compare(python: str, wanted: dict[str, Any], rounds: int) -> None:
    compiled, arguments = ours(wanted)
    mine = jax.tree.leaves(jax.block_until_ready(compiled(*arguments)))
    server = subprocess.Popen(
        [python, str(SERVER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=SERVER.parent,  # else it would import the ejkernel of this folder
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )

    def ask(text: str) -> str:
        server.stdin.write(text + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        if not answer:
            raise SystemExit(f"the public package ended:\n{server.stderr.read()[-2000:]}")
        return answer

    try:
        said = json.loads(ask(json.dumps(wanted)))
        for other, array in zip(said["sizes"], mine, strict=True):
            size = float(jnp.linalg.norm(array))
            agree = "" if abs(size - other) <= 1e-3 * max(size, other) else f"  DIFFERS: {other:g}"
            if agree:
                print(f"  a result of size {size:g}{agree}")
        times: dict[str, list[float]] = {"ours": [], "theirs": []}
        for _ in range(rounds):
            times["theirs"].append(float(ask("go")))
            begin = time.perf_counter()
            jax.block_until_ready(compiled(*arguments))
            times["ours"].append(time.perf_counter() - begin)
    finally:
        server.kill()
        server.wait()
    ratios = sorted(a / b for a, b in zip(times["ours"], times["theirs"], strict=True))
    memory = compiled.memory_analysis().temp_size_in_bytes
    print(
        f"{wanted['length']:>6} {'causal' if wanted['causal'] else 'full':<7}"
        f"{'forward+backward' if wanted['backward'] else 'forward':<17}"
        f"{1e3 * min(times['ours']):>9.1f} ms {1e3 * min(times['theirs']):>9.1f} ms  "
        f"ratio {statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]  "
        f"temporary {memory / 2**20:.0f} MiB and {said['temporary'] / 2**20:.0f} MiB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, help="the Python that has the public package")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 4096])
    options = parser.parse_args()
    print("length                        ours         theirs")
    for length in options.lengths:
        for causal in (False, True):
            for backward in (False, True):
                wanted = {"length": length, "heads": 8, "head_dim": 64}
                compare(
                    os.path.abspath(options.python),  # it is started in another folder
                    {**wanted, "causal": causal, "backward": backward},
                    options.rounds,
                )


if __name__ == "__main__":
    main()
