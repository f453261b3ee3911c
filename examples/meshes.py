# SPDX-License-Identifier: Apache-2.0
"""What the examples over a mesh share: devices of one process or of a job, arrays, printing."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

DEVICES = 8


def begin(distributed: bool) -> None:
    """Joins a job of several processes, or makes this one have all devices."""
    if distributed:
        jax.distributed.initialize()
    else:
        jax.config.update("jax_num_cpu_devices", DEVICES)


def make_mesh(**axes: int) -> Mesh:
    """All devices; those of a process are neighbours along the last axis."""
    return Mesh(np.array(jax.devices()).reshape(tuple(axes.values())), tuple(axes))


def put(mesh: Mesh, tree: Any, spec: Any) -> Any:
    """Puts what every process knows on the devices; `spec` may stand for a subtree."""

    def below(spec, tree):
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index]), tree
        )

    return jax.tree.map(below, spec, tree, is_leaf=lambda spec: isinstance(spec, P))


def mapped(function, mesh: Mesh, in_specs: Any, out_specs: Any):
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def bits_of(tree: Any) -> bytes:
    """The bits of the parts that this process has."""
    shards = [shard.data for array in jax.tree.leaves(tree) for shard in array.addressable_shards]
    return b"".join(np.asarray(data).tobytes() for data in shards)


def say(*what: Any) -> None:
    """Prints, in one process of a job."""
    if jax.process_index() == 0:
        print(*what, flush=True)
