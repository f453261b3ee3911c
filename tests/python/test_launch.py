# SPDX-License-Identifier: Apache-2.0
"""`jax-dfccl launch`: what processes get, what is shown, how all end. Every job has a limit."""

import contextlib
import importlib
import json
import os
import pty
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests/programs"
LAUNCH = [sys.executable, str(PROGRAMS / "launch.py")]
LAUNCHED = str(PROGRAMS / "launched.py")
LIMIT_S = 60


class Jobs:
    """Starts jobs whose processes can be found again by a mark in their environment."""

    def __init__(self) -> None:
        self._mark = f"JAX_DFCCL_TEST_MARK={uuid.uuid4()}"

    def environment(self, **variables: str) -> dict[str, str]:
        name, value = self._mark.split("=")
        # The tests' own devices are not the jobs'.
        kept = {key: x for key, x in os.environ.items() if key != "XLA_FLAGS"}
        return {**kept, name: value, **variables}

    def start(self, *words: str, command: list[str] | None = None, **options) -> subprocess.Popen:
        options.setdefault("env", self.environment())
        options.setdefault("stdout", subprocess.PIPE)
        options.setdefault("stderr", subprocess.PIPE)
        return subprocess.Popen([*(command or LAUNCH), *words], **options)

    def run(self, *words: str, command: list[str] | None = None, **variables: str):
        """Runs a job to its end, which no process of it may outlive."""
        job = self.start(*words, command=command, env=self.environment(**variables))
        out, err = job.communicate(timeout=LIMIT_S)
        assert self.processes() == {}
        return job.returncode, out.decode(), err.decode()

    def processes(self) -> dict[int, str]:
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self._mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        return found

    def wait_for_none(self, limit_s: float = 30) -> None:
        deadline = time.monotonic() + limit_s
        while self.processes():
            assert time.monotonic() < deadline, self.processes()
            time.sleep(0.05)

    def clean_up(self) -> None:
        while self.processes():
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    jobs = Jobs()
    yield jobs
    jobs.clean_up()


def told(out: str) -> list[dict]:
    """What `launched.py tell` said, by rank."""
    seen = [json.loads(line.partition(" ")[2]) for line in out.splitlines()]
    for line, one in zip(out.splitlines(), seen, strict=True):
        assert line.startswith(f"[{one['rank']}] ")
    return sorted(seen, key=lambda one: one["rank"])


def test_environment(jobs):
    status, out, err = jobs.run("-n", "3", LAUNCHED, "tell", "-n", "--", "a b")
    assert (status, err) == (0, "")
    ranks = told(out)
    assert [one["rank"] for one in ranks] == [0, 1, 2]
    for one in ranks:
        assert one["argv"] == ["tell", "-n", "--", "a b"]
        assert (one["name"], one["file"], one["path"]) == ("__main__", LAUNCHED, str(PROGRAMS))
        assert one["stdin"] == ""
        assert not one["secret_is_shown"]
        environment = one["environment"]
        assert re.fullmatch(r"127\.0\.0\.1:\d+", environment["JAX_COORDINATOR_ADDRESS"])
        assert environment["JAX_COORDINATOR_BIND_ADDRESS"] == environment["JAX_COORDINATOR_ADDRESS"]
        assert environment["JAX_DFCCL_NUM_PROCESSES"] == "3"
        assert environment["JAX_LOCAL_DEVICE_IDS"] == str(one["rank"])
        assert environment["JAX_ENABLE_RECOVERABILITY"] == "1"
        assert environment["JAX_ENABLE_PREEMPTION_SERVICE"] == "0"
        assert "JAX_NUM_CPU_DEVICES" not in environment
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_DFCCL_JOB_SECRET"):
        assert len({one["environment"][name] for one in ranks}) == 1
    secret = ranks[0]["environment"]["JAX_DFCCL_JOB_SECRET"]
    assert re.fullmatch("[0-9a-f]{64}", secret)
    _, out, _ = jobs.run("-n", "1", LAUNCHED, "tell")
    assert told(out)[0]["environment"]["JAX_DFCCL_JOB_SECRET"] != secret


