# SPDX-License-Identifier: Apache-2.0
"""Messages between processes."""

import jax
import numpy as np
from between import EACH, RANK, N, check, main, ranked

import jax_dfccl

group = jax_dfccl.Group(jax.devices(), name="ring")
mine = [(r, d) for r, d in enumerate(group.devices) if d in jax.local_devices()]


def ring() -> None:
    """Everyone sends to both neighbours, which with two are the same, before it receives."""
    send = jax.jit(
        lambda x, key, to: jax_dfccl.send(x, group, to, name="to the right", key=key),
        static_argnums=2,
    )
    recv = jax.jit(
        lambda key, count, of: jax_dfccl.recv(
            jax.ShapeDtypeStruct((count,), np.float32), group, of, name="to the right", key=key
        ),
        static_argnums=(1, 2),
    )
    for launch, count in enumerate((1, 300, 10_000)):
        x = ranked((N, count), seed=launch)
        for rank, device in mine:
            y = jax.device_put(x[rank], device)
            send(y, launch, (rank + 1) % N)
            jax_dfccl.send_any(y[: rank + 1], group, (rank - 1) % N, key=launch)
        found = []
        for rank, device in reversed(mine):
            left, right = (rank - 1) % N, (rank + 1) % N
            got = recv(jax.device_put(launch, device), count, left)
            found.append((rank, got, x[left]))
            short = jax_dfccl.recv_any(group, right, device=device, key=launch)
            found.append((rank, short, x[right, : right + 1]))
        for rank, got, wanted in found:
            check((launch, rank), got, wanted)
    assert len(mine) == EACH and mine[0][0] == RANK * EACH


main([ring])
