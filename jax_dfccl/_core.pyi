# SPDX-License-Identifier: Apache-2.0
"""Types of the native extension (xla_ffi/bindings.cc)."""

from collections.abc import Sequence
from typing import Any

def registrations(platform: str) -> dict[str, dict[str, Any]]:
    """{target: {stage: capsule}} for jax.ffi.register_ffi_target, platform "cpu" or "CUDA"."""

def type_registrations(platform: str) -> dict[str, dict[str, Any]]:
    """{name: {"type_id": capsule, "type_info": capsule}} for jax.ffi.register_ffi_type.

    The backend must exist before types are registered, and types before targets.
    """

def configure(
    *,
    workers: int = 0,
    timeout_s: float = 600.0,
    stall_warning_s: float = 10.0,
    cycle_grace_s: float = 2.0,
    plan_rules: Sequence[tuple[str, int, int | None, str]] = (),
    preemption: bool = True,
    first_sequence: int = 0,
) -> None:
    """Sets the options of the runtime; they count when it starts next."""

def configure_gpus(
    *,
    devices: dict[int, int],
    blocks: int,
    memory_bytes: int,
    host_memory_bytes: int,
    several_processes: bool,
    low_latency_bytes: int,
    bulk: bool,
    timeout_s: float,
    plan_rules: Sequence[tuple[str, int, int | None, str]],
) -> None:
    """{number of a GPU: global device id}, and options of their daemons.

    Nothing of CUDA is loaded before the first call.
    """

def has_gpu_kernel() -> bool:
    """Whether this build holds the kernel of the GPUs' daemons."""

def gpu_counters() -> dict[str, int]:
    """What the GPUs' daemons have done together; empty before the first call."""

def plans() -> dict[str, dict[str, bool]]:
    """{kind: {plan: whether it may be chosen unasked, as it folds in the members' order}}."""

def set_plan_rules(plan_rules: Sequence[tuple[str, int, int | None, str]]) -> bool:
    """Other rules from now on; False, and nothing is changed, while anything is in flight."""

def plan_rules_hash() -> int:
    """Equal in processes that choose the same plans."""

def register_site(
    program: int,
    site: int,
    operation: str,
    name: str,
    source: str,
    program_name: str,
    after: Sequence[int],
) -> None:
    """Tells the runtime what a call site is, for its reports and errors."""

def handle_state(ticket: int, gpu: bool = False) -> str:
    """What has become of a handle's operation: "pending", "finished" or "gone"."""

def handle_drop(ticket: int, gpu: bool = False) -> bool:
    """Nobody will wait for it; False: it is gone already."""

def handle_cancel(ticket: int, gpu: bool = False) -> bool:
    """Ends it on all members with an error; False: it is gone or has finished."""

def take_ends(timeout_s: float) -> list[tuple[int, str]]:
    """Waits for ends of operations that were started with a tag: (tag, error or "")."""

def begin_executable() -> None:
    """The next executable is about to be compiled or loaded; one at a time."""

def cluster_join(
    process: int, process_of: dict[int, int], host_of: list[int], peer_timeout_s: float
) -> None:
    """Once: the index of this process, the process of each global device id, and the hosts.

    `host_of`: a number for the host of each process; empty: not known. Processes that are connected
    with TCP and silent for `peer_timeout_s` are lost; 0: never.
    """

def cluster_link(process: int, sockets: list[int], memory: int) -> None:
    """Connects a process; takes over all descriptors.

    The sockets are non-blocking streams with nothing unread, in the same order at both ends. The
    memory (-1: none, and then they are TCP sockets) is a file for two rings of the same size, that
    of the process with the smaller index first, zero at the beginning; there is one socket then.
    """

def threads_question() -> int: ...
def threads_answer(threads: int) -> None: ...
def cluster_down(process: int, reason: str) -> None:
    """That process will never come."""

def note_send(process: int, text: str) -> None:
    """Words for the same part of another process; they come in order."""

def notes_ready() -> int:
    """A descriptor that is readable when there are notes."""

def notes_take() -> list[tuple[int, bool, bool, str]]:
    """Notes that came: process, whether it has ended, whether in order, text."""

def give_up_before(era: int, reason: str) -> None:
    """Ends calls between processes that were, or will be, launched in an earlier era."""

def begin_era(era: int) -> None:
    """Launches are counted anew from here on."""

def leave_out(process: int, reason: str) -> None:
    """Breaks with a process, which hears why if it can."""

def stand_in(timeout_s: float) -> int:
    """For so long, takes part with zeros in what others call; returns in how many calls."""

def report() -> dict[str, Any]:
    """The flight report: "in_flight", "recent", "devices" and "cycles" (core/trace/flight.h)."""

class Roofline:
    """The least time an all_reduce in memory takes here (core/reduce/roofline.h)."""

    def __init__(self, members: int, bytes: int, threads: int) -> None: ...
    def streaming_seconds(self, repetitions: int) -> float:
        """The median time of the loop with non-temporal stores."""

    def cached_seconds(self, repetitions: int) -> float:
        """The median time of the loop with normal stores."""

def shutdown() -> None:
    """Ends everything pending with an error and stops the runtime's threads."""
