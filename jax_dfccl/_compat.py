# SPDX-License-Identifier: Apache-2.0
"""The only file that uses private JAX or jaxlib names.

Each has the versions it was seen in; nothing else in the package may import `jax._src` or
`jaxlib`. Seen in 0.10.2 and 0.12.0.1 unless a line says otherwise.
"""

import contextlib
import dataclasses
import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import compiler, core, dispatch, distributed, effects, source_info_util, xla_bridge
from jax._src import config as jax_config
from jax._src.core import NamedAxisEffect as NamedAxisEffect
from jax._src.dispatch import apply_primitive as apply_primitive
from jax._src.interpreters import mlir
from jax._src.lax import parallel
from jaxlib.mlir import ir as ir
from jaxlib.mlir.dialects import sdy, stablehlo

from jax_dfccl import _config


class MessageEffect(effects.Effect):
    """Of what has its effect on another member's program: JAX keeps it though nothing uses it.

    Not allowed under `jax.checkpoint`, which would send again.
    """


for _allowing in (
    effects.lowerable_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
):
    _allowing.add_type(MessageEffect)


def settle_effects(is_stuck: Callable[[], bool]) -> threading.Thread:
    """Waits for this thread's programs with effects, as JAX does at exit.

    But not for ever where something is stuck after a while, and those that have failed, of which
    who asked for results has heard, are no errors. Returns the thread that waits for the rest: a
    thread that comes back from JAX when Python has gone ends the process by a signal (until 3.13).
    """
    tokens = list(dispatch.runtime_tokens.output_runtime_tokens.values())
    dispatch.runtime_tokens.output_runtime_tokens.clear()

    def wait() -> None:
        for token in tokens:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                token.block_until_ready()

    waiting = threading.Thread(target=wait, name="jax_dfccl-effects", daemon=True)
    waiting.start()
    waiting.join(2.0)
    while waiting.is_alive() and not is_stuck():
        waiting.join(0.1)
    return waiting


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


