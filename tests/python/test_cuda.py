# SPDX-License-Identifier: Apache-2.0
"""What a machine without a GPU can tell of programs for CUDA: their modules and registration.

The handlers themselves are called by tests/xla_ffi/handlers_cuda_test.cc.
"""

import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from members import spmd

import jax_dfccl
from jax_dfccl import _cluster, _core, _handles, _lowering

N = 8
X = np.arange(N * 8, dtype=np.float32).reshape(N, 8)
INDICES = np.arange(N, dtype=np.int32)
TARGETS = (
    "dfccl_collective",
    "dfccl_collective_start",
    "dfccl_collective_done",
    "dfccl_handle_start",
    "dfccl_handle_wait",
)
CHECKS = [jax.export.DisabledSafetyCheck.custom_call(target) for target in TARGETS]

KINDS: dict[str, Any] = {
    "all_reduce": lambda x: jax_dfccl.all_reduce(x, "i", op="max"),
    "all_gather": lambda x: jax_dfccl.all_gather(x, "i"),
    "reduce_scatter": lambda x: jax_dfccl.reduce_scatter(x.T, "i"),
    "all_to_all": lambda x: jax_dfccl.all_to_all(x.T, "i", 0, 0, tiled=True),
    "permute": lambda x: jax_dfccl.ppermute(x, "i", [(0, 1), (1, 0)]),
    "broadcast": lambda x: jax_dfccl.broadcast(x, "i", root=2),
    "reduce": lambda x: jax_dfccl.reduce(x, "i", root=2),
    "gather": lambda x: jax_dfccl.gather(x, "i", root=2),
    "scatter": lambda x: jax_dfccl.scatter(x.T, "i", root=2),
    "scan": lambda x: jax_dfccl.inclusive_scan(x, "i"),
    "exscan": lambda x: jax_dfccl.exclusive_scan(x, "i"),
    "barrier": lambda x: jax_dfccl.barrier(x, "i"),
    "ragged_all_to_all": lambda x: jax_dfccl.ragged_all_to_all(
        x[0], x[0], INDICES, INDICES * 0 + 1, INDICES, INDICES * 0 + 1, axis_name="i"
    ),
}


def lowered(f: Any, platform: str) -> str:
    return spmd(f).trace(X).lower(lowering_platforms=(platform,)).as_text()


