# SPDX-License-Identifier: Apache-2.0
"""Settings of the process, read once from the environment. The only user of os.environ."""

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

# XLA:CPU sizes its thread pools by the first of these that is set, else by cores and devices.
_POOL_VARIABLES = ("PJRT_NPROC", "NPROC")


def forced_cpu_devices() -> int:
    """How many CPU devices XLA_FLAGS asks for; 1 if it does not say."""
    counts = re.findall(
        r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")
    )
    return int(counts[-1]) if counts else 1


def environment_with_xla_flags(flags: str) -> dict[str, str]:
    """This process's environment with more XLA_FLAGS, for a child process."""
    return {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}"}


def environment() -> dict[str, str]:
    """This process's environment, for the processes that `launch` starts."""
    return dict(os.environ)


def xla_pool_is_chosen() -> bool:
    """Whether the user has set the size of XLA:CPU's thread pools."""
    return any(variable in os.environ for variable in _POOL_VARIABLES)


@contextlib.contextmanager
def xla_pool_threads(threads: int) -> Iterator[None]:
    """Lets a CPU client that is made inside have so many threads, unless the user has chosen."""
    if xla_pool_is_chosen():
        yield
        return
    os.environ[_POOL_VARIABLES[0]] = str(threads)
    try:
        yield
    finally:
        del os.environ[_POOL_VARIABLES[0]]


def overrides_lax() -> bool:
    """JAX_DFCCL_OVERRIDE_LAX: whether lax's collectives run on the daemon from the start."""
    text = os.environ.get("JAX_DFCCL_OVERRIDE_LAX", "")
    if text not in ("", "0", "1"):
        raise ValueError(f"JAX_DFCCL_OVERRIDE_LAX={text!r}: must be 0 or 1")
    return text == "1"


