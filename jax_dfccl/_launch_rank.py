# SPDX-License-Identifier: Apache-2.0
"""Runs a user's script or module as one process of a job.

The guard (`_launch_guard.py`) runs this file by its path:
`python _launch_rank.py RANK COUNT CONTROL script.py ...` or `... CONTROL -m module ...`, where
CONTROL is the number of a socket to the guard. The script sees what it would see under `python`,
except that

* `jax.distributed.initialize()` knows the rank and the number of processes. JAX reads only the
  coordinator's address from the environment; the rest it takes as arguments, or from a class that
  derives from a private one. So this fills in the arguments.
* process 0, which hosts JAX's coordination service, waits with its end (or with
  `jax.distributed.shutdown()`) until the others have ended or shut down: JAX aborts every process
  whose service goes away. JAX itself has a barrier there, but only without recoverability, and
  then a process that raised waits for it too instead of ending.

JAX is not imported here, so a script can still set variables that JAX reads when it is imported.
"""

import atexit
import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import runpy
import socket
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# As in _launch_guard.py, which is not on the path of this program.
FAILING, LEFT = b"f", b"l"

OUR_FILES = (__file__, runpy.__file__, "<frozen runpy>")


class Rank:
    """This process's place in the job and its line to the guard."""

    def __init__(self, rank: int, count: int, control: int) -> None:
        self._rank = rank
        self._count = count
        os.set_inheritable(control, False)
        self._control = socket.socket(fileno=control)
        self._pid = os.getpid()
        self._initialized = False
        self._shutdown_timeout_s: float | None = None

    def tell_failing(self) -> None:
        """Tells the launcher that this process is about to end with an error.

        Others may go on without it, so process 0 then serves them for as long as they run.
        """
        self._shutdown_timeout_s = None
        self._tell(FAILING)

    def _tell(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # the guard is gone, and this process is about to be
            self._control.send(message)

    def _wait_for_others(self) -> None:
        if not self._initialized or self._rank > 0 or os.getpid() != self._pid:
            return
        self._initialized = False
        self._tell(LEFT)
        limit_s = self._shutdown_timeout_s
        self._control.settimeout(limit_s)
        try:
            self._control.recv(1)
        except TimeoutError:
            print(
                f"jax-dfccl launch: process 0 waited {limit_s:g} s for the others to end "
                "(shutdown_timeout_seconds of jax.distributed.initialize)",
                file=sys.stderr,
            )
        except OSError:
            pass

    def wrap(self, distributed: types.ModuleType) -> None:
        """Replaces `initialize` and `shutdown` of the module jax.distributed."""
        initialize, shutdown = distributed.initialize, distributed.shutdown
        signature = inspect.signature(initialize)

        @functools.wraps(initialize)
        def initialize_rank(*args: Any, **kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs)
            settings: dict[str, Any] = {
                "num_processes": self._count,
                "process_id": self._rank,
                "cluster_detection_method": "deactivate",
            }
            settings |= {name: x for name, x in given.arguments.items() if x is not None}
            initialize(**settings)
            bound = signature.bind(**settings)
            bound.apply_defaults()
            self._initialized = True
            self._shutdown_timeout_s = float(bound.arguments["shutdown_timeout_seconds"])
            atexit.register(self._wait_for_others)  # after JAX's own, so it runs before

        @functools.wraps(shutdown)
        def shutdown_rank() -> None:
            self._wait_for_others()
            shutdown()
            self._tell(LEFT)  # only now: it needed the service

        distributed.initialize = initialize_rank  # type: ignore[attr-defined]
        distributed.shutdown = shutdown_rank  # type: ignore[attr-defined]


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function once with a module that was just imported."""

    def __init__(self, name: str, function: Callable[[types.ModuleType], None]) -> None:
        self._name = name
        self._function = function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds the module where it would be found without us."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: types.ModuleType) -> None:
                execute(module)
                self._function(module)

            spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


def run_script(path: str) -> None:
    """Runs a file as the module __main__, which stays: atexit and threads may still need it."""
    if not path.endswith(".py"):  # a folder, an archive, or compiled
        runpy.run_path(path, run_name="__main__")
        return
    main = types.ModuleType("__main__")
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    sys.modules["__main__"] = main
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        print(f"{sys.executable}: can't open file {path!r}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def show_exception(
    kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None
) -> None:
    """Shows an uncaught exception as if this file were not there."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename in OUR_FILES:
        traceback = traceback.tb_next
    sys.__excepthook__(kind, error.with_traceback(traceback), traceback)


def main() -> None:
    """Runs what the command line says."""
    words = sys.argv[1:]
    rank = Rank(*map(int, words[:3]))
    sys.argv = words[3:]
    is_module = sys.argv[0] == "-m"
    if is_module:
        del sys.argv[0]
    if not sys.flags.safe_path:  # Python has put this file's folder there
        sys.path[0] = str(Path.cwd() if is_module else Path(sys.argv[0]).resolve().parent)
    sys.excepthook = show_exception
    sys.meta_path.insert(0, AfterImport("jax.distributed", rank.wrap))
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            run_script(sys.argv[0])
    except SystemExit as end:
        if end.code not in (None, 0):
            rank.tell_failing()
        raise
    except BaseException:
        rank.tell_failing()
        raise


if __name__ == "__main__":
    main()
