# SPDX-License-Identifier: Apache-2.0
"""From a primitive to `stablehlo.custom_call @dfccl_collective`, and registration with XLA.

The custom call's operands are the arrays, and the key if there is one. Its `backend_config`:

    kind         str    what it does: "all_reduce"
    op           str    the reduction; "" for kinds that only move data
    root         i64    index in the group, for kinds that have a root; else 0
    pairs        i64[]  of a permute: source, target, ... as indices in the group; else empty
    groups       i64[]  positions in the mesh's flat device order, group after group
    group_sizes  i64[]
    devices      i64[]  empty; the global device id of each position once the program is loaded
    members      i64[]  of a `Group`: its members' global device ids, whose indices `groups` has
                        then in the place of positions; else empty
    name         str    "": unnamed
    has_key      i64    0 or 1
    priority     i64
    timeout_us   i64    0: the process default
    call         i64    index for `call_info`; the module pass resolves and removes it
    program      i64    0, which the module pass replaces
    site         i64    -1, which the module pass replaces
    as_device    i64    -1: the call is the part of the device that executes it
    closed       i64    0; the module pass sets 1 if nothing else in the program can wait for peers
    acts         i64    -1; of a message, the member that calls: 0 the source, 1 the target
    shape        i64    0; of a message, a hash of the operand's shape and type

A start whose ticket a handle has may have a tag as its last operand, an int32 under which its end
is announced (`_core.take_ends`), and says so:

    has_tag      i64    0 or 1
    detached     i64    0; 1 if nobody waits for it, so it has no ticket

A message has also

    peer         i64    the rank in the Group of the other member; the module pass puts the two in
                        `groups` when it is known who makes the call
    shown        str    what messages call it

All but `call` are the same in every process that lowers the program, whatever line, thread or
folder it was started from.
"""

import atexit
import dataclasses
import functools
import hashlib
import sys
import threading
from collections.abc import Collection, Iterable
from typing import Any

import jax
import jax.core
import numpy as np
from jax.interpreters import mlir

from jax_dfccl import _cluster, _compat, _local, _passes, _plans
from jax_dfccl._config import Config
from jax_dfccl._groups import Ends, Group, Groups, replica_groups
from jax_dfccl._primitive import (
    KINDS,
    PRIMITIVES,
    RANK_IN_GROUP,
    START,
    WAIT,
    Kind,
    array_count,
    explicit,
)

# XLA's name of each platform that JAX lowers for.
PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}


@dataclasses.dataclass(frozen=True)
class CallInfo:
    """What messages say about a call."""

    operation: str  # "all_reduce(sum)"
    name: str  # "": unnamed
    source: str  # "train.py:12 (step)"


_calls: list[CallInfo] = []
_call_indices: dict[CallInfo, int] = {}
_lock = threading.Lock()
_registered: set[str] = set()


def call_info(index: int) -> CallInfo:
    """What the `call` attribute of a custom call stands for."""
    return _calls[index]


def _index_of(info: CallInfo) -> int:
    with _lock:
        index = _call_indices.setdefault(info, len(_calls))
        if index == len(_calls):
            _calls.append(info)
        return index


def register(platform: str = "cpu") -> None:
    """Registers the handlers with XLA, once for each platform.

    Called when a program is about to be loaded, and on CPU by the first lowering. The backend must
    exist before a stateful handler is registered, so this is not done on import.
    """
    with _lock:
        if platform in _registered:
            return
        from jax_dfccl import _core

        config = Config.from_environment()
        devices = jax.local_devices(backend=platform)
        if not _registered:
            _core.configure(
                workers=config.workers,
                timeout_s=config.timeout_s,
                stall_warning_s=config.stall_warning_s,
                cycle_grace_s=config.cycle_grace_s,
                plan_rules=_plans.rules_of(config),
            )
            # Runs before JAX's own exit handlers, which take the devices away.
            atexit.register(_shut_down)
        if platform == "cuda":
            # Plans that were measured on the CPU are not the GPU's.
            _core.configure_gpus(
                devices={device.local_hardware_id: device.id for device in devices},
                blocks=config.gpu_blocks,
                memory_bytes=config.gpu_memory_bytes,
                host_memory_bytes=config.gpu_host_memory_bytes,
                several_processes=jax.process_count() > 1,
                low_latency_bytes=config.gpu_low_latency_bytes,
                bulk=config.gpu_bulk,
                timeout_s=config.timeout_s,
                plan_rules=_plans.forced(config.plan),
            )
        xla_platform = PLATFORMS[platform]
        for name, handles in _core.type_registrations(xla_platform).items():
            jax.ffi.register_ffi_type(name, handles, platform=xla_platform)  # type: ignore[arg-type]
        for target, stages in _core.registrations(xla_platform).items():
            jax.ffi.register_ffi_target(target, stages, platform=xla_platform)
        _registered.add(platform)


