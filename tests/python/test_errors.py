# SPDX-License-Identifier: Apache-2.0
"""What is refused while tracing, and that the message says what was wrong and what is accepted."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import folders, movers, shape_for
from jax.sharding import PartitionSpec as P
from members import data, make_mesh, spmd
from processes import outputs_of_two

import jax_dfccl
from jax_dfccl import _lowering, all_reduce, report
from jax_dfccl._config import Config
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


@pytest.mark.parametrize("platform", ["rocm", "tpu"])
def test_other_platforms(platform):
    traced = spmd(lambda x: all_reduce(x, "i")).trace(X)
    with pytest.raises(NotImplementedError, match=f"CPUs and CUDA GPUs, not on {platform}"):
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
            "JAX_DFCCL_PLAN": "ring",
            "JAX_DFCCL_TUNING": "off",
            "JAX_DFCCL_GPU_BLOCKS": "4",
            "JAX_DFCCL_GPU_MEMORY": "512",
            "JAX_DFCCL_GPU_HOST_MEMORY": "64",
            "JAX_DFCCL_GPU_LOW_LATENCY": "0",
            "JAX_DFCCL_GPU_BULK": "1",
            "UNRELATED": "x",
        }
    )
    assert config == Config(2.5, 1.0, 0.0, 3, "ring", "off", 4, 512 << 20, 64 << 20, 0, True)


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
        ("JAX_DFCCL_GPU_BLOCKS", "0"),
        ("JAX_DFCCL_GPU_MEMORY", "1"),
        ("JAX_DFCCL_GPU_HOST_MEMORY", "0"),
        ("JAX_DFCCL_GPU_LOW_LATENCY", "16385"),
        ("JAX_DFCCL_GPU_BULK", "yes"),
    ],
)
def test_bad_settings(variable, value):
    with pytest.raises(ValueError, match=f"{variable}='{value}': must be"):
        Config.from_environment({variable: value})


def test_report_format():
    with pytest.raises(ValueError, match="format is 'json'"):
        report(format="json")  # type: ignore[call-overload]


def test_report_text_joins_the_members_of_a_collective():
    entry = {
        "operation": "all_reduce(sum)", "name": "g", "key": "7", "program": "jit_step",
        "launch": 3, "source": "train.py:12 (step)", "dtype": "float32", "count": 5,
        "plan": "ring:8", "group": [0, 1, 2, 3], "absent": [3], "state": "waiting for members",
        "error": "", "age_s": 2.0, "total_s": 0.0,
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
        "gpus": {"submitted": 3, "completed": 2},
        "plans": {"forced": "ring:8", "table": "", "note": "", "hash": "01"},
    }
    assert str(Report(flight)).splitlines() == [
        "in flight: 1 collective",
        "  all_reduce(sum) 'g' key=7 of 5 x float32 over devices 0-3 by ring:8 at "
        "train.py:12 (step) in jit_step, launch 3: waiting for members on 0-2 since 2.0 s, "
        "absent: 3",
        "cycle: devices 0 and 1 wait for each other",
        "recent: 0 collectives",
        "device 0: 4 submitted, 3 completed, 0 failed, 1 preemption, 2 context saves, 1 quit, "
        "0 restarts, largest wait 250.00 ms",
        "of jax.lax, replaced: 1 pmax, 2 psum",
        "GPUs: 3 submitted, 2 completed",
        "plans, forced: ring:8",
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
x = jax.make_array_from_callback(
    (2, 2), NamedSharding(mesh, P("process", "device")), lambda i: np.arange(4.0).reshape(2, 2)[i]
)
def over(axis):
    f = lambda x: jax_dfccl.all_reduce(x, axis)
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P(*mesh.axis_names),
                                 out_specs=P(*mesh.axis_names), check_vma=False))(x)
values = [float(shard.data.item()) for shard in over("device").addressable_shards]
assert values == [4.0 * int(sys.argv[2]) + 1] * 2, values
print("right")
"""


def test_groups_within_one_of_two_processes():
    for out, err in outputs_of_two(TWO_PROCESSES):
        assert out.splitlines()[-1:] == ["right"], err


