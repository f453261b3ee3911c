# SPDX-License-Identifier: Apache-2.0
"""Enforces the arrows of docs/architecture.md: who may include, import or name what.

Reads source text only and needs nothing but the standard library. Prints one line per
violation and exits 1 if there is any. `tests/python/test_layering.py` plants one violation of
each kind and sees it found.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE_FOLDERS = (
    ".ci",
    "bench",
    "core",
    "cuda",
    "examples",
    "jax_dfccl",
    "tests",
    "tools",
    "xla_ffi",
)
CPP_SUFFIXES = {".h", ".cc", ".cu", ".cuh"}
PYTHON_SUFFIXES = {".py", ".pyi"}
SPDX_SUFFIXES = CPP_SUFFIXES | PYTHON_SUFFIXES | {".bzl", ".cmake", ".sh"}
SPDX_NAMES = {"BUILD", "CMakeLists.txt", "WORKSPACE", "run"}
SPDX_LINE = "SPDX-License-Identifier: Apache-2.0"

# Who may use tests/ and bench/, and where rules about product code don't apply.
NOT_PRODUCT = r"tests/|bench/"

ATOMICS_HEADER = "core/protocol/atomics.h"
ATOMIC_LIBRARIES = r"atomic$|stdatomic\.h$|cuda/(std/)?atomic$|relacy/"

# (what, headers it is about, files that may include them): regular expressions matched at the
# start of the included path and of the including file.
INCLUDE_RULES = (
    ("only xla_ffi bindings may use nanobind", r"nanobind/|Python\.h$", r"xla_ffi/bindings[^/]*$"),
    ("only xla_ffi may use XLA's headers", r"xla/", r"(tests/)?xla_ffi/"),
    ("nothing below includes xla_ffi", r"xla_ffi/", rf"xla_ffi/|{NOT_PRODUCT}"),
    (
        "core does not know CUDA",
        r"cuda_runtime|cuda\.h$|cuda/(?!atomic$)",
        rf"cuda/|xla_ffi/|{NOT_PRODUCT}",
    ),
    (
        "atomics come from core/protocol/atomics.h",
        ATOMIC_LIBRARIES,
        rf"core/protocol/atomics\.h$|{NOT_PRODUCT}",
    ),
    ("nothing uses tests/ or bench/", r"tests/|bench/", NOT_PRODUCT),
    (
        "the daemon is behind core/runtime.h",
        r"core/daemon/",
        rf"core/daemon/|core/[^/]+\.cc$|{NOT_PRODUCT}",
    ),
    (
        "plans, reduce, trace and protocol do not know the runtime",
        r"core/runtime\.h$",
        rf"core/daemon/|core/[^/]+$|cuda/|xla_ffi/|{NOT_PRODUCT}",
    ),
    (
        "the transport knows nothing of what it carries",
        r"core/(?!transport/|protocol/|status\.h$|hash\.h$)",
        r"(?!core/transport/)",
    ),
    ("plans do not include reduce or trace", r"core/(reduce|trace)/", r"(?!core/plans/)"),
    ("reduce does not include plans or trace", r"core/(plans|trace)/", r"(?!core/reduce/)"),
    ("trace does not include plans or reduce", r"core/(plans|reduce)/", r"(?!core/trace/)"),
)

# core/protocol compiles on the host, under nvcc and under a model checker.
PROTOCOL_HEADERS = re.compile(
    r"(core/protocol/[^/]+|stdint\.h|stddef\.h|limits\.h|cstdint|cstddef|climits|limits"
    r"|type_traits)$"
)

# (what, pattern in C++ code without comments and strings, files it is about, files excepted)
CPP_CODE_RULES = (
    (
        "memory orders live in core/protocol/atomics.h",
        re.compile(r"\b(std::atomic|atomic_thread_fence|memory_order\w*|__atomic_\w+|__sync_\w+)"),
        re.compile(r"core/|cuda/|xla_ffi/"),
        ATOMICS_HEADER,
    ),
    (
        "volatile is not synchronisation",
        re.compile(r"\bvolatile\b(?!\s*\()"),
        re.compile(r"core/|cuda/|xla_ffi/"),
        ATOMICS_HEADER,
    ),
    (
        "only jax_dfccl/_config.py reads the environment",
        re.compile(r"\b(secure_)?getenv\b"),
        re.compile(r"core/|cuda/|xla_ffi/"),
        None,
    ),
)

PACKAGE = "jax_dfccl"
PACKAGE_IMPORTS = {PACKAGE, "jax", "numpy"}
DEMO_FILE = re.compile(r"jax_dfccl/_?demo(\.py$|/)")
DEMO_IMPORTS = {"rich", "sklearn"}
COMPAT_FILE = "jax_dfccl/_compat.py"
CONFIG_FILE = "jax_dfccl/_config.py"
# The guard of `launch` makes the environment of a process and runs outside the package.
ENVIRONMENT_FILES = (CONFIG_FILE, "jax_dfccl/_launch_guard.py")
ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}

_INCLUDE = re.compile(r'^\s*#\s*include\s*(<|")([^>"]+)[>"]', re.MULTILINE)
_COMMENT_OR_STRING = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|(?<!\w)\'(?:\\.|[^\'\\\n])*\'', re.DOTALL
)


def source_files(root: Path) -> Iterator[Path]:
    """Yields every source file that has rules, in a stable order."""
    for folder in SOURCE_FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path
    yield from sorted(path for path in root.iterdir() if path.is_file())


def check(root: Path) -> list[str]:
    """Returns one line per violation in the tree at `root`."""
    violations: list[str] = []
    for path in source_files(root):
        name = path.relative_to(root).as_posix()
        if path.suffix in SPDX_SUFFIXES or path.name in SPDX_NAMES:
            text = path.read_text(encoding="utf-8")
            found = list(_check_spdx(text))
            if path.suffix in CPP_SUFFIXES:
                found += _check_cpp(root, name, text)
            elif path.suffix in PYTHON_SUFFIXES:
                found += _check_python(name, text)
            violations += [f"{name}:{line}: {what}" for line, what in found]
    return violations


def _check_spdx(text: str) -> Iterator[tuple[int, str]]:
    # An empty file (a package marker) has nothing to license.
    if text and not any(SPDX_LINE in line for line in text.splitlines()[:2]):
        yield 1, f'no "{SPDX_LINE}" in the first two lines'


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match.group())


def _check_cpp(root: Path, name: str, text: str) -> Iterator[tuple[int, str]]:
    def line_of(match: re.Match[str]) -> int:
        return text.count("\n", 0, match.start(match.lastindex or 0)) + 1

    for match in _INCLUDE.finditer(text):
        quote, header = match.groups()
        for what, headers, files in INCLUDE_RULES:
            if re.match(headers, header) and not re.match(files, name):
                yield line_of(match), f"{what} (includes {header})"
        if name.startswith("core/protocol/") and not PROTOCOL_HEADERS.match(header):
            allowed = name == ATOMICS_HEADER and re.match(ATOMIC_LIBRARIES, header)
            if not allowed:
                yield line_of(match), f"core/protocol uses std integers only (includes {header})"
        if quote == '"' and (root / name).parent.joinpath(header).is_file():
            if not (root / header).is_file():
                yield line_of(match), f"include paths start at the repository root ({header})"
    code = _COMMENT_OR_STRING.sub(_blank, text)
    for what, pattern, files, excepted in CPP_CODE_RULES:
        if files.match(name) and name != excepted:
            for match in pattern.finditer(code):
                line = text.count("\n", 0, match.start()) + 1
                yield line, f"{what} ({match.group()})"


def _imports(node: ast.AST) -> list[str]:
    """Dotted names that an import statement, or a call of import_module, brings in."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        if node.level:  # relative: stays inside its package
            return []
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and node.args:
        function = node.func
        called = function.attr if isinstance(function, ast.Attribute) else ""
        called = function.id if isinstance(function, ast.Name) else called
        argument = node.args[0]
        if called in ("import_module", "__import__") and isinstance(argument, ast.Constant):
            return [str(argument.value)]
    return []