def _shut_down() -> None:
    from jax_dfccl import _core

    waiting = _compat.settle_effects(lambda: bool(_core.report()["in_flight"]))
    sent = [entry for entry in _core.report()["in_flight"] if entry["operation"].startswith("send")]
    for entry in sent[:8]:
        key = f" key {entry['key']}" if entry["key"] else ""
        what = f"{entry['operation']} '{entry['name']}'{key} at {entry['source']}"
        print(f"jax_dfccl: at exit nobody had received: {what}", file=sys.stderr)
    _core.shutdown()
    waiting.join(10.0)  # which the end of all calls has ended


def _register_site(site: _passes.Site) -> None:
    from jax_dfccl import _core

    # The attribute that the handlers see is signed.
    program = site.program - (1 << 64) if site.program >> 63 else site.program
    _core.register_site(**{**dataclasses.asdict(site), "program": program})


def _begin_executable(groups: set[tuple[int, ...]], platform: str) -> None:
    if platform not in PLATFORMS:
        raise NotImplementedError(f"jax_dfccl runs on CPUs and CUDA GPUs, not on {platform}")
    register(platform)  # not done yet if the module was lowered by another process, or for GPUs
    from jax_dfccl import _core

    if jax.process_count() > 1:
        process_of = {device.id: device.process_index for device in jax.devices(platform)}
        reached = _reached([[process_of[member] for member in group] for group in groups])
        if groups:
            _cluster.require(reached, platform=platform)
    _core.begin_executable()


def check_all_axes_manual(function: str, mesh: Any, manual_axes: Any) -> None:
    """Refuses meshes with axes left to the compiler, which would gather the operands over them."""
    automatic = [a for a in mesh.axis_names if a not in manual_axes and mesh.shape[a] > 1]
    if automatic:
        raise NotImplementedError(
            f"{function}: this jax.shard_map is manual over "
            f"{sorted(map(str, manual_axes))} only and leaves {automatic} to the compiler, which "
            "cannot partition the call over them; leave out axis_names= of jax.shard_map, or add "
            "those axes to it, and name them in in_specs and out_specs"
        )


