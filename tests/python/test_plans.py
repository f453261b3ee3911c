# SPDX-License-Identifier: Apache-2.0
"""The choice of plans: forced, measured and kept in a table, and `jax-dfccl tune`."""

import json
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
from collectives import SOME, Case, expected, folders, movers, shape_for
from members import assert_same_bits, data, per_member, spmd

import jax_dfccl
from jax_dfccl import _core, _plans, _tune, all_reduce
from jax_dfccl._config import Config

PLANS = _plans.available()
CASES = [*movers(), *folders("sum")]
LIMIT_S = 120


@pytest.fixture(autouse=True)
def own_state(monkeypatch):
    """Whatever a test does, others find the plans of this process as they were."""
    monkeypatch.setattr(_plans, "state", dict(_plans.state))
    yield
    assert _core.set_plan_rules([])


def operation(case: Case) -> str:
    return case.name.partition("(")[0]


def plans_run(count: int) -> set[str]:
    """The plans of the newest collectives."""
    return {entry["plan"] for entry in jax_dfccl.report(format="dict")["recent"][:count]}


# Forced plans -------------------------------------------------------------------------------------


def test_cases_are_there_for_all():
    assert {operation(case) for case in CASES} == PLANS.keys() - {"ragged_all_to_all"}
    assert list(PLANS["ragged_all_to_all"]) == ["direct"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_by_every_plan(case):
    """All plans of all kinds, for sizes around those at which plans change."""
    for count in (1, 13, 20_001):
        x = data(shape_for(case, (count,)), np.int32, seed=count)
        right = expected(case, x, None)
        run = spmd(lambda x: case.call(x[0], "i")[None])
        for plan in PLANS[operation(case)]:
            assert _core.set_plan_rules(_plans.forced(f"{operation(case)}={plan}"))
            assert_same_bits(run(x), right)
            assert plans_run(8) == {plan}


def test_plans_for_one_come_before_plans_for_all():
    rules = _plans.forced("direct, ring:8,exclusive_scan = chain,all_gather=direct_flat")
    assert rules[:2] == [("exscan", 0, None, "chain"), ("all_gather", 0, None, "direct_flat")]
    assert ("all_gather", 0, None, "direct") in rules[2:]
    assert ("permute", 0, None, "direct") in rules[2:]
    assert ("all_reduce", 0, None, "ring:8") in rules[2:]
    assert not [rule for rule in rules[2:] if rule[0] == "exscan"]
    assert _plans.forced("") == []


@pytest.mark.parametrize(
    "text",
    ["fastest", "all_reduce=", "=ring", "all_reduce=direct", "psum=ring", "ring:3", "ring=ring"],
)
def test_what_cannot_be_forced(text):
    with pytest.raises(ValueError, match=f"JAX_DFCCL_PLAN='{text}': must be plans") as caught:
        _plans.forced(text)
    for name in ("all_reduce: direct_flat", "ring:8", "ppermute: direct", "exclusive_scan: chain"):
        assert name in str(caught.value)


def test_a_forced_plan_that_cannot_serve_a_kind_is_left_out():
    assert _core.set_plan_rules(_plans.forced("ring"))
    x = data((8, 3), np.int32)
    got = per_member(lambda x: jax_dfccl.ppermute(x, "i", SOME), x)
    assert_same_bits(got, expected(next(c for c in CASES if c.name == "ppermute"), x, None))
    assert plans_run(8) == {"direct"}


def test_rules_are_checked():
    for rule in [("all_reduce", 8, None, "chain"), ("none", 8, None, "ring")]:
        with pytest.raises(ValueError, match=f"there is no plan {rule[3]} of {rule[0]}"):
            _core.set_plan_rules([rule])


# The table ----------------------------------------------------------------------------------------

RULES = [("all_reduce", 8, 100, "direct_one_shot"), ("exscan", 2, None, "chain:8")]


def config(path, plan=""):
    return Config(plan=plan, tuning=str(path))


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "folder" / "table.json"
    _plans.write(path, _plans.topology(0), RULES, [])
    return path


def no_warning(f, *arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return f(*arguments)


def test_a_table_is_read_as_it_was_written(table):
    assert no_warning(_plans.rules_of, config(table)) == RULES
    assert _plans.state == {"forced": "", "table": str(table), "note": ""}
    assert list(table.parent.iterdir()) == [table]


def test_forced_plans_come_before_the_table(table):
    rules = _plans.rules_of(config(table, "all_reduce=ring"))
    assert rules == [("all_reduce", 0, None, "ring"), *RULES]
    assert f"plans, forced: all_reduce=ring\nplans, table: {table}" in str(jax_dfccl.report())


def test_the_table_of_this_machine_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = _plans.topology(0)
    assert no_warning(_plans.rules_of, Config()) == []
    assert _plans.state["table"] == ""
    _plans.write(_plans.default_path(place), place, RULES, [])
    assert [path.parent for path in tmp_path.rglob("*.json")] == [tmp_path / "jax_dfccl"]
    assert _plans.rules_of(Config()) == RULES
    assert _plans.rules_of(Config(workers=7)) == []  # another table
    assert _plans.rules_of(Config(tuning="off")) == []


def test_a_table_that_decides(table):
    """Whose rules the runtime goes by: by size and group, all members alike."""
    assert _core.set_plan_rules(_plans.rules_of(config(table)))
    for members, count, plan in [(8, 25, "direct_one_shot"), (8, 26, None), (4, 25, None)]:
        groups = [list(range(i, i + members)) for i in range(0, 8, members)]
        x = data((8, count), np.int32)
        got = per_member(lambda x, g=groups: all_reduce(x, "i", axis_index_groups=g), x)
        rows = [np.tile(x[g].sum(0, dtype=x.dtype), (members, 1)) for g in groups]
        assert_same_bits(got, np.concatenate(rows))
        (ran,) = plans_run(8)
        assert (ran == "direct_one_shot") == (plan is not None)


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"version": _plans.VERSION + 1}, "its version is 2, not 1"),
        ({"topology": {"cpu": "another", "cores": 2, "workers": 2, "devices": 8}}, "another"),
    ],
)
def test_other_tables_are_ignored_with_a_note(table, change, note):
    table.write_text(json.dumps({**json.loads(table.read_text()), **change}))
    assert no_warning(_plans.rules_of, config(table)) == []
    assert f"plans, note: {table} is not used: " in str(jax_dfccl.report())
    assert note in _plans.state["note"]


