# SPDX-License-Identifier: Apache-2.0
"""Collectives for JAX that may be reached in any order on any device."""

from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version

try:
    from jax_dfccl import _core as _core
except ImportError as error:
    raise ImportError(
        f"jax_dfccl was imported from {__path__[0]}, where its extension is not built or does "
        "not load. If that is the source tree, install the package (pip install .) and run from "
        "another folder, or install it in place (pip install -e .)"
    ) from error

from jax_dfccl import lax as lax
from jax_dfccl._all_reduce import all_reduce as all_reduce
from jax_dfccl._all_reduce import max_with_index as max_with_index
from jax_dfccl._all_reduce import min_with_index as min_with_index
from jax_dfccl._override import override_lax as override_lax
from jax_dfccl._report import Report as Report
from jax_dfccl._report import report as report

try:
    __version__ = _version("jax-dfccl")
except _PackageNotFoundError:  # run from the source tree
    __version__ = "0+unknown"

__all__ = [
    "Report",
    "__version__",
    "all_reduce",
    "lax",
    "max_with_index",
    "min_with_index",
    "override_lax",
    "report",
]
