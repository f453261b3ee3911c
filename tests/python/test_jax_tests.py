# SPDX-License-Identifier: Apache-2.0
"""tools/jax_tests.py compares what it says, and finds a planted difference."""

import os
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "jax_tests.py"
SUM = """
import unittest
import jax
from jax import lax

class SumTest(unittest.TestCase):
  def test_sum(self):
    f = jax.pmap(lambda x: lax.psum(x, "i"), axis_name="i")
    self.assertEqual(f(jax.numpy.arange(8))[0], 28)

  def test_unrelated(self):
    self.fail("not to be run")
"""
DIFFERENCE = """
  def test_native(self):
    f = jax.pmap(lambda x: lax.psum(x, "i"), axis_name="i")
    self.assertIn("stablehlo.all_reduce", f.lower(jax.numpy.arange(8)).as_text())
"""
NONE = """
def test_psum_is_only_named():
  pass
"""


def run(folder, text):
    (folder / "tests").mkdir(exist_ok=True)
    (folder / "tests" / "sum_test.py").write_text(text)
    # The package that runs here, installed or in a folder of the path.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-P", str(TOOL), str(folder), "sum_test.py", "--limit", "100"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=240,
    )


def test_equal_outcomes_with_replaced_collectives_pass(tmp_path):
    done = run(tmp_path, SUM)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sum_test.py: stock {'passed': 1}" in done.stdout
    assert "sum_test.py: ours  {'passed': 1}" in done.stdout
    assert "sum_test.py: replaced {'psum': 1}" in done.stdout


def test_a_different_outcome_is_found(tmp_path):
    done = run(tmp_path, SUM + DIFFERENCE)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "test_native: stock passed, ours failed" in done.stdout
    assert "'failed': 1" in done.stdout


def test_nothing_replaced_is_a_failure(tmp_path):
    done = run(tmp_path, NONE)
    assert done.returncode == 1 and "replaced {}" in done.stdout, done.stdout + done.stderr
