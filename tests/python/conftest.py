# SPDX-License-Identifier: Apache-2.0
"""Eight virtual CPU devices for every test, and bounded property tests."""

import os
import sys
from pathlib import Path

DEVICES = 8
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
)
os.environ["JAX_DFCCL_TUNING"] = "off"
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import hypothesis  # noqa: E402

# Every example may compile a program; the examples are the same in every run.
hypothesis.settings.register_profile(
    "bounded", max_examples=25, deadline=None, derandomize=True, database=None
)
hypothesis.settings.load_profile("bounded")
