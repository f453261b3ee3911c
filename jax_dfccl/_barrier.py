# SPDX-License-Identifier: Apache-2.0
"""The public function `barrier`."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jax_dfccl._arguments import AxisName, Options, as_array, check


def barrier(x: Any, axis_name: AxisName, **options: Unpack[Options]) -> Any:
    """Returns `x` once every member has come here with its own.

    >>> import jax, numpy as np, jax_dfccl
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    >>> def together(x):
    ...     return jax_dfccl.barrier(x, "i")
    >>> x = np.arange(jax.device_count())
    >>> y = jax.jit(jax.shard_map(together, mesh=mesh, in_specs=P("i"), out_specs=P("i")))(x)
    >>> np.testing.assert_array_equal(y, x)

    A program has no order but that of its data: what must come after the barrier has to use its
    result, and what must come before it has to be in `x`.

    **Order.** Matched as `all_reduce` is. Every member waits for all.

    **Differentiation.** Derivatives pass through it, without a barrier of their own.

    Args:
        x: an array, a scalar or a pytree of them, of any dtype. Members' shapes may differ.
        axis_name: as for `all_reduce`. An empty tuple returns `x`.
        **options: as for `all_reduce`.

    Returns:
        `x`, with the same values.

    Raises:
        As `all_reduce` does.
    """
    call = check("barrier", axis_name, **options)
    leaves, tree = jax.tree_util.tree_flatten_with_path(x)
    arrays = [as_array("barrier", leaf, "x" + jax.tree_util.keystr(path)) for path, leaf in leaves]
    if not call.axes:
        return x
    sent = sum((_trace_of(array) for array in arrays), start=jnp.zeros((1,), np.int32))
    received = call.bind("barrier", sent)
    # They are always equal, but XLA cannot know it and has to wait.
    came = (received == sent)[0]
    return tree.unflatten([jnp.where(came, array, jnp.zeros_like(array)) for array in arrays])


def _trace_of(array: Any) -> Any:
    """A number that is there only when the array is."""
    first = jax.lax.stop_gradient(array.ravel()[:1])
    return jnp.where(first != 0, 1, 0).astype(np.int32).sum(keepdims=True)