def cache_folder() -> Path:
    """Where this user's measurements are kept: $XDG_CACHE_HOME/jax_dfccl."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not folder.is_absolute():  # to be ignored then, says the XDG specification
        folder = Path(os.environ.get("HOME", "/")) / ".cache"
    return folder / "jax_dfccl"


# kMostPostedBytes in cuda/layout.h.
_MOST_LOW_LATENCY_BYTES = 16 << 10


@dataclasses.dataclass(frozen=True)
class Config:
    """What the runtime is started with.

    Attributes:
        timeout_s: JAX_DFCCL_TIMEOUT. How long a collective may wait for a member before it ends
            with an error that names the absent ones.
        stall_warning_s: JAX_DFCCL_STALL_WARNING. After this long a warning says who is awaited.
        cycle_grace_s: JAX_DFCCL_CYCLE_GRACE. How long members may wait for each other in a circle
            before that is an error; 0: only the time limit ends it.
        workers: JAX_DFCCL_WORKERS. Threads that drive the daemons; 0: one per core.
        plan: JAX_DFCCL_PLAN. Forces plans (`_plans.forced` checks it); "": chosen by size.
        tuning: JAX_DFCCL_TUNING. File with measured plans; "": this machine's in `cache_folder`,
            "off": none.
        gpu_blocks: JAX_DFCCL_GPU_BLOCKS. Streaming multiprocessors that the daemon of a GPU takes.
        gpu_memory_bytes: JAX_DFCCL_GPU_MEMORY. Device memory of that daemon, in MiB: for the
            results of calls in branches and the sources and results of those that need a copy.
        gpu_host_memory_bytes: JAX_DFCCL_GPU_HOST_MEMORY. Page-locked memory of the host for each
            GPU, in MiB: for what goes through the host, if anything does.
        gpu_low_latency_bytes: JAX_DFCCL_GPU_LOW_LATENCY. Collectives whose sources have at most so
            many bytes in all go with flags in the data there; 0: none.
        gpu_bulk: JAX_DFCCL_GPU_BULK. 1: large copies there are done in bulk, from sm_90 on.
    """

    timeout_s: float = 600.0
    stall_warning_s: float = 10.0
    cycle_grace_s: float = 2.0
    workers: int = 0
    plan: str = ""
    tuning: str = ""
    gpu_blocks: int = 8
    gpu_memory_bytes: int = 256 << 20
    gpu_host_memory_bytes: int = 256 << 20
    gpu_low_latency_bytes: int = _MOST_LOW_LATENCY_BYTES
    gpu_bulk: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "Config":
        """Reads the JAX_DFCCL_* variables; a bad value is a ValueError that names it."""
        env = os.environ if environment is None else environment
        return cls(
            timeout_s=_seconds(env, "JAX_DFCCL_TIMEOUT", cls.timeout_s),
            stall_warning_s=_seconds(env, "JAX_DFCCL_STALL_WARNING", cls.stall_warning_s),
            cycle_grace_s=_seconds(
                env, "JAX_DFCCL_CYCLE_GRACE", cls.cycle_grace_s, zero_allowed=True
            ),
            workers=_whole(env, "JAX_DFCCL_WORKERS", cls.workers, 0, 1024, " (0: one per core)"),
            gpu_blocks=_whole(env, "JAX_DFCCL_GPU_BLOCKS", cls.gpu_blocks, 1, 128),
            gpu_memory_bytes=_whole(
                env, "JAX_DFCCL_GPU_MEMORY", cls.gpu_memory_bytes >> 20, 16, 1 << 16, " (MiB)"
            )
            << 20,
            gpu_host_memory_bytes=_whole(
                env,
                "JAX_DFCCL_GPU_HOST_MEMORY",
                cls.gpu_host_memory_bytes >> 20,
                1,
                1 << 16,
                " (MiB)",
            )
            << 20,
            gpu_low_latency_bytes=_whole(
                env,
                "JAX_DFCCL_GPU_LOW_LATENCY",
                cls.gpu_low_latency_bytes,
                0,
                _MOST_LOW_LATENCY_BYTES,
                " (bytes)",
            ),
            gpu_bulk=_whole(env, "JAX_DFCCL_GPU_BULK", int(cls.gpu_bulk), 0, 1) != 0,
            plan=env.get("JAX_DFCCL_PLAN", cls.plan),
            tuning=env.get("JAX_DFCCL_TUNING", cls.tuning),
        )


_LEAST_RING_BYTES, _MOST_RING_BYTES = 1 << 16, 1 << 30
_MOST_SOCKETS = 16


@dataclasses.dataclass(frozen=True)
class ClusterConfig:
    """How this process gets connected with the other processes of its job.

    Attributes:
        transport: JAX_DFCCL_TRANSPORT. "tcp": TCP also within a host; "": what fits.
        interface: JAX_DFCCL_INTERFACE. Where to listen with TCP: the name of an interface or an
            address; "": the address by which this host reaches the coordinator.
        ring_bytes: JAX_DFCCL_RING_BYTES. Memory for what is under way between two processes of a
            host, per direction.
        sockets: JAX_DFCCL_SOCKETS. How many TCP connections two processes share.
        connect_timeout_s: JAX_DFCCL_CONNECT_TIMEOUT. How long a process whose address is known
            may be unreachable before it counts as lost.
        peer_timeout_s: JAX_DFCCL_PEER_TIMEOUT. How long a process that is connected with TCP may
            be silent before it counts as lost; 0: for ever.
        job_secret: JAX_DFCCL_JOB_SECRET. What every process of the job knows and no one else; "":
            a random one from the job's key-value store.
    """

    transport: str = ""
    interface: str = ""
    ring_bytes: int = 2 << 20
    sockets: int = 1
    connect_timeout_s: float = 60.0
    peer_timeout_s: float = 30.0
    job_secret: str = dataclasses.field(default="", repr=False)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "ClusterConfig":
        """Reads the JAX_DFCCL_* variables; a bad value is a ValueError that names it."""
        env = os.environ if environment is None else environment
        transport = env.get("JAX_DFCCL_TRANSPORT", cls.transport)
        if transport not in ("", "tcp"):
            raise ValueError(f"JAX_DFCCL_TRANSPORT={transport!r}: must be tcp or empty")
        return cls(
            transport=transport,
            interface=env.get("JAX_DFCCL_INTERFACE", cls.interface),
            ring_bytes=_ring_bytes(env, cls.ring_bytes),
            sockets=_whole(env, "JAX_DFCCL_SOCKETS", cls.sockets, 1, _MOST_SOCKETS),
            connect_timeout_s=_seconds(env, "JAX_DFCCL_CONNECT_TIMEOUT", cls.connect_timeout_s),
            peer_timeout_s=_seconds(
                env, "JAX_DFCCL_PEER_TIMEOUT", cls.peer_timeout_s, zero_allowed=True
            ),
            job_secret=env.get("JAX_DFCCL_JOB_SECRET", cls.job_secret),
        )


def _ring_bytes(env: Mapping[str, str], default: int) -> int:
    text = env.get("JAX_DFCCL_RING_BYTES")
    if text is None:
        return default
    size = int(text) if text.isascii() and text.isdigit() else 0
    if not _LEAST_RING_BYTES <= size <= _MOST_RING_BYTES or size & (size - 1):
        raise ValueError(
            f"JAX_DFCCL_RING_BYTES={text!r}: must be a power of two from {_LEAST_RING_BYTES} to "
            f"{_MOST_RING_BYTES}"
        )
    return size


def _seconds(
    env: Mapping[str, str], variable: str, default: float, zero_allowed: bool = False
) -> float:
    text = env.get(variable)
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (0 <= seconds <= 1e9) or (seconds == 0 and not zero_allowed):
        least = "0 or more" if zero_allowed else "more than 0"
        raise ValueError(f"{variable}={text!r}: must be a number of seconds, {least}")
    return seconds


def _whole(
    env: Mapping[str, str], variable: str, default: int, least: int, most: int, meaning: str = ""
) -> int:
    text = env.get(variable)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        raise ValueError(
            f"{variable}={text!r}: must be a whole number from {least} to {most}{meaning}"
        )
    return int(text)
