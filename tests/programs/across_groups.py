# SPDX-License-Identifier: Apache-2.0
"""Explicit groups of devices of several processes."""

import jax
import numpy as np
from between import N, check, main, ranked

import jax_dfccl


def programs() -> None:
    """Every device runs programs of its own, in which it meets all, half, and its neighbours."""
    devices = jax.devices()
    order = np.random.default_rng(3).permutation(N)
    lists = {
        "all": order.tolist(),
        **{f"pair{k}": [k, (k + 1) % N] for k in range(N)},
        "half": order[: N // 2].tolist(),
    }
    groups = {
        name: jax_dfccl.Group([devices[m] for m in members], name=name)
        for name, members in lists.items()
    }
    for launch, count in enumerate((1, 300, 40_000)):
        x = ranked((N, count), seed=launch)
        found = []
        for name, group in groups.items():  # in one order everywhere
            for d, device in enumerate(devices):
                if d not in lists[name] or device not in jax.local_devices():
                    continue
                f = jax.jit(
                    lambda x, k, d=d, group=group: jax_dfccl.all_reduce(x * (d + 1), group, key=k)
                )
                found.append((name, f(jax.device_put(x[d], device), launch)))
        for name, y in found:
            check(name, y, sum((m + 1) * x[m] for m in lists[name]))


main([programs])
