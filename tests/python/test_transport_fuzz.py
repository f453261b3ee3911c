# SPDX-License-Identifier: Apache-2.0
"""libFuzzer on what a peer may send to the transport, for DFCCL_SOAK_SECONDS (600)."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    "tests/core/transport/wire_fuzz.cc",
    "core/transport/assembler.cc",
    "core/transport/ring_wire.cc",
    "core/transport/socket_wire.cc",
)
SECONDS = int(os.environ.get("DFCCL_SOAK_SECONDS", "600"))


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 300)
def test_no_input_breaks_a_wire(tmp_path):
    compiler = shutil.which("clang++") or shutil.which("clang++-14")
    if compiler is None:
        pytest.skip("no clang++ on PATH")
    program = tmp_path / "wire_fuzz"
    command = [compiler, "-std=c++17", "-O1", "-g", "-fsanitize=fuzzer,address,undefined"]
    command += [f"-I{ROOT}", "-o", str(program), *(str(ROOT / source) for source in SOURCES)]
    subprocess.run(command, check=True)
    found = tmp_path / "found"
    found.mkdir()
    corpus = ROOT / "tests/core/transport/corpus"
    result = subprocess.run(
        [str(program), f"-max_total_time={SECONDS}", "-max_len=20000", str(found), str(corpus)],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-5000:]
