# SPDX-License-Identifier: Apache-2.0
"""The programs of examples/ that train: each compares its values itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = "--blocks 1 --width 16 --hidden 32 --length 16 --heads 2 --steps 3".split()
QUICK_TO_COMPILE = "--xla_backend_optimization_level=0"


def output_of(processes: int, program: str, *options: str) -> str:
    command: list[object] = [sys.executable]
    if processes > 1:
        command += ["-m", "jax_dfccl", "launch", "-n", processes]
        command += ["--devices-per-process", 8 // processes]
        options = ("--distributed", *options)
    command += [EXAMPLES / program, *options]
    ended = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "XLA_FLAGS": QUICK_TO_COMPILE},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_a_transformer_learns_what_one_device_learns():
    said = output_of(1, "transformer.py", *SMALL, "--measure", "1")
    assert "losses are those of one device, and no bit depends on the order" in said
    assert "ms by the launcher" in said and "piece 0 of step" in said, said


ALL = "plain launcher handles programs".split()


@pytest.mark.parametrize("forms", [["programs"], pytest.param(ALL, marks=pytest.mark.soak)])
def test_a_transformer_learns_the_same_in_four_processes(forms):
    said = output_of(4, "transformer.py", *SMALL, "--forms", *forms)
    assert "losses are those of one device, and no bit depends on the order" in said
    assert "programs, shuffled" in said


@pytest.mark.parametrize("processes", [1, pytest.param(4, marks=pytest.mark.soak)])
def test_experts_learn_what_one_device_learns(processes):
    said = output_of(processes, "experts.py", "--layers", "2", "--steps", "3")
    assert "losses are those of one device, and no bit depends on the order" in said


@pytest.mark.parametrize("processes", [1, 4])
def test_a_second_thread_changes_nothing(processes):
    said = output_of(processes, "background.py", *SMALL, "--every", "2")
    assert "runs from its files end with the same weights" in said
