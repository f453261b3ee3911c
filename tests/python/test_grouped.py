# SPDX-License-Identifier: Apache-2.0
"""Several collectives at once."""

import re
from functools import partial

import jax
import numpy as np
import pytest
from jax import lax
from members import assert_same_bits, data, per_member, spmd

from jax_dfccl import all_gather, all_reduce, grouped, ppermute, reduce_scatter

X = data((8, 16), np.int32)


def calls(x):
    return {
        "sum": partial(all_reduce, x, "i"),
        "all": partial(all_gather, x, "i"),
        "part": partial(reduce_scatter, x, "i", op="max", tiled=True),
        "next": partial(ppermute, x, "i", [(k, (k + 1) % 8) for k in range(8)]),
    }


RIGHT = {
    "sum": np.tile(X.sum(0, dtype=np.int32), (8, 1)),
    "all": np.broadcast_to(X, (8, 8, 16)),
    "part": X.max(0).reshape(8, 2),
    "next": np.roll(X, 1, 0),
}


def test_lists_and_dicts():
    got = per_member(lambda x: grouped(calls(x)), X)
    assert list(got) == sorted(RIGHT)
    for label, right in RIGHT.items():
        assert_same_bits(got[label], right)
    got = per_member(lambda x: tuple(grouped(list(calls(x).values()), name="all")), X)
    for y, right in zip(got, RIGHT.values(), strict=True):
        assert_same_bits(y, right)
    assert grouped([]) == [] and grouped({}) == {}


def test_orders_that_differ_between_members():
    def f(x):
        def branch(order):
            def run(x):
                listed = calls(x)
                return grouped({label: listed[label] for label in order}, name="step", key=3)

            return run

        orders = [list(RIGHT), list(RIGHT)[::-1], list(RIGHT)[2:] + list(RIGHT)[:2]]
        return lax.switch(lax.axis_index("i") % 3, [branch(order) for order in orders], x)

    got = per_member(f, X)
    for label, right in RIGHT.items():
        assert_same_bits(got[label], right)


def test_names_and_options():
    def f(x):
        own = partial(all_reduce, x, "i", name="own", priority=1, timeout=5)
        two = lambda: (all_reduce(x, "i"), all_reduce(2 * x, "i"))  # noqa: E731
        y = grouped({"own": own, "two": two}, name="g", key=7, priority=9, timeout=60)
        return y["own"] + sum(y["two"]) + all_reduce(3 * x, "i")

    text = spmd(f).lower(X).as_text()
    found = {
        re.search(r'name = "([^"]*)"', call)[1]: call
        for call in re.findall(r"backend_config = \{(.*?)\}", text)
    }
    assert set(found) == {"own", "g['two']", "g['two']/1", ""}
    for name, keyed, priority in (("own", 0, 1), ("g['two']", 1, 9), ("g['two']/1", 1, 9)):
        assert f"has_key = {keyed} " in found[name] and f"priority = {priority} " in found[name]
    assert "timeout_us = 5000000 " in found["own"]
    assert "priority = 0 " in found[""] and "timeout_us = 0 " in found[""]


def test_all_are_started_before_any_is_waited_for():
    compiled = spmd(lambda x: grouped(list(calls(x[0]).values())[:3], name="g")[:2])
    text = compiled.lower(X).as_text()
    order = re.findall(r"@dfccl_collective(?:_(start|done))?\(", text)
    assert order[0] == "start" and order == sorted(order, reverse=True)


def test_derivatives():
    x = data((8, 4))

    def f(x):
        a, b = grouped(
            [partial(all_gather, x, "i"), partial(all_reduce, x, "i", op="max")], name="g"
        )
        return a.sum(0) * b

    got = jax.jvp(lambda x: per_member(f, x), (x,), (x,))[1]
    np.testing.assert_allclose(got, np.tile(2 * x.sum(0) * x.max(0), (8, 1)), rtol=1e-4)


def test_errors():
    with pytest.raises(TypeError, match=r"calls\['a'\] is a ndarray; it must be a function"):
        grouped({"a": X})
    with pytest.raises(ValueError, match="key is given without name"):
        grouped([], key=1)

    def f(x):
        with pytest.raises(ValueError, match="must be one of"):
            grouped([lambda: all_reduce(x, "i", op="add")], name="g", priority=3)
        return all_reduce(x, "i")  # has none of the failed group's options

    text = spmd(f).lower(X).as_text()
    assert 'name = ""' in text and "priority = 0 " in text
