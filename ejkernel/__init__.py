"""ejkernel: JAX operations that choose their own configuration.

Import what you need from `ejkernel.ops` (the framework) and `ejkernel.modules` (ready-made
operations). This module itself imports nothing, so that `import ejkernel` is free.
"""

__version__ = "0.1.0"
