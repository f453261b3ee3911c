# SPDX-License-Identifier: Apache-2.0
"""A sum over all devices of all processes of a job. docs/launch.md says how to start it.

Started by what JAX knows (jax-dfccl launch, Slurm, Open MPI, Kubernetes) it needs no arguments;
otherwise `distributed.py HOST:PORT PROCESSES PROCESS`, the first being where process 0 is reached.
"""

import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dfccl

coordinator = sys.argv[1:2] or [None]
jax.distributed.initialize(*coordinator, *map(int, sys.argv[2:4]))

mesh = Mesh(np.array(jax.devices()), ("data",))
rows = np.arange(1.0, 1 + 4 * mesh.size, dtype=np.float32).reshape(mesh.size, 4)
x = jax.make_array_from_callback(
    rows.shape, NamedSharding(mesh, P("data")), lambda index: rows[index]
)
total = jax.jit(
    jax.shard_map(
        lambda x: jax_dfccl.all_reduce(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
    )
)(x)

here = np.asarray(total.addressable_data(0))[0]
assert (here == rows.sum(0)).all(), here
print(
    f"process {jax.process_index()} of {jax.process_count()}, {mesh.size} devices: {here.tolist()}",
    flush=True,
)
