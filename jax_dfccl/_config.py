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
    """

    timeout_s: float = 600.0
    stall_warning_s: float = 10.0
    cycle_grace_s: float = 2.0
    workers: int = 0
    plan: str = ""
    tuning: str = ""

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
            workers=_workers(env, cls.workers),
            plan=env.get("JAX_DFCCL_PLAN", cls.plan),
            tuning=env.get("JAX_DFCCL_TUNING", cls.tuning),
        )


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


def _workers(env: Mapping[str, str], default: int) -> int:
    text = env.get("JAX_DFCCL_WORKERS")
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or int(text) > 1024:
        raise ValueError(
            f"JAX_DFCCL_WORKERS={text!r}: must be a whole number from 0 (one per core) to 1024"
        )
    return int(text)