def _dotted(node: ast.AST) -> str:
    """The dotted name of an attribute chain, "" if it is none."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def _is_private_jax(dotted: str) -> bool:
    return re.match(r"jaxlib(\.|$)|jax\.(.*\.)?_[^_]", dotted) is not None


def _check_python(name: str, text: str) -> Iterator[tuple[int, str]]:
    in_package = name.startswith(f"{PACKAGE}/")
    may_import = PACKAGE_IMPORTS | (DEMO_IMPORTS if DEMO_FILE.match(name) else set())
    if name == COMPAT_FILE:
        may_import |= {"jaxlib"}
    for node in ast.walk(ast.parse(text, filename=name)):
        line = getattr(node, "lineno", 0)
        imports = _imports(node)
        for module in imports:
            top = module.split(".")[0]
            if in_package and top not in may_import and top not in sys.stdlib_module_names:
                yield line, f"the package imports only jax, numpy and the stdlib ({module})"
            if top in ("tests", "bench") and not re.match(NOT_PRODUCT, name):
                yield line, f"nothing uses tests/ or bench/ (imports {module})"
            if name.startswith("bench/") and re.match(rf"{PACKAGE}\._(?!core\b)", module):
                yield line, f"bench uses only the public API and the extension (imports {module})"
            if top == "os" and module.split(".")[-1] in ENVIRONMENT_NAMES and in_package:
                if name not in ENVIRONMENT_FILES:
                    yield line, f"only {CONFIG_FILE} reads the environment ({module})"
        if not in_package:
            continue
        used = imports
        if isinstance(node, ast.Attribute):
            if node.attr.startswith("_"):
                used = [_dotted(node)]
            if node.attr in ENVIRONMENT_NAMES and _dotted(node.value) == "os":
                if name not in ENVIRONMENT_FILES:
                    yield line, f"only {CONFIG_FILE} reads the environment (os.{node.attr})"
        if name != COMPAT_FILE:
            for dotted in used:
                if _is_private_jax(dotted):
                    yield line, f"private JAX belongs in {COMPAT_FILE} ({dotted})"
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.match(r"(\.\./|\./)*(tests|bench)/\S+$", node.value):
                yield line, f'nothing uses tests/ or bench/ ("{node.value}")'


def main() -> int:
    """Checks the tree that this file lies in."""
    root = Path(__file__).resolve().parent.parent
    violations = check(root)
    for violation in violations:
        print(violation)
    print(f"check_layering: {len(violations)} violation(s)")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
