# SPDX-License-Identifier: Apache-2.0
"""Messages: `send` and `recv`, each in a program of its own."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import jobs
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from members import data
from test_programs import run

import jax_dfccl
from jax_dfccl import _core, _messages

Shape = jax.ShapeDtypeStruct
LARGE = _messages.EAGER_BYTES // 4 + 1  # float32s that the sender waits with
AXIS: Any = "i"
GROUP = jax_dfccl.Group([jax.devices()[k] for k in (6, 1, 3)], name="three")


@pytest.fixture(autouse=True)
def _nothing_stays():
    before = _core.report()["open_tickets"]
    yield
    assert _core.report()["open_tickets"] == before
    assert not _core.report()["in_flight"]


def at(rank, x, group=GROUP):
    return jax.device_put(x, group.devices[rank])


def sender(to=1, group=GROUP, **options):
    return jax.jit(lambda x, key: jax_dfccl.send(x, group, to, key=key, **options))


def receiver(shape, from_=0, group=GROUP, **options):
    return jax.jit(lambda key: jax_dfccl.recv(shape, group, from_, key=key, **options))


TYPES = [np.float32, jnp.bfloat16, np.complex64, np.bool_, np.int8, jnp.int4, jnp.float8_e5m2]


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (70_000,)], ids=str)
def test_every_type_small_and_large(dtype, shape):
    x = jnp.asarray(data(shape, np.float32) % 7).astype(dtype)
    sender()(at(0, x), 1)
    y = receiver(Shape(shape, dtype))(at(1, 1))
    assert y.dtype == dtype and y.shape == shape
    np.testing.assert_array_equal(y.astype(np.complex64), x.astype(np.complex64))


def test_messages_meet_by_peer_name_and_key_and_the_nth_of_equals():
    shape = Shape((), np.float32)
    for key, value in ((1, 10), (2, 20), (1, 11), (1, 12)):
        sender()(at(0, np.float32(value)), key)
    sender(name="other")(at(0, np.float32(13)), 1)
    sender()(at(2, np.float32(30)), 1)
    sender(to=-1)(at(0, np.float32(40)), 1)
    order = [(1, 0), (2, 0), (1, 0), (1, 2), (1, 0)]
    got = [float(receiver(shape, from_)(at(1, key))) for key, from_ in order]
    assert got == [10, 20, 11, 30, 12]
    assert float(receiver(shape, name="other")(at(1, 1))) == 13
    assert float(receiver(shape)(at(2, 1))) == 40


def test_a_message_is_no_collective_of_the_group():
    pair = jax_dfccl.Group(jax.devices()[:2], name="both")
    x, y = (at(rank, np.float32(rank + 1), pair) for rank in (0, 1))
    jax_dfccl.send(x, pair, 1)
    sums = [jax_dfccl.all_reduce(z, pair) for z in (x, y)]
    assert float(jax_dfccl.recv(y, pair, 0)) == 1 and list(map(float, sums)) == [3, 3]


def test_pytrees():
    x = {"a": data((3,)), "b": [data((2, 2), np.int32), np.int8(4)]}
    sender()(at(0, x), 1)
    y = receiver(jax.tree.map(lambda leaf: Shape(leaf.shape, leaf.dtype), x))(at(1, 1))
    jax.tree.map(np.testing.assert_array_equal, y, x)


def test_a_call_stays_though_nothing_uses_it():
    def first(x):
        jax_dfccl.send(x, GROUP, 1, key=1)
        jax_dfccl.send(jnp.zeros(LARGE), GROUP, 1, key=2)
        return x

    def second(x):
        jax_dfccl.recv(Shape((LARGE,), np.float32), GROUP, 0, key=2)
        jax_dfccl.recv(Shape((), np.float32), GROUP, 0, key=1)
        return x

    x = np.float32(7)
    np.testing.assert_array_equal([jax.jit(first)(at(0, x)), jax.jit(second)(at(1, x))], 7)


@pytest.mark.parametrize("count", [3, LARGE])
def test_both_send_first(count):
    """In one program starts come before waits; buffered ones wait for nobody."""
    shape = Shape((count,), np.float32)

    def exchange(x, other):
        jax_dfccl.send(x, GROUP, other)
        return jax_dfccl.recv(shape, GROUP, other)

    x, y = (at(rank, data((count,), seed=rank)) for rank in (0, 1))
    got = [jax.jit(exchange, static_argnums=1)(z, other) for z, other in ((x, 1), (y, 0))]
    for z, right in zip(got, (y, x), strict=True):
        np.testing.assert_array_equal(z, right)
    for z, other in ((x, 1), (y, 0)):
        sender(other, buffered=True)(z, 5)
    for rank, right in ((0, y), (1, x)):
        np.testing.assert_array_equal(receiver(shape, 1 - rank)(at(rank, 5)), right)


def test_in_a_loop():
    def first(x):
        def step(x, k):
            jax_dfccl.send(x, GROUP, 1, key=k)
            return 2 * x, None

        return lax.scan(step, x, jnp.arange(5))[0]

    def second(x):
        def step(x, k):
            return x + k * jax_dfccl.recv(Shape((), np.float32), GROUP, 0, key=k), None

        return lax.scan(step, x, jnp.arange(5))[0]

    a, b = jax.jit(first)(at(0, np.float32(1))), jax.jit(second)(at(1, np.float32(0)))
    assert (float(a), float(b)) == (32, sum(k * 2**k for k in range(5)))


def test_under_shard_map():
    """Each of four devices sends to a fifth; one of them, by a branch, to another one."""
    group = jax_dfccl.Group(jax.devices(), name="everyone")
    mesh = Mesh(np.array(jax.devices()[:4]), ("i",))
    shape = Shape((3,), np.float32)

    def body(x):
        jax_dfccl.send(x[0], group, 5)

        def first(x):
            jax_dfccl.send(10 * x, group, 2, name="inside")
            return x

        def third(x):
            return x + jax_dfccl.recv(shape, group, 0, name="inside")

        branch = jnp.array([0, 1, 2, 1])[lax.axis_index("i")]
        return lax.switch(branch, [first, lambda x: x, third], x[0])[None]

    x = data((4, 3))
    right = x.copy()
    right[2] += 10 * x[0]
    for check_vma in (False, True):
        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=check_vma
        )
        np.testing.assert_array_equal(jax.jit(mapped)(x), right)
        gathered = jax.jit(lambda k: [k * jax_dfccl.recv(shape, group, d) for d in range(4)])
        np.testing.assert_array_equal(gathered(at(5, np.float32(2), group)), 2 * x)


@pytest.mark.parametrize("count", [3, LARGE])
def test_started_and_launched(count):
    shape, x = Shape((count,), np.float32), data((count,))
    begin = jax.jit(lambda x: jax_dfccl.start(jax_dfccl.send, x, GROUP, 1, key=4))
    handle = begin(at(0, x))
    other = jax.jit(lambda k: jax_dfccl.start(jax_dfccl.recv, shape, GROUP, 0, key=k))(at(1, 4))
    jax_dfccl.wait_any([other])
    assert jax_dfccl.test(handle) and jax_dfccl.wait(handle) is None
    np.testing.assert_array_equal(jax_dfccl.wait(other), x)

    # The receiver of all comes first, and each side goes through the keys in its own order.
    gather = jax_dfccl.dispatch(
        lambda k: jnp.stack([jax_dfccl.recv(shape, GROUP, 0, key=n) for n in range(3)]) + k
    )
    got = gather(at(1, np.float32(1)))
    sent = [
        jax_dfccl.dispatch(lambda x, n: jax_dfccl.send(x * n, GROUP, 1, key=n))(at(0, x), n)
        for n in (2, 0, 1)
    ]
    np.testing.assert_array_equal(got.result(60), np.stack([x * n for n in range(3)]) + 1)
    assert [future.result(60) for future in sent] == [None] * 3


def test_a_launched_sender_of_a_small_message_ends_without_the_receiver():
    future = jax_dfccl.dispatch(lambda x: jax_dfccl.send(x, GROUP, 1))(at(0, np.float32(3)))
    assert future.result(60) is None
    assert float(jax_dfccl.recv(at(1, np.float32(0)), GROUP, 0)) == 3


@pytest.mark.parametrize("shape", [Shape((3, 1), np.float32), Shape((3,), np.int32)], ids=str)
def test_the_two_disagree(shape):
    sender()(at(0, np.zeros(3, np.float32)), 1)
    lines = r"send of float32\[3\] to rank 1 .*key 1 at test_messages.py:\d+ .*recv of {} from"
    match = lines.format(re.escape(f"{shape.dtype}{list(shape.shape)}"))
    with pytest.raises(jax.errors.JaxRuntimeError, match=match + r" rank 0 .* at test_messages.py"):
        receiver(shape)(at(1, 1)).block_until_ready()


def test_who_waits_for_nobody_is_reported():
    y = receiver(Shape((), np.float32), timeout=1)(at(1, 9))
    while not (waiting := jax_dfccl.report("dict")["in_flight"]):
        pass
    assert (waiting[0]["operation"], waiting[0]["absent"]) == ("recv of float32[] from rank 0", [6])
    match = (
        r"recv of float32\[\] from rank 0 'three/message' key 9 at test_messages.py.*\[6\] have not"
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match=match):
        y.block_until_ready()


def test_shapes_that_only_the_sender_knows():
    """Both send first, in several dtypes; a sender may be a jitted program."""
    arrays = [data((), np.int32), data((LARGE, 1))]
    for x in arrays:
        jax_dfccl.send_any(at(0, x), GROUP, 1)
        jax_dfccl.send_any(at(1, -x), GROUP, 0)
    jax.jit(lambda x: jax_dfccl.send_any(2 * x, GROUP, 1))(at(0, arrays[0]))
    expected = [(rank, x * (2 * rank - 1)) for x in arrays for rank in (1, 0)]
    for rank, right in [*expected, (1, 2 * arrays[0])]:
        y = jax_dfccl.recv_any(GROUP, 1 - rank, device=GROUP.devices[rank])
        assert y.dtype == right.dtype and y.devices() == {GROUP.devices[rank]}
        np.testing.assert_array_equal(y, right)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda x: jax_dfccl.send(x, AXIS, 1), TypeError, "send: group is 'i'; messages need"),
        (lambda x: jax_dfccl.recv(x, GROUP, 3), ValueError, "recv: from_ is 3, but the group"),
        (lambda x: jax_dfccl.send(x, GROUP, 0), ValueError, "to rank 0: device 6.*rank itself"),
        (lambda x: jax_dfccl.recv(x, GROUP, -3), ValueError, "from rank 0: device 6.*rank itself"),
        (lambda x: jax_dfccl.recv((3,), GROUP, 1), TypeError, "shape_dtype has 3; it must have"),
        (lambda x: jax_dfccl.send("x", GROUP, 1), TypeError, "send: x is a str"),
        (lambda x: jax_dfccl.recv_any(GROUP, 1), ValueError, "recv_any: give device="),
        (
            lambda x: [jax_dfccl.send(k * x, GROUP, 1, key=3) for k in (1, 2)],
            ValueError,
            r"may run in either order(.|\n)*name= or key=",
        ),
        (
            lambda x: jax.grad(lambda x: jax.checkpoint(lambda x: (_sent(x), jnp.sin(x))[1])(x))(x),
            NotImplementedError,
            "Effects not supported in .*`checkpoint`",
        ),
    ],
)
def test_what_is_refused(call, error, match):
    with pytest.raises(error, match=match):
        jax.jit(call)(at(0, np.float32(1)))


def _sent(x):
    jax_dfccl.send(lax.stop_gradient(x), GROUP, 1)


def test_who_is_no_member_is_told():
    with pytest.raises(ValueError, match=r"device 0, which calls it, is none of the group's \[6"):
        sender()(jax.device_put(1, jax.devices()[0]), 1)


@pytest.mark.parametrize("case", ["opposite", "lost", "leaving"])
def test_whole_programs(case):
    run("messages", case, limit_s=60)


@pytest.mark.parametrize(("processes", "devices"), [(2, 1), (4, 2)])
def test_between_processes(processes, devices):
    jobs.all_right(jobs.run("across_messages", "ring", processes, devices))
