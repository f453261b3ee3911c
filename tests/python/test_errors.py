# SPDX-License-Identifier: Apache-2.0
"""What is refused while tracing, and that the message says what was wrong and what is accepted."""

import socket
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from members import data, make_mesh, spmd

from jax_dfccl import _lowering, all_reduce, report
from jax_dfccl._config import ALGORITHMS, Config
from jax_dfccl._report import Report

X = data((8, 4))


def refused(error: type[Exception], match: str, x: Any = X, axis_name: Any = "i", **arguments):
    with pytest.raises(error, match=match):
        spmd(lambda x: all_reduce(x, axis_name, **arguments))(x)


@pytest.mark.parametrize("op", ["add", "SUM", "", None, 3])
def test_unknown_op(op):
    refused(ValueError, "op is .*must be one of sum, mean", op=op)


@pytest.mark.parametrize("op", ["min", "max"])
def test_minimum_of_complex(op):
    refused(TypeError, "not defined for complex.*complex64", X.astype(np.complex64), op=op)


@pytest.mark.parametrize("op", ["and", "or", "xor"])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.complex64])
def test_bitwise_of_floats(op, dtype):
    refused(TypeError, "for bool and integers", X.astype(dtype), op=op)


def test_the_leaf_is_named():
    x = {"good": X.astype(np.int32), "bad": X}
    refused(TypeError, r"x\['bad'\] has dtype float32", x, op="xor")


def test_what_is_no_array():
    with pytest.raises(TypeError, match=r"x\[0\] is a str"):
        spmd(lambda x: all_reduce(["text"], "i"))(X)
    keys = jax.random.split(jax.random.key(0), 8)
    refused(TypeError, "bool, integers, floats and complex", keys)


@pytest.mark.parametrize(
    ("groups", "match"),
    [
        ([[0, 1], [2, 3]], "leaves out indices 4, 5, 6, 7"),
        ([[0, 1, 2, 3, 4, 5, 6]], "leaves out index 7"),
        ([[0, 1, 2, 3], [3, 4, 5, 6, 7]], "names index 3 twice"),
        ([[0, 1, 2, 3], [4, 5, 6, 8]], "names index 8, but the axis has 8"),
        ([[0, 1, 2, 3], [-1, 4, 5, 6, 7]], "names index -1"),
        ([list(range(8)), []], "empty group"),
        ([], "leaves out"),
    ],
)
def test_bad_groups(groups, match):
    refused(ValueError, match, axis_index_groups=groups)


@pytest.mark.parametrize("groups", [3, [0, 1, 2], "01234567", [[0.0, 1.0]]])
def test_groups_that_are_no_lists_of_indices(groups):
    refused(TypeError, "must be a list of lists", axis_index_groups=groups)


@pytest.mark.parametrize("axis_name", [0, None, ("i", 1), True])
def test_axes_that_are_no_names(axis_name):
    refused(TypeError, "must name mesh or vmap axes", axis_name=axis_name)


def test_repeated_axes():
    refused(ValueError, "repeats an axis", axis_name=("i", "i"))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"name": 3}, TypeError, "name is 3; it must be a str"),
        ({"name": b"n"}, TypeError, "must be a str"),
        ({"name": ""}, ValueError, "name is empty"),
        ({"priority": 1.0}, TypeError, "priority is 1.0; it must be a Python int"),
        ({"priority": True}, TypeError, "must be a Python int"),
        ({"priority": "high"}, TypeError, "must be a Python int"),
        ({"priority": 2**31}, ValueError, "does not fit in 32 bits"),
        ({"timeout": 0}, ValueError, "positive, finite number of seconds"),
        ({"timeout": -1.5}, ValueError, "positive"),
        ({"timeout": float("nan")}, ValueError, "positive"),
        ({"timeout": float("inf")}, ValueError, "finite"),
        ({"timeout": "1"}, TypeError, "timeout is '1'"),
        ({"timeout": [1]}, TypeError, "positive"),
        ({"key": 1}, ValueError, "key is given without name"),
        ({"name": "n", "key": 1.5}, TypeError, "must be an integer"),
        ({"name": "n", "key": True}, TypeError, "must be an integer"),
        ({"name": "n", "key": "k"}, TypeError, "must be an integer"),
        ({"name": "n", "key": object()}, TypeError, "must be an integer"),
        ({"name": "n", "key": np.zeros(2, np.int32)}, TypeError, r"shape \(2,\)"),
        ({"name": "n", "key": np.float32(1)}, TypeError, "dtype float32"),
        ({"name": "n", "key": np.bool_(True)}, TypeError, "dtype bool"),
        ({"name": "n", "key": 2**31}, ValueError, "jax_enable_x64"),
        ({"name": "n", "key": np.uint32(1)}, ValueError, "jax_enable_x64"),
        ({"name": "n", "key": 2**63}, ValueError, "does not fit in a signed 64-bit"),
    ],
)
def test_bad_arguments(arguments, error, match):
    refused(error, match, **arguments)


