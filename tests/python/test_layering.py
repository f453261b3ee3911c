# SPDX-License-Identifier: Apache-2.0
"""The tree keeps its arrows, and the checkers find one planted violation of each kind.

The planted text is put together from pieces where the checker would otherwise see it here.
"""

import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import check_build_files  # noqa: E402
import check_layering  # noqa: E402

SPDX = check_layering.SPDX_LINE
CPP = f"// {SPDX}\n"
PYTHON = f"# {SPDX}\n"
PRIVATE_JAX = "private JAX belongs in jax_dfccl/_compat.py"
ENVIRONMENT = "only jax_dfccl/_config.py reads the environment"

# (file to plant, its text, what must be reported)
VIOLATIONS = [
    ("core/planted.cc", "int x;\n", 'no "SPDX'),
    ("jax_dfccl/planted.py", "x = 1\n", 'no "SPDX'),
    ("core/planted.h", CPP + '#include "xla_ffi/handlers.h"\n', "nothing below includes xla_ffi"),
    ("core/planted.h", CPP + "#include <nanobind/nanobind.h>\n", "only xla_ffi bindings"),
    ("core/planted.h", CPP + '#include "xla/ffi/api/ffi.h"\n', "only xla_ffi may use XLA"),
    ("xla_ffi/planted.cc", CPP + "#include <nanobind/nanobind.h>\n", "only xla_ffi bindings"),
    ("core/daemon/planted.cc", CPP + "#include <atomic>\n", "atomics come from"),
    ("core/protocol/planted.h", CPP + "#include <cuda/atomic>\n", "atomics come from"),
    ("xla_ffi/planted.cc", CPP + "#include <relacy/relacy.hpp>\n", "atomics come from"),
    ("core/planted.cc", CPP + "std::atomic<int> x;\n", "memory orders live in"),
    ("core/planted.cc", CPP + "int y = __sync_fetch_and_add(&x, 1);\n", "memory orders live in"),
    ("core/planted.cc", CPP + "volatile int x;\n", "volatile is not synchronisation"),
    ("core/planted.cc", CPP + 'auto* x = getenv("X");\n', ENVIRONMENT),
    ("core/planted.cc", CPP + "#include <cuda_runtime.h>\n", "core does not know CUDA"),
    ("core/protocol/planted.h", CPP + "#include <vector>\n", "std integers only"),
    ("core/protocol/planted.h", CPP + '#include "core/status.h"\n', "std integers only"),
    ("core/plans/planted.cc", CPP + '#include "core/daemon/daemon.h"\n', "the daemon is behind"),
    ("core/reduce/planted.cc", CPP + '#include "core/daemon/daemon.h"\n', "the daemon is behind"),
    ("xla_ffi/planted.cc", CPP + '#include "core/daemon/daemon.h"\n', "the daemon is behind"),
    ("core/plans/planted.cc", CPP + '#include "core/runtime.h"\n', "do not know the runtime"),
    ("core/reduce/planted.cc", CPP + '#include "core/runtime.h"\n', "do not know the runtime"),
    (
        "core/transport/planted.cc",
        CPP + '#include "core/runtime.h"\n',
        "nothing of what it carries",
    ),
    ("core/plans/planted.cc", CPP + '#include "core/reduce/reduce.h"\n', "plans do not include"),
    ("core/reduce/planted.cc", CPP + '#include "core/plans/plan.h"\n', "reduce does not include"),
    ("core/trace/planted.cc", CPP + '#include "core/plans/plan.h"\n', "trace does not include"),
    ("core/plans/planted.cc", CPP + '#include "plan.h"\n', "start at the repository root"),
    ("core/planted.cc", CPP + '#include "tests/support/x.h"\n', "nothing uses tests/ or bench/"),
    ("xla_ffi/planted.cc", CPP + '#include "bench/x.h"\n', "nothing uses tests/ or bench/"),
    ("jax_dfccl/planted.py", PYTHON + "import scipy\n", "the package imports only"),
    ("jax_dfccl/planted.py", PYTHON + "from sklearn import datasets\n", "the package imports only"),
    ("jax_dfccl/planted.py", PYTHON + "from tests.support import x\n", "nothing uses tests/"),
    ("jax_dfccl/planted.py", PYTHON + "x = 'bench/collectives.py'\n", "nothing uses tests/"),
    ("jax_dfccl/planted.py", PYTHON + "from jax._src import core\n", PRIVATE_JAX),
    ("jax_dfccl/planted.py", PYTHON + "from jax import _src\n", PRIVATE_JAX),
    ("jax_dfccl/planted.py", PYTHON + "import jax\nx = jax._src.core\n", PRIVATE_JAX),
    ("jax_dfccl/planted.py", PYTHON + "import_module('jax._src.core')\n", PRIVATE_JAX),
    ("jax_dfccl/planted.py", PYTHON + "import jaxlib\n", PRIVATE_JAX),
    ("jax_dfccl/planted.py", PYTHON + "import os\nx = os.environ['X']\n", ENVIRONMENT),
    ("jax_dfccl/planted.py", PYTHON + "from os import getenv\n", ENVIRONMENT),
    ("bench/planted.py", PYTHON + "import jax_dfccl._compat\n", "only the public API"),
    ("examples/planted.py", PYTHON + "import bench.results\n", "nothing uses tests/ or bench/"),
]