def test_all_kinds_are_here():
    assert set(KINDS) == set(_lowering.KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_modules_are_those_of_the_cpu(kind):
    text = lowered(KINDS[kind], "cuda")
    (call,) = re.findall(r"stablehlo\.custom_call @dfccl_collective\(.*", text)
    for attribute in (f'kind = "{kind}"', "as_device = -1", "site = 0", "group_sizes = dense<8>"):
        assert attribute in call
    assert text == lowered(KINDS[kind], "cpu")


def two_orders(x):
    first = lambda x: jax_dfccl.all_reduce(x, "i", name="first")  # noqa: E731
    second = lambda x: jax_dfccl.all_gather(x, "i", name="second").sum(0)  # noqa: E731
    return lax.cond(
        lax.axis_index("i") % 2 == 0,
        lambda x: first(x) + second(x),
        lambda x: second(x) + first(x),
        x,
    )


def test_starts_come_before_dones_in_branches():
    targets = re.findall(r"custom_call @(dfccl_\w+)\(", lowered(two_orders, "cuda"))
    start, done = TARGETS[1:3]
    assert targets == 2 * [start, start, done, done]


def test_handles():
    def two(x):
        a, b = (jax_dfccl.start(jax_dfccl.all_reduce, k * x, "i") for k in (1, 2))
        return jax_dfccl.wait(b) - jax_dfccl.wait(a)

    text = lowered(two, "cuda")
    start, wait = TARGETS[3:]
    assert re.findall(r"custom_call @(dfccl_\w+)\(", text) == [start, start, wait, wait]
    assert text == lowered(two, "cpu")
    with pytest.raises(
        NotImplementedError, match="handles are for CPUs and CUDA GPUs, not for tpu"
    ):
        lowered(two, "tpu")


@pytest.mark.parametrize("gpu", [False, True])
def test_handles_are_known_by_platform(monkeypatch, gpu):
    """GPUs have tickets of their own, with the same numbers."""
    asked: list[Any] = []
    device = types.SimpleNamespace(platform="gpu" if gpu else "cpu")
    ticket = types.SimpleNamespace(
        addressable_shards=[types.SimpleNamespace(data=np.array([7], np.uint64))],
        devices=lambda: [device],
        is_ready=lambda: True,
    )
    monkeypatch.setattr(_handles, "_concrete", lambda function, handle: (ticket,))
    for name, result in (("handle_state", "finished"), ("handle_cancel", True)):
        monkeypatch.setattr(
            _core,
            name,
            lambda *asks, name=name, result=result: asked.append((name, *asks)) or result,
        )
    handle: Any = None
    assert jax_dfccl.test(handle)
    assert jax_dfccl.cancel(handle)
    assert asked == [("handle_state", 7, gpu), ("handle_cancel", 7, gpu)]


def test_export():
    exported = jax.export.export(spmd(two_orders), platforms=["cuda"], disabled_checks=CHECKS)(X)
    assert exported.platforms == ("cuda",)
    assert len(re.findall("@dfccl_collective_start", exported.mlir_module())) == 4


def test_overridden_lax():
    with jax_dfccl.override_lax():
        text = lowered(lambda x: lax.psum(x, "i"), "cuda")
    assert "@dfccl_collective" in text
    assert "all_reduce" not in lowered(lambda x: x, "cuda")


LOWER = """
import jax
import jax_dfccl
from jax.sharding import PartitionSpec as P
from jax_dfccl import _lowering

auto = (jax.sharding.AxisType.Auto,)
mesh = jax.sharding.AbstractMesh((8,), ("i",), axis_types=auto)
f = jax.shard_map(lambda x: jax_dfccl.all_reduce(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P())
traced = jax.jit(f).trace(jax.ShapeDtypeStruct((8,), "float32"))
text = traced.lower(lowering_platforms=("cuda",)).as_text()
assert "dfccl_collective" in text
assert not _lowering._registered
from jax_dfccl import _core
assert _core.gpu_counters() == {}
assert "libcuda" not in open("/proc/self/maps").read()
print("fine")
"""


def test_neither_import_nor_lowering_needs_a_driver():
    child = subprocess.run(
        [sys.executable, "-c", LOWER], capture_output=True, text=True, timeout=120
    )
    assert child.stdout.strip() == "fine", child.stderr


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs of which JAX sees the second one first, and what is registered for them."""
    events: list[Any] = []
    devices = [
        types.SimpleNamespace(id=4, local_hardware_id=1, process_index=0),
        types.SimpleNamespace(id=5, local_hardware_id=0, process_index=0),
    ]
    monkeypatch.setattr(_lowering, "_registered", {"cpu"})
    monkeypatch.setattr(jax, "local_devices", lambda backend: devices)
    monkeypatch.setattr(jax, "devices", lambda backend: devices)
    monkeypatch.setattr(_core, "configure_gpus", lambda **options: events.append(options))
    for name in ("register_ffi_type", "register_ffi_target"):
        monkeypatch.setattr(
            jax.ffi,
            name,
            lambda target, handles, platform, name=name: events.append((name, target, platform)),
        )
    return types.SimpleNamespace(events=events, devices=devices)


def test_registration(gpus):
    for _ in range(2):
        _lowering._begin_executable({(4, 5)}, "cuda")
    options, *registered = gpus.events
    assert options["devices"] == {1: 4, 0: 5}
    assert (options["blocks"], options["memory_bytes"]) == (8, 256 << 20)
    assert (options["host_memory_bytes"], options["several_processes"]) == (256 << 20, False)
    assert (options["low_latency_bytes"], options["bulk"]) == (16 << 10, False)
    assert registered == [
        ("register_ffi_type", "jax_dfccl.call", "CUDA"),
        *(("register_ffi_target", target, "CUDA") for target in TARGETS),
    ]
    assert _lowering._registered == {"cpu", "cuda"}


def test_groups_over_processes(gpus, monkeypatch):
    gpus.devices[1].process_index = 1
    wanted: list[Any] = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(_cluster, "_platform", None)
    monkeypatch.setattr(
        _cluster, "joined", lambda runtime: types.SimpleNamespace(want=wanted.append)
    )
    _lowering._begin_executable({(4,), (5,)}, "cuda")
    assert wanted == []
    _lowering._begin_executable({(4, 5)}, "cuda")
    assert wanted == [{1}]
    assert gpus.events[0]["several_processes"]
    # Their devices may have the same ids.
    with pytest.raises(NotImplementedError, match="of one platform: cuda in this one"):
        _lowering._begin_executable({(4, 5)}, "cpu")


def test_handlers_of_platforms():
    cpu, cuda = (_core.registrations(platform) for platform in ("cpu", "CUDA"))
    assert set(cuda) == set(TARGETS) == set(cpu)
    assert all(set(stages) == {"instantiate", "execute"} for stages in cuda.values())
    with pytest.raises(ValueError, match="no handlers for ROCM"):
        _core.registrations("ROCM")
    with pytest.raises(NotImplementedError, match="not on rocm"):
        _lowering._begin_executable(set(), "rocm")


def test_the_program_for_gpus_is_right_on_a_cpu():
    """tools/gpu_check.sh runs it on a GPU."""
    program = Path(__file__).parents[1] / "programs" / "gpu.py"
    child = subprocess.run(
        [sys.executable, str(program), "cpu"],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
    )
    assert child.stdout.splitlines()[-1:] == ["fine"], child.stdout + child.stderr


def test_machines_without_gpus_say_so():
    with pytest.raises(RuntimeError, match="cuda"):
        _lowering._begin_executable(set(), "cuda")
    assert "cuda" not in _lowering._registered