def test_arguments_are_checked_without_axes_too():
    with pytest.raises(ValueError, match="must be one of"):
        all_reduce(X, (), op="add")


def test_traced_static_arguments():
    def f(x):
        return all_reduce(x, "i", priority=x.size * jnp.int32(1))

    with pytest.raises(TypeError, match="must be a Python int"):
        spmd(f)(X)
    with pytest.raises(TypeError, match="must be a positive"):
        spmd(lambda x: all_reduce(x, "i", timeout=x[0, 0]))(X)


# Outside shard_map --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.jit, jax.vmap, jax.grad], ids=["plain", "jit", "vmap", "grad"]
)
def test_call_outside_shard_map(wrap):
    def f(x):
        return all_reduce(x, "i").sum()

    with pytest.raises(NameError, match=r"all_reduce: no axis is named 'i'.*use jax.shard_map"):
        wrap(f)(X)


def test_call_in_automatically_sharded_jit_is_refused_not_gathered():
    mesh = make_mesh()
    x = jax.device_put(X, jax.NamedSharding(mesh, P("i")))
    with jax.set_mesh(mesh), pytest.raises(NameError, match=r"use jax\.shard_map"):
        jax.jit(lambda x: all_reduce(x, "i"))(x)


@pytest.mark.parametrize("jit", [True, False])
def test_shard_map_that_is_manual_over_some_axes_only(jit):
    mesh = make_mesh((4, 2), ("i", "j"))
    f = jax.shard_map(
        lambda x: all_reduce(x, "i"),
        mesh=mesh, in_specs=P("i"), out_specs=P(), axis_names={"i"},
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match=r"leaves \['j'\] to the compiler.*axis_names="):
        (jax.jit(f) if jit else f)(X)


def test_axes_of_size_one_may_be_left_to_the_compiler():
    mesh = make_mesh((8, 1), ("i", "j"))
    f = jax.shard_map(
        lambda x: all_reduce(x, "i"),
        mesh=mesh, in_specs=P("i"), out_specs=P(), axis_names={"i"},
    )  # fmt: skip
    assert "dfccl_collective" in jax.jit(f).lower(X).as_text()


def test_keys_that_differ_along_a_reduced_vmap_axis():
    def f(x):
        def g(x, k):
            return all_reduce(x, ("i", "b"), name="n", key=k)

        return jax.vmap(g, axis_name="b")(x[0], jnp.arange(4))[None]

    with pytest.raises(ValueError, match="must have the same key"):
        spmd(f)(X)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_other_platforms(platform):
    traced = spmd(lambda x: all_reduce(x, "i")).trace(X)
    with pytest.raises(NotImplementedError, match=f"CPU devices only so far, not on {platform}"):
        traced.lower(lowering_platforms=(platform,))


def test_the_traceback_ends_in_the_users_line():
    with pytest.raises(ValueError, match="op is") as caught:
        spmd(lambda x: all_reduce(x, "i", op="nothing"))(X)
    frames = [entry for entry in caught.traceback if str(entry.path) == __file__]
    assert "nothing" in str(frames[-1].statement)


# Settings and report ------------------------------------------------------------------------------


def test_settings_have_defaults():
    config = Config.from_environment({})
    assert (config.timeout_s, config.stall_warning_s, config.workers) == (600, 10, 0)


