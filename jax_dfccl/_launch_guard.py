# SPDX-License-Identifier: Apache-2.0
"""Keeps one process of a job: starts it, passes on what it writes, ends it with all it started.

The launcher (`_launch.py`) runs this file by its path, perhaps through ssh, one guard for each
process of the job. Standard library only, so that it starts at once.

* stdin: a line of JSON (see `Guard`), then commands of one byte. Its end means that the launcher
  is gone, and is STOP.
* stdout: frames of one byte (what), four (length, big-endian) and the payload.
* stderr: what goes wrong with the guard itself.
"""

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

# Commands.
STOP, KILL, GO = b"s", b"k", b"g"

# Frames. OUT and ERR are output, EXITED has the exit status as subprocess gives it; FAILING and
# LEFT are messages of the process itself (see _launch_rank.py).
OUT, ERR, EXITED, FAILING, LEFT = b"o", b"e", b"x", b"f", b"l"
HEADER_BYTES = 5

_READ_BYTES = 1 << 16
_FULL_BYTES = 1 << 20  # so much is kept for a launcher that does not read, then the process waits
_KILL_AGAIN_S = 0.1
_KILLS = 50

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def frame(what: bytes, payload: bytes = b"") -> bytes:
    """One message to the launcher."""
    return what + len(payload).to_bytes(HEADER_BYTES - 1, "big") + payload


