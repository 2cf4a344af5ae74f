"""Keep thread-local state right across asyncio task switches.

JAX's context is per thread, an asyncio task is not: a task that awaits inside a `with` block would
leave its overlay in force for whichever task runs next. Python has no hook for task switches
(before 3.14), so once a loop has seen a layer, every callback that it schedules first brings the
thread-local state up to date, and gives it back afterwards. Callbacks run in their own
`contextvars.Context`, which is where each task's layers are.

One case is out of reach: the first step of an *eager* task (Python 3.12) runs inside its parent,
with no callback in between.
"""

from __future__ import annotations

import collections
import contextvars
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

# For each event loop we follow: the context that its tasks were started with.
_followed: weakref.WeakKeyDictionary[Any, contextvars.Context] = weakref.WeakKeyDictionary()
# Steps that we put first; one in front is enough, however many blocks a task enters.
_given_back: weakref.WeakSet[Any] = weakref.WeakSet()


def follow_switches(
    synchronise: Callable[[], None], keeping: Callable[[], AbstractContextManager[None]]
) -> None:
    """Call `synchronise` at the start of every step of the running event loop, if there is one.

    To be called before the running task changes its layers. `keeping` restores the thread's state
    at the end of a step.
    """
    asyncio = sys.modules.get("asyncio")
    if asyncio is None:  # nobody imported it, so no loop is running
        return
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    if loop not in _followed:
        _followed[loop] = contextvars.copy_context()
        for method, position in (("call_soon", 0), ("call_soon_threadsafe", 0), ("call_at", 1)):
            _synchronise_callbacks(loop, method, position, synchronise, keeping)
    # Steps that were queued before we followed the loop do not synchronise by themselves: give
    # them back, as the very next thing that runs, the state they were started with.
    ready = getattr(loop, "_ready", None)
    if isinstance(ready, collections.deque) and not (ready and ready[0] in _given_back):
        handle = asyncio.Handle(synchronise, (), loop, _followed[loop])
        _given_back.add(handle)
        ready.appendleft(handle)


def _synchronise_callbacks(
    loop: Any,
    method: str,
    position: int,
    synchronise: Callable[[], None],
    keeping: Callable[[], AbstractContextManager[None]],
) -> None:
    """Wrap the callback (the argument at `position`) that a method of the loop schedules."""
    schedule = getattr(loop, method)

    def schedule_synchronised(*args: Any, context: Any = None) -> Any:
        callback = args[position]

        def step(*values: Any) -> Any:
            with keeping():
                synchronise()
                return callback(*values)

        return schedule(*args[:position], step, *args[position + 1 :], context=context)

    setattr(loop, method, schedule_synchronised)
