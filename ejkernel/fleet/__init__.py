"""Many hosts: the processes of one job agree on configs.

`agreement` works by itself in a job with `jax.distributed`. Nothing inside `ejkernel.ops` needs
this package, and a run of one process does not load it.
"""

from ..ops.config.agreement import AgreementError, AgreementTimeout

__all__ = ["AgreementError", "AgreementTimeout"]