# Other collectives --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*movers(), *folders("sum")], ids=str)
def test_every_function_checks_what_all_have_in_common(case):
    """And says its own name."""
    function = case.name.removesuffix("(sum)").split("(")[0]
    x = data(shape_for(case, (2,)))
    for arguments, error, match in [
        ({"axis_name": 0}, TypeError, "must name mesh or vmap axes"),
        ({"axis_name": "k"}, NameError, "no axis is named 'k' here"),
        ({"axis_name": ("i", "i")}, ValueError, "repeats an axis"),
        ({"name": ""}, ValueError, "name is empty"),
        ({"key": 1}, ValueError, "key is given without name"),
        ({"priority": 0.5}, TypeError, "must be a Python int"),
        ({"timeout": -1}, ValueError, "must be a positive"),
        ({"axis_index_groups": [[0]]}, ValueError, "leaves out"),
    ]:
        axis_name = arguments.pop("axis_name", "i")
        with pytest.raises(error, match=f"{function}: .*{match}"):
            spmd(lambda x, a=axis_name, o=arguments: case.call(x[0], a, **o))(x)
    with pytest.raises(TypeError, match=rf"{function}: x\['k'\] is a str"):
        spmd(lambda x: case.call({"k": "text"}, "i"))(x)
    with pytest.raises(NameError, match=rf"{function}: .*use jax\.shard_map"):
        case.call(x[0], "i")
    with pytest.raises(TypeError, match="unexpected keyword"):
        spmd(lambda x: case.call(x[0], "i", tile=True))(x)
    if case.even:
        groups = [[0, 1, 2, 3, 4], [5, 6, 7]]
        with pytest.raises(ValueError, match=f"{function}: .*groups of different sizes"):
            spmd(lambda x: case.call(x[0], "i", axis_index_groups=groups))(x)
    mesh = make_mesh((4, 2), ("i", "j"))
    partly = jax.shard_map(
        lambda x: case.call(x[0], "i"),
        mesh=mesh, in_specs=P("i"), out_specs=P("i"), axis_names={"i"},
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match=f"{function}: .*to the compiler"):
        partly(x)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda j, x: j.all_gather(x, "i", axis=3), ValueError, "all_gather: axis is 3.*3 dim"),
        (lambda j, x: j.all_gather(x, "i", axis=-4), ValueError, "all_gather: axis is -4"),
        (lambda j, x: j.all_gather(x[0, 0], "i", tiled=True), ValueError, "0 dimensions"),
        (lambda j, x: j.all_gather(x, "i", axis="0"), TypeError, "axis is '0'; it must be an int"),
        (lambda j, x: j.gather(x, "i", 8), ValueError, "gather: root is 8.*only 8 members"),
        (lambda j, x: j.gather(x, "i", x), TypeError, "gather: root is .*a Python int"),
        (lambda j, x: j.broadcast(x, "i", -9), ValueError, "broadcast: root is -9"),
        (lambda j, x: j.reduce(x, "i", 0, op="avg"), ValueError, "reduce: op is 'avg'"),
        (lambda j, x: j.reduce(x, "i", 0, op="xor"), TypeError, "reduce: op 'xor' is for bool"),
        (
            lambda j, x: j.reduce_scatter(x, "i"),
            ValueError,
            "reduce_scatter: dimension 0 of x has size 7; with tiled=False it must be the number",
        ),
        (
            lambda j, x: j.reduce_scatter({"w": x}, "i", tiled=True),
            ValueError,
            r"dimension 0 of x\['w'\] has size 7; with tiled=True it must be a multiple",
        ),
        (
            lambda j, x: j.reduce_scatter(x, "i", scatter_dimension=2),
            ValueError,
            "scatter_dimension is 2",
        ),
        (lambda j, x: j.scatter(x, "i", 0, axis=1), ValueError, "scatter: dimension 1 of x has"),
        (lambda j, x: j.all_to_all(x, "i", 2, 0), ValueError, "all_to_all: split_axis is 2"),
        (lambda j, x: j.all_to_all(x, "i", 0, 5), ValueError, "all_to_all: concat_axis is 5"),
        (lambda j, x: j.ppermute(x, "i", [(0, 8)]), ValueError, "a target in perm is 8"),
        (lambda j, x: j.ppermute(x, "i", [(0, 1), (0, 2)]), ValueError, "0 twice as a source"),
        (lambda j, x: j.ppermute(x, "i", [(0, 1), (2, -7)]), ValueError, "1 twice as a target"),
        (lambda j, x: j.ppermute(x, "i", [0, 1]), TypeError, "a sequence of pairs"),
        (lambda j, x: j.send_recv(x, "i", 1, -7), ValueError, "are both 1; they must differ"),
        (
            lambda j, x: j.send_recv(x, "i", 1, 2, axis_index_groups=[]),
            TypeError,
            "source and target are the group",
        ),
        (lambda j, x: j.inclusive_scan(x, "i", op="mean"), ValueError, "inclusive_scan: op is"),
        (lambda j, x: j.exclusive_scan(x, "i", op="nor"), ValueError, "exclusive_scan: op is"),
        (lambda j, x: j.all_reduce(x, "i", op="max", scale=2), ValueError, "scale is for sum"),
        (lambda j, x: j.all_reduce(x, "i", scale=x), TypeError, r"scale has shape \(7, 3\)"),
        (
            lambda j, x: j.all_reduce(x.astype(int), "i", scale=0.5),
            TypeError,
            "scale has dtype float32.*without changing its type",
        ),
        (lambda j, x: j.max_with_index(1j * x, "i"), TypeError, "max_with_index: op 'max' is not"),
    ],
)
def test_own_arguments(call, error, match):
    with pytest.raises(error, match=match):
        spmd(lambda x: call(jax_dfccl, x[0]))(np.zeros((8, 7, 3), np.float32))


def test_unreduced_operands():
    def f(x):
        return jax_dfccl.all_gather(jax.lax.pcast(x, "i", to="unreduced"), "i")

    with pytest.raises(Exception, match="unreduced"):
        spmd(f, check_vma=True)(X)
