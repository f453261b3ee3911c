# SPDX-License-Identifier: Apache-2.0
"""The public function `grouped`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

from jax_dfccl._arguments import options_for

Key = TypeVar("Key")


@overload
def grouped(
    calls: Mapping[Key, Callable[[], Any]],
    *,
    name: str | None = None,
    key: Any = None,
    priority: int = 0,
    timeout: float | None = None,
) -> dict[Key, Any]: ...
@overload
def grouped(
    calls: Sequence[Callable[[], Any]],
    *,
    name: str | None = None,
    key: Any = None,
    priority: int = 0,
    timeout: float | None = None,
) -> list[Any]: ...


def grouped(
    calls: Any,
    *,
    name: str | None = None,
    key: Any = None,
    priority: int = 0,
    timeout: float | None = None,
) -> Any:
    """Several collectives at once, which every member may list in an order of its own.

    >>> import jax, numpy as np, jax_dfccl
    >>> from functools import partial
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    >>> def both(x):
    ...     total = partial(jax_dfccl.all_reduce, x, "i")
    ...     whole = partial(jax_dfccl.all_gather, x, "i", tiled=True)
    ...     one = lambda: jax_dfccl.grouped({"total": total, "whole": whole}, name="both")
    ...     other = lambda: jax_dfccl.grouped({"whole": whole, "total": total}, name="both")
    ...     return jax.lax.cond(jax.lax.axis_index("i") % 2 == 0, one, other)
    >>> x = np.arange(jax.device_count())
    >>> f = jax.shard_map(both, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)
    >>> y = jax.jit(f)(x)
    >>> bool((y["total"] == x.sum()).all()) and bool((y["whole"].reshape(len(x), -1) == x).all())
    True

    **Order.** With names (its own, or the calls'), all are started before any is waited for.
    Without, they are matched as separate calls are: by their place in the program.

    **Differentiation.** As the calls.

    Args:
        calls: functions without arguments that make a call each, in a list or under labels in a
            dict. None may need the result of another.
        name: names the calls that have no name: "NAME[LABEL]", where the label is the key in the
            dict or the place in the list. Use a dict where orders may differ.
        key: as for `all_reduce`, for those calls.
        priority: as for `all_reduce`, for calls that have none.
        timeout: as for `all_reduce`, for calls that have none.

    Returns:
        The results, as a list or a dict with the same labels.

    Raises:
        What the calls raise; ValueError for a key without a name, and TypeError for what is no
        function.
    """
    if key is not None and name is None:
        raise ValueError("grouped: key is given without name; give both or neither")
    labelled = isinstance(calls, Mapping)
    items = list(calls.items()) if labelled else list(enumerate(calls))
    results = {}
    for label, call in items:
        if not callable(call):
            raise TypeError(
                f"grouped: calls[{label!r}] is a {type(call).__name__}; it must be a function "
                "without arguments, such as functools.partial(jax_dfccl.all_reduce, x, 'i')"
            )
        own = None if name is None else f"{name}[{label!r}]"
        with options_for(name=own, key=key, priority=priority, timeout=timeout):
            results[label] = call()
    return results if labelled else list(results.values())
