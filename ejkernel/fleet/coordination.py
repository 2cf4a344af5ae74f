"""The key-value store of JAX's coordination service: the one file that touches private JAX.

`jax.distributed.initialize` starts the service in process 0 and a client of it in each process. The
client is not public; if a JAX release moves it, only this file has to follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from ..ops.config.hooks import AgreementError
from ..ops.utils import environment

T = TypeVar("T")

_NEEDED = ("key_value_set", "key_value_try_get", "blocking_key_value_get")


class CoordinationService:
    """A small store that all processes of a job share, for as long as the job runs.

    Attributes:
      process: this process's number.
      processes: how many there are.
    """

    def __init__(self, client: Any, process: int, processes: int) -> None:
        missing = [name for name in _NEEDED if not hasattr(client, name)]
        if missing:
            raise _not_found(f"its client has no {', '.join(missing)}")
        self.client = client
        self.process = process
        self.processes = processes

    def set_first(self, key: str, value: str) -> bool:
        """Set a key that nobody has set; False if somebody has."""
        stored = self._call(lambda: self.client.key_value_set(key, value) or True, "ALREADY_EXISTS")
        return stored is not None

    def set(self, key: str, value: str) -> None:
        """Set a key, whatever it was."""
        self._call(lambda: self.client.key_value_set(key, value, allow_overwrite=True))

    def get(self, key: str, seconds: float) -> str | None:
        """The value of a key, as soon as it has one; None if it has none in this time."""
        milliseconds = max(1, round(seconds * 1000))
        return self._call(
            lambda: str(self.client.blocking_key_value_get(key, milliseconds)), "DEADLINE_EXCEEDED"
        )

    def try_get(self, key: str) -> str | None:
        """The value of a key at this moment, or None."""
        return self._call(lambda: str(self.client.key_value_try_get(key)), "NOT_FOUND")

    def _call(self, function: Callable[[], T], none_if: str | None = None) -> T | None:
        """What the service answers; None for the one error that is an answer too."""
        try:
            return function()
        except jax.errors.JaxRuntimeError as error:
            if none_if is not None and str(error).startswith(none_if):
                return None
            raise AgreementError(
                f"process {self.process}: the coordination service of jax.distributed, which runs "
                f"in process 0, does not answer: {error}"
            ) from error


def connect() -> CoordinationService | None:
    """The service of the job that this process belongs to; None if it is the only process."""
    try:
        from jax._src.distributed import global_state

        client, process = global_state.client, global_state.process_id
        processes = global_state.num_processes
    except (ImportError, AttributeError) as error:
        raise _not_found(str(error)) from error
    if client is None or processes is None or processes < 2:
        return None
    return CoordinationService(client, process, processes)


def _not_found(why: str) -> AgreementError:
    return AgreementError(
        f"jax.distributed is up, but its key-value store is not where JAX {jax.__version__} should "
        f"have it ({why}), so the processes cannot agree on configs. Use a JAX that this ejkernel "
        f"was tested with (0.10 to 0.12), or set {environment.AGREEMENT_SECONDS.name}=0: then each "
        "process decides for itself, so give all of them the same stored configs and do not tune"
    )
