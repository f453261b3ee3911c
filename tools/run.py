# SPDX-License-Identifier: Apache-2.0
"""Runs the package's command line in an environment of its own: `python3 tools/run.py demo`.

Makes `.venv`, installs the project with what the demo needs, and runs `python -m jax_dfccl` with
the given arguments. Needs Python 3.11 or newer and a C++17 compiler; pip brings the rest.
"""

import os
import shutil
import sys

import environment


def main() -> int:
    """Sets the environment up and becomes the requested command."""
    environment.check_python()
    if shutil.which("c++") is None and not environment.apt_install("g++"):
        sys.exit("a C++17 compiler is needed (c++ is not on PATH)")
    python = environment.prepare(".venv", "demo") / "python"
    # The installed package is meant, here and in children: not the folder beside this file.
    child_environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    arguments = sys.argv[1:] or ["--help"]
    os.execve(python, [str(python), "-m", "jax_dfccl", *arguments], child_environment)


if __name__ == "__main__":
    sys.exit(main())
