# SPDX-License-Identifier: Apache-2.0
"""Virtual environments and system packages for tools/run.py and tools/test.py.

Standard library only: this runs before anything is installed.
"""

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Compiling the GPU kernel takes minutes. (The pip of Debian 12 has no -C.)
NO_KERNEL = ("--config-settings=cmake.define.DFCCL_CUDA=OFF",)


def check_python() -> None:
    """Ends the program with a sentence if this Python is too old."""
    if sys.version_info < (3, 11):  # noqa: UP036 (this may run on any Python)
        sys.exit(f"jax_dfccl needs Python 3.11 or newer; this is {sys.version.split()[0]}")


def run(command: Sequence[str | Path], **kwargs: object) -> None:
    """Prints and runs a set-up command; ends the program if it fails."""
    print("+", *command, flush=True)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, check=False, **kwargs)  # pyright: ignore[reportCallIssue, reportArgumentType]
    if done.returncode:
        sys.exit(f"failed with status {done.returncode}: {' '.join(map(str, command))}")


def can_apt() -> bool:
    """Whether this process may install Debian packages."""
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


@functools.cache
def _apt_update() -> bool:
    return _apt("update", "-qq")


def _apt(*arguments: str) -> bool:
    command = ["apt-get", *arguments]
    print("+", *command, flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment, check=False
    )
    return done.returncode == 0


def apt_install(*packages: str) -> bool:
    """Installs Debian packages if this process may; says what it does. True on success."""
    if not can_apt():
        return False
    print(f"installing {' '.join(packages)} with apt-get", flush=True)
    return _apt_update() and _apt("install", "-y", "-qq", "--no-install-recommends", *packages)


def requirements(extras: str) -> list[str]:
    """What pyproject.toml asks for, to run with `extras` and to build.

    The build's jaxlib is left out: it is then the one that the package runs with.
    """
    import tomllib  # not before check_python: new in 3.11

    with (ROOT / "pyproject.toml").open("rb") as file:
        settings = tomllib.load(file)
    project = settings["project"]
    wanted = [name for name in settings["build-system"]["requires"] if "jaxlib" not in name]
    wanted += project["dependencies"]
    for extra in extras.split(","):
        wanted += project["optional-dependencies"][extra]
    # pip brings CMake and Ninja only to isolated builds.
    return [*wanted, "cmake", "ninja"]


def _fingerprint(extras: str, editable: bool) -> str:
    """Changes when the installed package would."""
    digest = hashlib.sha256(f"{sys.version} {extras} {editable}".encode())
    files = [ROOT / "pyproject.toml", ROOT / "CMakeLists.txt"]
    for folder in ("core", "cuda", "xla_ffi", *(() if editable else ("jax_dfccl",))):
        files += sorted(path for path in (ROOT / folder).rglob("*") if path.is_file())
    for path in files:
        if path.suffix not in (".pyc", ".so"):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def prepare(name: str, extras: str, editable: bool = False) -> Path:
    """Makes or refreshes a virtual environment that holds this project.

    Args:
      name: Folder of the environment, in the root of the repository.
      extras: Comma-separated extras of the project to install.
      editable: Whether the package's Python files stay in the tree. The build then runs against
        the jaxlib of the environment itself.

    Returns:
      Its `bin` folder.
    """
    folder = ROOT / name
    bin_folder = folder / "bin"
    if not (bin_folder / "pip").exists():
        if importlib.util.find_spec("ensurepip") is None:
            apt_install(f"python3.{sys.version_info.minor}-venv")
        run([sys.executable, "-m", "venv", "--clear", folder])
    stamp = folder / "installed"
    fingerprint = _fingerprint(extras, editable)
    if stamp.exists() and stamp.read_text() == fingerprint:
        print(f"{name} is up to date", flush=True)
        return bin_folder
    pip = [bin_folder / "python", "-m", "pip", "install", "--quiet"]
    if editable:
        run([*pip, *requirements(extras)])
        run([*pip, *NO_KERNEL, "--no-build-isolation", "--no-deps", "-e", "."], cwd=ROOT)
    else:
        run([*pip, *NO_KERNEL, f".[{extras}]"], cwd=ROOT)
    stamp.write_text(fingerprint)
    return bin_folder
