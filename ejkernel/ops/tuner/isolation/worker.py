"""The process that candidates run in: `process.py` starts it, with a socket to talk over.

It owns the device and runs none of the user's code: it is given StableHLO programs and input
arrays, and does with them what `LocalBench` does. Whatever a program does to this process, the
parent lives on (see `worker_bench.py`). It exits when the parent's end of the socket closes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import select
import socket
import struct
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.experimental import serialize_executable

from ejkernel.native import loading as native

from ...utils.serialize import dtype_name
from ..bench import CandidateError, LocalBench, LocalHandle, Lowered
from ..judge import differs

Header = dict[str, Any]
Blob = bytes | bytearray | memoryview

# A candidate may call what it likes: the program comes from this machine, and from the same JAX.
ANY_CUSTOM_CALL = (export.DisabledSafetyCheck.custom_call("ALL"),)


# --- messages ------------------------------------------------------------------------------------


class Channel:
    """Messages over a socket: the length of a JSON header, the header, raw blobs.

    The header's `blobs` says how long each of them is. Nothing is ever unpickled. Both ways raise
    `ConnectionError` if the other side is gone, and `TimeoutError` after `seconds`.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(
        self, header: Header, blobs: Sequence[Blob] = (), seconds: float | None = None
    ) -> None:
        """Send one message."""
        text = json.dumps({**header, "blobs": [len(blob) for blob in blobs]}).encode()
        self._socket.settimeout(seconds)
        for part in (struct.pack("!Q", len(text)) + text, *blobs):
            self._socket.sendall(part)

    def receive(self, seconds: float | None = None) -> tuple[Header, list[bytearray]]:
        """Wait for one message."""
        deadline = None if seconds is None else time.monotonic() + seconds
        (length,) = struct.unpack("!Q", self._read(8, deadline))
        header = json.loads(self._read(length, deadline))
        return header, [self._read(size, deadline) for size in header["blobs"]]

    def close(self) -> None:
        """Close this side."""
        self._socket.close()

    def _read(self, count: int, deadline: float | None) -> bytearray:
        buffer = bytearray(count)
        rest = memoryview(buffer)
        while rest:
            left = None if deadline is None else max(1e-3, deadline - time.monotonic())
            self._socket.settimeout(left)
            got = self._socket.recv_into(rest)
            if got == 0:
                raise ConnectionError("the other side is gone")
            rest = rest[got:]
        return buffer


# --- arrays --------------------------------------------------------------------------------------


def describe(array: Any) -> list[Any]:
    """Dtype and shape of an array, for a header."""
    return [dtype_name(array.dtype), list(array.shape)]