def test_devices_and_what_the_user_sets(jobs):
    status, out, _ = jobs.run(
        *("-n", "2", "--devices-per-process", "3", "--env", "A=b=c", "--env", "HOME"),
        *("--env", "PYTHONUNBUFFERED=", LAUNCHED, "tell"),
        XLA_FLAGS="--xla_force_host_platform_device_count=8 --xla_dump_to=/nowhere",
        JAX_ENABLE_RECOVERABILITY="0",
        JAX_COORDINATOR_BIND_ADDRESS="[::]:1",
    )
    assert status == 0
    for one, devices in zip(told(out), ("0,1,2", "3,4,5"), strict=True):
        environment = one["environment"]
        assert environment["JAX_NUM_CPU_DEVICES"] == "3"
        assert environment["JAX_LOCAL_DEVICE_IDS"] == devices
        assert environment["XLA_FLAGS"] == "--xla_dump_to=/nowhere"
        assert environment["JAX_ENABLE_RECOVERABILITY"] == "0"
        assert environment["JAX_COORDINATOR_BIND_ADDRESS"] == "[::]:1"
        assert environment["A"] == "b=c"
        assert environment["HOME"] == os.environ["HOME"]
        assert environment["PYTHONUNBUFFERED"] == ""


@pytest.mark.parametrize("prefixed", [True, False])
def test_lines_stay_whole_and_on_their_stream(jobs, tmp_path, prefixed):
    options = [] if prefixed else ["--no-prefix"]
    status, *streams = jobs.run(
        "-n", "2", *options, "--log-dir", str(tmp_path / "a/b"), LAUNCHED, "lines"
    )
    assert status == 0
    for name, shown in zip(("out", "err"), streams, strict=True):
        written = [[f"{name} {r} {i} grüße" for i in range(300)] + [f"{name} end"] for r in (0, 1)]
        assert shown.endswith("\n")
        lines = shown.splitlines()
        if prefixed:
            for rank in (0, 1):
                own = [line[4:] for line in lines if line.startswith(f"[{rank}] ")]
                assert own == written[rank]
        assert len(lines) == 602
        bare = [line.removeprefix("[0] ").removeprefix("[1] ") for line in lines]
        assert sorted(bare) == sorted(written[0] + written[1])
        for rank in (0, 1):
            log = (tmp_path / f"a/b/rank-{rank}.{name}").read_text(encoding="utf-8")
            assert log == "\n".join(written[rank])


def test_long_lines_and_other_bytes(jobs):
    job = jobs.start("-n", "1", LAUNCHED, "raw")
    out, err = job.communicate(timeout=LIMIT_S)
    assert (job.returncode, err) == (0, b"")
    *pieces, last, rest = out.split(b"\n")
    assert (last, rest) == (b"[0] \xff\xfe\r", b"")
    assert len(pieces) > 1
    assert "".join(piece[4:].decode() for piece in pieces) == "ü€" * 500_000


def test_colour_on_a_terminal_only(jobs):
    ours, theirs = pty.openpty()
    for variables, prefix in (({}, "\x1b[31m[0]\x1b[0m "), ({"NO_COLOR": "1"}, "[0] ")):
        environment = jobs.environment(**variables)
        job = jobs.start("-n", "1", LAUNCHED, "lines", stdout=theirs, env=environment)
        shown = b""
        while not shown.endswith(b"out end\r\n"):
            shown += os.read(ours, 4096)
        _, err = job.communicate(timeout=LIMIT_S)
        assert shown.decode().startswith(f"{prefix}out 0 0 grüße\r\n")
        assert err.startswith(b"[0] err 0 0")
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize(
    ("how", "status", "words"),
    [
        ("3", 3, "exit status 3"),
        ("raise", 1, "exit status 1"),
        ("text", 1, "exit status 1"),
        ("SIGKILL", 137, "killed by SIGKILL"),
        ("SIGSEGV", 139, "killed by SIGSEGV"),
        ("SIGTERM", 143, "killed by SIGTERM"),
    ],
)
def test_first_failure_ends_the_job(jobs, how, status, words):
    got, out, err = jobs.run("-n", "3", LAUNCHED, "end", how)
    assert (got, out) == (status, "")
    assert err.count("failed") == 1
    summary = err.partition("jax-dfccl launch: ")[2]
    assert summary.startswith(f"rank 1 failed: {words}; its last lines on stderr:\n    first\n")
    assert "    last words\n" in summary
    if how == "raise":
        assert "    ValueError: nothing to add up\n" in summary
        assert "_launch_rank" not in err


