# SPDX-License-Identifier: Apache-2.0
"""`report()`: the flight record of this process, as data and as text."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any, Literal, overload

from jax_dfccl import _override, _plans


class Report:
    """What is in flight, what was lately, and each device's counters. `print` it."""

    def __init__(self, data: Mapping[str, Any]):
        self._data = data

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data.

        "in_flight" and "recent" (newest first): one entry per member of a collective, with
        "operation", "name", "key", "source", "program", "dtype", "count", "plan", "group",
        "absent", "state", "error", times in seconds and more. "devices": counters. "cycles":
        members that wait for each other, one line each. "override_lax": collectives of jax.lax
        that `override_lax` "replaced" and "kept", by primitive. "gpus": what the daemons of GPUs
        have done together; empty before the first call on one. "plans": what was "forced", the
        "table" of measured plans in use, a "note" if there is one that is not, and the "hash" that
        is equal in processes that choose the same plans.
        """
        return copy.deepcopy(dict(self._data))

    def __str__(self) -> str:
        lines = _section("in flight", self._data["in_flight"])
        lines += [f"cycle: {cycle}" for cycle in self._data["cycles"]]
        lines += _section("recent", self._data["recent"], limit=16)
        lines += [_device_line(device) for device in self._data["devices"]]
        for what, counts in self._data["override_lax"].items():
            if counts:
                listed = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
                lines.append(f"of jax.lax, {what}: {listed}")
        if gpus := self._data["gpus"]:
            lines.append("GPUs: " + ", ".join(f"{count} {name}" for name, count in gpus.items()))
        plans = self._data["plans"]
        lines += [f"plans, {what}: {plans[what]}" for what in _plans.state if plans[what]]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<jax_dfccl report: {len(self._data['in_flight'])} in flight>"


@overload
def report() -> Report: ...
@overload
def report(format: Literal["text"]) -> Report: ...
@overload
def report(format: Literal["dict"]) -> dict[str, Any]: ...


def report(format: str = "text") -> Report | dict[str, Any]:
    """Says what this process's collectives are doing. May be called while the job is stuck.

    Args:
        format: "text" for a `Report` (`print` it), "dict" for its `as_dict()`.

    Returns:
        The report: who waits for whom at which source line, recent operations, and counters.
    """
    if format not in ("text", "dict"):
        raise ValueError(f'report: format is {format!r}; it must be "text" or "dict"')
    from jax_dfccl import _core

    plans = {**_plans.state, "hash": f"{_core.plan_rules_hash():016x}"}
    result = Report({**_core.report(), "override_lax": _override.totals(), "plans": plans})
    return result.as_dict() if format == "dict" else result


def _section(title: str, entries: list[dict[str, Any]], limit: int | None = None) -> list[str]:
    """One line per collective: entries of its members are put together."""
    members: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for entry in entries:
        same = (
            "operation", "name", "key", "program", "launch", "source", "dtype", "count", "plan",
            "state",
        )  # fmt: skip
        identity = (*(entry[field] for field in same), tuple(entry["group"]), entry["error"])
        members.setdefault(identity, []).append(entry)
    shown = list(members.values())[:limit]
    lines = [f"{title}: {_plural(len(members), 'collective')}"]
    lines += [f"  {_collective_line(collective)}" for collective in shown]
    if len(shown) < len(members):
        lines.append(f"  ... and {len(members) - len(shown)} more")
    return lines


def _collective_line(entries: list[dict[str, Any]]) -> str:
    entry = entries[0]
    parts = [entry["operation"]]
    if entry["name"]:
        parts.append(repr(entry["name"]))
    if entry["key"]:
        parts.append(f"key={entry['key']}")
    parts.append(f"of {entry['count']} x {entry['dtype']} over devices {_ranges(entry['group'])}")
    parts.append(f"by {entry['plan']}")
    parts.append(f"at {entry['source']} in {entry['program']}, launch {entry['launch']}:")
    parts.append(f"{entry['state']} on {_ranges(e['device'] for e in entries)}")
    if entry["absent"]:
        parts.append(f"since {max(e['age_s'] for e in entries):.1f} s, absent:")
        parts.append(_ranges(entry["absent"]))
    elif entry["total_s"]:
        parts.append(f"after {max(e['total_s'] for e in entries) * 1e3:.2f} ms")
    if entry["error"]:
        parts.append(f"({entry['error']})")
    return " ".join(parts)


def _device_line(device: dict[str, Any]) -> str:
    return (
        f"device {device['device']}: {device['submitted']} submitted, "
        f"{device['completed']} completed, {device['failed']} failed, "
        f"{_plural(device['preemptions'], 'preemption')}, "
        f"{_plural(device['context_saves'], 'context save')}, {_plural(device['quits'], 'quit')}, "
        f"{_plural(device['restarts'], 'restart')}, "
        f"largest wait {device['largest_wait_s'] * 1e3:.2f} ms"
    )


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _ranges(numbers: Iterable[int]) -> str:
    """Sorted runs: 0-3, 5."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)
