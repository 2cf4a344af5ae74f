"""What a tier is asked and how it answers."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ....markup import one_line
from ....store.reading import shown
from ...core.requirements import reasons_against_config
from ...core.types import ConfigKey
from ..context import AutotunePolicy

if TYPE_CHECKING:
    from ...core.invocation import Invocation
    from ...core.kernel import Kernel
    from ...tuner.tuner import Tuner

logger = logging.getLogger(__name__)

Emit = Callable[..., None]


@dataclasses.dataclass(frozen=True)
class Request:
    """One question: which config for this call, under this policy."""

    inv: Invocation[Any, Any]
    kernel: Kernel[Any, Any]
    key: ConfigKey
    policy: AutotunePolicy
    emit: Emit
    offline: bool = False  # asked by a tuning run, not by a call that runs with the answer
    tuner: Tuner | None = None  # another one than the selector's
    agreed: bool = False  # asked for all processes of a job; programs keep what was agreed before

    @property
    def measured(self) -> str:
        """What a tuning run times for this question."""
        return "forward and backward" if self.inv.differentiated else "forward"


@dataclasses.dataclass(frozen=True)
class TierHit:
    """A config, where it came from in words, and what else is known about it.

    `doubt` says why it may not be the best any more: where tuning is allowed it is measured again.
    """

    cfg: Any
    reason: str
    about: Any = None
    doubt: str = ""


class Tier(Protocol):
    """A source of configs."""

    name: str

    def look(self, request: Request) -> TierHit | str:
        """The config for a request, or the reason why this tier has none."""
        ...


_said: set[str] = set()
_MOST_SAID = 1000  # then it starts again: a server meets ever new calls


def refusal(request: Request, cfg: Any, where: str) -> str | None:
    """Why a cached or stored config does not fit a call, said once; None if it does.

    The next source answers then; so it does where the kernel and its config class were defined
    again, as in a notebook. A config of any other class is the program's own mistake and raises a
    `TypeError`.
    """
    if _is_of_namesake(request.kernel, cfg):
        return f"{where} holds {shown(cfg, 1000)}, for another definition of {request.key.op_id}"
    request.kernel.check_config_class(cfg, f"{where} holds")
    reasons = reasons_against_config(request.kernel, cfg, request.inv)
    if not reasons:
        return None
    held = f"{where} holds {shown(cfg, 1000)}"
    return warn_once(request, f"{held}, but {'; '.join(reasons)}", f"{request.key.op_id} {held}")


def _is_of_namesake(kernel: Kernel[Any, Any], cfg: Any) -> bool:
    """Whether a config is of another class that has the name of one of the kernel's."""
    classes = [cls for cls in kernel.config_types if isinstance(cls, type)]
    return type(cfg) not in classes and type(cfg).__name__ in {cls.__name__ for cls in classes}


def warn_once(request: Request, reason: str, trouble: str) -> str:
    """Say why a config is not used, each trouble the first time, and give the reason back."""
    if trouble not in _said:
        if len(_said) >= _MOST_SAID:
            _said.clear()
        _said.add(trouble)
        logger.warning("ejkernel: a config is not used: %s", one_line(f"{request.key}: {reason}"))
    return reason