def test_deaf_process_is_killed(jobs):
    status, out, err = jobs.run("-n", "2", "--grace", "0.5", LAUNCHED, "stubborn")
    assert (status, out) == (5, "[0] deaf\n")
    assert "rank 1 failed: exit status 5; it wrote nothing on stderr\n" in err
    assert "rank 0 did not end within 0.5 s of SIGTERM and was killed\n" in err


def test_nothing_outlives_a_process(jobs):
    status, out, err = jobs.run("-n", "2", "--grace", "0.5", LAUNCHED, "children")
    assert (status, out, err) == (0, "", "")


def test_pipe_in_foreign_hands_does_not_keep_a_job(jobs, tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        job = jobs.start("-n", "1", LAUNCHED, "give_away", str(tmp_path / "socket"))
        sender, _ = listener.accept()
        with sender:
            _, (stdout,), _, _ = socket.recv_fds(sender, 1, 1)
        out, _ = job.communicate(timeout=LIMIT_S)
        os.close(stdout)
    assert (job.returncode, out) == (0, b"[0] given away\n")


def started(jobs: Jobs, *options: str) -> subprocess.Popen:
    """A job of two processes with children, all of which are running."""
    job = jobs.start("-n", "2", "--grace", "0.5", *options, LAUNCHED, "children", "stay")
    assert job.stdout is not None
    assert sorted(job.stdout.readline() for _ in range(2)) == [b"[0] ready\n", b"[1] ready\n"]
    return job


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_signal_stops_the_job(jobs, name):
    job = started(jobs)
    job.send_signal(signal.Signals[name])
    _, err = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 128 + signal.Signals[name]
    assert err.decode() == f"jax-dfccl launch: stopped by {name}\n"
    assert jobs.processes() == {}


def test_second_signal_kills(jobs):
    job = jobs.start("-n", "2", "--grace", "1000", LAUNCHED, "stubborn")
    assert job.stdout is not None
    assert job.stdout.readline() == b"[0] deaf\n"
    job.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert job.poll() is None
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 130, err
    assert jobs.processes() == {}


def test_killed_launcher_leaves_nothing(jobs):
    job = started(jobs)
    assert len(jobs.processes()) > 8
    job.kill()
    jobs.wait_for_none()
    job.communicate(timeout=LIMIT_S)


def test_killed_guard_takes_its_process_along(jobs):
    job = jobs.start("-n", "2", LAUNCHED, "stubborn")
    assert job.stdout is not None
    assert job.stdout.readline() == b"[0] deaf\n"
    (guard, *_) = sorted(pid for pid, line in jobs.processes().items() if "_guard.py" in line)
    os.kill(guard, signal.SIGKILL)
    _, err = job.communicate(timeout=LIMIT_S)
    assert job.returncode in (137, 5), err  # rank 1 may be first
    jobs.wait_for_none()


def test_stuck_reader_does_not_keep_a_job(jobs):
    job = jobs.start("-n", "1", "--grace", "0.5", "-m", "timeit", "-n", "1", "print('x' * 10**7)")
    time.sleep(1)  # nobody reads: the pipes are full
    job.terminate()
    time.sleep(0.2)
    job.kill()
    jobs.wait_for_none()
    job.communicate(timeout=LIMIT_S)


def test_reader_that_goes_away(jobs):
    job = jobs.start("-n", "2", LAUNCHED, "lines")
    assert job.stdout is not None
    job.stdout.close()
    assert job.wait(timeout=LIMIT_S) == 128 + signal.SIGPIPE
    assert jobs.processes() == {}
    assert job.stderr is not None
    assert b"Traceback" not in job.stderr.read()


def test_keep_going(jobs):
    status, out, err = jobs.run("-n", "2", "--keep-going", LAUNCHED, "uneven")
    assert (status, out) == (6, "[0] worked on\n")
    assert "rank 1 failed: exit status 6" in err
    status, out, _ = jobs.run("-n", "2", LAUNCHED, "uneven")
    assert (status, out) == (6, "")


def test_script_is_the_main_module(jobs):
    status, out, err = jobs.run("-n", "1", LAUNCHED, "main_module")
    assert (status, out, err) == (0, "[0] [4, 9]\n[0] at exit 49\n", "")


def test_module(jobs):
    status, out, _ = jobs.run("-n", "2", "-m", "base64", "-t", "-n", command=LAUNCH)
    assert status == 2  # base64 knows no -n: it got the words that follow its name
    status, out, _ = jobs.run("-n", "1", "--", "-m", "json.tool", "--help")
    assert status == 0 and "json.tool" in out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([LAUNCHED], "say how many processes: -n 4"),
        (["-n", "2"], "say what to run"),
        (["-n", "2", "-m"], "-m needs the name of a module"),
        (["-n", "0", LAUNCHED], "-n 0: must be 1 or more"),
        (["-n", "x", LAUNCHED], "invalid int value"),
        (["-n", "2", "--grace", "-1", LAUNCHED], "--grace -1.0: must be 0 or more"),
        (["-n", "2", "--grace", "nan", LAUNCHED], "--grace nan: must be 0 or more"),
        (["-n", "2", "--devices-per-process", "0", LAUNCHED], "must be 1 or more"),
        (["-n", "2", "nothing.py"], "there is no script nothing.py in "),
        (["-n", "2", "--unknown", LAUNCHED], "unrecognized arguments: --unknown"),
        (["-n", "2", "--env", "NOT_SET", LAUNCHED], "give --env NOT_SET=VALUE"),
        (["-n", "2", "--log-dir", "/proc/x", LAUNCHED], "--log-dir /proc/x: cannot write there"),
        (["--hosts", "no/file", LAUNCHED], "--hosts no/file: there is no such file"),
        (["--hosts", ",", LAUNCHED], "names no host"),
        (["--hosts", "a,-oX=y", LAUNCHED], "'-oX=y' is no host"),
        (["--hosts", "a,b,c", "-n", "2", LAUNCHED], "raise -n or name fewer hosts"),
        (["--hosts", "localhost,b", LAUNCHED], "give --coordinator HOST"),
    ],
)
def test_bad_input_says_what_to_do(jobs, words, text):
    status, out, err = jobs.run(*words)
    assert (status, out) == (2, "")
    assert text in err and "Traceback" not in err


