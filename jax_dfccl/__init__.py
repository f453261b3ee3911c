# SPDX-License-Identifier: Apache-2.0
"""Collectives for JAX that may be reached in any order on any device."""

from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version

from jax_dfccl._all_reduce import all_reduce as all_reduce
from jax_dfccl._report import Report as Report
from jax_dfccl._report import report as report

try:
    __version__ = _version("jax-dfccl")
except _PackageNotFoundError:  # run from the source tree
    __version__ = "0+unknown"

__all__ = ["Report", "__version__", "all_reduce", "report"]