@pytest.mark.parametrize(
    "change",
    [
        {"version": "1"},
        {"rules": None},
        {"rules": [{}]},
        {"rules": [{"operation": "all_reduce", "members": 8, "up_to_bytes": None, "plan": "x"}]},
        {"rules": [{"operation": "psum", "members": 8, "up_to_bytes": None, "plan": "ring"}]},
        {"rules": [{"operation": "all_reduce", "members": 0, "up_to_bytes": 1, "plan": "ring"}]},
        {"rules": [{"operation": "all_reduce", "members": 8, "up_to_bytes": "", "plan": "ring"}]},
        b"{",
        b"\xff",
        b"[]",
        None,
    ],
    ids=str,
)
def test_a_table_that_cannot_be_used_is_a_warning_that_says_what_to_do(table, change):
    if change is None:
        table.unlink()
    elif isinstance(change, bytes):
        table.write_bytes(change)
    else:
        table.write_text(json.dumps({**json.loads(table.read_text()), **change}))
    with pytest.warns(UserWarning, match="table.json cannot be used .*jax-dfccl tune.*=off"):
        assert _plans.rules_of(config(table, "chain")) == _plans.forced("chain")
    assert _plans.state["table"] == ""


def test_a_table_is_written_whole_or_not_at_all(table):
    before = table.read_bytes()
    with pytest.raises(TypeError, match="JSON"):
        _plans.write(table, _plans.topology(0), RULES, [object()])
    assert table.read_bytes() == before
    assert list(table.parent.iterdir()) == [table]


# Measuring ----------------------------------------------------------------------------------------


def test_what_is_taken():
    plans = PLANS["all_reduce"]
    us = {"direct_flat": 10.0, "direct_one_shot": 30.0, "direct_two_shot": 9.9, "ring": 1.0}
    assert _tune._take(us, "direct_flat", plans) == "direct_flat"  # about as fast
    assert _tune._take({**us, "direct_two_shot": 9.0}, "direct_flat", plans) == "direct_two_shot"
    assert _tune._take(us, "direct_one_shot", plans) == "direct_two_shot"


