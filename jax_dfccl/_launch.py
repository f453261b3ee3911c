# SPDX-License-Identifier: Apache-2.0
"""`jax-dfccl launch`: runs a script as several processes, here or on several hosts.

Every process has a guard (`_launch_guard.py`) that starts it and ends it with all it started;
this file decides who starts with what, shows what they write, and who must end when. One thread
and one loop; nothing listens. Standard library only.
"""

import argparse
import collections
import contextlib
import functools
import ipaddress
import json
import os
import re
import secrets
import select
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from jax_dfccl import _launch_guard as guard

SSH = "ssh -o BatchMode=yes -o ServerAliveInterval=15"

# Set unless the user has set them; docs/launch.md says why.
DEFAULTS = {
    "JAX_ENABLE_RECOVERABILITY": "1",
    "JAX_ENABLE_PREEMPTION_SERVICE": "0",
    "PYTHONUNBUFFERED": "1",
}
FORCED_DEVICES = r"--xla_force_host_platform_device_count=\d+"
# What goes to other hosts, apart from --env.
FORWARDED = re.compile(r"(JAX|XLA|PYTHON)[A-Z_]*$")

# Remote hosts may have the package elsewhere; find_spec finds it without importing JAX.
REMOTE_GUARD = (
    "import importlib.util as u, os, runpy, sys; s = u.find_spec('jax_dfccl'); "
    "s or sys.exit(f'jax_dfccl is not installed for {sys.executable}'); "
    "runpy.run_path(os.path.join(os.path.dirname(s.origin), '_launch_guard.py'), None, '__main__')"
)

TAIL_LINES = 10
TAIL_COLUMNS = 500
LONGEST_LINE = 1 << 20  # longer ones are shown in pieces
LOST_GUARD_S = 10.0  # after its grace period, before a guard that does not end is killed


class UsageError(Exception):
    """What the user must change; the text says how."""


@dataclass(frozen=True)
class Place:
    """Where a process runs.

    Attributes:
        host: As ssh knows it; None: this machine, without ssh.
        local_rank: Among the processes of the host.
        local_count: How many there are on the host.
    """

    host: str | None
    local_rank: int
    local_count: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line of `launch`."""
    parser.add_argument("-n", "--processes", type=int, metavar="N", help="number of processes")
    parser.add_argument(
        "--devices-per-process",
        type=int,
        metavar="K",
        help="CPU devices of each process; where there are GPUs, each process sees K of them",
    )
    parser.add_argument(
        "--hosts", help="hosts, separated by commas, or a file with one a line (default: here)"
    )
    parser.add_argument(
        "--ssh",
        default=SSH,
        metavar="COMMAND",
        help=f"what to put before a host and the command to run there (default: {SSH}); if it "
        "has a {host}, the host comes there",
    )
    parser.add_argument(
        "--coordinator",
        metavar="HOST[:PORT]",
        help="where all hosts reach process 0 (default: the first host, a free port)",
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="set a variable, or send one to other hosts, where only JAX*, XLA* and PYTHON* go",
    )
    parser.add_argument(
        "--no-prefix", action="store_true", help="do not put [rank] before each line"
    )
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="also write files per rank")
    parser.add_argument(
        "--grace",
        type=float,
        default=5.0,
        metavar="S",
        help="seconds between SIGTERM and SIGKILL when processes are stopped (default 5)",
    )
    parser.add_argument(
        "--keep-going", action="store_true", help="do not stop the others when a process fails"
    )
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help="run a module, as python -m does"
    )
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="script.py ...", help="and its arguments"
    )


def parse_hosts(text: str) -> list[str]:
    """The hosts that --hosts names."""
    path = Path(text)
    if path.is_file():
        lines = [line.partition("#")[0] for line in path.read_text(encoding="utf-8").splitlines()]
    elif "/" in text:
        raise UsageError(f"--hosts {text}: there is no such file")
    else:
        lines = text.split(",")
    hosts = [line.strip() for line in lines if line.strip()]
    for host in hosts:
        if host.startswith("-") or len(host.split()) > 1:
            raise UsageError(f"--hosts: {host!r} is no host; give a,b,c or a file, one a line")
    if not hosts:
        raise UsageError(f"--hosts {text}: names no host")
    return hosts


def place(count: int, hosts: Sequence[str]) -> list[Place]:
    """Spreads processes over hosts in order, the first hosts taking what does not divide."""
    if count < len(hosts):
        raise UsageError(
            f"{count} process(es) for {len(hosts)} hosts: raise -n or name fewer hosts"
        )
    here = {"localhost", socket.gethostname()}
    places = []
    for index, host in enumerate(hosts):
        local = count // len(hosts) + (index < count % len(hosts))
        name = None if host in here else host
        places += [Place(name, rank, local) for rank in range(local)]
    return places


def free_port() -> int:
    """A port of the loopback address that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def coordinator(option: str | None, hosts: Sequence[str], places: Sequence[Place]) -> str:
    """The address of process 0's coordination service."""
    address = option or ""
    if not address and all(p.host is None for p in places):
        address = "127.0.0.1"
    elif not address and hosts[0] == "localhost":
        raise UsageError(
            "the first host is localhost, which other hosts cannot reach: name it as they know it, "
            "or give --coordinator HOST"
        )
    address = address or hosts[0].rpartition("@")[2]
    if re.search(r"[^:]:\d+$|\]:\d+$", address):
        return address
    if ":" in address and not address.startswith("["):
        address = f"[{address}]"
    # On another host a free port cannot be seen from here; below 32768 none is given to clients.
    port = free_port() if places[0].host is None else 20000 + secrets.randbelow(12768)
    return f"{address}:{port}"


