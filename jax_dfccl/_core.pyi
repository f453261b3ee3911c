# SPDX-License-Identifier: Apache-2.0
"""Types of the native extension (xla_ffi/bindings.cc)."""

from collections.abc import Sequence
from typing import Any

def registrations() -> dict[str, dict[str, dict[str, Any]]]:
    """What to register with XLA.

    {"types": {name: {"type_id": capsule, "type_info": capsule}},
     "targets": {target: {stage: capsule}}}
    """

def configure(
    *,
    workers: int = 0,
    timeout_ns: int = 600_000_000_000,
    stall_warning_ns: int = 10_000_000_000,
    cycle_grace_ns: int = 2_000_000_000,
    preemption: bool = True,
    first_sequence: int = 0,
    algorithm: str = "",
) -> None:
    """Sets the options of the runtime; they count when it starts next."""

def register_site(
    program: int,
    site: int,
    *,
    operation: str,
    name: str,
    source: str,
    program_name: str,
    after: Sequence[int] = (),
) -> None:
    """Tells the runtime what a call site is, for its messages."""

def report() -> dict[str, Any]:
    """The flight report: "in_flight", "recent", "devices" and "cycles" (core/trace/flight.h)."""

def shutdown() -> None:
    """Ends everything pending with an error and stops the runtime's threads."""