FAKE_SSH = """#!/bin/sh
# A host is a folder with the words of each call; "down" cannot be reached.
echo "$@" >> "{folder}/$1"
if [ "$1" = down ]; then echo "no route to host" >&2; exit 255; fi
exec env -i PATH="$PATH" PYTHONPATH="$PYTHONPATH" "$MARK" FAKE_HOST="$1" sh -c "$2"
"""


@pytest.fixture
def fake_ssh(jobs, tmp_path) -> list[str]:
    """The option that reaches fake hosts: a clean environment on the same machine."""
    script = tmp_path / "fake_ssh"
    script.write_text(FAKE_SSH.format(folder=tmp_path).replace("$MARK", jobs._mark))
    script.chmod(0o755)
    return ["--ssh", f"sh {shlex.quote(str(script))}"]


def test_hosts(jobs, tmp_path, fake_ssh):
    hosts = tmp_path / "hosts"
    hosts.write_text("# our hosts\nme@one\n\ntwo  # the old one\n")
    status, out, err = jobs.run(
        *("-n", "3", "--hosts", str(hosts), *fake_ssh, "--env", "MINE=a 'b' $c"),
        *(LAUNCHED, "tell", "x 'y' $z"),
        JAX_LOG_COMPILES="0",
        OTHER="1",
    )
    assert (status, err) == (0, "")
    ranks = told(out)
    assert [one["environment"]["FAKE_HOST"] for one in ranks] == ["me@one", "me@one", "two"]
    assert [one["environment"]["JAX_LOCAL_DEVICE_IDS"] for one in ranks[:2]] == ["0", "1"]
    assert "JAX_LOCAL_DEVICE_IDS" not in ranks[2]["environment"]
    for one in ranks:
        environment = one["environment"]
        assert one["argv"] == ["tell", "x 'y' $z"]
        assert re.fullmatch(r"one:\d+", environment["JAX_COORDINATOR_ADDRESS"])
        assert "JAX_COORDINATOR_BIND_ADDRESS" not in environment
        assert environment["PWD"] == str(Path.cwd())
        assert environment["MINE"] == "a 'b' $c"
        assert environment["JAX_LOG_COMPILES"] == "0"
        assert "OTHER" not in environment
        assert not one["secret_is_shown"]
        secret = environment["JAX_DFCCL_JOB_SECRET"]
        assert all(secret not in (tmp_path / host).read_text() for host in ("me@one", "two"))


