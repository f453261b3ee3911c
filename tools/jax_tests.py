# SPDX-License-Identifier: Apache-2.0
"""Runs JAX's own tests of collectives twice, on its collectives and on ours, and compares.

    python tools/jax_tests.py CHECKOUT [FILE ...]

CHECKOUT is a checkout of JAX at the tag of the installed version; nothing in it is changed. Needs
jax_dfccl, pytest and absl-py. Each FILE of CHECKOUT/tests is run stock and under
JAX_DFCCL_OVERRIDE_LAX=1, each time in a process of its own. Ends with status 1 if an outcome
differs (but of tests in `READERS`) or no collective was replaced.
"""

import argparse
import ast
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

FILES = ("shard_map_test.py", "pmap_test.py", "async_collectives_test.py")
COLLECTIVE = re.compile(
    r"\b(psum|pmean|pmax|pmin|all_gather|psum_scatter|all_to_all|ppermute|pshuffle|pswapaxes|"
    r"pbroadcast|pargmin|pargmax)"
)
# Newer tests that look for JAX's own operations in the lowered program, which holds ours instead.
READERS = re.compile(r"::test_(all_gather|all_reduce|all_to_all|reduce_scatter)_rgv3")
RECORD = "JAX_TESTS_RECORD"  # environment variable: the file that a run leaves its record in


def mentioning_collectives(path: Path) -> set[str]:
    """The test functions of a file in whose source, decorators too, a collective is named."""
    text = path.read_text()
    return {
        node.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test")
        and COLLECTIVE.search(ast.unparse(node))
    }


def run(path: Path, select: list[str], override: bool, limit_s: float) -> dict[str, Any]:
    """One run of a file: {"outcomes": {test: outcome}, "replaced": ..., "kept": ..., ...}."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        empty = Path(folder) / "pytest.ini"
        empty.write_text("[pytest]\n")
        command = [sys.executable, "-P", "-m", "pytest", "-q", "--tb=short", "-p", "jax_tests"]
        command += ["-c", str(empty), "--noconftest", "--import-mode=importlib", *select]
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "8",
            "JAX_DFCCL_OVERRIDE_LAX": str(int(override)),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            RECORD: str(record),
        }
        done = subprocess.run(
            [*command, str(path)], env=environment, cwd=folder, timeout=limit_s, check=False
        )
        if not record.exists():
            sys.exit(f"{path.name}: pytest left no record (status {done.returncode})")
        return json.loads(record.read_text())


def main() -> int:
    """Runs and compares; returns the exit status."""
    parser = argparse.ArgumentParser(description="JAX's own tests, stock and on the daemon")
    parser.add_argument("checkout", type=Path, help="a checkout of JAX at the installed version")
    parser.add_argument("files", nargs="*", default=FILES, help=f"default: {' '.join(FILES)}")
    parser.add_argument("--all", action="store_true", help="also tests that name no collective")
    parser.add_argument("-k", default="", help="pytest's -k")
    parser.add_argument("--limit", type=float, default=1800, help="seconds a run may take")
    arguments = parser.parse_args()

    bad = False
    for name in arguments.files:
        path = (arguments.checkout / "tests" / name).resolve()
        select = ["-k", arguments.k] if arguments.k else []
        if not arguments.all:
            select.append("--only-collectives")
        stock = run(path, select, False, arguments.limit)["outcomes"]
        ours = run(path, select, True, arguments.limit)
        outcomes = ours["outcomes"]
        different = sorted(t for t in stock | outcomes if stock.get(t) != outcomes.get(t))
        print(f"{name}: stock {dict(Counter(stock.values()))}")
        print(f"{name}: ours  {dict(Counter(outcomes.values()))}")
        print(f"{name}: replaced {ours['replaced']}")
        print(f"{name}: kept {ours['kept']}")
        for kept, tests in sorted(ours["keepers"].items()):
            print(f"{name}: kept {kept} in {', '.join(tests)}")
        for test in different:
            why = " (reads the lowered program)" if READERS.search(test) else ""
            print(f"{name}: {test}: stock {stock.get(test)}, ours {outcomes.get(test)}{why}")
        different = [test for test in different if not READERS.search(test)]
        bad = bad or bool(different) or not stock or not ours["replaced"]
    return int(bad)


# As a pytest plugin, in the children ------------------------------------------------------------

_outcomes: dict[str, str] = {}
_keepers: dict[str, list[str]] = {}  # what was kept -> the tests that did it
_seen: dict[str, int] = {}  # what was kept until now


def pytest_addoption(parser: Any) -> None:
    """Adds the option by which `main` selects tests."""
    parser.addoption("--only-collectives", action="store_true", default=False)


def pytest_configure() -> None:
    """Imports the package before JAX's backend starts; stock runs are without it."""
    if os.environ["JAX_DFCCL_OVERRIDE_LAX"] == "1":
        importlib.import_module("jax_dfccl")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leaves out tests that name no collective. Parameters make a test's name longer."""
    if not config.getoption("--only-collectives") or not items:
        return
    functions = mentioning_collectives(items[0].path)
    chosen = [item for item in items if any(item.name.startswith(name) for name in functions)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen


def pytest_runtest_logreport(report: Any) -> None:
    """Notes how a test ended."""
    if report.when == "call" or report.outcome != "passed":
        _outcomes[report.nodeid.partition("::")[2]] = report.outcome


def pytest_runtest_teardown(item: Any) -> None:
    """Notes what a test kept."""
    kept = _totals()["kept"]
    for what in kept:
        if kept[what] > _seen.get(what, 0):
            _keepers.setdefault(what, []).append(item.name)
    _seen.update(kept)


def pytest_sessionfinish() -> None:
    """Writes the record."""
    record = {"outcomes": _outcomes, "keepers": _keepers, **_totals()}
    Path(os.environ[RECORD]).write_text(json.dumps(record))


def _totals() -> dict[str, Any]:
    if "jax_dfccl" not in sys.modules:
        return {"replaced": {}, "kept": {}}
    return sys.modules["jax_dfccl"].report("dict")["override_lax"]


if __name__ == "__main__":
    sys.exit(main())
