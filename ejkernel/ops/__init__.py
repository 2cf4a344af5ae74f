"""The framework: kernels that choose their own configuration.

>>> from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Kernel
"""

from typing import TYPE_CHECKING, Any

from ..native import provide_environment
from . import core, execution, utils
from .config import (  # not by `*`, which would load the tuner
    AutotunePolicy,
    ConfigCache,
    ConfigMiss,
    ConfigSelectorChain,
    Decision,
    PersistentCache,
    Space,
    Stats,
    StrictMiss,
    export_bundle,
    forward_autotune_only,
    import_bundle,
    overlay_cache,
    policy_override,
    reset_stats,
    stats,
    verify_bundle,
)
from .config.hooks import provide_agreement, provide_measuring
from .core import *  # noqa: F403  what each layer exports, `ejkernel.ops` does too
from .core.kernel import provide_calling
from .execution import *  # noqa: F403
from .execution import default_executor
from .execution.jitted import JittedCalls
from .registry import clear_invocations, get_invocations, record_invocation
from .utils import *  # noqa: F403
from .utils import environment
from .utils.meta import provide_default_selector

if TYPE_CHECKING:
    from .tuner.tuner import Tuner

__all__ = [
    "AutotunePolicy",
    "ConfigCache",
    "ConfigMiss",
    "ConfigSelectorChain",
    "Decision",
    "PersistentCache",
    "Space",
    "Stats",
    "StrictMiss",
    "Tuner",
    "clear_invocations",
    "export_bundle",
    "forward_autotune_only",
    "get_invocations",
    "import_bundle",
    "overlay_cache",
    "policy_override",
    "record_invocation",
    "reset_stats",
    "stats",
    "verify_bundle",
]
__all__ += core.__all__
__all__ += execution.__all__
__all__ += utils.__all__


# --- putting the layers together: what a lower one calls of a higher one is handed to it here -----


def _measuring() -> Any:
    from .tuner import session

    return session


def _job_agreement() -> Any:
    from ..fleet.agreement import job_agreement

    return job_agreement()


provide_calling(JittedCalls)
provide_measuring(_measuring)
provide_agreement(_job_agreement)
provide_default_selector(lambda: default_executor().selector)
provide_environment(environment)  # of what is native, which lies below and asks nobody


def __getattr__(name: str) -> Any:
    if name == "Tuner":  # the measuring parts are loaded when something is measured
        return _measuring().Tuner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
