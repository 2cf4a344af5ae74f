"""Start a script as the processes of one JAX job on this machine, and collect what they report."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_job(script: str, folder: pathlib.Path, *, processes: int = 4, seconds: float = 240, **env):
    """Run `script` in so many processes; what each one reported, and how each one ended.

    A process gets its number, the number of processes, the coordinator's address and the folder as
    arguments, and reports by writing `report-{number}.json` there. Its output is in
    `output-{number}.txt`.
    """
    address = f"127.0.0.1:{free_port()}"
    running = []
    for number in range(processes):
        settings = {name: v for name, v in os.environ.items() if not name.startswith("EJKERNEL_")}
        settings |= {
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
            "JAX_PLATFORMS": "cpu",
            "EJKERNEL_CACHE_DIR": str(folder / f"cache-{number}"),
            **env,
        }
        with open(folder / f"output-{number}.txt", "w") as output:
            arguments = [str(number), str(processes), address, str(folder)]
            running.append(
                subprocess.Popen(
                    [sys.executable, str(pathlib.Path(__file__).parent / script), *arguments],
                    env=settings,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        codes = [process.wait(timeout=seconds) for process in running]
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"the job hung:\n{outputs(folder, processes)}") from error
    finally:
        for process in running:
            process.kill()
            process.wait()
    reports = []
    for number in range(processes):
        file = folder / f"report-{number}.json"
        reports.append(json.loads(file.read_text()) if file.exists() else None)
    return reports, codes, outputs(folder, processes)


def outputs(folder: pathlib.Path, processes: int) -> str:
    return "\n".join(
        f"--- process {number}\n{(folder / f'output-{number}.txt').read_text()[-3000:]}"
        for number in range(processes)
    )
