"""The process that candidates run in: `process.py` starts it with the numbers of its pipes.

It owns the device and runs none of the user's code: it is given StableHLO programs and input
arrays, and does with them what `LocalBench` does. Whatever a program does to this process, the
parent lives on (see `worker_bench.py`). It exits when the parent's end of the pipe closes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import struct
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.experimental import serialize_executable

from ejkernel.native import loading as native

from ...utils.serialize import dtype_name
from ..bench import CandidateError, Clock, LocalBench, LocalHandle, Lowered
from ..judge import differs

NOTIFICATION = "!Q"  # the number of a handle, in the pipe of what is told unasked
MOST_COMPILERS = 8  # programs that are compiled at the same time

Header = dict[str, Any]
Blob = bytes | bytearray | memoryview

# A candidate may call what it likes: the program comes from this machine, and from the same JAX.
ANY_CUSTOM_CALL = (export.DisabledSafetyCheck.custom_call("ALL"),)


# --- messages ------------------------------------------------------------------------------------


class Disconnected(Exception):
    """The other side is gone."""


class Channel:
    """Messages over a pair of pipes: the length of a JSON header, the header, raw blobs.

    The header's `blobs` says how long each of them is. Nothing is ever unpickled.
    """

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        os.set_blocking(writing, False)  # else a write could outlast its deadline

    def send(
        self, header: Header, blobs: Sequence[Blob] = (), seconds: float | None = None
    ) -> None:
        """Send one message. Raises `Disconnected`, or `TimeoutError` after `seconds`."""
        deadline = None if seconds is None else time.monotonic() + seconds
        text = json.dumps({**header, "blobs": [len(blob) for blob in blobs]}).encode()
        for part in (struct.pack("!Q", len(text)) + text, *blobs):
            rest = memoryview(part)
            while rest:
                _wait(self._writing, select.POLLOUT, deadline)
                try:
                    rest = rest[os.write(self._writing, rest) :]
                except BrokenPipeError:
                    raise Disconnected from None

    def receive(self, seconds: float | None = None) -> tuple[Header, list[bytearray]]:
        """Wait for one message. Raises `Disconnected`, or `TimeoutError` after `seconds`."""
        deadline = None if seconds is None else time.monotonic() + seconds
        (length,) = struct.unpack("!Q", self._read(8, deadline))
        header = json.loads(self._read(length, deadline))
        return header, [self._read(size, deadline) for size in header["blobs"]]

    def close(self) -> None:
        """Close both pipes."""
        os.close(self._reading)
        os.close(self._writing)

    def _read(self, count: int, deadline: float | None) -> bytearray:
        buffer = bytearray(count)
        rest = memoryview(buffer)
        while rest:
            _wait(self._reading, select.POLLIN, deadline)
            got = os.readv(self._reading, [rest])
            if got == 0:
                raise Disconnected
            rest = rest[got:]
        return buffer


def _wait(descriptor: int, event: int, deadline: float | None) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
    if not poll.poll(left):
        raise TimeoutError


# --- arrays --------------------------------------------------------------------------------------


def describe(array: Any) -> list[Any]:
    """Dtype and shape of an array, for a header."""
    return [dtype_name(array.dtype), list(array.shape)]


def raw(array: np.ndarray[Any, Any]) -> memoryview:
    """The bytes of an array, for a blob; without a copy if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _array(description: list[Any], blob: Blob) -> np.ndarray[Any, Any]:
    name, shape = description
    return np.frombuffer(blob, np.dtype(name)).reshape(shape)


def _abstract(description: list[Any]) -> jax.ShapeDtypeStruct:
    name, shape = description
    return jax.ShapeDtypeStruct(tuple(shape), np.dtype(name))


# --- programs ------------------------------------------------------------------------------------


class _ReceivedProgram:
    """A program as `LocalBench.compile` wants it: something to `compile()`.

    `jax.export` can write an `Exported` to bytes only if the optional package flatbuffers is
    there. So only the module is sent; the rest of the `Exported` is taken from that of a trivial
    program of the same inputs and outputs, made here.
    """

    def __init__(self, module: bytes, kept: list[int], like: export.Exported) -> None:
        self._exported = dataclasses.replace(
            like, mlir_module_serialized=module, module_kept_var_idx=tuple(kept)
        )

    def lowered(self, arrays: list[Any]) -> Lowered:
        """The program, ready for `LocalBench.compile`."""
        call: Any = self._exported.call
        return Lowered("", jax.jit(call).lower(arrays))


