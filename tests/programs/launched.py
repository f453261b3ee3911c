# SPDX-License-Identifier: Apache-2.0
"""What the tests of `launch` run as a process of a job: `launched.py CASE [...]`."""

import atexit
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

RANK = int(os.environ.get("JAX_DFCCL_PROCESS_ID", "-1"))
SLEEP_S = 600  # longer than any test: only being stopped ends it


def square(x):
    return x * x


def tell():
    """What this process sees."""
    secret = os.environ["JAX_DFCCL_JOB_SECRET"]
    command_lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    seen = {
        "rank": RANK,
        "argv": sys.argv[1:],
        "name": __name__,
        "file": __file__,
        "path": sys.path[0],
        "stdin": sys.stdin.read(),
        "secret_is_shown": any(secret.encode() in line for line in command_lines),
        "environment": dict(os.environ),
    }
    print(json.dumps(seen))


def lines():
    """Lines in pieces, to both streams, the last ones without an end."""
    for i in range(300):
        for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
            stream.write(f"{name} {RANK} {i} gr")
            stream.flush()
            stream.write("üße\n")
            stream.flush()
    sys.stdout.write("out end")
    sys.stderr.write("err end")


def raw():
    """One long line, and bytes that are no text."""
    sys.stdout.buffer.write("ü€".encode() * 500_000 + b"\n\xff\xfe\r\n")


def give_away():
    """Gives its stdout to a process outside the job, which keeps it open."""
    with socket.socket(socket.AF_UNIX) as to:
        to.connect(sys.argv[2])
        socket.send_fds(to, [b"x"], [1])
    print("given away")


def end():
    """Rank 1 ends as told, the others would sleep."""
    if RANK != 1:
        time.sleep(SLEEP_S)
    print("first\nlast words", file=sys.stderr)
    how = sys.argv[2]
    if how == "raise":
        raise ValueError("nothing to add up")
    if how == "text":
        sys.exit("a text")
    if how.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[how])
    os._exit(int(how))


def stubborn():
    """Rank 1 fails, rank 0 ignores SIGTERM."""
    if RANK == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("deaf", flush=True)
        time.sleep(SLEEP_S)
    time.sleep(1)  # rank 0 needs a moment to turn deaf
    sys.exit(5)


def children():
    """Leaves a child in its group, and one in a session of its own that ignores SIGTERM."""
    sleep = ["sleep", str(SLEEP_S)]
    subprocess.Popen(sleep)
    deaf = ["sh", "-c", f"trap '' TERM; {' '.join(sleep)} & {' '.join(sleep)}"]
    subprocess.Popen(deaf, start_new_session=True)
    time.sleep(0.3)  # for the trap to be set
    if sys.argv[2:] == ["stay"]:
        print("ready", flush=True)
        time.sleep(SLEEP_S)


def uneven():
    """Rank 1 fails at once, rank 0 works on."""
    if RANK == 1:
        sys.exit(6)
    time.sleep(1)
    print("worked on")


def main_module():
    """What a script may expect of its module: spawned children, classes by name, atexit."""
    atexit.register(lambda: print("at exit", sys.modules["__main__"].square(7)))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(square, [2, 3]))


def listening(port):
    """The addresses that listen on a port, as /proc/net shows them."""
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state = line.split()[:4]
            address, _, hexadecimal = local.rpartition(":")
            if state == "0A" and int(hexadecimal, 16) == port:
                found.append(address)
    return found


def psum():
    """Stock JAX over two processes; then they end as told."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    jax.distributed.initialize()
    assert jax.process_index() == RANK and jax.process_count() == 2
    if RANK == 0:
        port = int(os.environ["JAX_COORDINATOR_ADDRESS"].rpartition(":")[2])
        loopback = {"0100007F", "0000000000000000FFFF00000100007F"}  # IPv4, and as an IPv6 socket
        assert listening(port) and set(listening(port)) <= loopback, listening(port)
    mesh = Mesh(np.array(jax.devices()), ("i",))
    data = np.arange(12.0) ** 2 + 1
    x = jax.make_array_from_callback((12,), NamedSharding(mesh, P("i")), lambda index: data[index])
    add = jax.shard_map(lambda v: jax.lax.psum(v, "i"), mesh=mesh, in_specs=P("i"), out_specs=P())
    got = np.asarray(jax.jit(add)(x).addressable_shards[0].data)
    np.testing.assert_array_equal(got, data.reshape(4, 3).sum(0))
    print("right", jax.local_device_count(), len(jax.devices()), flush=True)
    how = sys.argv[2]
    if how == "uneven":  # process 0, which hosts the coordination service, is done first
        if RANK == 1:
            time.sleep(2)
            print("worked on")
    elif how == "shutdown":
        if RANK == 1:
            time.sleep(1)
        jax.distributed.shutdown()
        print("shut down")
    elif int(how) == RANK:
        raise ValueError("nothing to add up")
    else:
        time.sleep(SLEEP_S)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
