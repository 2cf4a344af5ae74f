"""Keep thread-local state right across asyncio task switches.

JAX's context is per thread, an asyncio task is not: a task that awaits inside a `with` block would
leave its overlay in force for whichever task runs next. Python has no hook for task switches
(before 3.14), so once a loop has seen a layer, every callback that it schedules first brings the
thread-local state up to date. Callbacks run in their own `contextvars.Context`, which is where each
task's layers are.
"""

from __future__ import annotations

import collections
import contextvars
import sys
import weakref
from collections.abc import Callable
from typing import Any

# For each event loop we follow: the context that its tasks were started with.
_followed: weakref.WeakKeyDictionary[Any, contextvars.Context] = weakref.WeakKeyDictionary()


def follow_switches(synchronise: Callable[[], None]) -> None:
    """Call `synchronise` at the start of every step of the running event loop, if there is one.

    To be called before the running task changes its layers.
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
        _synchronise_each_step(loop, synchronise)
    # Steps that were queued before we followed the loop do not synchronise by themselves: give
    # them back, as the very next thing that runs, the state they were started with.
    ready = getattr(loop, "_ready", None)
    if isinstance(ready, collections.deque):
        ready.appendleft(asyncio.Handle(synchronise, (), loop, _followed[loop]))


def _synchronise_each_step(loop: Any, synchronise: Callable[[], None]) -> None:
    call_soon = loop.call_soon

    def call_soon_in_step(callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        def step(*args: Any) -> Any:
            synchronise()
            return callback(*args)

        return call_soon(step, *args, context=context)

    loop.call_soon = call_soon_in_step
