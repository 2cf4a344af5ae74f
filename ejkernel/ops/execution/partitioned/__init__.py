"""Run a call whose arrays are sharded over a mesh, on every device with its local shapes.

`run` decides whether and how; `gradient` is the one gradient rule of such calls, made of `passes`:
one forward, one backward. A pass is placed on the mesh in one of two ways: `explicit_axes`, where
JAX knows shardings while it traces, and `auto_axes`, where the compiler decides on them later.
"""

from .run import run_definition, run_partitioned

__all__ = ["run_definition", "run_partitioned"]
