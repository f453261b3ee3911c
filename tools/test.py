# SPDX-License-Identifier: Apache-2.0
"""Runs every check of the project: `python3 tools/test.py`.

Makes a virtual environment for the Python it runs on, installs the project with its test and
development tools, installs the few system packages it needs where it may, and runs the stages
below in order until one fails. What cannot run here is skipped with its reason, never silently.
Standard library only.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import environment

ROOT = environment.ROOT
VENV = f".venv-test-{sys.version_info.major}.{sys.version_info.minor}"
BUILD = ROOT / "build"
CPP_SOURCES = ("core", "xla_ffi", "cuda", "tests", "bench")
NVCC_ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


class Failed(Exception):
    """A stage failed; the text says why."""


class Skipped(Exception):
    """A stage cannot run on this machine; the text says why."""


@dataclass
class Context:
    """What the stages share."""

    bin: Path
    jobs: int
    soak: bool
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    environment: dict[str, str] = field(default_factory=dict)

    def tool(self, name: str) -> str:
        """The path of a program, the environment's own first."""
        own = self.bin / name
        return str(own) if own.exists() else name

    def run(
        self,
        command: Sequence[str | Path],
        limit_s: float = 600,
        cwd: Path = ROOT,
        **variables: str,
    ) -> None:
        """Runs a command in a process group of its own, which ends with it; counts its tests."""
        words = [str(word) for word in command]
        shown = " ".join(words).replace(f"{ROOT}/", "")
        print(f"+ {shown[:300]}{' ...' if len(shown) > 300 else ''}", flush=True)
        process = subprocess.Popen(
            words,
            cwd=cwd,
            env={**os.environ, **self.environment, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert process.stdout is not None
        with Deadline(process.pid, limit_s):
            for line in process.stdout:
                print(line, end="", flush=True)
                self._count(line)
            status = process.wait()
        if status:
            raise Failed(f"{Path(words[0]).name} ended with status {status}")

    def _count(self, line: str) -> None:
        """Adds up the closing lines of pytest, ctest and Bazel."""
        ctest = re.match(r"\d+% tests passed, (\d+) tests failed out of (\d+)", line)
        bazel = re.match(r"Executed \d+ out of (\d+) tests?: (\d+) tests? pass(?!.*\bfail)", line)
        if ctest:
            failed, total = map(int, ctest.groups())
            self.failed += failed
            self.passed += total - failed
        elif bazel:
            self.passed += int(bazel[2])
        elif re.match(r"=*\s*\d+ (passed|failed|skipped|deselected|error).* in [\d.]+s", line):
            numbers = {
                what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|error|skipped)", line)
            }
            self.passed += numbers.get("passed", 0)
            self.failed += numbers.get("failed", 0) + numbers.get("error", 0)
            self.skipped += numbers.get("skipped", 0)


class Deadline:
    """Raises when a process group's time is up, and kills what is left of it in any case."""

    def __init__(self, group: int, limit_s: float) -> None:
        self._group = group
        self._limit_s = limit_s

    def _expire(self, *_: object) -> None:
        raise Failed(f"no end within {self._limit_s:.0f} s")

    def __enter__(self) -> None:
        signal.signal(signal.SIGALRM, self._expire)
        signal.setitimer(signal.ITIMER_REAL, self._limit_s)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        with contextlib.suppress(ProcessLookupError):  # everything in the group has ended
            os.killpg(self._group, signal.SIGKILL)


def existing(*folders: str) -> list[str]:
    """Those of the folders that are there and hold files."""
    return [name for name in folders if any(path.is_file() for path in (ROOT / name).rglob("*"))]


def cpp_files(*folders: str, suffixes: Sequence[str]) -> list[str]:
    """The C++ files below the folders, relative to the root."""
    return [
        path.relative_to(ROOT).as_posix()
        for name in folders
        for path in sorted((ROOT / name).rglob("*"))
        if path.suffix in suffixes
    ]


def lint(context: Context) -> None:
    """Format, lint and types."""
    context.run([context.tool("ruff"), "format", "--check", "."])
    context.run([context.tool("ruff"), "check", "."])
    files = cpp_files(*CPP_SOURCES, suffixes=(".h", ".cc", ".cu", ".cuh"))
    context.run([context.tool("clang-format"), "--dry-run", "--Werror", *files])
    context.run([context.tool("pyright"), "--pythonpath", context.bin / "python"])
    context.passed += 4


def layering(context: Context) -> None:
    """Arrows between the folders, and both builds in step."""
    context.run([context.bin / "python", "tools/check_layering.py"])
    context.run([context.bin / "python", "tools/check_build_files.py"])
    context.passed += 2


def cmake(context: Context, folder: Path, options: Mapping[str, str | Path]) -> list[str | Path]:
    """The command that configures a build with tests in `folder`."""
    command: list[str | Path] = [context.tool("cmake"), "-S", ROOT, "-B", folder, "-G", "Ninja"]
    ninja = shutil.which(context.tool("ninja"))
    if ninja:
        command.append(f"-DCMAKE_MAKE_PROGRAM={ninja}")
    settings = {
        "CMAKE_BUILD_TYPE": "Debug",
        "DFCCL_BUILD_TESTS": "ON",
        "Python_EXECUTABLE": context.bin / "python",
        **options,
    }
    return command + [f"-D{key}={value}" for key, value in settings.items()]


def cpp_build(context: Context, name: str, options: Mapping[str, str], *ctest: str) -> None:
    """Builds the C++ code with its tests in build/`name` and runs them."""
    folder = BUILD / name
    context.run(cmake(context, folder, options))
    context.run([context.tool("cmake"), "--build", folder, "-j", str(context.jobs)], limit_s=900)
    context.run(
        [
            context.tool("ctest"),
            *("--test-dir", folder, "--output-on-failure", "--no-tests=error"),
            *("--timeout", "300", "-j", str(context.jobs), *ctest),
        ],
        limit_s=1500,
    )


def cpp(context: Context) -> None:
    """C++ tests in a Debug build: unit, conformance, models, planted faults."""
    cpp_build(context, "debug", {})


def sanitized(context: Context, name: str, sanitizers: str, **variables: str) -> None:
    """C++ tests of core under sanitizers (relacy has its own stacks, so not the models)."""
    context.environment.update(variables)
    options = {"CMAKE_BUILD_TYPE": "RelWithDebInfo", "DFCCL_SANITIZE": sanitizers}
    cpp_build(context, name, options, "--label-exclude", "model")


def tsan(context: Context) -> None:
    """C++ tests of core under ThreadSanitizer."""
    sanitized(context, "tsan", "thread", TSAN_OPTIONS="halt_on_error=1")


def asan(context: Context) -> None:
    """C++ tests of core under AddressSanitizer and UndefinedBehaviorSanitizer."""
    sanitized(
        context,
        "asan",
        "address,undefined",
        ASAN_OPTIONS="detect_leaks=1",
        UBSAN_OPTIONS="print_stacktrace=1",
    )


def python(context: Context) -> None:
    """Python tests on the CPU devices of this machine."""
    marker = [] if context.soak else ["-m", "not soak"]
    context.run(
        [
            *(context.bin / "python", "-m", "pytest", "tests/python", "-n", "2"),
            *("--timeout", "300", "--durations", "5", *marker),
        ],
        limit_s=7200 if context.soak else 2700,
    )


WHEEL_PROGRAM = """
import jax, jax_dfccl, sys
from jax.sharding import PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 4)
mesh = jax.sharding.Mesh(jax.devices(), ("i",))
add = lambda x: jax_dfccl.all_reduce(x, "i")
add = jax.shard_map(add, mesh=mesh, in_specs=P("i"), out_specs=P())
print(jax.__version__, jax_dfccl.__file__, add(jax.numpy.arange(4.0)))
sys.exit("unpacked" not in jax_dfccl.__file__ or add(jax.numpy.arange(4.0)).tolist() != [6.0])
"""


def wheel(context: Context) -> None:
    """A wheel, built in isolation, holds the whole package and runs."""
    folder = BUILD / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    python_path = context.bin / "python"
    context.run(
        [
            *(python_path, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder),
            *environment.NO_KERNEL,
            *(f"--config-settings=build-dir={folder / 'build'}", "."),
        ]
    )
    (path,) = folder.glob("*.whl")
    names = {name for name in zipfile.ZipFile(path).namelist() if name.startswith("jax_dfccl/")}
    sources = {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "jax_dfccl").rglob("*")
        if file.suffix in (".py", ".pyi") or file.name == "py.typed"
    }
    extensions = {name for name in names if name.endswith(".so")}
    if names - extensions != sources or len(extensions) != 1:
        raise Failed(f"{path.name} differs in {sorted(sources ^ names)}")
    unpacked = folder / "unpacked"
    zipfile.ZipFile(path).extractall(unpacked)
    # -S leaves out the environment's link to the tree; its packages come by path.
    packages = subprocess.check_output(
        [python_path, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    ).strip()
    paths = os.pathsep.join([str(unpacked), packages])
    context.run([python_path, "-S", "-c", WHEEL_PROGRAM], cwd=folder, PYTHONPATH=paths)
    context.passed += 1


def clang(context: Context) -> None:
    """A second compiler reads core; headers stand alone."""
    compiler = shutil.which("clang++") or shutil.which("clang++-14")
    if not compiler:
        raise Skipped("no clang++ on PATH")
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-I.", "-fsyntax-only", "-x", "c++"]
    # A header on its own has constants and functions that nobody uses yet.
    flags += [
        "-Wno-unused-const-variable",
        "-Wno-unused-function",
        "-Wno-pragma-once-outside-header",
    ]
    files = cpp_files("core", suffixes=(".h", ".cc"))
    files = [name for name in files if not name.endswith("_inl.h")]  # bodies, not headers
    context.run([compiler, *flags, *files])
    context.passed += 1


def nvcc(context: Context) -> None:
    """The protocol headers and the daemon's kernel compile for GPUs; its resources and orders."""
    compiler = shutil.which("nvcc")
    if not compiler:
        raise Skipped("no nvcc on PATH")
    folder = BUILD / "nvcc"
    folder.mkdir(parents=True, exist_ok=True)
    headers = cpp_files("core/protocol", suffixes=(".h",))
    unit = folder / "protocol.cu"
    unit.write_text("".join(f'#include "{header}"\n' for header in headers))
    for architecture in NVCC_ARCHITECTURES:
        context.run(
            [
                *(compiler, f"-arch={architecture}", "-std=c++17", "-Werror", "all-warnings"),
                *("-Xcompiler", "-Wall,-Wextra", "-I", ROOT, "-c", unit),
                *("-o", folder / f"protocol_{architecture}.o"),
            ]
        )
        context.passed += 1
    context.run([context.bin / "python", "tools/check_kernel.py", "--nvcc", compiler], limit_s=1200)
    options = {"DFCCL_CUDA": "ON", "DFCCL_NVCC": compiler}
    context.run(cmake(context, BUILD / "kernel", options))
    build = [context.tool("cmake"), "--build", BUILD / "kernel"]
    context.run([*build, "-j", str(context.jobs), "--target", "gpu_check"], limit_s=1200)
    context.passed += 2


def bazel(context: Context) -> None:
    """The Bazel build and its tests."""
    program = shutil.which("bazel")
    if not program:
        raise Skipped("no bazel on PATH (Debian: bazel-bootstrap)")
    context.run(
        [
            *(program, "--batch", "test", f"--repo_env=DFCCL_PYTHON={context.bin / 'python'}"),
            *(f"--jobs={context.jobs}", "--local_test_jobs=1", "--noshow_progress"),
            *("//core/...", "//cuda/...", "//xla_ffi/...", "//tests/..."),
        ],
        limit_s=1200,
    )


def bench(context: Context) -> None:
    """The benchmark runs and verifies its values; no thresholds on shared machines."""
    context.run(
        [
            *(context.bin / "python", "bench/collectives.py", "--op", "all"),
            *("--devices", "4", "--sizes", "64,64K", "--against", "lax", "--seconds", "0.1"),
        ],
        limit_s=300,
    )
    context.passed += 1


@dataclass(frozen=True)
class Stage:
    """One stage: its name, what it runs, and whether --quick keeps it."""

    name: str
    run: Callable[[Context], None]
    quick: bool = False


STAGES = (
    Stage("lint", lint, quick=True),
    Stage("layering", layering, quick=True),
    Stage("cpp", cpp, quick=True),
    Stage("tsan", tsan),
    Stage("asan", asan),
    Stage("python", python, quick=True),
    Stage("wheel", wheel),
    Stage("clang", clang),
    Stage("nvcc", nvcc),
    Stage("bazel", bazel),
    Stage("bench", bench),
)

# (Debian package, a path that shows it is there, stages that need it, whether they fail without)
SYSTEM_PACKAGES = (
    ("g++", "c++", {"cpp", "tsan", "asan", "python", "wheel", "bench"}, True),
    ("libgtest-dev", "/usr/include/gtest/gtest.h", {"cpp", "tsan", "asan", "bazel"}, True),
    ("relacy-dev", "/usr/include/relacy/relacy.hpp", {"cpp", "bazel"}, True),
    ("clang-14", "clang++-14", {"clang"}, False),
    ("bazel-bootstrap", "bazel", {"bazel"}, False),
)


def install_system_packages(stages: set[str]) -> None:
    """Installs what the stages need and is missing, or says what will be skipped."""
    for package, probe, needed_by, required in SYSTEM_PACKAGES:
        if not needed_by & stages or shutil.which(probe) or Path(probe).exists():
            continue
        if environment.apt_install(package):
            continue
        stages_text = ", ".join(sorted(needed_by & stages))
        if required:
            sys.exit(f"{package} is missing ({probe}); needed by: {stages_text}")
        print(f"{package} is missing ({probe}); to be skipped: {stages_text}", flush=True)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Runs every check of the project.")
    names = [stage.name for stage in STAGES]
    parser.add_argument(
        "--stage", action="append", choices=names, help="run only this (repeatable)"
    )
    parser.add_argument("--quick", action="store_true", help="lint, layering, cpp and python only")
    parser.add_argument("--soak", action="store_true", help="the long tests too (hours)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compile jobs")
    parser.add_argument("--keep-going", action="store_true", help="don't stop at a failed stage")
    return parser.parse_args()


def main() -> int:
    """Runs the chosen stages and prints a table of them."""
    environment.check_python()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that Deadline cleans up
    arguments = parse_arguments()
    stages = [
        stage
        for stage in STAGES
        if (not arguments.stage or stage.name in arguments.stage)
        and (not arguments.quick or stage.quick)
    ]
    install_system_packages({stage.name for stage in stages})
    bin_folder = environment.prepare(VENV, "test,dev,demo", editable=True)
    context = Context(bin=bin_folder, jobs=arguments.jobs, soak=arguments.soak)
    rows: list[tuple[str, str, float]] = []
    for stage in stages:
        print(f"\n== {stage.name}: {stage.run.__doc__}", flush=True)
        started = time.monotonic()
        failed_before = context.failed
        outcome = "passed"
        context.environment = {}
        try:
            stage.run(context)
        except Skipped as reason:
            outcome = f"skipped: {reason}"
            context.skipped += 1
            print(outcome, flush=True)
        except Failed as reason:
            outcome = f"FAILED: {reason}"
            if context.failed == failed_before:
                context.failed += 1
            print(outcome, flush=True)
        rows.append((stage.name, outcome, time.monotonic() - started))
        if outcome.startswith("FAILED") and not arguments.keep_going:
            break
    not_run = stages[len(rows) :]
    print(
        f"\nPython {sys.version.split()[0]}, {'all' if not arguments.stage else 'chosen'} stages:"
    )
    for name, outcome, seconds in rows:
        print(f"  {name:9} {seconds:7.1f} s  {outcome}")
    for stage in not_run:
        print(f"  {stage.name:9}       -    not run: an earlier stage failed")
    skipped = f", {context.skipped} skipped" if context.skipped else ""
    print(f"{context.passed} passed, {context.failed} failed{skipped}", flush=True)
    return 1 if context.failed else 0


if __name__ == "__main__":
    sys.exit(main())