def job_environment(
    coordinator_address: str, count: int, base: Mapping[str, str]
) -> dict[str, str]:
    """What all processes of a job get, on top of `base`."""
    environment = {name: value for name, value in DEFAULTS.items() if name not in base}
    environment["JAX_COORDINATOR_ADDRESS"] = coordinator_address
    environment["JAX_DFCCL_NUM_PROCESSES"] = str(count)
    environment["JAX_DFCCL_JOB_SECRET"] = secrets.token_hex(32)
    if "JAX_COORDINATOR_BIND_ADDRESS" not in base:
        # JAX would listen on every interface. A name may mean another address over there.
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(coordinator_address.rpartition(":")[0].strip("[]"))
            environment["JAX_COORDINATOR_BIND_ADDRESS"] = coordinator_address
    return environment


def rank_environment(
    rank: int, where: Place, devices: int | None, base: Mapping[str, str]
) -> dict[str, str]:
    """What one process gets, on top of `base`."""
    environment = {"JAX_DFCCL_PROCESS_ID": str(rank)}
    if devices is not None:
        environment["JAX_NUM_CPU_DEVICES"] = str(devices)
        if "XLA_FLAGS" in base:  # JAX refuses both ways of asking for CPU devices at once
            environment["XLA_FLAGS"] = re.sub(FORCED_DEVICES, "", base["XLA_FLAGS"]).strip()
    if devices is not None or where.local_count > 1:  # of GPUs each process sees its own ones
        first, own = where.local_rank * (devices or 1), devices or 1
        environment["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, range(first, first + own)))
    return environment


def explicit_environment(options: Sequence[str], base: Mapping[str, str]) -> dict[str, str]:
    """What --env asks for."""
    environment = {}
    for option in options:
        name, has_value, value = option.partition("=")
        if not name or (not has_value and name not in base):
            raise UsageError(f"--env {option}: not set here; give --env {name or 'NAME'}=VALUE")
        environment[name] = value if has_value else base[name]
    return environment


def reach(ssh: str, host: str) -> list[str]:
    """What comes before a shell command that is to run on a host."""
    words = shlex.split(ssh)
    if not any("{host}" in word for word in words):
        return [*words, host]
    return [word.replace("{host}", host) for word in words]


class Output:
    """Writes whole lines of one stream of one process, and keeps the last ones."""

    def __init__(self, prefix: bytes, write: Callable[[bytes], None], log: BinaryIO | None) -> None:
        self._prefix = prefix
        self._write = write
        self._log = log
        self._pending = bytearray()
        self.tail: collections.deque[bytes] = collections.deque(maxlen=TAIL_LINES)

    def feed(self, data: bytes) -> None:
        """Takes what the process wrote."""
        if self._log is not None:
            self._log.write(data)
            self._log.flush()
        self._pending += data
        end = self._pending.rfind(b"\n") + 1
        if end:
            lines = bytes(self._pending[: end - 1]).split(b"\n")
            del self._pending[:end]
            self._show(lines)
        while len(self._pending) > LONGEST_LINE:
            end = LONGEST_LINE
            while end > LONGEST_LINE - 3 and self._pending[end] & 0xC0 == 0x80:
                end -= 1  # not inside a UTF-8 character
            self._show([bytes(self._pending[:end])])
            del self._pending[:end]

    def close(self) -> None:
        """The process writes no more."""
        if self._pending:
            self._show([bytes(self._pending)])
        self._pending.clear()

    def _show(self, lines: list[bytes]) -> None:
        self.tail.extend(lines[-TAIL_LINES:])
        self._write(b"".join(self._prefix + line + b"\n" for line in lines))


class Process:
    """One process of the job, seen through its guard."""

    def __init__(self, rank: int, command: Sequence[str], out: Output, err: Output) -> None:
        self.rank = rank
        self.out = out
        self.err = err
        self.status: int | None = None  # as subprocess gives it
        self.is_lost = False  # nobody knows how it ended
        self.has_left = False  # shut down JAX's distributed system, or ended
        self.ended = False  # the guard too
        self.stop_at: float | None = None  # when to stop a process that said that it fails
        self.lost_at: float | None = None  # when to kill a guard that does not end
        self.outgoing = bytearray()
        self._incoming = bytearray()
        # A session of its own: signals from the terminal are for the launcher.
        self.guard = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.guard.stdin and self.guard.stdout and self.guard.stderr
        self.stdin = self.guard.stdin
        self.stdout = self.guard.stdout
        self.stderr = self.guard.stderr
        for pipe in (self.stdin, self.stdout, self.stderr):
            os.set_blocking(pipe.fileno(), False)

    def send(self, data: bytes) -> None:
        """Sends as much as fits now; a signal handler may do it."""
        self.outgoing += data
        if self.stdin.closed:
            return
        try:
            del self.outgoing[: os.write(self.stdin.fileno(), self.outgoing)]
        except BlockingIOError:
            pass
        except OSError:  # it has ended
            self.outgoing.clear()

    def frames(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """The whole frames that are there with more data."""
        self._incoming += data
        found = []
        while len(self._incoming) >= guard.HEADER_BYTES:
            end = guard.HEADER_BYTES + int.from_bytes(self._incoming[1 : guard.HEADER_BYTES], "big")
            if len(self._incoming) < end:
                break
            found.append(
                (bytes(self._incoming[:1]), bytes(self._incoming[guard.HEADER_BYTES : end]))
            )
            del self._incoming[:end]
        return found


def describe(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-status).name}"
    return f"killed by signal {-status}"


class Launcher:
    """Starts the processes of a job and sees to it that they end."""

    def __init__(self, grace_s: float, keep_going: bool) -> None:
        self._grace_s = grace_s
        self._keep_going = keep_going
        self._processes: list[Process] = []
        self._failed: list[Process] = []
        self._killed: list[Process] = []
        self._stopping = False
        self._signal: int | None = None
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wakeup_writer = socket.socketpair()
        self._broken: set[int] = set()  # of stdout and stderr

    def write(self, fd: int, data: bytes) -> None:
        """Writes to our own stdout or stderr."""
        while data and fd not in self._broken:
            try:
                data = data[os.write(fd, data) :]
            except BlockingIOError:  # somebody else has made the terminal non-blocking
                select.select([], [fd], [])
            except OSError:  # as after `| head`; what more is written goes nowhere
                self._broken.add(fd)
                self._signal = self._signal or signal.SIGPIPE
                self._stop()

    def say(self, text: str) -> None:
        """Writes a line of our own."""
        self.write(sys.stderr.fileno(), f"jax-dfccl launch: {text}\n".encode())

    def _watch_signals(self) -> None:
        for end in (self._wakeup, self._wakeup_writer):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wakeup_writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup wants it
                signal.signal(number, self._on_signal)
        self._selector.register(self._wakeup, selectors.EVENT_READ)

    def _on_signal(self, number: int, _frame: object) -> None:
        """The first signal stops, the second kills; a third has its usual effect.

        It acts at once: the loop may be waiting for whoever reads our output.
        """
        if self._signal is None:
            self._signal = number
            self._stop()
            return
        signal.signal(number, signal.SIG_DFL)
        for process in self._processes:
            process.send(guard.KILL)

    def start(self, process: Process, spec: dict[str, object]) -> None:
        """Lets a guard start its process."""
        self._processes.append(process)
        process.send(json.dumps(spec).encode() + b"\n")
        if self._stopping:
            self._stop_one(process)
        for pipe in (process.stdout, process.stderr):
            self._selector.register(pipe, selectors.EVENT_READ, process)

    def run(self, start_all: Callable[[], None]) -> int:
        """Starts the processes and returns the exit status of the job when all have ended."""
        self._watch_signals()
        try:
            start_all()
        except OSError as error:
            self._stop()
            self.say(str(error))
        while not all(process.ended for process in self._processes):
            for key, events in self._selector.select(self._timeout()):
                if key.fileobj is self._wakeup:
                    with contextlib.suppress(BlockingIOError):
                        self._wakeup.recv(4096)
                elif events & selectors.EVENT_WRITE:
                    key.data.send(b"")
                else:
                    self._receive(key.data, key.fd)
            self._check()
        return self._finish()

    def _timeout(self) -> float | None:
        times = [at for p in self._processes if not p.ended for at in (p.stop_at, p.lost_at) if at]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _check(self) -> None:
        """Sees to ended guards, passed deadlines, and what could not be sent at once."""
        now = time.monotonic()
        for process in self._processes:
            if process.ended:
                continue
            if process.guard.poll() is not None:
                self._on_end(process)
                continue
            if process.stop_at and now >= process.stop_at:
                self._stop_one(process)
            if process.lost_at and now >= process.lost_at:
                process.guard.kill()
            watched = process.stdin in self._selector.get_map()
            if process.outgoing and not watched:
                self._selector.register(process.stdin, selectors.EVENT_WRITE, process)
            elif watched and not process.outgoing:
                self._selector.unregister(process.stdin)

    def _receive(self, process: Process, fd: int) -> bool:
        """Reads once; returns whether there may be more."""
        pipe = process.stdout if fd == process.stdout.fileno() else process.stderr
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(pipe)
        elif pipe is process.stderr:  # of ssh, or of the guard itself
            process.err.feed(data)
        else:
            for what, payload in process.frames(data):
                self._on_frame(process, what, payload)
        return bool(data)

    def _on_frame(self, process: Process, what: bytes, payload: bytes) -> None:
        if what == guard.OUT:
            process.out.feed(payload)
        elif what == guard.ERR:
            process.err.feed(payload)
        elif what == guard.FAILING:
            self._on_failure(process)
            if not self._keep_going and process.stop_at is None:
                process.stop_at = time.monotonic() + self._grace_s
        elif what == guard.LEFT:
            self._on_left(process)
        elif what == guard.EXITED:
            process.status = int(payload)
            if process.status:
                self._on_failure(process)
            self._on_left(process)

    def _on_left(self, process: Process) -> None:
        process.has_left = True
        self._release_first()

    def _release_first(self) -> None:
        """Process 0 may end, or must, once all others have left."""
        if not all(process.has_left for process in self._processes if process.rank > 0):
            return
        for first in self._processes[:1]:
            first.send(guard.GO)
            if self._stopping and not first.ended and first not in self._failed:
                self._stop_one(first)

    def _on_failure(self, process: Process) -> None:
        if process in self._failed or self._stopping:
            return
        self._failed.append(process)
        if not self._keep_going:
            self._stop(but=process)

    def _on_end(self, process: Process) -> None:
        for pipe in (process.stdout, process.stderr):
            if pipe in self._selector.get_map():
                while self._receive(process, pipe.fileno()):
                    pass
                if pipe in self._selector.get_map():
                    self._selector.unregister(pipe)
        if process.stdin in self._selector.get_map():
            self._selector.unregister(process.stdin)
        process.ended = True
        if process.status is None:  # ssh or the guard ended instead
            process.status = process.guard.returncode or 1
            process.is_lost = True
            self._on_failure(process)
        elif process.status == -signal.SIGKILL and process not in self._failed:
            self._killed.append(process)
        self._on_left(process)
        for output in (process.out, process.err):
            output.close()
        for pipe in (process.stdin, process.stdout, process.stderr):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _stop_one(self, process: Process) -> None:
        process.stop_at = None
        process.lost_at = process.lost_at or time.monotonic() + self._grace_s + LOST_GUARD_S
        process.send(guard.STOP)

    def _stop(self, but: Process | None = None) -> None:
        """Stops the processes, process 0 after the others: it hosts JAX's coordination service.

        JAX aborts a process whose service goes away, with much text and another exit status.
        """
        self._stopping = True
        for process in self._processes:
            if process.rank == 0:
                process.stop_at = time.monotonic() + 2 * self._grace_s
            elif process is not but and not process.ended:
                self._stop_one(process)
        self._release_first()

    def _finish(self) -> int:
        """Says who failed, and returns the exit status."""
        for process in self._failed:
            assert process.status is not None
            what = describe(process.status)
            if process.is_lost:
                what = f"was not run or is lost (ssh or its guard: {what})"
            tail = [line[:TAIL_COLUMNS] for line in process.err.tail]
            rest = "its last lines on stderr:" if tail else "it wrote nothing on stderr"
            self.say(f"rank {process.rank} failed: {what}; {rest}")
            self.write(sys.stderr.fileno(), b"".join(b"    " + line + b"\n" for line in tail))
        for process in self._killed:
            self.say(
                f"rank {process.rank} did not end within {self._grace_s:g} s of SIGTERM "
                "and was killed"
            )
        if self._signal is not None:
            self.say(f"stopped by {signal.Signals(self._signal).name}")
            return 128 + self._signal
        if self._failed:
            status = self._failed[0].status or 1
            return status if status > 0 else 128 - status
        return 1 if self._stopping else 0


def _command(args: argparse.Namespace, is_local: bool) -> list[str]:
    """What every process runs: a script or `-m module`, and arguments."""
    if args.module is not None:
        if not args.module:
            raise UsageError("-m needs the name of a module")
        return ["-m", *args.module]
    words = list(args.script)
    if words[:1] == ["--"]:
        del words[0]
    if words[:1] == ["-m"]:
        return words
    if not words:
        raise UsageError("say what to run: jax-dfccl launch -n 2 script.py, or -m module")
    if is_local and not Path(words[0]).exists():
        raise UsageError(f"there is no script {words[0]} in {Path.cwd()}")
    return words


def _check_numbers(args: argparse.Namespace, count: int) -> None:
    for value, name, least in (
        (count, "-n", 1),
        (args.devices_per_process, "--devices-per-process", 1),
        (args.grace, "--grace", 0),
    ):
        if value is not None and not least <= value <= 1e6:
            raise UsageError(f"{name} {value}: must be {least} or more")


def _open_logs(folder: Path | None, rank: int) -> list[BinaryIO | None]:
    if folder is None:
        return [None, None]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [(folder / f"rank-{rank}.{name}").open("wb") for name in ("out", "err")]
    except OSError as error:
        raise UsageError(f"--log-dir {folder}: cannot write there ({error})") from None


def _prefix(
    rank: int, args: argparse.Namespace, is_terminal: bool, base: Mapping[str, str]
) -> bytes:
    if args.no_prefix:
        return b""
    text = f"[{rank}]"
    if is_terminal and not base.get("NO_COLOR"):
        text = f"\x1b[3{1 + rank % 6}m{text}\x1b[0m"
    return f"{text} ".encode()


def launch(args: argparse.Namespace, base: Mapping[str, str]) -> int:
    """Runs a job; returns its exit status.

    Args:
        args: The command line (`add_arguments`).
        base: This process's environment.
    """
    hosts = parse_hosts(args.hosts) if args.hosts is not None else ["localhost"]
    if args.processes is None and args.hosts is None:
        raise UsageError("say how many processes: -n 4")
    count = args.processes if args.processes is not None else len(hosts)
    _check_numbers(args, count)
    places = place(count, hosts)
    command = _command(args, is_local=all(p.host is None for p in places))
    explicit = explicit_environment(args.env, base)
    address = coordinator(args.coordinator, hosts, places)
    job = job_environment(address, count, {**base, **explicit})
    logs = [_open_logs(args.log_dir, rank) for rank in range(count)]
    launcher = Launcher(args.grace, args.keep_going)

    def start_all() -> None:
        for rank, where in enumerate(places):
            own = rank_environment(rank, where, args.devices_per_process, {**base, **explicit})
            inherited = dict(base)
            guard_command = [sys.executable, "-I", "-S", guard.__file__]
            if where.host is not None:
                inherited = {name: x for name, x in base.items() if FORWARDED.match(name)}
                remote = shlex.join([sys.executable, "-c", REMOTE_GUARD])
                guard_command = [*reach(args.ssh, where.host), f"exec {remote}"]
            outputs = []
            for stream, log in zip((sys.stdout, sys.stderr), logs[rank], strict=True):
                prefix = _prefix(rank, args, stream.isatty(), base)
                write = functools.partial(launcher.write, stream.fileno())
                outputs.append(Output(prefix, write, log))
            launcher.start(
                Process(rank, guard_command, *outputs),
                {
                    "rank": rank,
                    "count": count,
                    "arguments": command,
                    "environment": {**inherited, **job, **own, **explicit},
                    "folder": str(Path.cwd()),
                    "grace_s": args.grace,
                },
            )

    return launcher.run(start_all)


def main(args: argparse.Namespace, base: Mapping[str, str]) -> int:
    """Runs `launch`; what the user must change goes to stderr, with exit status 2."""
    try:
        return launch(args, base)
    except UsageError as error:
        print(f"jax-dfccl launch: {error}", file=sys.stderr)
        return 2