def descendants(ancestor: int) -> list[int]:
    """The processes below one, as /proc shows them now."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                parent = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [ancestor]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


class Guard:
    """Runs one process.

    Args:
        program: What to run: the command line, up to the number of the socket to the process.
        arguments: The command line after that number.
        environment: Variables to set on top of the guard's own.
        folder: Where to run it.
        grace_s: Between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        program: list[str],
        arguments: list[str],
        environment: dict[str, str],
        folder: str,
        grace_s: float,
    ) -> None:
        self._grace_s = grace_s
        self._deadline: float | None = None
        self._kills = 0
        self._children = True
        self._outgoing = bytearray()
        self._selector = selectors.DefaultSelector()
        self._readers: dict[int, bytes] = {}  # open pipes of the process -> frame
        self._libc = ctypes.CDLL(None, use_errno=True)
        # Whatever the process leaves behind becomes a child of the guard.
        self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._watch_signals()
        self._control, theirs = socket.socketpair()
        guard = os.getpid()

        def die_with_guard() -> None:
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != guard:
                os._exit(1)

        process = subprocess.Popen(
            [*program, str(theirs.fileno()), *arguments],
            cwd=folder,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=[theirs.fileno()],
            preexec_fn=die_with_guard,  # safe: the guard has one thread
        )
        theirs.close()
        self._process = process
        assert process.stdout is not None and process.stderr is not None
        for pipe, what in ((process.stdout, OUT), (process.stderr, ERR)):
            self._readers[pipe.fileno()] = what
        self._readers[self._control.fileno()] = b""
        for fd in (0, 1, *self._readers):
            os.set_blocking(fd, False)
        self._selector.register(0, selectors.EVENT_READ)
        for fd in self._readers:
            self._selector.register(fd, selectors.EVENT_READ)

    def _watch_signals(self) -> None:
        self._wakeup, wakeup = socket.socketpair()
        for end in (self._wakeup, wakeup):
            end.setblocking(False)
        self._wakeup_writer = wakeup
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self._stop())
        self._selector.register(self._wakeup.fileno(), selectors.EVENT_READ)

    def run(self) -> None:
        """Returns when the process and all it started have ended and all output is passed on."""
        while self._children or self._readers or self._outgoing:
            timeout = None
            if self._deadline is not None:
                timeout = max(0.0, self._deadline - time.monotonic())
            for key, events in self._selector.select(timeout):
                self._handle(key.fd, events)
            self._reap()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._kill()
            self._watch_output()

    def _handle(self, fd: int, events: int) -> None:
        if fd == 0:
            self._obey(self._read(0))
        elif fd == self._wakeup.fileno():
            self._read(fd)
        elif fd == 1 and events & selectors.EVENT_WRITE:
            self._flush()
        elif fd in self._readers:
            self._pass_on(fd)

    @staticmethod
    def _read(fd: int) -> bytes | None:
        """What is there: b"" at the end, None if it is nothing yet."""
        try:
            return os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def _obey(self, commands: bytes | None) -> None:
        if commands is None:
            return
        if not commands:
            self._selector.unregister(0)
            self._stop()
        for command in (commands[i : i + 1] for i in range(len(commands))):
            if command == STOP:
                self._stop()
            elif command == KILL:
                self._kill()
            elif command == GO:
                with contextlib.suppress(OSError):  # the process has ended
                    self._control.send(GO)

    def _pass_on(self, fd: int) -> None:
        data = self._read(fd)
        if data is None:
            return
        if not data:
            self._forget(fd)
        elif fd == self._control.fileno():
            for message in (FAILING, LEFT):
                if message in data:
                    self._outgoing += frame(message)
        else:
            self._outgoing += frame(self._readers[fd], data)

    def _forget(self, fd: int) -> None:
        del self._readers[fd]
        with contextlib.suppress(KeyError):  # not watched while the launcher does not read
            self._selector.unregister(fd)

    def _reap(self) -> None:
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._process.pid:
                    # Nobody but the process's own remains can write now, and they must end.
                    code = os.waitstatus_to_exitcode(status)
                    self._outgoing += frame(EXITED, str(code).encode())
                    self._stop()
        except ChildProcessError:
            self._children = False
            for fd in list(self._readers):  # what is left in the pipes
                while fd in self._readers and self._read_more(fd):
                    pass

    def _read_more(self, fd: int) -> bool:
        before = len(self._outgoing)
        self._pass_on(fd)
        if fd in self._readers and len(self._outgoing) == before:
            self._forget(fd)  # open, empty, and no process of ours left to write
            return False
        return True

    def _signal(self, number: int) -> None:
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def _stop(self) -> None:
        if self._deadline is None:
            self._deadline = time.monotonic() + self._grace_s
            self._signal(signal.SIGTERM)

    def _kill(self) -> None:
        """Kills all; again soon, because a process may just have started another one."""
        if not self._children:
            self._deadline = None
            return
        self._kills += 1
        if self._kills > _KILLS:  # it changed its user, or hangs in the kernel
            sys.exit("a process does not end when killed")
        self._signal(signal.SIGKILL)
        self._deadline = time.monotonic() + _KILL_AGAIN_S

    def _watch_output(self) -> None:
        """Watches stdout while something is to be written, and pipes while not too much is."""
        registered = self._selector.get_map()
        if self._outgoing and 1 not in registered:
            self._selector.register(1, selectors.EVENT_WRITE)
        elif not self._outgoing and 1 in registered:
            self._selector.unregister(1)
        full = len(self._outgoing) >= _FULL_BYTES
        for fd in self._readers:
            if full and fd in registered:
                self._selector.unregister(fd)
            elif not full and fd not in registered:
                self._selector.register(fd, selectors.EVENT_READ)

    def _flush(self) -> None:
        try:
            del self._outgoing[: os.write(1, self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:  # the launcher is gone: nobody will read it
            self._outgoing.clear()
            self._stop()


def _read_line() -> bytes:
    """The first line of stdin and nothing after it."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit("the launcher ended before it said what to run")
        line += byte
    return line


def main() -> None:
    """Runs the process that stdin tells of."""
    spec = json.loads(_read_line())
    rank_file = str(Path(__file__).with_name("_launch_rank.py"))
    program = [sys.executable, rank_file, *map(str, (spec.pop("rank"), spec.pop("count")))]
    try:
        guard = Guard(program, **spec)
    except OSError as error:
        sys.exit(f"cannot run {sys.executable} in {spec['folder']}: {error}")
    guard.run()


if __name__ == "__main__":
    main()
