"""The framework: kernels that choose their own configuration.

>>> from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Kernel
"""

# ruff: noqa: F403, F405  the lists of the layers say what `*` is
from typing import TYPE_CHECKING, Any

from ..native import provide_environment
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
from .core import *
from .core.kernel import provide_calling
from .execution import *
from .execution import default_executor
from .execution.jitted import JittedCalls
from .registry import clear_invocations, get_invocations, record_invocation
from .utils import *
from .utils import environment
from .utils.meta import provide_default_selector

if TYPE_CHECKING:
    from .tuner.tuner import Tuner

__all__ = [
    "LABEL_PREFIXES",
    "LABEL_RE",
    "AutotunePolicy",
    "AutotuningResult",
    "BatchAxes",
    "BwdParams",
    "Cfg",
    "ConfigCache",
    "ConfigChooser",
    "ConfigKey",
    "ConfigMiss",
    "ConfigSelectorChain",
    "Decision",
    "Dimension",
    "Entry",
    "Executor",
    "FwdParams",
    "Implementation",
    "Invocation",
    "Kernel",
    "Limit",
    "Limits",
    "NearShapes",
    "NotSupported",
    "Out",
    "Partitioning",
    "PersistentCache",
    "Shards",
    "Space",
    "Stats",
    "StrictMiss",
    "Supports",
    "Tuner",
    "Work",
    "abstractify",
    "autotune",
    "autotune_lowered",
    "autotune_recorded",
    "benchmark",
    "clear_invocations",
    "default_executor",
    "default_key_builder_with_sharding",
    "device_fingerprint",
    "device_kind",
    "export_bundle",
    "extract_labels_from_hlo_text",
    "find_labels_in_lowered",
    "forward_autotune_only",
    "from_json",
    "get_device_platform",
    "get_invocations",
    "import_bundle",
    "label",
    "labels_to_configs",
    "overlay_cache",
    "pmap_with_config",
    "policy_override",
    "record_invocation",
    "reset_stats",
    "set_default_executor",
    "sharding_fingerprint",
    "short_hash",
    "stable_json",
    "stats",
    "to_json",
    "verify_bundle",
    "vmap_with_config",
]


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