def test_settings_are_read():
    config = Config.from_environment(
        {
            "JAX_DFCCL_TIMEOUT": "2.5",
            "JAX_DFCCL_STALL_WARNING": "1",
            "JAX_DFCCL_CYCLE_GRACE": "0",
            "JAX_DFCCL_WORKERS": "3",
            "JAX_DFCCL_ALGORITHM": "ring",
            "UNRELATED": "x",
        }
    )
    assert config == Config(2.5, 1.0, 0.0, 3, "ring")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("JAX_DFCCL_TIMEOUT", "soon"),
        ("JAX_DFCCL_TIMEOUT", "0"),
        ("JAX_DFCCL_TIMEOUT", "-3"),
        ("JAX_DFCCL_TIMEOUT", "nan"),
        ("JAX_DFCCL_TIMEOUT", "inf"),
        ("JAX_DFCCL_TIMEOUT", ""),
        ("JAX_DFCCL_STALL_WARNING", "0"),
        ("JAX_DFCCL_CYCLE_GRACE", "-1"),
        ("JAX_DFCCL_WORKERS", "two"),
        ("JAX_DFCCL_WORKERS", "-1"),
        ("JAX_DFCCL_WORKERS", "1.5"),
        ("JAX_DFCCL_ALGORITHM", "fastest"),
    ],
)
def test_bad_settings(variable, value):
    with pytest.raises(ValueError, match=f"{variable}='{value}': must be"):
        Config.from_environment({variable: value})


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_can_be_forced(algorithm):
    assert Config.from_environment({"JAX_DFCCL_ALGORITHM": algorithm}).algorithm == algorithm


def test_report_format():
    with pytest.raises(ValueError, match="format is 'json'"):
        report(format="json")  # type: ignore[call-overload]


def test_report_text_joins_the_members_of_a_collective():
    entry = {
        "operation": "all_reduce(sum)", "name": "g", "key": "7", "program": "jit_step",
        "launch": 3, "source": "train.py:12 (step)", "dtype": "float32", "count": 5,
        "group": [0, 1, 2, 3], "absent": [3], "state": "waiting for members", "error": "",
        "age_s": 2.0, "total_s": 0.0,
    }  # fmt: skip
    device = {
        "device": 0, "submitted": 4, "completed": 3, "failed": 0, "preemptions": 1,
        "context_saves": 2, "quits": 1, "restarts": 0, "largest_wait_s": 0.25,
    }  # fmt: skip
    flight = {
        "in_flight": [{**entry, "device": device} for device in range(3)],
        "recent": [],
        "devices": [device],
        "cycles": ["devices 0 and 1 wait for each other"],
        "override_lax": {"replaced": {"psum": 2, "pmax": 1}, "kept": {}},
    }
    assert str(Report(flight)).splitlines() == [
        "in flight: 1 collective",
        "  all_reduce(sum) 'g' key=7 of 5 x float32 over devices 0-3 at train.py:12 (step) in "
        "jit_step, launch 3: waiting for members on 0-2 since 2.0 s, absent: 3",
        "cycle: devices 0 and 1 wait for each other",
        "recent: 0 collectives",
        "device 0: 4 submitted, 3 completed, 0 failed, 1 preemption, 2 context saves, 1 quit, "
        "0 restarts, largest wait 250.00 ms",
        "of jax.lax, replaced: 1 pmax, 2 psum",
    ]
    copy = Report(flight).as_dict()
    copy["in_flight"].clear()
    assert len(flight["in_flight"]) == 3


def test_calls_are_kept_once_per_place():
    def f(x):
        return all_reduce(x, "i", name="kept")

    for _ in range(3):
        spmd(f).lower(X)
        jax.clear_caches()
    assert sum(info.name == "kept" for info in _lowering._calls) == 1


TWO_PROCESSES = """
import sys
import jax, jax_dfccl, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("process", "device"))
x = jax.make_array_from_callback(
    (2, 2), NamedSharding(mesh, P("process", "device")), lambda i: np.arange(4.0).reshape(2, 2)[i]
)
def over(axis):
    f = lambda x: jax_dfccl.all_reduce(x, axis)
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P(*mesh.axis_names),
                                 out_specs=P(*mesh.axis_names), check_vma=False))(x)
values = [float(shard.data.item()) for shard in over("device").addressable_shards]
assert values == [4.0 * int(sys.argv[2]) + 1] * 2, values
try:
    over("process")
except NotImplementedError as error:
    print(error)
"""


def test_groups_across_processes():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, address, str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for out, err in outputs:
        assert "in processes [0, 1]; collectives between processes are not there yet" in out, err