def test_the_host_may_be_in_the_middle_of_what_reaches_it(jobs, fake_ssh):
    way = f"env ON={{host}} {fake_ssh[1]} a-{{host}}"
    status, out, err = jobs.run("--hosts", "one,two", "--ssh", way, LAUNCHED, "tell")
    assert (status, err) == (0, "")
    assert [one["environment"]["FAKE_HOST"] for one in told(out)] == ["a-one", "a-two"]


def test_coordinator_of_hosts(jobs, fake_ssh):
    for option, address, bound in (
        ("10.1.2.3", r"10\.1\.2\.3:\d+", True),
        ("fd00::1", r"\[fd00::1\]:\d+", True),
        ("[fd00::1]:77", r"\[fd00::1\]:77", True),
        ("name:78", "name:78", False),
    ):
        status, out, _ = jobs.run(
            *("--hosts", "localhost,two", *fake_ssh, "--coordinator", option, LAUNCHED, "tell")
        )
        assert status == 0
        for one in told(out):
            environment = one["environment"]
            assert re.fullmatch(address, environment["JAX_COORDINATOR_ADDRESS"])
            assert ("JAX_COORDINATOR_BIND_ADDRESS" in environment) == bound


def test_failures_of_hosts(jobs, fake_ssh):
    status, _, err = jobs.run(
        "-n", "4", "--hosts", "one,two", *fake_ssh, LAUNCHED, "end", "SIGABRT"
    )
    assert status == 134
    assert "rank 1 failed: killed by SIGABRT; its last lines on stderr:\n    first\n" in err
    status, _, err = jobs.run("--hosts", "one,down", *fake_ssh, LAUNCHED, "stubborn")
    assert status == 255
    assert "rank 1 failed: was not run or is lost (ssh or its guard: exit status 255)" in err
    assert "    no route to host\n" in err
    status, _, err = jobs.run("--hosts", "one,two", "--ssh", "/no/ssh", LAUNCHED, "tell")
    assert status == 1 and "No such file or directory: '/no/ssh'" in err


def test_killed_launcher_leaves_nothing_on_hosts(jobs, fake_ssh):
    job = started(jobs, "--hosts", "one,two", *fake_ssh)
    job.kill()
    jobs.wait_for_none()
    job.communicate(timeout=LIMIT_S)


COMMAND_LINE = [sys.executable, "-P", "-m", "jax_dfccl", "launch"]
JAX_JOB = ["-n", "2", "--devices-per-process", "2", LAUNCHED, "psum"]


@pytest.mark.parametrize(("how", "last"), [("uneven", "[1] worked on"), ("shutdown", "shut down")])
def test_jax_processes(jobs, how, last):
    status, out, err = jobs.run(*JAX_JOB, how, command=COMMAND_LINE)
    assert status == 0, err
    assert "[0] right 2 4" in out and "[1] right 2 4" in out
    assert last in out


@pytest.mark.parametrize("rank", [0, 1])
def test_jax_process_that_raises(jobs, rank):
    status, out, err = jobs.run(*JAX_JOB, str(rank))
    assert status == 1, err
    assert f"[{rank}] right 2 4" in out  # the other one is stopped, perhaps before it says so
    assert f"rank {rank} failed: exit status 1; its last lines on stderr:\n" in err
    assert "    ValueError: nothing to add up\n" in err
    assert "Terminating process because the JAX distributed service" not in err


def test_console_script():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["jax-dfccl"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
