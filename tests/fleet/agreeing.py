"""A job whose processes would each choose something else, and agree. Run by test_agreement.py."""

from __future__ import annotations

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
from member import (
    PROCESSES,
    RANK,
    Config,
    OwnTaste,
    Rows,
    await_word,
    join,
    report,
    scenario,
    tell,
    tuning,
    write_report,
)

from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Kernel,
    PersistentCache,
    Tuner,
    autotune_lowered,
    overlay_cache,
    policy_override,
)

join()
KEYS = 50


def shapes():
    """The same for all, in an order of each one's own."""
    order = np.random.default_rng(RANK).permutation(KEYS)
    return [(int(i), jax.ShapeDtypeStruct((8 * (int(i) + 1),), jnp.float32)) for i in order]


@scenario
def measurements_disagree():
    executor, events = tuning()
    rows = Rows("fifty")
    chosen, alone, deciders = {}, {}, {}
    for i, x in shapes():
        decision = executor.decide(rows, x)
        chosen[i] = decision.cfg.rows
        alone[i] = OwnTaste().autotune(None, (x,), {}, rows.candidates(rows.bind(x))).rows
        deciders[i] = decision.reason if decision.reason.startswith("agreed") else ""
    tuned = sum(event == "autotune_finish" for event, _ in events)
    return {"chosen": chosen, "alone": alone, "tuned": tuned, "reasons": deciders}


@scenario
def programs_are_identical():
    executor, _ = tuning()
    rows = Rows("programs")

    @jax.jit
    def model(x, y):
        return executor(rows, x).sum() + executor(rows, y) @ y

    lowered = model.lower(jnp.ones(64), jnp.ones(128))
    compiled = lowered.compile()
    model(jnp.ones(64), jnp.ones(128))
    return {"lowered": lowered.as_text(), "compiled": compiled.as_text()}


@scenario
def forward_and_training_are_agreed_on_apart():
    """Each is measured once, by whoever comes first, and all run each program with its own."""
    executor, events = tuning()
    rows = Rows("two_questions")
    x = jax.ShapeDtypeStruct((512,), jnp.float32)
    programs = {
        "forward": lambda x: executor(rows, x),
        "training": jax.grad(lambda x: executor(rows, x).sum()),
    }
    names = sorted(programs, reverse=RANK % 2 == 1)  # in an order of each one's own
    lowered = {name: jax.jit(programs[name]).lower(x).as_text() for name in names}
    asked = [rows.bind(x), rows.bind(x).differentiate()]
    return {
        "lowered": [lowered["forward"], lowered["training"]],
        "chosen": [executor.selector.choose(inv, rows).rows for inv in asked],
        "keys": [inv.call_key for inv in asked],
        "tuned": [data["call_key"] for event, data in events if event == "autotune_finish"],
    }


class Told(Rows):
    def candidate_cfgs(self, inv):
        tell(self.op_id)
        return super().candidate_cfgs(inv)


@scenario
def really_measured():
    """By process 2, to which the first of all devices does not belong."""
    if RANK != 2:
        await_word("measured")
    executor, events = tuning(tuner=Tuner(effort="quick"), persistent=PersistentCache())
    rows = Told("measured")
    decision = executor.decide(rows, jnp.ones(4096))
    again = executor.decide(rows, jnp.ones(4096))
    return {
        "rows": decision.cfg.rows,
        "again": again.cfg.rows,
        "tier": decision.tier,
        "started": [event for event, _ in events].count("autotune_start"),
        "measured": sum(
            trial.seconds is not None
            for event, data in events
            if event == "autotune_finish"
            for trial in data["outcome"].trials
        ),
        "explained": decision.explain(),
        "stored": len(executor.selector.persistent),
    }


@scenario
def stores_and_memories_differ():
    rows = Rows("stored")
    inputs = [jnp.ones(8 * (i + 1)) for i in range(8)]
    keys = [rows.bind(x).key for x in inputs]
    store, memory = PersistentCache(), ConfigCache()
    for i, key in enumerate(keys):  # what one has, another one lacks; and no two have the same
        if (i + RANK) % 4 < 2:
            store.put(key, Config(10 + RANK))
        if (i + RANK) % 4 == 3:
            memory.put(key, Config(20 + RANK))
    executor = Executor(ConfigSelectorChain(memory, persistent=store, autotune=False))
    chosen = [executor.choose_config(rows, x).rows for x in inputs]
    in_memory = [None if key not in memory else memory.get(key).rows for key in keys]
    return {"chosen": chosen, "in_memory": in_memory}


@scenario
def devices_differ():
    rows = Rows("devices")
    inv = rows.bind(jnp.ones(8))
    inv = dataclasses.replace(inv, metadata={"device": f"cpu|model-{RANK}|{RANK + 1}-threads"})
    decision = tuning()[0].selector.decide(inv, rows)
    return {"rows": decision.cfg.rows, "device": decision.key.device}


@scenario
def only_some_trace():
    executor, _ = tuning()
    if RANK not in (1, 3):
        return None
    return executor.choose_config(Rows("some"), jnp.ones(8)).rows