@dataclasses.dataclass(frozen=True)
class _Executable:
    """An executable that an earlier worker compiled, in the same place.

    The payload is JAX's own and holds pickles inside. It comes from an earlier worker of the same
    parent, through that parent's memory, and holds nothing of the user's but machine code.
    """

    payload: Blob
    inputs: int
    outputs: int
    device: Any

    def compile(self) -> Any:
        """What `jax.stages.Lowered.compile` would have returned."""
        return serialize_executable.deserialize_and_load(
            bytes(self.payload),
            jax.tree.structure((([0] * self.inputs,), {})),
            jax.tree.structure([0] * self.outputs),
            backend=self.device.client,
            execution_devices=[self.device],
        )


def _payload(compiled: Any) -> list[bytes]:
    """What `_Executable` needs; nothing if this backend cannot do that."""
    try:
        payload, _, _ = serialize_executable.serialize(compiled)
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError):
        return []  # then a new worker has to compile again
    return [payload]


class _Bench:
    """A `LocalBench` and the programs compiled for it, by the numbers the parent gave them."""

    def __init__(self, arrays: list[Any], device: Any, clock: Clock) -> None:
        # On the default device, which `configure` set. Not committed to it: JAX 0.10 refuses
        # committed arrays of 4 bits, as if their layout were another one.
        self.arrays = [jax.device_put(array) for array in arrays]
        self.device = device
        self.local = LocalBench(self.arrays, clock=clock)
        self.handles: dict[int, LocalHandle] = {}
        self.compiling: dict[int, Future[tuple[LocalHandle, list[bytes]]]] = {}
        self._like: dict[str, export.Exported] = {}
        self._making_like = threading.Lock()

    def program(self, header: Header, module: bytes) -> _ReceivedProgram:
        native.load_same(header["native"])
        signature = json.dumps([header["platform"], header["outputs"]])
        with self._making_like:
            if signature not in self._like:
                self._like[signature] = self._trivial(header)
        return _ReceivedProgram(module, header["kept"], self._like[signature])

    def _trivial(self, header: Header) -> export.Exported:
        """A program with the same inputs and outputs that does nothing."""
        outputs = [_abstract(description) for description in header["outputs"]]
        trivial = jax.jit(lambda _: [jnp.zeros(out.shape, out.dtype) for out in outputs])
        exporting = export.export(
            trivial, platforms=[header["platform"]], disabled_checks=ANY_CUSTOM_CALL
        )
        return exporting([jax.ShapeDtypeStruct(array.shape, array.dtype) for array in self.arrays])


# --- what the parent may ask for -----------------------------------------------------------------