def equations_below(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of those in it."""
    for equation in jaxpr.eqns:
        yield equation
        yield from equations_inside(equation)


def equations_inside(equation: Any) -> Iterator[Any]:
    """The equations of the jaxprs that an equation holds."""
    for inner in jaxprs_inside(equation):
        yield from equations_below(inner)


def jaxprs_inside(equation: Any) -> Iterator[Any]:
    """The jaxprs that an equation holds."""
    return core.jaxprs_in_params(equation.params)


def source_of(equation: Any) -> Any:
    """In its `with` block what is bound has an equation's source line."""
    info = equation.source_info
    stack = source_info_util.current_name_stack() + info.name_stack
    return source_info_util.user_context(info.traceback, name_stack=stack)


def run_equation(equation: Any, operands: list[Any]) -> list[Any]:
    """What an equation of a jaxpr gives for some operands."""
    params = equation.primitive.get_bind_params(equation.params)
    with source_of(equation), equation.ctx.manager:
        results = equation.primitive.bind(*operands, **params)
    return list(results) if equation.primitive.multiple_results else [results]


def alias_result_to_operand(op: Any) -> None:
    """Tells XLA that the result of a custom call is the memory of its first operand."""
    alias = stablehlo.OutputOperandAlias.get([], 0, [])
    op.attributes["output_operand_aliases"] = ir.ArrayAttr.get([alias])


def bitcast(value: Any, shape: Sequence[int], dtype: Any) -> Any:
    """A value of a lowered module as another integer type of as many bytes in all."""
    element = mlir.dtype_to_ir_type(np.dtype(dtype))
    had = ir.RankedTensorType(value.type)
    bits, had_bits = np.dtype(dtype).itemsize * 8, ir.IntegerType(had.element_type).width
    wide = had_bits < bits
    # Two narrow numbers are the last dimension of one wide number.
    whole = list(had.shape)[:-1] if wide else [*had.shape, had_bits // bits]
    cast = stablehlo.BitcastConvertOp(ir.RankedTensorType.get(whole, element), value).result
    return stablehlo.ReshapeOp(ir.RankedTensorType.get(list(shape), element), cast).result


class _Lowering(threading.local):
    """What is known of the module that this thread lowers now."""

    holds_calls = False  # of ours
    platforms = 1


_lowering = _Lowering()
_loading = threading.RLock()  # held while an executable with calls of ours is made


def note_call() -> None:
    """Called by the lowering rules: the module being lowered holds a call of ours."""
    _lowering.holds_calls = True


def install_hooks(
    rewrite: Callable[[ir.Module], Any],
    holds_calls: Callable[[ir.Module], bool],
    begin_executable: Callable[[ir.Module, list[int], str], Any],
) -> None:
    """Hooks into JAX's lowering and compilation; a second call changes nothing.

    XLA instantiates an executable's custom calls while it compiles it or loads it from the
    persistent cache; in 0.12.0.1 on the calling thread, in 0.10.2 on one of its own. So the
    executables that hold calls of ours are made one at a time, and the calls that are instantiated
    between one `begin_executable` and the next belong to one executable.

    Args:
      rewrite: Changes a lowered module in place; called for those that `note_call` was called for.
      holds_calls: Whether a module that is to be compiled holds calls of ours.
      begin_executable: Called with such a module, and the ids of the devices that run its
        partitions, and the platform that JAX lowers for on them, just before it is compiled or
        loaded; may change it in place.
    """
    lower = _hookable(mlir, "lower_jaxpr_to_module")
    load = _hookable(compiler, "compile_or_get_cached")
    if hasattr(lower, "_jax_dfccl"):
        return

    @functools.wraps(lower)
    def lower_and_rewrite(*args: Any, **kwargs: Any) -> Any:
        # Lowering can compile and so lower something else on the way.
        outer = _lowering.holds_calls, _lowering.platforms
        _lowering.holds_calls, _lowering.platforms = False, len(kwargs["platforms"])
        try:
            result = lower(*args, **kwargs)
            if _lowering.holds_calls:
                rewrite(result.module)
        finally:
            _lowering.holds_calls, _lowering.platforms = outer
        return result

    @functools.wraps(load)
    def begin_and_load(
        backend: Any, computation: ir.Module, devices: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not holds_calls(computation):
            return load(backend, computation, devices, *args, **kwargs)
        with _loading:
            platform = "cuda" if backend.platform == "gpu" else backend.platform
            begin_executable(computation, [device.id for device in devices.flat], platform)
            return load(backend, computation, devices, *args, **kwargs)

    for wrapper in (lower_and_rewrite, begin_and_load):
        wrapper._jax_dfccl = True  # type: ignore[attr-defined]
    mlir.lower_jaxpr_to_module = lower_and_rewrite
    compiler.compile_or_get_cached = begin_and_load


def _hookable(module: Any, name: str) -> Any:
    function = getattr(module, name, None)
    if function is None:
        raise ImportError(
            f"jax_dfccl needs {module.__name__}.{name}, which jax {jax.__version__} does not have. "
            "jax 0.10.2 and 0.12.0.1 are known to work"
        )
    return function


def prepare_cpu_client(before: Callable[[], None]) -> None:
    """Calls `before` when JAX makes its CPU client, and makes that launch from more threads.

    XLA:CPU runs the devices of a program on a pool of as many threads as there are devices, and
    each stays blocked until its device's part is finished. From 32 unfinished programs per device
    on, a thread that launches a further program blocks pool threads too (one per device). A running
    program then finds no thread for one of its devices, and everything stops: with several
    launching threads soon, whatever the collectives do. So the pool gets room for the launches of
    eight threads (fewer from 64 devices on).
    """
    if xla_bridge.backends_are_initialized():
        _warn_of_narrow_pool()
        return
    registration = xla_bridge._backend_factories.get("cpu")
    if registration is None or hasattr(registration.factory, "_jax_dfccl"):
        return
    make_client = registration.factory

    @functools.wraps(make_client)
    def make_wider_client(*args: Any, **kwargs: Any) -> Any:
        before()
        configured = xla_bridge.num_cpu_devices.value
        devices = configured if configured > 0 else _config.forced_cpu_devices()
        if devices == 1:  # launched on the calling thread
            return make_client(*args, **kwargs)
        threads = max(os.cpu_count() or 1, devices + min(8 * devices, 256))
        with _config.xla_pool_threads(threads):
            return make_client(*args, **kwargs)

    make_wider_client._jax_dfccl = True  # type: ignore[attr-defined]
    xla_bridge._backend_factories["cpu"] = dataclasses.replace(
        registration, factory=make_wider_client
    )


def _warn_of_narrow_pool() -> None:
    client = xla_bridge.backends().get("cpu")
    if client is None or client.local_device_count() == 1 or _config.xla_pool_is_chosen():
        return
    warnings.warn(
        "jax_dfccl was imported after JAX had started its CPU backend, whose thread pool may be "
        "too small: with more than 32 unfinished programs XLA can get stuck. Import jax_dfccl "
        "before the first use of jax.devices() or of an array, or set PJRT_NPROC to several times "
        "the number of devices",
        RuntimeWarning,
        stacklevel=2,
    )


def _manual_axes(manual_computation: Any) -> set[str]:
    axes = sdy.ManualAxesAttr(manual_computation.attributes["manual_axes"])
    return {axes[i] for i in range(len(axes))}


def is_split_by_manual_axes(manual_computation: Any, index: int) -> bool:
    """Whether an operand's parts on the devices of a manual computation may differ."""
    manual = _manual_axes(manual_computation)
    in_shardings = manual_computation.attributes["in_shardings"]
    sharding = sdy.TensorShardingAttr(sdy.TensorShardingPerValueAttr(in_shardings).shardings[index])
    if len(sharding.unreduced_axes) > 0:
        return True
    dimensions = [sdy.DimensionShardingAttr(d) for d in sharding.dimension_shardings]
    return any(sdy.AxisRefAttr(axis).name in manual for d in dimensions for axis in d.axes)


def operand_sharding(manual_computation: Any, index: int) -> Any:
    """The sharding that a manual computation wants an operand to have."""
    shardings = manual_computation.attributes["in_shardings"]
    return sdy.TensorShardingPerValueAttr(shardings).shardings[index]


def result_sharding(manual_computation: Any, index: int) -> Any:
    """The sharding that a result of a manual computation has."""
    shardings = manual_computation.attributes["out_shardings"]
    return sdy.TensorShardingPerValueAttr(shardings).shardings[index]


def resharding_moves_data(have: Any, wanted: Any) -> bool:
    """Whether devices need each other's data to go from one sharding to another; None fits all."""
    if have is None or wanted is None:
        return False
    (had, unreduced), (asked, _) = _axes_of(have), _axes_of(wanted)
    if unreduced:
        return True
    return had != asked and any(had)  # else each device cuts its part out of the whole


def _axes_of(sharding: Any) -> tuple[list[list[str]], bool]:
    attribute = sdy.TensorShardingAttr(sharding)
    dimensions = [sdy.DimensionShardingAttr(d) for d in attribute.dimension_shardings]
    axes = [[str(sdy.AxisRefAttr(axis)) for axis in d.axes] for d in dimensions]
    return axes, len(attribute.unreduced_axes) > 0


def is_manual_over_all(manual_computation: Any, module: ir.Module) -> bool:
    """Whether a manual computation leaves no axis of the module's meshes to the compiler."""
    axes: set[str] = set()
    for view in module.body.operations:
        if view.operation.name == "sdy.mesh":
            listed = sdy.MeshAttr(view.operation.attributes["mesh"]).axes
            axes |= {axis.name for axis in map(sdy.MeshAxisAttr, listed) if axis.size > 1}
    return axes <= _manual_axes(manual_computation)


def spans_all_devices(collective: Any, manual_computations: list[Any]) -> bool:
    """Whether a native collective has one group, as far as that is said plainly.

    Args:
      collective: A StableHLO operation with replica groups.
      manual_computations: Those that the operation stands in.
    """
    groups = collective.attributes["replica_groups"]
    if isinstance(groups, ir.DenseElementsAttr):
        return ir.ShapedType(groups.type).shape[0] == 1
    if not stablehlo.ReplicaGroupMeshAxesAttr.isinstance(groups):  # the usual form in 0.12.0.1
        return False
    listed = ir.ArrayAttr(stablehlo.ReplicaGroupMeshAxesAttr(groups).axes)
    axes = [stablehlo.AxisRefAttr(axis) for axis in listed]
    names = {axis.name for axis in axes if axis.sub_axis_info is None}
    manual = set().union(*map(_manual_axes, manual_computations))
    return len(manual) > 0 and manual <= names


def lax_collective(name: str) -> Any:
    """The primitive behind a collective of lax; None in versions of JAX that lack it."""
    return getattr(parallel, f"{name}_p", None)


class _Uncacheable(set[Any]):
    """Primitives whose lowerings are not cached, of which some are cached at times."""

    def __init__(self, primitives: set[Any]):
        super().__init__(primitives)
        self.at_times: dict[Any, Callable[[], bool]] = {}

    def __contains__(self, primitive: Any) -> bool:
        if super().__contains__(primitive):
            return True
        # 0.10.2 cannot lower what is not cached for several platforms.
        now = self.at_times.get(primitive)
        return now is not None and now() and _lowering.platforms == 1


def wrap_lowering(
    primitive: Any,
    platform: str,
    wrap: Callable[[Callable[..., Any]], Any],
    is_active: Callable[[], bool],
) -> None:
    """Puts `wrap(rule)` in the place of the rule by which `platform` lowers a primitive.

    While it is active it is asked for every equation: a cached lowering would be counted once, and
    have the first call's source line.
    """
    entry = mlir._platform_specific_lowerings[platform].get(primitive)
    entry = entry or mlir._lowerings.get(primitive)

    def missing(*_: Any, **__: Any) -> Any:  # as JAX says it
        raise NotImplementedError(
            f"MLIR translation rule for primitive '{primitive.name}' not found for platform "
            f"{platform}"
        )

    rule = missing if entry is None else entry.rule
    mlir.register_lowering(primitive, wrap(rule), platform=platform)
    if not isinstance(mlir._uncacheable_primitives, _Uncacheable):
        mlir._uncacheable_primitives = _Uncacheable(mlir._uncacheable_primitives)
    mlir._uncacheable_primitives.at_times[primitive] = is_active


def ppermute_order(group: tuple[int, ...]) -> tuple[int, ...] | None:
    """The members of a group as lax.ppermute counts them; None if it refuses their order."""
    refuses = getattr(jax_config, "raise_on_ppermute_sort_diff", None)
    if refuses is None:  # 0.10.2
        return tuple(sorted(group))
    return None if refuses.value and group != tuple(sorted(group)) else group


class KeyValueStore:
    """The key-value store of jax.distributed."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def get(self, key: str) -> str | None:
        """The value, None if there is none yet."""
        try:
            return self._client.key_value_try_get(key)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def add(self, key: str, value: str) -> bool:
        """Sets a value unless there is one; whether it did."""
        try:
            self._client.key_value_set(key, value)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" in str(error):
                return False
            raise
        return True

    def replace(self, key: str, value: str) -> None:
        """Sets a value."""
        self._client.key_value_set(key, value, allow_overwrite=True)

    def below(self, folder: str) -> dict[str, str]:
        """All that begin with `folder` and a slash, by what comes after it."""
        found = self._client.key_value_dir_get(f"{folder}/")
        return {key.rpartition("/")[2]: value for key, value in found}


def is_recoverable() -> bool:
    """Whether JAX's coordination service lets processes come and go one by one."""
    return jax.config.jax_enable_recoverability  # type: ignore[attr-defined]


def key_value_store() -> tuple[KeyValueStore, str] | None:
    """The job's store and its coordinator's host:port; None without jax.distributed."""
    state = distributed.global_state
    if state.client is None:
        return None
    return KeyValueStore(state.client), state.coordinator_address or ""


def process_id() -> int:
    """This process's index in the job, also before there is a backend."""
    return distributed.global_state.process_id