# What looks like a violation and is none.
ALLOWED = [
    ("core/protocol/planted.h", CPP + '#include "core/protocol/step.h"\n#include <stdint.h>\n'),
    ("core/daemon/planted.cc", CPP + '#include "core/plans/plan.h"\n#include "core/runtime.h"\n'),
    ("core/planted.cc", CPP + '// not std::atomic\nconst char* x = "volatile";\n'),
    ("xla_ffi/bindings_planted.cc", CPP + "#include <nanobind/nanobind.h>\n"),
    ("tests/core/planted.cc", CPP + "#include <atomic>\n"),
    ("jax_dfccl/planted.py", PYTHON + '"""Not jax._src, as tests/ knows."""\nimport json\n'),
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the tree's source folders."""
    for folder in check_layering.SOURCE_FOLDERS:
        if (ROOT / folder).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    return tmp_path


def plant(tree: Path, name: str, text: str) -> None:
    path = tree / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_tree_keeps_its_arrows() -> None:
    assert check_layering.check(ROOT) == []


@pytest.mark.parametrize(("name", "text", "expected"), VIOLATIONS)
def test_planted_violation_is_found(tree: Path, name: str, text: str, expected: str) -> None:
    before = check_layering.check(tree)
    plant(tree, name, text)
    new = [line for line in check_layering.check(tree) if line not in before]
    assert any(line.startswith(name) and expected in line for line in new), new


@pytest.mark.parametrize(("name", "text"), ALLOWED)
def test_no_false_alarm(tree: Path, name: str, text: str) -> None:
    before = check_layering.check(tree)
    plant(tree, name, text)
    assert check_layering.check(tree) == before


def test_every_rule_has_a_planted_violation() -> None:
    rules = [what for what, *_ in check_layering.INCLUDE_RULES + check_layering.CPP_CODE_RULES]
    planted = [expected for _, _, expected in VIOLATIONS]
    assert [rule for rule in rules if not any(expected in rule for expected in planted)] == []


def test_builds_name_every_file() -> None:
    assert check_build_files.check(ROOT) == []


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("core/planted.cc", CPP, "core/planted.cc: in no BUILD"),
        ("core/planted.cc", CPP, "core/planted.cc: in no CMakeLists.txt"),
        ("core/planted.h", CPP, "core/planted.h: in no BUILD"),
        ("core/x/BUILD", 'cc_library(srcs = ["no.cc"])', "core/x/BUILD: names core/x/no.cc, which"),
        ("core/x/BUILD", 'cc_library(srcs = glob(["*.cc"]))', "core/x/BUILD: sources are listed"),
        ("core/x/CMakeLists.txt", "file(GLOB x *.cc)", "core/x/CMakeLists.txt: sources are"),
        (
            "core/reduce/roofline.cc",
            CPP + '#include "core/daemon/crew.h"\n',
            "//core/reduce:reduce: core/reduce/roofline.cc includes core/daemon/crew.h, which no",
        ),
    ],
)
def test_planted_build_fault_is_found(tree: Path, name: str, text: str, expected: str) -> None:
    before = check_build_files.check(tree)
    plant(tree, name, text)
    new = [line for line in check_build_files.check(tree) if line not in before]
    assert any(line.startswith(expected) for line in new), new