def raw(array: np.ndarray[Any, Any]) -> memoryview:
    """The bytes of an array, for a blob; without a copy if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


# --- what the parent may ask for -----------------------------------------------------------------


class _Bench:
    """A `LocalBench` and the programs compiled for it: one public method per request.

    Handles go by the numbers that the parent gave them.
    """

    def __init__(self, header: Header, arrays: list[Any]) -> None:
        # On the default device, which `configure` set. Not committed to it: JAX 0.10 refuses
        # committed arrays of 4 bits, as if their layout were another one.
        self._arrays = [jax.device_put(array) for array in arrays]
        self._device = _device(header["device"])
        self._local = LocalBench(self._arrays, clock=header["clock"])
        self._handles: dict[int, LocalHandle] = {}
        self._like: dict[str, export.Exported] = {}
        self._making_like = threading.Lock()

    def free(self, what: str, number: int) -> None:
        if what == "handle":
            self._handles.pop(number, None)
        elif number in self._handles:
            self._local.forget(self._handles[number])

    def compile(self, header: Header, module: Blob) -> Header:
        """Compile a program; attached is its executable for `load`, if that can be written."""
        native.load_same(header["native"])
        call: Any = dataclasses.replace(
            self._trivial(header),
            mlir_module_serialized=bytes(module),
            module_kept_var_idx=tuple(header["kept"]),
        ).call
        handle = self._local.compile(Lowered("", jax.jit(call).lower(self._arrays)))
        self._handles[header["handle"]] = handle
        try:
            payload, _, _ = serialize_executable.serialize(handle.compiled)
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError):
            return {}  # this backend cannot: then a new worker has to compile again
        return {"attached": [payload]}

    def load(self, header: Header, payload: Blob) -> None:
        """Have an executable that an earlier worker compiled, in the same place.

        The payload is JAX's own and holds pickles inside. It comes from an earlier worker of the
        same parent, through that parent's memory, and holds nothing of the user's but machine code.
        """
        load = functools.partial(
            serialize_executable.deserialize_and_load,
            bytes(payload),
            jax.tree.structure((([0] * len(self._arrays),), {})),
            jax.tree.structure([0] * len(header["outputs"])),
            backend=self._device.client,
            execution_devices=[self._device],
        )
        program = types.SimpleNamespace(compile=load)
        self._handles[header["handle"]] = self._local.compile(Lowered("", program))

    def run(self, header: Header) -> None:
        self._local.run(self._handles[header["handle"]])

    def compare(self, header: Header) -> Header:
        handle, reference = self._handles[header["handle"]], self._handles[header["reference"]]
        # One by one: only the parent knows what the outputs are called.
        for index, pair in enumerate(zip(handle.output, reference.output, strict=True)):
            reason = differs(*pair)
            if reason is not None:
                return {"output": index, "reason": reason}
        return {"reason": None}

    def warm_up(self, header: Header) -> None:
        self._local.warm_up(self._handles[header["handle"]], header["times"])

    def sample(self, header: Header) -> Header:
        seconds = self._local.sample(self._handles[header["handle"]])
        return {"seconds": seconds, "clock": self._local.clock}

    def repeats(self, header: Header) -> Header:
        difference = self._local.repeats(self._handles[header["handle"]])
        return {"difference": difference and dataclasses.asdict(difference)}

    def _trivial(self, header: Header) -> export.Exported:
        """A program with the same inputs and outputs that does nothing.

        `jax.export` can write an `Exported` to bytes only if the optional package flatbuffers is
        there. So only the module is sent, and the rest of the `Exported` is taken from this one.
        """
        signature = json.dumps([header["platform"], header["outputs"]])
        with self._making_like:
            if signature not in self._like:
                outputs = [(shape, np.dtype(name)) for name, shape in header["outputs"]]
                exporting = export.export(
                    jax.jit(lambda _: [jnp.zeros(*output) for output in outputs]),
                    platforms=[header["platform"]],
                    disabled_checks=ANY_CUSTOM_CALL,
                )
                shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self._arrays]
                self._like[signature] = exporting(shapes)
            return self._like[signature]


class _Worker:
    """Does what the parent asks for: the requests that are not about one bench, and the others."""

    def __init__(self) -> None:
        self._benches: dict[int, _Bench] = {}

    def answer(self, header: Header, blobs: list[bytearray]) -> Header:
        for what, number, handle in header["garbage"]:
            if what == "bench":
                self._benches.pop(number, None)
            elif number in self._benches:
                self._benches[number].free(what, handle)
        if header["do"] == "configure":
            for name, value in header["config"].items():
                jax.config.update(name, value)
            # An executable that JAX took from its cache on disk cannot be serialised: the copy
            # loads, and has lost its functions when it runs.
            jax.config.update("jax_enable_compilation_cache", False)
            jax.config.update("jax_default_device", _device(header["device"]))
        elif header["do"] == "inputs":
            described = zip(header["arrays"], blobs, strict=True)
            arrays = [np.frombuffer(b, np.dtype(name)).reshape(s) for (name, s), b in described]
            self._benches[header["bench"]] = _Bench(header, arrays)
        elif header["do"] != "nothing":
            request = getattr(self._benches[header["bench"]], header["do"])
            return request(header, *blobs) or {}
        return {}


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


def serve_parent(answer_of: Callable[[Header, list[bytearray]], Header]) -> None:
    """Answer the parent, whose sockets are named on the command line, until it is gone.

    `answer_of` gives the answer to a request, with blobs in `attached`; the parent is told of an
    exception. Each socket has a thread of its own.
    """
    first, *others = [socket.socket(fileno=int(number)) for number in sys.argv[1:]]
    os.dup2(2, 1)  # stray output has nowhere to do harm: the sockets are no standard streams
    threading.Thread(target=_exit_when_closed, args=(first.fileno(),), daemon=True).start()
    for other in others:
        threading.Thread(target=_serve, args=(Channel(other), answer_of), daemon=True).start()
    _serve(Channel(first), answer_of)


def _serve(channel: Channel, answer_of: Callable[[Header, list[bytearray]], Header]) -> None:
    try:
        while True:
            header, blobs = channel.receive()
            # From here on the request is to blame for what happens to this process.
            channel.send({"started": True})
            try:
                answer = answer_of(header, blobs)
            except CandidateError as error:
                answer = {"error": str(error)}
            except Exception as error:  # noqa: BLE001  the parent is told, and decides
                answer = {"error": f"{type(error).__name__}: {error}"}
            attached = answer.pop("attached", ())
            channel.send(answer, attached)
    except ConnectionError:
        os._exit(0)  # at once: nothing here is worth an orderly end


def main() -> None:
    """Run and time candidates for the parent."""
    sys.setswitchinterval(0.0005)  # the parent need not wait until a compiling thread gives way
    serve_parent(_Worker().answer)


if __name__ == "__main__":
    main()
