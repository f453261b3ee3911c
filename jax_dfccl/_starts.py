# SPDX-License-Identifier: Apache-2.0
"""`all_reduce_start(x, ...)` for `start(all_reduce, x, ...)`, and so on."""

from functools import partial

from jax_dfccl._all_reduce import all_reduce
from jax_dfccl._barrier import barrier
from jax_dfccl._exchange import all_to_all, all_to_all_v, ragged_all_to_all
from jax_dfccl._gather import all_gather, all_gather_v, gather
from jax_dfccl._handles import start
from jax_dfccl._messages import recv
from jax_dfccl._permute import ppermute, send_recv
from jax_dfccl._root import broadcast, reduce
from jax_dfccl._scan import exclusive_scan, inclusive_scan
from jax_dfccl._scatter import reduce_scatter, scatter

all_gather_start = partial(start, all_gather)
all_gather_v_start = partial(start, all_gather_v)
all_reduce_start = partial(start, all_reduce)
all_to_all_start = partial(start, all_to_all)
all_to_all_v_start = partial(start, all_to_all_v)
barrier_start = partial(start, barrier)
broadcast_start = partial(start, broadcast)
exclusive_scan_start = partial(start, exclusive_scan)
gather_start = partial(start, gather)
inclusive_scan_start = partial(start, inclusive_scan)
ppermute_start = partial(start, ppermute)
ragged_all_to_all_start = partial(start, ragged_all_to_all)
recv_start = partial(start, recv)
reduce_start = partial(start, reduce)
reduce_scatter_start = partial(start, reduce_scatter)
scatter_start = partial(start, scatter)
send_recv_start = partial(start, send_recv)