@scenario
def many_threads_ask_once():
    executor, events = tuning()
    rows = Rows("threads")
    chosen = []
    threads = [
        threading.Thread(
            target=lambda: chosen.append(executor.choose_config(rows, jnp.ones(16)).rows)
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"chosen": chosen, "tuned": [event for event, _ in events].count("autotune_start")}


@scenario
def the_program_itself_is_not_asked_about():
    executor, events = tuning()
    rows = Rows("written")
    given = executor.decide(rows, jnp.ones(8), cfg=Config(2))
    with overlay_cache({"written": Config(4)}):
        laid_over = executor.decide(rows, jnp.ones(8))
    return [given.cfg.rows, given.tier, laid_over.cfg.rows, laid_over.tier, len(events)]


@scenario
def changes_of_the_program():
    executor, _ = tuning()
    rows, x = Rows("changed"), jnp.ones(64)
    key, memory = rows.bind(x).key, executor.selector.cache
    seen = []

    @jax.jit
    def model(x):
        seen.append(executor.choose_config(rows, x).rows)
        return executor(rows, x)

    with policy_override(executor.selector, autotune=False):
        model(x)
    model(x)  # another question
    with policy_override(executor.selector, autotune=False):
        model(x)  # the first program, from JAX's cache
    first = len(seen)
    memory.put(key, Config(16))
    model(x)  # traced again, and what was agreed holds
    if RANK % 2:  # even if only half of them do it
        memory.put(key, Config(32))
        model(x)
    held = seen[first:]
    memory.install({key: Config(16 * (1 + RANK % 2))})
    model(x)  # settled anew; each installed its own, and there is one answer
    return {"before": seen[:first], "held": held, "installed": seen[-1]}


@scenario
def offline_tuning_agrees():
    selector = tuning()[0].selector
    rows = Rows("offline")
    executor = Executor(ConfigSelectorChain(ConfigCache(), autotune=False))
    lowered = jax.jit(lambda x, y: executor(rows, x).sum() + executor(rows, y).sum()).lower(
        jnp.ones(24), jnp.ones(40)
    )
    result = autotune_lowered(selector, lowered)
    return {
        "configs": {entry.call_key: entry.cfg.rows for entry in result.entries},
        "skipped": [skipped.reason for skipped in result.skipped],
    }


class Spoilt(Rows):
    def heuristic_cfg(self, inv):
        tell(self.op_id)
        raise ArithmeticError("the table is gone")


@scenario
def the_deciding_process_fails():
    executor = Executor(ConfigSelectorChain(ConfigCache(), autotune=False))
    rows = Spoilt("spoilt")
    if RANK != 1:
        await_word("spoilt")
    try:
        executor(rows, jnp.ones(8))
    except (ArithmeticError, RuntimeError) as error:
        first = f"{type(error).__name__}: {error}"
    try:
        executor(rows, jnp.ones(8))
    except RuntimeError as error:
        return {"first": first, "again": f"{type(error).__name__}: {error}"}


@scenario
def nobody_has_a_config():
    policy = AutotunePolicy(allow_autotune=False, allow_heuristics=False)
    executor = Executor(ConfigSelectorChain(ConfigCache(), policy))
    return {"chosen": executor.choose_config(Rows("nothing"), jnp.ones(8)).rows}


@dataclasses.dataclass(frozen=True)
class OtherConfig:
    columns: int = 1


class OtherCode(Kernel[OtherConfig if RANK == 3 else Config, jax.Array]):
    def run(self, x, *, cfg):
        return x

    def heuristic_cfg(self, inv):
        tell("other code")
        return Config(2)


@scenario
def code_differs():
    if RANK == 3:
        await_word("other code")
    executor = Executor(ConfigSelectorChain(ConfigCache(), autotune=False))
    return {"chosen": executor.choose_config(OtherCode(), jnp.ones(8)).rows}


class Nesting(Rows):
    """Calls another kernel, which is tuned too."""

    inner = Rows("nested")

    def __init__(self, name, executor):
        super().__init__(name)
        self.executor = executor

    def run(self, x, *, cfg):
        return super().run(self.executor(self.inner, x), cfg=cfg)


@scenario
def kernels_in_kernels():
    executor, _ = tuning(tuner=Tuner(effort="quick"))
    nesting = Nesting("nesting", executor)
    text = jax.jit(lambda x: executor(nesting, x)).lower(jnp.ones(512)).as_text()
    return {"lowered": text}


@scenario
def what_tuning_traced_is_not_served():
    """An inner kernel is answered locally while the outer one is measured, and only then."""
    inner, events = tuning()  # a taste of each process's own
    outer, _ = tuning(tuner=Tuner(effort="quick"))
    nesting = Nesting("outer", inner)
    x = jnp.ones(1024)
    if RANK != 0:
        await_word("outer")
    outer.choose_config(nesting, x)  # process 0 measures it, and with it the inner kernel
    measured_with = [data["cfg"].rows for event, data in events if event == "autotune_finish"]
    tell("outer")
    if RANK != 3:
        await_word("inner")
    lowered = jax.jit(lambda x: inner(nesting.inner, x)).lower(x)  # process 3 decides it
    tell("inner")
    rows = inner.choose_config(nesting.inner, x).rows
    return {"measured_with": measured_with, "rows": rows, "lowered": lowered.as_text()}


@scenario
def over_the_whole_mesh():
    """A kernel inside shard_map over all processes, tuned by one of them, with a real psum."""
    executor, events = tuning(tuner=Tuner(effort="quick"))
    rows = Rows("sharded")
    mesh = jax.make_mesh((PROCESSES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")

    def local(x):
        return jax.lax.psum(executor(rows, x).sum(), "data")

    step = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec())
    )
    x = jax.make_array_from_process_local_data(
        jax.sharding.NamedSharding(mesh, spec), np.full(64, 0.5, np.float32)
    )
    return {
        "total": float(step(x)),
        "events": [event for event, _ in events if event != "agreed"],
        "lowered": step.lower(x).as_text(),
    }


@scenario
def what_spans_processes_is_not_measured():
    executor, _ = tuning(tuner=Tuner(effort="quick"))
    mesh = jax.make_mesh((PROCESSES,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    decision = executor.decide(Rows("spanning"), x)
    return {"tier": decision.tier, "misses": [miss.reason for miss in decision.misses]}


report["process_count"] = jax.process_count()
write_report()
