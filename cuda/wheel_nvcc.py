# SPDX-License-Identifier: Apache-2.0
"""Prints where Python wheels of NVIDIA keep programs, for CMake: `a;b`."""

import importlib.util
from pathlib import Path

spec = importlib.util.find_spec("nvidia")
packages = spec.submodule_search_locations or [] if spec else []
folders = [folder / "bin" for package in packages for folder in sorted(Path(package).iterdir())]
print(";".join(str(folder) for folder in folders if folder.is_dir()))
