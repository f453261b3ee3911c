# SPDX-License-Identifier: Apache-2.0
"""The only file that uses private JAX or jaxlib names.

Each has the versions it was seen in; nothing else in the package may import `jax._src` or
`jaxlib`. Seen in 0.10.2 and 0.12.0.1 unless a line says otherwise.
"""

from pathlib import Path
from typing import Any

from jax._src import source_info_util
from jax._src.core import NamedAxisEffect as NamedAxisEffect
from jax._src.dispatch import apply_primitive as apply_primitive
from jaxlib.mlir.dialects import stablehlo


def hide_from_source_lines(file: str) -> None:
    """Makes JAX look past `file` when it says which Python line an operation came from."""
    source_info_util.register_exclusion(file)


def user_source(traceback: Any) -> str:
    """The innermost user line of an equation: "train.py:12 (step)"."""
    frame = source_info_util.user_frame(traceback)
    if frame is None:
        return "unknown source"
    function = frame.function_name.rsplit(".", 1)[-1]
    return f"{Path(frame.file_name).name}:{frame.start_line} ({function})"


def partition_id() -> Any:
    """Emits StableHLO's partition_id at the current insertion point: a u32 scalar."""
    return stablehlo.partition_id()
