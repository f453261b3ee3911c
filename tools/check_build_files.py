# SPDX-License-Identifier: Apache-2.0
"""Keeps the two builds in step with the tree.

Every C++ file of core/, cuda/, xla_ffi/ and their tests must be named in a CMakeLists.txt and in a
BUILD file (headers in a BUILD file only), every file named there must exist, and neither may glob.
What a file includes must be in its Bazel target or in one that this depends on. Standard library
only.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDERS = ("core", "cuda", "xla_ffi", "tests/core", "tests/cuda", "tests/xla_ffi")
SUFFIXES = {".h", ".cc", ".cu", ".cuh"}

# The files that each kind of build file lists; CMake finds headers by include path.
_LISTED = {"CMakeLists.txt": r"\.(cc|cu)$", "BUILD": r"\.(h|cc|cuh?)$"}
_FILE = re.compile(
    r"(?P<root>\$\{(?:PROJECT|CMAKE)_SOURCE_DIR\}/|//(?P<package>[\w/-]+):)?(?P<path>[\w./-]+\.(?:h|cuh?|cc))\b"
)
_INCLUDE = re.compile(r'^#include "([\w./-]+)"', re.MULTILINE)
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


@dataclass(frozen=True)
class Target:
    """A rule of a BUILD file: its files, relative to the root, and the labels of its deps."""

    label: str
    files: frozenset[str]
    deps: tuple[str, ...]


def targets(root: Path, build_file: Path) -> list[Target]:
    """Returns the C++ rules of a BUILD file, which is read as the Python that it also is."""
    package = build_file.parent.relative_to(root).as_posix()
    found = []

    def absolute(label: str) -> str:
        if label.startswith((":", "@")):
            return f"//{package}{label}" if label[0] == ":" else label
        return label if ":" in label else f"{label}:{label.rsplit('/', 1)[-1]}"

    def rule(
        name: str = "",
        srcs: Sequence[str] = (),
        hdrs: Sequence[str] = (),
        deps: Sequence[str] = (),
        **_others: object,
    ) -> None:
        paths = []
        for file in (*srcs, *hdrs):
            folder, _, path = file.removeprefix("//").rpartition(":")
            paths.append(f"{folder if file.startswith('//') else package}/{path}")
        found.append(Target(f"//{package}:{name}", frozenset(paths), tuple(map(absolute, deps))))

    rules = {"cc_library": rule, "cc_test": rule, "cc_binary": rule}
    ignored = dict.fromkeys(("package", "exports_files", "load"), lambda *_, **__: None)
    exec(build_file.read_text(encoding="utf-8"), {**rules, **ignored})
    return found


def missing_deps(root: Path) -> Iterator[str]:
    """Yields a line for each include that no dependency of its Bazel target gives."""
    found: dict[str, Target] = {}
    for build_file in build_files(root, "BUILD"):
        if not _GLOB.search(build_file.read_text(encoding="utf-8")):
            found |= {target.label: target for target in targets(root, build_file)}
    for target in found.values():
        reached, waiting = set(target.files), list(target.deps)
        seen = set(waiting)
        while waiting:
            dep = found.get(waiting.pop())
            if dep is not None:
                reached |= dep.files
                waiting += [label for label in dep.deps if label not in seen]
                seen |= set(dep.deps)
        for file in sorted(target.files):
            if not (root / file).is_file():
                continue
            for include in _INCLUDE.findall((root / file).read_text(encoding="utf-8")):
                if include not in reached and (root / include).is_file():
                    yield f"{target.label}: {file} includes {include}, which no dep has"


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
    return [*faults, *missing_deps(root)]


def main() -> int:
    """Checks the tree that this file lies in."""
    faults = check(Path(__file__).parent.parent)
    for fault in faults:
        print(fault)
    print(f"check_build_files: {len(faults)} fault(s)")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
