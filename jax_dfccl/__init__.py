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
from jax_dfccl._barrier import barrier as barrier
from jax_dfccl._elastic import Survivors as Survivors
from jax_dfccl._elastic import detach as detach
from jax_dfccl._elastic import join as join
from jax_dfccl._elastic import shrink as shrink
from jax_dfccl._exchange import all_to_all as all_to_all
from jax_dfccl._exchange import all_to_all_v as all_to_all_v
from jax_dfccl._exchange import ragged_all_to_all as ragged_all_to_all
from jax_dfccl._gather import all_gather as all_gather
from jax_dfccl._gather import all_gather_v as all_gather_v
from jax_dfccl._gather import gather as gather
from jax_dfccl._grouped import grouped as grouped
from jax_dfccl._groups import Group as Group
from jax_dfccl._handles import Handle as Handle
from jax_dfccl._handles import cancel as cancel
from jax_dfccl._handles import start as start
from jax_dfccl._handles import test as test
from jax_dfccl._handles import wait as wait
from jax_dfccl._handles import wait_all as wait_all
from jax_dfccl._handles import wait_any as wait_any
from jax_dfccl._launcher import dispatch as dispatch
from jax_dfccl._launcher import launcher as launcher
from jax_dfccl._messages import recv as recv
from jax_dfccl._messages import recv_any as recv_any
from jax_dfccl._messages import send as send
from jax_dfccl._messages import send_any as send_any
from jax_dfccl._override import override_lax as override_lax
from jax_dfccl._permute import ppermute as ppermute
from jax_dfccl._permute import send_recv as send_recv
from jax_dfccl._report import Report as Report
from jax_dfccl._report import report as report
from jax_dfccl._root import broadcast as broadcast
from jax_dfccl._root import reduce as reduce
from jax_dfccl._scan import exclusive_scan as exclusive_scan
from jax_dfccl._scan import inclusive_scan as inclusive_scan
from jax_dfccl._scatter import reduce_scatter as reduce_scatter
from jax_dfccl._scatter import scatter as scatter
from jax_dfccl._sharded import sharded as sharded
from jax_dfccl._starts import all_gather_start as all_gather_start
from jax_dfccl._starts import all_gather_v_start as all_gather_v_start
from jax_dfccl._starts import all_reduce_start as all_reduce_start
from jax_dfccl._starts import all_to_all_start as all_to_all_start
from jax_dfccl._starts import all_to_all_v_start as all_to_all_v_start
from jax_dfccl._starts import barrier_start as barrier_start
from jax_dfccl._starts import broadcast_start as broadcast_start
from jax_dfccl._starts import exclusive_scan_start as exclusive_scan_start
from jax_dfccl._starts import gather_start as gather_start
from jax_dfccl._starts import inclusive_scan_start as inclusive_scan_start
from jax_dfccl._starts import ppermute_start as ppermute_start
from jax_dfccl._starts import ragged_all_to_all_start as ragged_all_to_all_start
from jax_dfccl._starts import recv_start as recv_start
from jax_dfccl._starts import reduce_scatter_start as reduce_scatter_start
from jax_dfccl._starts import reduce_start as reduce_start
from jax_dfccl._starts import scatter_start as scatter_start
from jax_dfccl._starts import send_recv_start as send_recv_start

try:
    __version__ = _version("jax-dfccl")
except _PackageNotFoundError:  # run from the source tree
    __version__ = "0+unknown"

__all__ = [
    "Group",
    "Handle",
    "Report",
    "Survivors",
    "__version__",
    "all_gather",
    "all_gather_start",
    "all_gather_v",
    "all_gather_v_start",
    "all_reduce",
    "all_reduce_start",
    "all_to_all",
    "all_to_all_start",
    "all_to_all_v",
    "all_to_all_v_start",
    "barrier",
    "barrier_start",
    "broadcast",
    "broadcast_start",
    "cancel",
    "detach",
    "dispatch",
    "exclusive_scan",
    "exclusive_scan_start",
    "gather",
    "gather_start",
    "grouped",
    "inclusive_scan",
    "inclusive_scan_start",
    "join",
    "launcher",
    "lax",
    "max_with_index",
    "min_with_index",
    "override_lax",
    "ppermute",
    "ppermute_start",
    "ragged_all_to_all",
    "ragged_all_to_all_start",
    "recv",
    "recv_any",
    "recv_start",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_start",
    "reduce_start",
    "report",
    "scatter",
    "scatter_start",
    "send",
    "send_any",
    "send_recv",
    "send_recv_start",
    "sharded",
    "shrink",
    "start",
    "test",
    "wait",
    "wait_all",
    "wait_any",
]