def test_thresholds_lie_between_sizes():
    taken = [(64, "chain"), (256, "chain"), (1024, "chain:8"), (4096, "chain")]
    assert _tune._rules("inclusive_scan", 4, taken) == [
        ("scan", 4, 512, "chain"),
        ("scan", 4, 2048, "chain:8"),
        ("scan", 4, None, "chain"),
    ]


def test_sizes_and_groups():
    assert _tune._sizes("1K:64K") == [1 << 10, 4 << 10, 16 << 10, 64 << 10]
    assert _tune._sizes("16M,4") == [4, 16 << 20]
    assert _tune._group_sizes(8) == [2, 4, 8]
    assert _tune._group_sizes(6) == [2, 4, 6]


def tune(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-P", "-m", "jax_dfccl", "tune", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, "XLA_FLAGS": "", **environment},
    )


PROGRAM = """
import jax, jax_dfccl
from jax.sharding import Mesh, PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 2)
mesh = Mesh(jax.devices(), ("i",))
f = jax.jit(jax.shard_map(lambda x: jax_dfccl.all_reduce(x, "i"), mesh=mesh, in_specs=P("i"),
                          out_specs=P()))
assert f(jax.numpy.arange(2 << 20).astype("float32")).tolist() == [
    2 * i + (1 << 20) for i in range(1 << 20)]
report = jax_dfccl.report(format="dict")
print(report["recent"][0]["plan"], report["plans"]["table"], report["plans"]["note"], sep="|")
"""


def run_program(**environment):
    return subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, "XLA_FLAGS": "", "JAX_DFCCL_TUNING": "", **environment},
    )


def test_tune_writes_what_programs_then_use(tmp_path):
    cache = {"XDG_CACHE_HOME": str(tmp_path), "JAX_DFCCL_TUNING": ""}
    child = tune("--devices", "2", "--sizes", "64,4K", "--seconds", "0.001", **cache)
    assert child.returncode == 0, child.stderr
    (path,) = (tmp_path / "jax_dfccl").iterdir()
    assert child.stdout.splitlines()[-1] == f"# written to {path}"
    table = json.loads(path.read_text())
    several = [name for name, plans in PLANS.items() if len(plans) > 1]
    assert [(row["operation"], row["members"], row["bytes"]) for row in table["measured"]] == [
        (name, 2, size) for name in several for size in (64, 4096)
    ]
    for row in table["measured"]:
        assert list(row["us"]) == list(PLANS[row["operation"]])
        assert all(us > 0 for us in row["us"].values())
        assert row["default"] in row["us"]
    assert {rule["operation"] for rule in table["rules"]} == set(several)
    assert all(PLANS[rule["operation"]][rule["plan"]] for rule in table["rules"])

    # Its last rule for an all_reduce is made one that would not be chosen.
    rules = [rule for rule in table["rules"] if rule["operation"] != "all_reduce"]
    rules.append(
        {"operation": "all_reduce", "members": 2, "up_to_bytes": None, "plan": "direct_one_shot"}
    )
    path.write_text(json.dumps({**table, "rules": rules}))
    child = run_program(**cache)
    assert child.stdout == f"direct_one_shot|{path}|\n", child.stderr
    child = run_program(**{**cache, "JAX_DFCCL_PLAN": "all_reduce=ring"})
    assert child.stdout == f"ring|{path}|\n", child.stderr
    child = run_program(**{**cache, "JAX_DFCCL_TUNING": "off"})
    assert child.stdout == "direct_two_shot||\n", child.stderr
    child = run_program(**{**cache, "JAX_DFCCL_PLAN": "fastest"})
    assert child.returncode != 0
    assert "JAX_DFCCL_PLAN='fastest': must be plans" in child.stderr


def test_tune_says_what_it_cannot_do(tmp_path):
    for arguments, message in [
        (("--ops", "barrier"), "--ops barrier: nothing to choose; there are all_reduce"),
        (("--devices", "1"), "--devices must be 2 or more"),
        (("--sizes", "big"), "'big' is not a size"),
    ]:
        child = tune(*arguments, "-o", str(tmp_path / "table.json"))
        assert (child.returncode, child.stdout) == (2, "")
        assert message in child.stderr
    assert not list(tmp_path.iterdir())
