# SPDX-License-Identifier: Apache-2.0
"""Identity of calls, in whole programs; tests/core/identity_test.cc has the rules one by one."""

import pytest
from test_programs import run


@pytest.mark.parametrize(
    "case", ["two_executables", "recompiled", "threads", "launches", "named_occurrences"]
)
def test_calls_are_never_crossed(case):
    run("identity", case)


def test_an_executable_from_the_persistent_cache_names_its_calls_alike(tmp_path):
    run("identity", "from_cache", str(tmp_path), "miss")
    run("identity", "from_cache", str(tmp_path), "hit")


def test_a_program_reloaded_from_an_export(tmp_path):
    run("identity", "exported", str(tmp_path / "program"))
    run("identity", "reloaded", str(tmp_path / "program"))
