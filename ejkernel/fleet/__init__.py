"""Many hosts: the processes of one job agree on configs; many machines tune together.

Agreement works by itself in a job with `jax.distributed`; `tune_on_cluster` needs the extra
the extra `ray`. Nothing inside `ejkernel.ops` needs this package, and a run of one process does
not load it.
"""

from typing import TYPE_CHECKING, Any

from ..ops.config.hooks import AgreementError, AgreementTimeout

if TYPE_CHECKING:
    from .cluster import ClusterResult, tune_on_cluster

__all__ = ["AgreementError", "AgreementTimeout", "ClusterResult", "tune_on_cluster"]


def __getattr__(name: str) -> Any:
    if name in ("ClusterResult", "tune_on_cluster"):
        from . import cluster

        return getattr(cluster, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
