# SPDX-License-Identifier: Apache-2.0
"""Keeps the two builds in step with the tree.

Every C++ file of core/, xla_ffi/ and their tests must be named in a CMakeLists.txt and in a BUILD
file (headers in a BUILD file only), every file named there must exist, and neither may glob.
Standard library only.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("core", "xla_ffi", "tests/core", "tests/xla_ffi")
SUFFIXES = {".h", ".cc", ".cu", ".cuh"}

# The files that each kind of build file lists; CMake finds headers by include path.
_LISTED = {"CMakeLists.txt": r"\.(cc|cu)$", "BUILD": r"\.(h|cc|cuh?)$"}
_FILE = re.compile(
    r"(?P<root>\$\{(?:PROJECT|CMAKE)_SOURCE_DIR\}/|//(?P<package>[\w/-]+):)?(?P<path>[\w./-]+\.(?:h|cuh?|cc))\b"
)
_GLOB = re.compile(r"\bfile\s*\(\s*GLOB|\bglob\s*\(", re.IGNORECASE)


def build_files(root: Path, name: str) -> Iterator[Path]:
    """Yields the files called `name` at the root and in the folders with C++ code."""
    candidates = {root / name, root / "tests" / name}
    for folder in FOLDERS:
        candidates |= set((root / folder).rglob(name))
    yield from sorted(path for path in candidates if path.is_file())


def named_files(root: Path, build_file: Path) -> Iterator[str]:
    """Yields the C++ files that a build file names, relative to the root."""
    text = re.sub(r"#.*", "", build_file.read_text(encoding="utf-8"))
    for match in _FILE.finditer(text):
        base = root / (match["package"] or "") if match["root"] else build_file.parent
        path = (base / match["path"]).resolve()
        listed = re.search(_LISTED[build_file.name], path.name)
        if listed and path.is_relative_to(root):
            yield path.relative_to(root).as_posix()


def check(root: Path) -> list[str]:
    """Returns one line per fault in the build files of the tree at `root`."""
    root = root.resolve()
    sources = {
        path.relative_to(root).as_posix()
        for folder in FOLDERS
        for path in (root / folder).rglob("*")
        if path.suffix in SUFFIXES
    }
    faults = []
    for build_name, listed in _LISTED.items():
        named: set[str] = set()
        for build_file in build_files(root, build_name):
            shown = build_file.relative_to(root).as_posix()
            if _GLOB.search(build_file.read_text(encoding="utf-8")):
                faults.append(f"{shown}: sources are listed, not globbed")
            for path in named_files(root, build_file):
                named.add(path)
                if not (root / path).is_file():
                    faults.append(f"{shown}: names {path}, which does not exist")
        wanted = {path for path in sources if re.search(listed, path)}
        faults += [f"{path}: in no {build_name}" for path in sorted(wanted - named)]
    return faults


def main() -> int:
    """Checks the tree that this file lies in."""
    faults = check(Path(__file__).parent.parent)
    for fault in faults:
        print(fault)
    print(f"check_build_files: {len(faults)} fault(s)")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
