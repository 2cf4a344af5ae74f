"""Two processes of one job agree on every config, although each would choose for itself.

    python examples/two_hosts.py

Starts two processes on this machine that form a job with `jax.distributed`, as two hosts would.
Both call the same kernel, whose heuristic is different in each of them: without agreement they
would run different programs, which is how multi-host jobs hang.
"""

from __future__ import annotations

import dataclasses
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp

from ejkernel.ops import Kernel, default_executor


@dataclasses.dataclass(frozen=True)
class Rows:
    rows: int


class RowSum(Kernel[Rows, jax.Array]):
    """Sums of rows, some rows at a time."""

    def __init__(self, preferred: int) -> None:
        super().__init__(name="row_sum")
        self.preferred = preferred

    def run(self, x, *, cfg):
        return jax.lax.map(lambda part: part.sum(1), x.reshape(-1, cfg.rows, x.shape[1])).ravel()

    def heuristic_cfg(self, inv):
        return Rows(self.preferred)


def member(address: str, rank: int) -> None:
    """What each host runs."""
    jax.distributed.initialize(address, num_processes=2, process_id=rank)
    preferred = (32, 128)[rank]
    kernel = RowSum(preferred)
    x = jnp.ones((1024, 16))
    kernel(x)
    chosen = default_executor().choose_config(kernel, x)
    print(f"process {rank}: would take {Rows(preferred)}, takes {chosen}", flush=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, __file__, address]
    processes = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    told = [process.communicate(timeout=120)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a process failed")
    print("".join(told), end="")
    taken = {text.strip().rsplit("takes ", 1)[1] for text in told}
    if len(taken) != 1:
        raise SystemExit(f"the processes disagree: {taken}")
    print(f"they agree on {taken.pop()}")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        member(sys.argv[1], int(sys.argv[2]))
    else:
        main()
