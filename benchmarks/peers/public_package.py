"""The public package's `flash_attention`, timed on request; runs under its own Python.

Reads a line of JSON that says what to prepare, answers with the temporary bytes of the compiled
program and its output's mean; then answers every line `go` with the seconds of one call.
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    import jax
    import jax.numpy as jnp

    from ejkernel.modules import flash_attention

    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever it prints by itself is no answer
    wanted = json.loads(sys.stdin.readline())
    length, heads, dim = wanted["length"], wanted["heads"], wanted["head_dim"]
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, length, heads, dim))

    def forward(q, k, v):
        return flash_attention(q, k, v, causal=wanted["causal"])

    def both(q, k, v):
        return jax.value_and_grad(lambda *a: jnp.sum(forward(*a) ** 2), (0, 1, 2))(q, k, v)

    compiled = jax.jit(both if wanted["backward"] else forward).lower(q, k, v).compile()
    leaves = jax.tree.leaves(jax.block_until_ready(compiled(q, k, v)))
    said = {
        "temporary": compiled.memory_analysis().temp_size_in_bytes,
        "sizes": [float(jnp.linalg.norm(leaf)) for leaf in leaves],
        "jax": jax.__version__,
    }
    print(json.dumps(said), file=answers, flush=True)
    for line in sys.stdin:
        if line.strip() == "go":
            begin = time.perf_counter()
            jax.block_until_ready(compiled(q, k, v))
            print(time.perf_counter() - begin, file=answers, flush=True)


if __name__ == "__main__":
    main()
