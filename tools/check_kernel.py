# SPDX-License-Identifier: Apache-2.0
"""Compiles the CUDA kernel and reads what came of it: `python tools/check_kernel.py`.

Three things are checked for each architecture: it compiles without a warning; it keeps to the
limits below, so that a block fits beside others' kernels and nothing is spilled; and the operations
on shared words (tests/cuda/orders.cu) are the instructions that their names promise, in PTX and,
where there is a cuobjdump, in SASS. The last is also done for headers with a weakened order, which
must be found. Standard library only; needs nvcc and no GPU.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNEL = "dfccl_daemon"

# Instructions of bulk copies, from sm_90 on; in SASS their name is another.
BULK = (
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",
    "cp.async.bulk.global.shared::cta.bulk_group",
    "cp.async.bulk.wait_group 0",
    "mbarrier.try_wait.parity",
    "fence.proxy.async",
)
FIRST_WITH_BULK = 90

# Of the kernel: registers of a thread (of 256 threads: half of an SM's, at 128; from sm_90 on three
# quarters, as some would be spilled), bytes of shared memory of a block, bytes of a
# thread's stack (submission entries on their way), no spills.
MOST_REGISTERS = 128
MOST_REGISTERS_FROM_SM_90 = 192
MOST_SHARED_BYTES = 24 << 10
MOST_STACK_BYTES = 512

# What an operation must compile to in PTX.
ORDERS: dict[str, tuple[str, ...]] = {
    "spsc_push": ("ld.acquire.sys", "st.release.sys"),
    "spsc_pop": ("ld.acquire.sys", "st.release.sys"),
    "progress_publish": ("st.release.sys",),
    "progress_reached": ("ld.acquire.sys",),
    "roll_arrive": ("atom.add.acq_rel.sys",),
    "roll_leave": ("atom.add.acq_rel.sys",),
    "roll_fail": ("atom.or.acq_rel.sys",),
    "roll_quiet": ("ld.acquire.sys",),
    "word_ready": ("ld.acquire.sys",),
    "word_done": ("st.release.sys",),
    "flagged_post": ("st.relaxed.sys.b64",),
    "flagged_read": ("ld.relaxed.sys.b64",),
}
# What it must not: the data says itself that it is there, so nothing else is waited for.
NO_ORDER = ("fence", "acquire", "release", "MEMBAR", "CCTL")
UNORDERED = ("flagged_post", "flagged_read")
# In SASS an acquire is a strong load after which the L1 cache is invalidated, a release a
# strong store after a barrier of the memory.
SASS = {
    "ld.acquire.sys": (r"LDG?\.E(\.\w+)*\.STRONG\.SYS", r"CCTL\.IVALL"),
    "st.release.sys": (r"MEMBAR\.\w+\.SYS", r"STG?\.E(\.\w+)*\.STRONG\.SYS"),
    # Whole words of 64 bits.
    "ld.relaxed.sys.b64": (r"LDG?\.E\.64\.STRONG\.SYS",),
    "st.relaxed.sys.b64": (r"STG?\.E\.64\.STRONG\.SYS",),
}

# Where a kernel begins, in PTX and in SASS.
ENTRY = r"\.visible \.entry (\w+)\("
FUNCTION = r"Function : (\w+)\n"

# (header, its text, a weaker order, an operation that must be found out)
WEAKENED = (
    ("spsc_queue.h", "pushed.StoreRelease(", "pushed.StoreRelaxed(", "spsc_push"),
    ("spsc_queue.h", "pushed.LoadAcquire(", "pushed.LoadRelaxed(", "spsc_pop"),
    ("progress.h", "value_.StoreRelease(", "value_.StoreRelaxed(", "progress_publish"),
    ("flagged_word.h", "word_.LoadRelaxed()", "word_.LoadAcquire()", "flagged_read"),
    ("flagged_word.h", "Atomic<uint64_t> word_", "Atomic<uint32_t> word_", "flagged_post"),
    ("roll.h", "FetchAddAcqRel(kOneGone)", "FetchAddRelaxed(kOneGone)", "roll_leave"),
    ("atomics.h", "kAcquire = cuda::memory_order_acquire", "kAcquire = cuda::memory_order_relaxed",
     "word_ready"),
)  # fmt: skip


@dataclass(frozen=True)
class Usage:
    """What ptxas says of the kernel."""

    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int  # of any function


def run(command: Sequence[str | Path]) -> str:
    """The output of a command that must succeed."""
    # cuobjdump looks for nvdisasm on the path; it is beside it.
    path = os.pathsep.join([str(Path(command[0]).parent), os.environ.get("PATH", "")])
    process = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": path},
    )
    output = process.stdout + process.stderr
    if process.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{output}\nended with {process.returncode}")
    return output


def compile_kernel(nvcc: str, architecture: str, cubin: Path) -> Usage:
    """Compiles the kernel for one architecture."""
    output = run(
        [
            *(nvcc, f"-arch={architecture}", "-std=c++17", "-O3", "-fmad=false"),
            *("-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra", "-Xptxas", "-v"),
            *("-I", ROOT, "-cubin", "-o", cubin, ROOT / "cuda" / "daemon.cu"),
        ]
    )
    return read_usage(output)


def read_usage(output: str) -> Usage:
    """What ptxas -v says of the kernel, and the spills of all functions."""
    match = re.search(
        rf"Function properties for {KERNEL}\n\s*(\d+) bytes stack frame.*\n.*Used (\d+) registers"
        r".*?(\d+) bytes smem",
        output,
    )
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", output)]
    if not match or not spills:
        sys.exit(f"ptxas says nothing of {KERNEL}:\n{output[-2000:]}")
    return Usage(int(match[2]), int(match[3]), int(match[1]), sum(spills))


def number(architecture: str) -> int:
    """90 of sm_90."""
    return int(architecture.removeprefix("sm_"))


def over(usage: Usage, architecture: str) -> list[str]:
    """Which limits a kernel breaks."""
    most = MOST_REGISTERS if number(architecture) < 90 else MOST_REGISTERS_FROM_SM_90
    limits = (
        ("registers", usage.registers, most),
        ("bytes of shared memory", usage.shared_bytes, MOST_SHARED_BYTES),
        ("bytes of stack", usage.stack_bytes, MOST_STACK_BYTES),
        ("bytes spilled", usage.spill_bytes, 0),
    )
    return [f"{value} {what}, more than {limit}" for what, value, limit in limits if value > limit]


def bodies(text: str, start: str) -> dict[str, str]:
    """The text of each kernel, from a line that matches `start` (whose group is its name)."""
    parts = re.split(start, text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def wrong_bulk(ptx: str, sass: str, architecture: str) -> list[str]:
    """What a bulk copy lacks, or, on GPUs that have none, has."""
    wanted = number(architecture) >= FIRST_WITH_BULK
    faults = [
        f"bulk_copy: {'no' if wanted else 'has'} {instruction} in PTX"
        for instruction in BULK
        if (instruction in bodies(ptx, ENTRY).get("bulk_copy", "")) != wanted
    ]
    if sass and ("UBLKCP" in bodies(sass, FUNCTION).get("bulk_copy", "")) != wanted:
        faults.append(f"bulk_copy: {'no' if wanted else 'has'} UBLKCP in SASS")
    return faults


def wrong_orders(ptx: str, sass: str) -> list[str]:
    """Which operations are not what their names promise."""
    ptx_of = bodies(ptx, ENTRY)
    sass_of = bodies(sass, FUNCTION) if sass else {}
    faults = []
    for name, orders in ORDERS.items():
        for order in orders:
            if not re.search(re.escape(order) + r"\b", ptx_of.get(name, "")):
                faults.append(f"{name}: no {order} in PTX")
            for pattern in SASS.get(order, ()) if sass else ():
                if not re.search(pattern, sass_of.get(name, "")):
                    faults.append(f"{name}: no {pattern} in SASS for {order}")
    for name in UNORDERED:
        text = ptx_of.get(name, "") + sass_of.get(name, "")
        faults += [f"{name}: {word} is not needed" for word in NO_ORDER if word in text]
    return faults


def check_orders(nvcc: str, cuobjdump: str | None, architecture: str, include: Path) -> list[str]:
    """Compiles the operations, with the headers in `include` before those of the tree."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        common = [nvcc, f"-arch={architecture}", "-std=c++17", "-I", include, "-I", ROOT]
        unit = ROOT / "tests" / "cuda" / "orders.cu"
        run([*common, "-ptx", "-o", folder / "orders.ptx", unit])
        sass = ""
        if cuobjdump:
            run([*common, "-cubin", "-o", folder / "orders.cubin", unit])
            sass = run([cuobjdump, "-sass", folder / "orders.cubin"])
        ptx = (folder / "orders.ptx").read_text()
        return wrong_orders(ptx, sass) + wrong_bulk(ptx, sass, architecture)


