# SPDX-License-Identifier: Apache-2.0
"""Processes with one device each, which may be of one GPU: `python gpu_across.py [cuda | cpu]`.

Runs programs that tests/python/test_across.py runs on CPU devices.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import jobs

PROGRAMS = (
    ("across", "kinds", 2),
    ("across", "ragged", 2),
    ("across", "unawaited", 2),
    ("across_handles", "permutations", 4),
)


def main() -> None:
    platform = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    options = {"DFCCL_TEST_PLATFORM": platform, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    for program, case, processes in PROGRAMS:
        print(program, case, flush=True)
        jobs.all_right(jobs.run(program, case, processes, 1, **options))
    print("fine")


if __name__ == "__main__":
    main()
