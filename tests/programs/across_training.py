# SPDX-License-Identifier: Apache-2.0
"""A small network, trained by several processes: prints what its weights are in the end.

The arguments: how many steps, and, if somebody wants to know, a file for the number of those done.
"""

import hashlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from between import RANK, N, case_arguments, main, mesh, put
from jax.sharding import PartitionSpec as P

import jax_dfccl

STEPS = int(case_arguments[0])
ROWS, FEATURES, HIDDEN = 16, 48, 320


def _loss(weights, x, y):
    first, second = weights
    return jnp.mean((jnp.tanh(x @ first) @ second - y) ** 2)


def train():
    """Gradients of a small layer and of one beyond what is sent with the arrival."""
    random = np.random.default_rng(7)
    truth = random.standard_normal((FEATURES, HIDDEN)).astype(np.float32)
    weights = tuple(
        put((0.05 * random.standard_normal(shape)).astype(np.float32), mesh, P())
        for shape in ((FEATURES, FEATURES), (FEATURES, HIDDEN))
    )

    def on_each(weights, x, y):
        loss, slopes = jax.value_and_grad(_loss)(weights, x[0], y[0])
        slopes = jax_dfccl.all_reduce(slopes, "i")
        loss = jax_dfccl.all_reduce(loss, "i")
        return tuple(w - 2.0 / N * s for w, s in zip(weights, slopes, strict=True)), loss / N

    specs = {"in_specs": (P(), P("i"), P("i")), "out_specs": (P(), P())}
    step = jax.jit(jax.shard_map(on_each, mesh=mesh, check_vma=False, **specs))
    losses = []
    for number in range(STEPS):
        x = random.standard_normal((N, ROWS, FEATURES)).astype(np.float32)
        weights, loss = step(weights, put(x), put(0.2 * x @ truth))
        losses.append(float(loss))
        if RANK == 0 and len(case_arguments) > 1:
            Path(case_arguments[1]).write_text(str(number + 1))
    assert losses[-1] < 0.9 * losses[0], losses
    bits = b"".join(np.asarray(w.addressable_data(0)).tobytes() for w in weights)
    print("weights", hashlib.sha256(bits).hexdigest(), losses[0], losses[-1])


main([train])