def _lower(kind: Kind, ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
    return emit(ctx, *operands, kind=kind.name, **_resolved(kind, ctx, **params))


def _lower_start(
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    kind: str,
    has_tag: bool,
    detached: bool,
    **params: Any,
) -> Any:
    platforms = ctx.platforms or ctx.module_context.platforms
    if detached and tuple(platforms) != ("cpu",):
        raise NotImplementedError(
            f"send: what is buffered is for CPU devices only, not for {', '.join(platforms)}"
        )
    resolved = _resolved(KINDS[kind], ctx, **params)
    count = len(operands) - has_tag
    ticket = jax.core.ShapedArray((1,), np.dtype(np.uint64))
    ctx = ctx.replace(avals_out=[ticket])
    (made,) = emit(
        ctx,
        *operands,
        kind=kind,
        **resolved,
        target=_passes.HANDLE_START,
        has_key=count > array_count(kind),
        has_tag=np.int64(has_tag),
        detached=np.int64(detached),
    )
    return [_compat.bitcast(made, (2,), np.uint32)]


def _lower_wait(
    ctx: mlir.LoweringRuleContext,
    ticket: Any,
    *_: Any,
    kind: str,
    shape: Any,
    dtype: Any,
    origin: str,
    **params: Any,
) -> Any:
    del shape, dtype, origin
    resolved = _resolved(KINDS[kind], ctx, **params)
    ctx = ctx.replace(avals_in=[jax.core.ShapedArray((1,), np.dtype(np.uint64))])
    return emit(
        ctx,
        _compat.bitcast(ticket, (1,), np.uint64),
        kind=kind,
        **resolved,
        target=_passes.HANDLE_WAIT,
        has_key=False,
    )


def _resolved(
    kind: Kind,
    ctx: mlir.LoweringRuleContext,
    *,
    axes: tuple[Any, ...],
    groups: Any,
    level: int,
    reverse: bool = False,
    **params: Any,
) -> dict[str, Any]:
    """The parameters of a primitive as `emit` takes them."""
    del level  # tells derivatives' names apart, nothing else
    group = explicit(axes)
    context = ctx.module_context.axis_context
    if isinstance(context, mlir.SPMDAxisContext):
        check_all_axes_manual(kind.shown, context.mesh, context.manual_axes)
        shape = context.mesh.shape
    elif group is not None and getattr(context, "num_devices", 0) == 1:
        shape = {}
    else:
        raise NotImplementedError(
            f"{kind.shown} over {axes} is outside jax.shard_map; call it in a function under "
            "jax.shard_map" + (" or on one device" if group else "")
        )
    if group is not None:
        shape = {group: group.size}
    members = replica_groups(shape, axes, groups)
    if reverse:
        members = tuple(group[::-1] for group in members)
    return {"members": members, "group": group, **params}


def _lower_rank(ctx: mlir.LoweringRuleContext, position: Any, *, group: Group) -> Any:
    """The pass puts the rank in its place when the devices are known."""
    register()
    _compat.note_call()
    members = np.array(group.members, np.int64)
    return jax.ffi.ffi_lowering(_passes.RANK)(ctx, position, members=members)


def emit(
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    kind: str,
    members: Groups,
    group: Group | None = None,
    op: str = "",
    root: int = 0,
    pairs: tuple[tuple[int, int], ...] = (),
    name: str = "",
    priority: int = 0,
    timeout_us: int = 0,
    target: str = _passes.CALL,
    has_key: bool | None = None,
    **attributes: Any,
) -> Any:
    """Emits the custom call. `ctx` has the types of its operands (arrays, key) and of its result.

    `members` are the groups, as positions in the mesh of the manual code that it stands in, or as
    ranks in `group`; `root` and `pairs` are indices in each. Groups of one member need no call.
    """
    if target == _passes.CALL and all(len(group) == 1 for group in members):

        def alone(*operands: Any) -> Any:
            arrays = tuple(x[None] for x in operands[: array_count(kind)])
            return _local.evaluate(kind, arrays, None, op=op, root=root, pairs=pairs)[0]

        return mlir.lower_fun(alone, multiple_results=False)(ctx, *operands)
    if "cpu" in (ctx.platforms or ctx.module_context.platforms):
        register()
    _compat.note_call()

    if has_key is None:
        has_key = len(operands) > array_count(kind)
    shape_hash = 0
    operation = f"{kind}({op})" if op else kind
    if isinstance(group, Ends):
        moved: Any = ctx.avals_out[0] if target == _passes.HANDLE_WAIT else ctx.avals_in[0]
        shape = f"{moved.dtype}{list(moved.shape)}"
        shape_hash = int.from_bytes(hashlib.blake2b(shape.encode(), digest_size=7).digest())
        operation = f"send of {shape} to" if group.sends else f"recv of {shape} from"
        operation += f" rank {group.peer}"
        attributes |= {"peer": np.int64(group.peer), "shown": operation}
    info = CallInfo(operation, name, _compat.user_source(ctx.traceback))
    # No side effect: unused calls may go and equal ones may merge, on all members alike, and the
    # call stays usable under remat.
    lowering = jax.ffi.ffi_lowering(target)
    return lowering(
        ctx,
        *operands,
        kind=kind,
        op=op,
        root=np.int64(root),
        pairs=np.array(pairs, np.int64).reshape(-1),
        groups=np.array([position for group in members for position in group], np.int64),
        group_sizes=np.array([len(group) for group in members], np.int64),
        devices=np.array([], np.int64),
        members=np.array(group.members if group is not None else [], np.int64),
        name=name,
        has_key=np.int64(has_key),
        priority=np.int64(priority),
        timeout_us=np.int64(timeout_us),
        call=np.int64(_index_of(info)),
        program=np.int64(0),
        site=np.int64(-1),
        as_device=np.int64(-1),
        closed=np.int64(0),
        acts=np.int64(-1 if not isinstance(group, Ends) else not group.sends),
        shape=np.int64(shape_hash),
        **attributes,
    )


def _reached(groups: Iterable[Collection[int]]) -> list[int]:
    """The processes that groups with members in this one have members in."""
    own = jax.process_index()
    return sorted({own}.union(*(group for group in groups if own in group)))


def _refuse(kind: Kind, ctx: mlir.LoweringRuleContext, *_: Any, **__: Any) -> Any:
    platforms = ctx.platforms or ctx.module_context.platforms
    raise NotImplementedError(
        f"{kind.shown} runs on CPUs and CUDA GPUs, not on {', '.join(platforms)}"
    )


def _refuse_handle(ctx: mlir.LoweringRuleContext, *_: Any, **__: Any) -> Any:
    platforms = ctx.platforms or ctx.module_context.platforms
    raise NotImplementedError(f"handles are for CPUs and CUDA GPUs, not for {', '.join(platforms)}")


# Not cacheable: a cached lowering would give two calls the source line of the first.
for _name, _primitive in PRIMITIVES.items():
    _refusal, _rule = (functools.partial(f, KINDS[_name]) for f in (_refuse, _lower))
    mlir.register_lowering(_primitive, _refusal, cacheable=False)
    for _platform in PLATFORMS:
        mlir.register_lowering(_primitive, _rule, platform=_platform, cacheable=False)

for _half, _rule in ((START, _lower_start), (WAIT, _lower_wait)):
    mlir.register_lowering(_half, _refuse_handle, cacheable=False)
    for _platform in PLATFORMS:
        mlir.register_lowering(_half, _rule, platform=_platform, cacheable=False)
for _platform in PLATFORMS:
    mlir.register_lowering(RANK_IN_GROUP, _lower_rank, platform=_platform, cacheable=False)

# At import: a module's lowering has begun by the time the first rule runs.
_passes.install(lambda index: call_info(index).source, _register_site, _begin_executable)
_compat.prepare_cpu_client(_cluster.publish_host)
