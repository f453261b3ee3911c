# SPDX-License-Identifier: Apache-2.0
"""By which plans collectives run: forced ones, those that `jax-dfccl tune` measured, the model's.

A rule is (kind, members or 0 for any, largest bytes or None for any, plan); the first that fits
counts, and without one the core's cost model (core/plans/choice.h).
"""

import hashlib
import json
import logging
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from jax_dfccl import _config
from jax_dfccl._primitive import KINDS

Rule = tuple[str, int, int | None, str]

VERSION = 1  # of the table's format and of what the names of plans mean
_logger = logging.getLogger("jax_dfccl")

# What `report()` says about the plans of this process.
state: dict[str, str] = {"forced": "", "table": "", "note": ""}


def available() -> dict[str, dict[str, bool]]:
    """{operation: {plan: whether it may be chosen unasked}}; each operation has a plan."""
    from jax_dfccl import _core

    return {KINDS[kind].shown: plans for kind, plans in _core.plans().items()}


def rule(operation: str, members: int, most_bytes: int | None, plan: str) -> Rule:
    """The rule with a kind's public name."""
    kind = next(kind.name for kind in KINDS.values() if kind.shown == operation)
    return kind, members, most_bytes, plan


def forced(text: str) -> list[Rule]:
    """The rules of JAX_DFCCL_PLAN: plans for all that have them, operation=plan before those."""
    plans = available()
    for_one: list[Rule] = []
    for_all: list[Rule] = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        operation, equals, plan = (part.strip() for part in entry.rpartition("="))
        having = [
            name for name in ([operation] if equals else plans) if plan in plans.get(name, {})
        ]
        if not having:
            listed = "; ".join(f"{name}: {', '.join(plans[name])}" for name in plans)
            raise ValueError(
                f"JAX_DFCCL_PLAN={text!r}: must be plans, or operation=plan, separated by commas; "
                f"{entry!r} is none. There are, of {listed}"
            )
        (for_one if equals else for_all).extend(rule(name, 0, None, plan) for name in having)
    return for_one + for_all


def topology(workers: int) -> dict[str, str | int]:
    """What a table of measured plans is good for: this machine, driven by so many threads."""
    cores = len(os.sched_getaffinity(0))
    return {
        "cpu": _cpu_model(),
        "cores": cores,
        "workers": workers or cores,
        "devices": len(jax.local_devices(backend="cpu")),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, os.uname().machine)


def default_path(place: Mapping[str, str | int]) -> Path:
    """Where the table of a machine is, unless JAX_DFCCL_TUNING says otherwise."""
    digest = hashlib.sha256(json.dumps(place, sort_keys=True).encode()).hexdigest()[:12]
    return _config.cache_folder() / f"plans-{digest}.json"


def rules_of(config: _config.Config) -> list[Rule]:
    """All rules of this process; notes in `state` where they come from."""
    rules = forced(config.plan)
    state.update(forced=config.plan, table="", note="")
    if config.tuning == "off":
        return rules
    place = topology(config.workers)
    path = Path(config.tuning) if config.tuning else default_path(place)
    if not config.tuning and not path.exists():
        return rules
    try:
        rules += _read(path, place)
        state["table"] = str(path)
    except _OtherTable as why:
        state["note"] = f"{path} is not used: {why}"
        _logger.debug(state["note"])
    except (OSError, ValueError) as error:
        state["note"] = f"{path} is not used: {error}"
        warnings.warn(
            f"jax_dfccl: the table of measured plans {path} cannot be used ({error}). Run "
            "`jax-dfccl tune` to make a new one, or set JAX_DFCCL_TUNING=off",
            stacklevel=2,
        )
    return rules


class _OtherTable(Exception):
    """A good table for something else."""


def _read(path: Path, place: Mapping[str, str | int]) -> list[Rule]:
    table = json.loads(path.read_bytes())
    if not isinstance(table, dict) or not isinstance(table.get("version"), int):
        raise ValueError("it has no version")
    if table["version"] != VERSION:
        raise _OtherTable(f"its version is {table['version']}, not {VERSION}")
    if table.get("topology") != place:
        raise _OtherTable(f"it was measured on {table.get('topology')}, this is {place}")
    rules = table.get("rules")
    if not isinstance(rules, list):
        raise ValueError("it has no rules")
    return [_parse(entry) for entry in rules]


def _parse(entry: Any) -> Rule:
    plans = available()
    match entry:
        case {
            "operation": str(operation),
            "members": int(members),
            "up_to_bytes": int() | None as most,
            "plan": str(plan),
        } if members > 0 and plan in plans.get(operation, {}):
            return rule(operation, members, most, plan)
    raise ValueError(f"{entry!r} is not a rule")


def write(
    path: Path, place: Mapping[str, str | int], rules: Iterable[Rule], measured: list[Any]
) -> None:
    """Writes a table; readers see the old one or the new one."""
    table = {
        "version": VERSION,
        "topology": place,
        "rules": [
            {"operation": KINDS[kind].shown, "members": members, "up_to_bytes": most, "plan": plan}
            for kind, members, most, plan in rules
        ],
        "measured": measured,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(table, indent=1))
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