def check_weakened(nvcc: str, architecture: str) -> list[str]:
    """Which weakened orders are not found."""
    missed = []
    for header, right, wrong, operation in WEAKENED:
        path = Path("core/protocol") / header
        text = (ROOT / path).read_text()
        if right not in text:
            missed.append(f"{path} has no {right!r} to weaken")
            continue
        with tempfile.TemporaryDirectory() as name:
            changed = Path(name) / path
            changed.parent.mkdir(parents=True)
            changed.write_text(text.replace(right, wrong))
            faults = check_orders(nvcc, None, architecture, Path(name))
        if not any(fault.startswith(operation) for fault in faults):
            missed.append(f"{wrong!r} in {path} goes unnoticed")
    return missed


def main() -> int:
    """Checks the kernel for each architecture."""
    parser = argparse.ArgumentParser(description="Compiles the CUDA kernel and checks it.")
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--cuobjdump", help="default: beside nvcc, or on the path")
    parser.add_argument("--architecture", action="append", help="sm_80, ... (repeatable)")
    parser.add_argument("--output", type=Path, help="folder for the cubins")
    arguments = parser.parse_args()
    nvcc = shutil.which(arguments.nvcc) or sys.exit(f"{arguments.nvcc} was not found")
    beside = Path(nvcc).resolve().parent / "cuobjdump"
    found = str(beside) if beside.exists() else shutil.which("cuobjdump")
    cuobjdump = arguments.cuobjdump or found
    faults = []
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.output or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        for architecture in arguments.architecture or ["sm_80", "sm_90", "sm_100"]:
            usage = compile_kernel(nvcc, architecture, folder / f"daemon_{architecture}.cubin")
            print(f"{architecture}: {usage}", flush=True)
            faults += [f"{architecture}: {fault}" for fault in over(usage, architecture)]
            faults += [
                f"{architecture}: {fault}"
                for fault in check_orders(nvcc, cuobjdump, architecture, ROOT)
            ]
    faults += check_weakened(nvcc, (arguments.architecture or ["sm_80"])[0])
    seen = "PTX and SASS" if cuobjdump else "PTX (there is no cuobjdump)"
    print(f"orders were looked at in {seen}; {len(WEAKENED)} weakened ones were planted")
    for fault in faults:
        print(fault)
    print(f"check_kernel: {len(faults)} fault(s)")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
