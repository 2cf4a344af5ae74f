"""What a person looks at after a tuning run: one file, in HTML, Markdown or JSON.

::

    from ejkernel import report

    result = autotune_lowered(selector, lowered)
    report.write(report.Run.of(result, title="My model", store=store), "tuning.html")

`Run` is the record of a run; it is saved and loaded as JSON, and shown without JAX. The HTML is one
file that needs no network.
"""

from typing import TYPE_CHECKING, Any

from .plain import NotARun
from .record import BeforeAfter, Candidate, Gain, NotTuned, Operation, Run
from .writing import FORMATS, render, write

if TYPE_CHECKING:
    from .before_after import before_and_after

__all__ = [
    "FORMATS",
    "BeforeAfter",
    "Candidate",
    "Gain",
    "NotARun",
    "NotTuned",
    "Operation",
    "Run",
    "before_and_after",
    "render",
    "write",
]


def __getattr__(name: str) -> Any:
    if name == "before_and_after":  # it runs programs: the only part that needs JAX at once
        from .before_after import before_and_after

        return before_and_after
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