class _Worker:
    """Does what the parent asks for: one method per request."""

    def __init__(self, notifications: int) -> None:
        self._notifications = notifications
        self._benches: dict[int, _Bench] = {}
        self._compilers = ThreadPoolExecutor(MOST_COMPILERS)

    def answer(self, header: Header, blobs: list[bytearray]) -> tuple[Header, list[bytes]]:
        for what, bench, handle in header["garbage"]:
            self._free(what, bench, handle)
        method = getattr(self, f"do_{header['do']}")
        answer: tuple[Header, list[bytes]] = method(header, blobs)
        return answer

    def _free(self, what: str, bench: int, handle: int) -> None:
        if what == "bench":
            self._benches.pop(bench, None)
        elif bench in self._benches:
            handles = self._benches[bench].handles
            if what == "handle":
                handles.pop(handle, None)
            elif handle in handles:
                self._benches[bench].local.forget(handles[handle])

    def do_nothing(self, header: Header, blobs: list[bytearray]) -> tuple[Header, list[bytes]]:
        return {}, []

    def do_configure(self, header: Header, blobs: list[bytearray]) -> tuple[Header, list[bytes]]:
        for name, value in header["config"].items():
            jax.config.update(name, value)
        # An executable that JAX took from its cache on disk cannot be serialised: the copy loads,
        # and has lost its functions when it runs.
        jax.config.update("jax_enable_compilation_cache", False)
        jax.config.update("jax_default_device", _device(header["device"]))
        return {}, []

    def do_inputs(self, header: Header, blobs: list[bytearray]) -> tuple[Header, list[bytes]]:
        arrays = [_array(*pair) for pair in zip(header["arrays"], blobs, strict=True)]
        self._benches[header["bench"]] = _Bench(arrays, _device(header["device"]), header["clock"])
        return {}, []

    def do_compile(self, header: Header, blobs: list[bytearray]) -> tuple[Header, list[bytes]]:
        bench = self._benches[header["bench"]]
        program = bench.program(header, bytes(blobs[0]))
        handle = bench.local.compile(program.lowered(bench.arrays))
        bench.handles[header["handle"]] = handle
        return {}, _payload(handle.compiled)

    def do_begin(self, header: Header, blobs: list[bytearray]) -> tuple[Header, list[bytes]]:
        """Compile alongside other requests; a notification tells when to ask for `compiled`."""
        bench = self._benches[header["bench"]]

        def compiled() -> tuple[LocalHandle, list[bytes]]:
            program = bench.program(header, bytes(blobs[0]))
            handle = bench.local.compile(program.lowered(bench.arrays))
            return handle, _payload(handle.compiled)

        def tell(_: object) -> None:
            os.write(self._notifications, struct.pack(NOTIFICATION, header["handle"]))

        bench.compiling[header["handle"]] = self._compilers.submit(compiled)
        bench.compiling[header["handle"]].add_done_callback(tell)
        return {}, []

    def do_compiled(self, header: Header, blobs: list[bytearray]) -> tuple[Header, list[bytes]]:
        bench = self._benches[header["bench"]]
        if not bench.compiling[header["handle"]].done():
            return {"done": False}, []
        handle, payload = bench.compiling.pop(header["handle"]).result()
        bench.handles[header["handle"]] = handle
        return {"done": True}, payload

    def do_load(self, header: Header, blobs: list[bytearray]) -> tuple[Header, list[bytes]]:
        bench = self._benches[header["bench"]]
        outputs = len(header["outputs"])
        executable = _Executable(blobs[0], len(bench.arrays), outputs, bench.device)
        bench.handles[header["handle"]] = bench.local.compile(Lowered("", executable))
        return {}, []

    def do_run(self, header: Header, blobs: list[bytearray]) -> tuple[Header, list[bytes]]:
        bench, handle = self._find(header)
        bench.local.run(handle)
        return {}, []

    def do_compare(self, header: Header, blobs: list[bytearray]) -> tuple[Header, list[bytes]]:
        bench, handle = self._find(header)
        reference = bench.handles[header["reference"]]
        # One by one: only the parent knows what the outputs are called.
        for index, pair in enumerate(zip(handle.output, reference.output, strict=True)):
            reason = differs(*pair)
            if reason is not None:
                return {"output": index, "reason": reason}, []
        return {"reason": None}, []

    def do_warm_up(self, header: Header, blobs: list[bytearray]) -> tuple[Header, list[bytes]]:
        bench, handle = self._find(header)
        bench.local.warm_up(handle, header["times"])
        return {}, []

    def do_sample(self, header: Header, blobs: list[bytearray]) -> tuple[Header, list[bytes]]:
        bench, handle = self._find(header)
        return {"seconds": bench.local.sample(handle), "clock": bench.local.clock}, []

    def do_repeats(self, header: Header, blobs: list[bytearray]) -> tuple[Header, list[bytes]]:
        bench, handle = self._find(header)
        difference = bench.local.repeats(handle)
        return {"difference": difference and dataclasses.asdict(difference)}, []

    def _find(self, header: Header) -> tuple[_Bench, LocalHandle]:
        bench = self._benches[header["bench"]]
        return bench, bench.handles[header["handle"]]


def _device(place: list[Any]) -> Any:
    platform, index = place
    return jax.local_devices(backend=platform)[index]


# --- the process ---------------------------------------------------------------------------------


def _exit_when_closed(reading: int) -> None:
    """Leave as soon as the parent has: a program that hangs would keep this process for ever."""
    poll = select.poll()
    poll.register(reading, 0)  # nothing but the hang-up, which is always reported
    poll.poll()
    os._exit(0)


class Answering(Protocol):
    """What a worker process does with a request."""

    def answer(self, header: Header, blobs: list[bytearray]) -> tuple[Header, list[bytes]]:
        """The answer; an exception is told to the parent."""
        ...


def serve(channel: Channel, worker: Answering) -> None:
    """Answer requests until the parent is gone."""
    while True:
        header, blobs = channel.receive()
        # From here on the request is to blame for what happens to this process.
        channel.send({"started": True})
        try:
            answer, attached = worker.answer(header, blobs)
        except CandidateError as error:
            answer, attached = {"error": str(error)}, []
        except Exception as error:  # noqa: BLE001  the parent is told, and decides
            answer, attached = {"error": f"{type(error).__name__}: {error}"}, []
        channel.send(answer, attached)


def serve_parent(worker: Answering) -> None:
    """Serve the parent whose pipes are named on the command line."""
    reading, writing = map(int, sys.argv[1:3])
    os.dup2(2, 1)  # stray output has nowhere to do harm: the pipes are not standard ones
    threading.Thread(target=_exit_when_closed, args=(reading,), daemon=True).start()
    try:
        serve(Channel(reading, writing), worker)
    except Disconnected:
        os._exit(0)  # at once: nothing here is worth an orderly end


def main() -> None:
    """Run and time candidates for the parent."""
    sys.setswitchinterval(0.0005)  # the parent need not wait until a compiling thread gives way
    serve_parent(_Worker(notifications=int(sys.argv[3])))


if __name__ == "__main__":
    main()
