"""A job in which the deciding process is slow, and then killed. Run by test_agreement.py."""

from __future__ import annotations

import os
import signal
import time

import jax
import jax.numpy as jnp
from member import RANK, OwnTaste, Rows, await_word, join, scenario, tell, tuning, write_report

from ejkernel.ops.utils import environment

join()
LIMIT = environment.AGREEMENT_SECONDS.seconds()


@scenario
def settings_differ():
    jax.devices()  # a collective: all processes start their backends before any waits for another
    if RANK == 3:
        await_word("first settings")
        os.environ["EJKERNEL_OPS_STAMP"] = "json"
    executor, _ = tuning()
    try:
        rows = executor.choose_config(Rows("settings"), jnp.ones(8)).rows
    finally:
        os.environ.pop("EJKERNEL_OPS_STAMP", None)
        tell("first settings")
    return {"rows": rows}


@scenario
def settings_no_longer_differ():
    return {"rows": tuning()[0].choose_config(Rows("settings"), jnp.ones(8)).rows}


class Slow(OwnTaste):
    def autotune(self, make_fn, args, kwargs, candidates):
        tell("slow")
        time.sleep(LIMIT + 4)
        return candidates[0]


class Dying(OwnTaste):
    def autotune(self, make_fn, args, kwargs, candidates):
        tell("dying")
        time.sleep(1)  # mid-way: the others are waiting
        os.kill(os.getpid(), signal.SIGKILL)


@scenario
def slow():
    if RANK != 1:
        await_word("slow")
    return {"rows": tuning(tuner=Slow())[0].choose_config(Rows("slow"), jnp.ones(8)).rows}


@scenario
def dying():
    if RANK != 2:
        await_word("dying")
    return {"rows": tuning(tuner=Dying())[0].choose_config(Rows("dying"), jnp.ones(8)).rows}


write_report()
tell(f"end of {RANK}")
if RANK == 0:  # the coordination service is in it: JAX ends all processes when it is gone
    for other in (1, 3):
        await_word(f"end of {other}")
os._exit(0)  # a regular end would wait for the process that was killed
