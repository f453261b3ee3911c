# SPDX-License-Identifier: Apache-2.0
"""How processes find each other and get connected: as threads of this process, and for real."""

import asyncio
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import mmap
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
from cluster import LIMIT_S, Runtime, Store, listening, receive, send, wait_until
from hypothesis import strategies

from jax_dfccl import _address, _cluster, _handshake
from jax_dfccl._address import Address, AddressError
from jax_dfccl._cluster import Cluster
from jax_dfccl._config import ClusterConfig
from jax_dfccl._handshake import (
    Greeting,
    HandshakeError,
    Hello,
    Identity,
    Role,
    Transport,
    Verdict,
)

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests/programs"
COORDINATOR = "127.0.0.1:1"
SECRET = "not to be told"
HELLO_BYTES = _handshake._HELLO.size
PROOF_BYTES = hashlib.sha256().digest_size
BEGINNING = b"jaxdfccl" + _handshake.VERSION.to_bytes(2, "little")  # of a hello
LOOPBACK, LOOPBACK6 = "0100007F", "00000000000000000000000001000000"


class Job:
    """The processes of a job, as threads of this one."""

    def __init__(self, processes: int) -> None:
        self.store = Store()
        self.process_of = {2048 * process: process for process in range(processes)}
        self.runtimes: dict[int, Runtime] = {}  # of the latest with each index
        self.everything: list[tuple[Cluster, Runtime]] = []

    def start(self, process: int, machine: str = "here", store=None, **config) -> Cluster:
        runtime = Runtime()
        cluster = Cluster(
            process,
            self.process_of,
            store or self.store,
            runtime,
            ClusterConfig(**{"job_secret": SECRET, **config}),
            COORDINATOR,
            machine,
        )
        assert runtime.joined == [(process, self.process_of)]
        self.runtimes[process] = runtime
        self.everything.append((cluster, runtime))
        return cluster

    def address(self, process: int) -> Address:
        return Address.parse(self.store.values[f"jax_dfccl/process/{process}"])

    def publish(self, process: int, address: Address) -> None:
        self.store.values[f"jax_dfccl/process/{process}"] = address.text()

    def wait_for_links(self, pairs) -> None:
        for one, other in pairs:
            for process, peer in ((one, other), (other, one)):
                wait_until(lambda: peer in self.runtimes[process].linked())

    def check(self) -> None:
        """Both ends of a pair have the same connection, one, with nothing unread."""

        def both_ends() -> bool:
            for process, runtime in self.runtimes.items():
                ends[process] = list(runtime.links)
            linked = {process: [peer for peer, *_ in links] for process, links in ends.items()}
            assert all(len(set(peers)) == len(peers) for peers in linked.values())
            return all(process in linked[peer] for process in linked for peer in linked[process])

        ends: dict[int, list] = {}
        wait_until(both_ends)
        for process, links in ends.items():
            send(process, links)
        for process, links in ends.items():
            receive(process, links)

    def families(self, process: int) -> dict[int, str]:
        links = self.runtimes[process].links
        return {peer: connection.family.name for peer, connection, *_ in links}

    def close(self) -> None:
        for cluster, runtime in self.everything:
            cluster.close()
            runtime.close()


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


@pytest.fixture
def make_job() -> Iterator[Callable[[int], Job]]:
    before, jobs = descriptors(), []

    def make(processes: int) -> Job:
        jobs.append(Job(processes))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("jax_dfccl_")]
    assert descriptors() <= before


def pairs(processes: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(processes) for j in range(i)]


# Getting connected --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "family", "listens"),
    [
        ({}, "AF_UNIX", set()),
        ({"machine": ""}, "AF_INET", {LOOPBACK}),
        ({"transport": "tcp"}, "AF_INET", {LOOPBACK}),
        ({"transport": "tcp", "sockets": 3}, "AF_INET", {LOOPBACK}),
        ({"transport": "tcp", "interface": "::1"}, "AF_INET6", {LOOPBACK6}),
        ({"transport": "tcp", "interface": "lo"}, "AF_INET", {LOOPBACK, LOOPBACK6}),
        ({"transport": "tcp", "interface": "0.0.0.0"}, "AF_INET", {"00000000"}),
    ],
    ids=["unix", "no_proc", "tcp", "tcps", "address", "interface", "everywhere"],
)
def test_all_want_all(make_job, config, family, listens):
    before = listening()
    job = make_job(4)
    clusters = [job.start(process, **config) for process in range(4)]
    for process, cluster in enumerate(clusters):
        cluster.want({0, 1, 2, 3} - {process})
    job.wait_for_links(pairs(4))
    job.check()
    for process in range(4):
        assert set(job.families(process).values()) == {family}
        assert job.runtimes[process].down == {}
    opened = [place.partition(":")[0] for place in listening() - before]
    assert set(opened) == listens
    assert len(opened) == 4 * len(listens)


@pytest.mark.parametrize("wanting", [0, 1])
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("config", [{}, {"transport": "tcp"}], ids=["unix", "tcp"])
def test_one_wants_and_either_is_late(make_job, wanting, late, config):
    job = make_job(2)
    first = job.start(1 - late, **config)
    if wanting != late:
        first.want([late])
        wait_until(lambda: first._lookups == {late})
    second = job.start(late, **config)
    if wanting == late:
        second.want([1 - late])
    job.wait_for_links(pairs(2))
    job.check()


def test_hosts(make_job):
    """AF_UNIX within each host, TCP between them, and TCP is opened only when it is needed."""
    before = listening()
    job = make_job(5)
    hosts = ["a", "a", "b", "b", "c"]
    clusters = [job.start(process, machine=host) for process, host in enumerate(hosts)]
    clusters[0].want([1])
    clusters[2].want([3])
    job.wait_for_links([(0, 1), (2, 3)])
    assert listening() == before
    assert all(job.address(process).tcp == () for process in range(5))
    for process, cluster in enumerate(clusters):
        cluster.want({0, 1, 2, 3, 4} - {process})
    job.wait_for_links(pairs(5))
    job.check()
    for process, peer in pairs(5):
        same = hosts[process] == hosts[peer]
        assert job.families(process)[peer] == ("AF_UNIX" if same else "AF_INET")
    opened = [place.partition(":")[0] for place in listening() - before]
    assert set(opened) == {LOOPBACK}
    assert 3 <= len(opened) <= 5  # who finds all others listening need not


def test_where_af_unix_does_not_reach_tcp_does(make_job):
    """As with virtual machines that were started from one snapshot."""
    job = make_job(2)
    clusters = [job.start(process) for process in range(2)]
    for process in range(2):
        job.publish(process, dataclasses.replace(job.address(process), unix="elsewhere"))
        clusters[process]._address = job.address(process)
    for process in range(2):
        clusters[process].want([1 - process])
    job.wait_for_links(pairs(2))
    job.check()
    assert job.families(0) == {1: "AF_INET"}


def test_random_wishes_at_the_same_time(make_job):
    """Many small jobs in which processes want each other at once: one connection per pair."""
    choose = random.Random(7)
    crossed = 0
    for round in range(40):
        processes = choose.randint(2, 5)
        job = make_job(processes)
        config = choose.choice([{}, {"transport": "tcp"}])
        machines = [choose.choice("ab") for _ in range(processes)]
        wishes = [
            (i, j) for i in range(processes) for j in range(processes) if choose.random() < 0.7
        ]
        ready = threading.Barrier(processes)

        def run(process):
            ready.wait(LIMIT_S)
            cluster = job.start(process, machine=machines[process], **config)
            for one, other in wishes:
                if one == process != other:
                    cluster.want([other])

        threads = [threading.Thread(target=run, args=(process,)) for process in range(processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        # Between hosts both must want: who wants nobody there does not listen with TCP.
        wanted = {
            (max(one, other), min(one, other))
            for one, other in wishes
            if one != other and (config or machines[one] == machines[other])
        } | {(i, j) for i, j in pairs(processes) if {(i, j), (j, i)} <= set(wishes)}
        crossed += sum({(i, j), (j, i)} <= set(wishes) for i, j in pairs(processes))
        job.wait_for_links(wanted)
        job.check()
        assert all(runtime.down == {} for runtime in job.runtimes.values()), round
        job.close()
        for _, runtime in job.everything:
            runtime.links.clear()
    assert crossed > 50


def test_the_store_may_be_away_for_a_time(make_job):
    class Flaky(Store):
        def __init__(self):
            super().__init__()
            self.fails = 0

        def fail(self):
            if self.fails > 0:
                self.fails -= 1
                raise RuntimeError("UNAVAILABLE")

        def get(self, key):
            self.fail()
            return super().get(key)

        def replace(self, key, value):
            self.fail()
            super().replace(key, value)

    job = make_job(2)
    job.store = Flaky()
    clusters = [job.start(process, machine=f"host {process}") for process in range(2)]
    job.store.fails = 8
    for process in range(2):
        clusters[process].want([1 - process])
    job.wait_for_links(pairs(2))
    job.check()
    assert job.store.fails == 0


def test_the_secret_comes_from_the_store(make_job):
    job = make_job(3)
    clusters = [job.start(process, job_secret="") for process in range(3)]
    for process in range(3):
        clusters[process].want({0, 1, 2} - {process})
    job.wait_for_links(pairs(3))
    assert re.fullmatch("[0-9a-f]{64}", job.store.values["jax_dfccl/secret"])
    assert all(job.store.values["jax_dfccl/secret"] not in repr(c._me) for c in clusters)


# Not getting connected ----------------------------------------------------------------------------


def test_who_does_not_know_the_secret_stays_out(make_job):
    job = make_job(3)
    config = {"connect_timeout_s": 1.5}
    clusters = [job.start(p, job_secret="ab"[p // 2], **config) for p in range(3)]
    for process in range(3):
        clusters[process].want({0, 1, 2} - {process})
    job.wait_for_links([(0, 1)])
    wait_until(lambda: [set(job.runtimes[p].down) for p in range(3)] == [{2}, {2}, {0, 1}])
    assert "JAX_DFCCL_JOB_SECRET" in job.runtimes[0].down[2]
    assert "does not know the job's secret" in str(clusters[0].dropped)
    job.check()


@pytest.mark.parametrize("tcp", [False, True])
def test_who_cannot_be_reached_is_given_up(make_job, tcp):
    """The reason names host, address and settings; what comes later is refused."""
    job = make_job(2)
    config = {"connect_timeout_s": 0.3, "transport": "tcp" if tcp else ""}
    clusters = [job.start(process, **config) for process in range(2)]
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))  # nobody listens
        name = port.getsockname()
        real, unreachable = job.address(1), {"tcp": (name,)} if tcp else {"unix": "nobody"}
        job.publish(1, dataclasses.replace(real, host="far-away", **unreachable))
        clusters[0].want([1])
        wait_until(lambda: job.runtimes[0].down)
    reason = job.runtimes[0].down[1]
    where = f"127.0.0.1:{name[1]}" if tcp else "AF_UNIX"
    assert f"{where}: Connection refused" in reason
    for text in ("process 1 on far-away", "0.3 s", "JAX_DFCCL_INTERFACE", "firewall"):
        assert text in reason
    clusters[1].want([0])
    wait_until(lambda: job.runtimes[1].down)
    assert "has given up this process" in job.runtimes[1].down[0]


@pytest.mark.parametrize("linked", [False, True])
def test_a_process_that_was_restarted_is_refused(make_job, caplog, linked):
    caplog.set_level(logging.WARNING, "jax_dfccl")
    job = make_job(2)
    job.start(0)
    first = job.start(1)
    if linked:
        first.want([0])
        job.wait_for_links(pairs(2))
    first.close()
    survivor = job.runtimes[0]
    job.start(1).want([0])
    wait_until(lambda: job.runtimes[1].down)
    assert "process that was restarted cannot join the job again" in job.runtimes[1].down[0]
    assert "refused process 1: it is a second process of that index" in caplog.text
    assert "this process is a second process 1 of its job" in caplog.text
    assert (survivor.linked(), survivor.down) == ([1] if linked else [], {})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 99}, "version 99 of the protocol.*install the same jax_dfccl"),
        ({"incarnation": "00"}, "makes no sense"),
        ({"incarnation": 3}, "makes no sense"),
        ({"tcp": [["name.of.a.host", 1]]}, "makes no sense"),
        ({"tcp": 3}, "makes no sense"),
    ],
)
def test_addresses_that_cannot_be_used(make_job, change, reason):
    job = make_job(2)
    cluster = job.start(0)
    job.start(1)
    fields = json.loads(job.address(1).text())
    job.store.values["jax_dfccl/process/1"] = json.dumps(fields | change)
    cluster.want([1])
    wait_until(lambda: job.runtimes[0].down)
    assert re.search(f"process 1: .*{reason}", job.runtimes[0].down[1])


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", f'{{"version": {_handshake.VERSION}}}'])
def test_addresses_that_are_none(text):
    with pytest.raises(AddressError, match="makes no sense"):
        Address.parse(text)


def test_interfaces():
    assert _address.listening_addresses("", "127.0.0.1:80") == [("127.0.0.1", "127.0.0.1")]
    assert _address.listening_addresses("", "[::1]:80") == [("::1", "::1")]
    assert _address.listening_addresses("", "localhost:80")[0][0] in ("127.0.0.1", "::1")
    assert _address.listening_addresses("0.0.0.0", "127.0.0.1:80") == [("0.0.0.0", "127.0.0.1")]
    with pytest.raises(OSError, match=r"'none0' is neither an address nor .* there are .*lo"):
        _address.listening_addresses("none0", COORDINATOR)
    with pytest.raises(OSError, match="set JAX_DFCCL_INTERFACE"):
        _address.listening_addresses("", "host.invalid:80")


def test_a_bad_interface_is_said_at_once(make_job):
    with pytest.raises(OSError, match="none0"):
        make_job(2).start(0, interface="none0")


# Strangers ----------------------------------------------------------------------------------------


class Client:
    """Speaks the protocol by hand, right or wrong."""

    def __init__(self, job: Job, process: int) -> None:
        self._address = address = job.address(process)
        if address.unix:
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.connect("\0" + address.unix)
        else:
            self.socket = socket.create_connection(address.tcp[0])
        self.socket.settimeout(LIMIT_S)
        self.transport = Transport.UNIX if address.unix else Transport.TCP
        self.acceptor = b""

    def greet(self) -> Hello:
        self.acceptor = self.socket.recv(HELLO_BYTES, socket.MSG_WAITALL)
        hello = Hello.unpack(self.acceptor)
        assert hello.incarnation == self._address.incarnation
        return hello

    def speak(self, acceptor: Hello, secret: str = SECRET, **changes) -> bytes:
        """What process 1 says after the acceptor's hello; `changes` make it wrong."""
        hello = Hello(
            role=Role.INITIATOR,
            transport=self.transport,
            process=1,
            peer=acceptor.process,
            incarnation=bytes(16),
            peer_incarnation=acceptor.incarnation,
            ring_bytes=1 << 16,
            sockets=1,
            number=0,
            nonce=secrets.token_bytes(32),
        )
        text = dataclasses.replace(hello, **changes).pack()
        self.greeting = Greeting(self.acceptor, text)
        return text + self.greeting.proof(secret.encode(), Role.INITIATOR)

    def verdict(self) -> Verdict:
        answer = self.socket.recv(1 + PROOF_BYTES, socket.MSG_WAITALL)
        assert answer[1:] == self.greeting.proof(SECRET.encode(), Role.ACCEPTOR, answer[:1])
        return Verdict(answer[0])

    def is_dropped(self) -> bool:
        """Waits until the other end closes; whether it did so without another word."""
        try:
            return self.socket.recv(1000) == b""
        except ConnectionResetError:  # what we sent was not read
            return True


def say(data: Callable[[Client], bytes] | bytes) -> Callable[[Client], None]:
    def act(client: Client) -> None:
        client.greet()
        with contextlib.suppress(ConnectionError):  # dropped before all was said
            client.socket.sendall(data if isinstance(data, bytes) else data(client))

    return act


def wrong(secret: str = SECRET, **changes) -> Callable[[Client], None]:
    """A hello that is wrong in one thing, with a proof."""

    def act(client: Client) -> None:
        hello = client.greet()
        client.socket.sendall(client.speak(hello, secret, **changes))

    return act


def shut(client: Client) -> None:
    client.greet()
    client.socket.shutdown(socket.SHUT_WR)


# What a stranger does, and why it is dropped.
STRANGERS = {
    "silent": (lambda client: client.greet(), "no answer in time"),
    "slow": (say(b"jax"), "no answer in time"),
    "gone": (shut, "it closed the connection"),
    "truncated": (lambda c: (say(b"jaxdfccl" * 5)(c), c.socket.shutdown(1)), "it closed"),
    "garbage": (say(bytes(range(256))), "does not speak this protocol"),
    "oversized": (say(b"x" * (1 << 20)), "does not speak this protocol"),
    "http": (say(b"GET / HTTP/1.1\r\n" * 9), "does not speak this protocol"),
    "reflected": (say(lambda c: c.acceptor + bytes(PROOF_BYTES)), "as an initiator does"),
    "no proof": (wrong(secret="guess"), "does not know the job's secret"),
    "version": (say(lambda c: b"jaxdfccl\x63\0" + bytes(200)), "version 99"),
    "role": (say(lambda c: BEGINNING + b"\x07\x01" + bytes(200)), "7 is not a valid Role"),
    "transport": (wrong(transport=9), "9 is not a valid Transport"),
    "other peer": (wrong(peer=2), "takes this process for another one"),
    "old peer": (wrong(peer_incarnation=bytes(16)), "takes this process for another one"),
    "own index": (wrong(process=0), "claims this process's own index"),
    "number": (wrong(number=1), "nobody waits for a further connection"),
    "no index": (wrong(process=1234), "no process of its index"),
}


@pytest.mark.parametrize("config", [{}, {"transport": "tcp"}], ids=["unix", "tcp"])
def test_strangers_are_dropped_and_the_job_goes_on(make_job, config):
    job = make_job(2)
    clusters = [job.start(process, **config) for process in range(2)]
    clients = [Client(job, 0) for _ in STRANGERS]
    for client, (act, _) in zip(clients, STRANGERS.values(), strict=True):
        act(client)
    clusters[1].want([0])
    job.wait_for_links(pairs(2))
    for client, (name, (_, reason)) in zip(clients, STRANGERS.items(), strict=True):
        assert client.is_dropped(), name
        client.socket.close()
        assert any(reason in said for said in clusters[0].dropped), (name, clusters[0].dropped)
    assert clusters[0].dropped.total() == len(STRANGERS)
    assert job.runtimes[0].down == job.runtimes[1].down == {}
    job.check()


def test_what_was_heard_cannot_be_said_again(make_job):
    job = make_job(2)
    cluster = job.start(0, transport="tcp")
    incarnation = job.start(1, transport="tcp")._me.incarnation
    client, again, twice = (Client(job, 0) for _ in range(3))
    said = client.speak(client.greet(), incarnation=incarnation)
    client.socket.sendall(said)
    assert client.verdict() is Verdict.ACCEPTED
    again.greet()
    again.socket.sendall(said)
    assert again.is_dropped()
    assert cluster.dropped == {"it does not know the job's secret": 1}
    twice.socket.sendall(twice.speak(twice.greet(), incarnation=incarnation))
    assert twice.verdict() is Verdict.LINKED
    assert job.runtimes[0].linked() == [1]
    for one in (client, again, twice):
        one.socket.close()


def test_an_acceptor_cannot_be_impersonated(make_job):
    """Whoever sits at a peer's address has only what the process itself says to strangers."""
    job = make_job(2)
    cluster = job.start(0, transport="tcp", connect_timeout_s=0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = dataclasses.replace(job.address(0), tcp=(server.getsockname(),))
        job.publish(1, dataclasses.replace(address, incarnation=b"1" * 16))
        cluster.want([1])
        connection, _ = server.accept()
        with connection:  # what it says itself as an acceptor is not what 1 would say
            client = Client(job, 0)
            hello = client.greet()
            connection.sendall(client.acceptor)
            assert connection.recv(1000) == b""
            client.socket.close()
        server.settimeout(LIMIT_S)
        connection, _ = server.accept()
        with connection:  # as 1 would say it, but then it cannot answer the proof
            mine = dataclasses.replace(hello, process=1, incarnation=b"1" * 16).pack()
            connection.sendall(mine)
            said = connection.recv(HELLO_BYTES + PROOF_BYTES, socket.MSG_WAITALL)
            connection.sendall(bytes([Verdict.ACCEPTED]) + said[HELLO_BYTES:])
            assert connection.recv(1000) == b""
    wait_until(lambda: job.runtimes[0].down)
    assert job.runtimes[0].links == []


def test_a_flood_of_connections(make_job):
    """Those that say nothing make room for those that do."""
    job = make_job(2)
    clusters = [job.start(process) for process in range(2)]
    clients = [Client(job, 0) for _ in range(3 * _cluster._HALF_OPEN)]
    clusters[1].want([0])
    job.wait_for_links(pairs(2))
    wait_until(lambda: clusters[0].dropped["too many at a time"] >= 2 * _cluster._HALF_OPEN)
    for client in clients:
        client.socket.close()
    job.check()


OTHER_USER = """
import os, socket, sys
os.setgid(65534)
os.setuid(65534)
connection = socket.socket(socket.AF_UNIX)
connection.settimeout(30)
connection.connect("\\0" + sys.argv[1])
print(connection.recv(1000))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_other_users_are_told_nothing(make_job):
    job = make_job(2)
    cluster = job.start(0)
    command = [sys.executable, "-S", "-c", OTHER_USER, job.address(0).unix]
    assert subprocess.check_output(command, timeout=LIMIT_S) == b"b''\n"
    assert cluster.dropped == {"it belongs to another user": 1}


def test_a_proof_covers_everything():
    """Both hellos, who proves, and the verdict."""
    greetings = [Greeting(*hellos) for hellos in ((b"a", b"i"), (b"A", b"i"), (b"a", b"I"))]
    proofs = [
        greeting.proof(secret, role, verdict)
        for greeting in greetings
        for secret in (b"s", b"t")
        for role in Role
        for verdict in (b"", b"1", b"2")
    ]
    assert len(set(proofs)) == len(proofs) == 36


@hypothesis.given(strategies.binary(max_size=HELLO_BYTES + PROOF_BYTES + 8), strategies.booleans())
def test_no_bytes_of_a_stranger_are_taken(data, with_magic):
    if with_magic:
        data = BEGINNING + data
    me = Identity(0, b"0" * 16, SECRET.encode(), 1 << 16, 1)

    async def hear(connection):
        await _handshake.greet_initiator(connection, me, Transport.TCP)

    with_pair(lambda us, them: (them.sendall(data), them.shutdown(socket.SHUT_WR)), hear)


def with_pair(act, hear) -> None:
    """A stranger acts at one end of a connection; what is heard at the other is refused."""
    us, them = socket.socketpair()
    with us, them:
        us.setblocking(False)
        act(us, them)
        with pytest.raises(HandshakeError):
            asyncio.run(hear(us))


def test_hosts_are_known_if_every_process_has_said_its(make_job):
    job = make_job(3)
    for process, machine in enumerate(("a", "b", "a")):
        job.start(process)
        assert job.runtimes[process].hosts == []
        job.store.add(f"jax_dfccl/host/{process}", machine)
    job.start(0)
    assert job.runtimes[0].hosts == [0, 1, 0]


# Several connections ------------------------------------------------------------------------------


@pytest.mark.parametrize("wanting", [0, 1])
def test_the_smaller_index_says_how_many_connections(make_job, wanting):
    job = make_job(2)
    clusters = [job.start(i, transport="tcp", sockets=count) for i, count in enumerate((4, 2))]
    clusters[wanting].want([1 - wanting])
    job.wait_for_links(pairs(2))
    job.check()  # both have them in the same order
    for runtime in job.runtimes.values():
        assert len(runtime.links[0][3]) == 3


def test_a_process_that_does_not_make_all_connections_is_lost(make_job):
    job = make_job(2)
    job.start(0, transport="tcp", sockets=2, connect_timeout_s=0.5)
    incarnation = job.start(1, transport="tcp")._me.incarnation
    client, other, again = (Client(job, 0) for _ in range(3))
    client.socket.sendall(client.speak(client.greet(), incarnation=incarnation))
    assert client.verdict() is Verdict.ACCEPTED
    # Neither another incarnation nor a number that there is not makes them complete.
    for one, changes in ((other, {}), (again, {"incarnation": incarnation, "number": 2})):
        one.socket.sendall(one.speak(one.greet(), **{"number": 1, **changes}))
        assert one.is_dropped()
    wait_until(lambda: job.runtimes[0].down)
    assert "could not make all connections: no answer in time" in job.runtimes[0].down[1]
    for one in (client, other, again):
        one.socket.close()


# Memory -------------------------------------------------------------------------------------------


def test_memory_is_shared_and_cannot_shrink(make_job):
    job = make_job(2)
    # The process with the smaller index decides about the size.
    clusters = [job.start(0, ring_bytes=1 << 17), job.start(1, ring_bytes=1 << 20)]
    clusters[1].want([0])
    job.wait_for_links(pairs(2))
    files = [job.runtimes[process].links[0][2] for process in range(2)]
    maps = [mmap.mmap(file, 0) for file in files]
    assert [len(view) for view in maps] == [1 << 18] * 2
    maps[0][::4096] = bytes(range(64))
    assert maps[1][::4096] == bytes(range(64))
    for file in files:
        with pytest.raises(PermissionError):
            os.ftruncate(file, 0)
        with pytest.raises(PermissionError):
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert fcntl.fcntl(file, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    for view in maps:
        view.close()


def unsealed() -> int:
    memory = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, 2 << 16)
    return memory


def read_only() -> int:
    memory = _handshake.create_memory(1 << 16)
    try:
        return os.open(f"/proc/self/fd/{memory}", os.O_RDONLY)
    finally:
        os.close(memory)


@pytest.mark.parametrize(
    "make",
    [
        unsealed,
        read_only,
        lambda: os.open("/dev/null", os.O_RDWR),
        lambda: _handshake.create_memory(1 << 17),
    ],
    ids=["unsealed", "read_only", "no_memory", "wrong_size"],
)
def test_memory_that_is_not_taken(make):
    before = descriptors()

    def act(us, them):
        memory = make()
        socket.send_fds(them, [b"M"], [memory])
        os.close(memory)

    with_pair(act, lambda us: _handshake.share_memory(us, 1 << 16, gives=False))
    assert descriptors() == before


@pytest.mark.parametrize("said", [b"M", b"", b"X"])
def test_no_memory_at_all(said):
    def act(us, them):
        them.sendall(said)
        them.shutdown(socket.SHUT_WR)

    with_pair(act, lambda us: _handshake.share_memory(us, 1 << 16, gives=False))
    with_pair(act, lambda us: _handshake.share_memory(us, 1 << 16, gives=True))


# Settings -----------------------------------------------------------------------------------------


def test_settings():
    assert ClusterConfig.from_environment({}) == ClusterConfig()
    config = ClusterConfig.from_environment(
        {
            "JAX_DFCCL_TRANSPORT": "tcp",
            "JAX_DFCCL_INTERFACE": "eth0",
            "JAX_DFCCL_RING_BYTES": "65536",
            "JAX_DFCCL_SOCKETS": "3",
            "JAX_DFCCL_CONNECT_TIMEOUT": "1.5",
            "JAX_DFCCL_PEER_TIMEOUT": "2.5",
            "JAX_DFCCL_JOB_SECRET": SECRET,
        }
    )
    assert config == ClusterConfig("tcp", "eth0", 65536, 3, 1.5, 2.5, SECRET)
    assert SECRET not in repr(config)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("JAX_DFCCL_TRANSPORT", "udp"),
        ("JAX_DFCCL_RING_BYTES", "65537"),
        ("JAX_DFCCL_RING_BYTES", "32768"),
        ("JAX_DFCCL_RING_BYTES", "2M"),
        ("JAX_DFCCL_RING_BYTES", str(1 << 31)),
        ("JAX_DFCCL_SOCKETS", "0"),
        ("JAX_DFCCL_SOCKETS", "17"),
        ("JAX_DFCCL_SOCKETS", "-1"),
        ("JAX_DFCCL_CONNECT_TIMEOUT", "0"),
        ("JAX_DFCCL_CONNECT_TIMEOUT", "soon"),
    ],
)
def test_bad_settings(variable, value):
    with pytest.raises(ValueError, match=f"{variable}={value!r}"):
        ClusterConfig.from_environment({variable: value})


# With jax.distributed -----------------------------------------------------------------------------


def run_job(processes: int, case: str, status: int = 0, **variables: str) -> list[dict]:
    """What the processes of a real job say."""
    environment = {key: x for key, x in os.environ.items() if key != "XLA_FLAGS"}
    job = subprocess.run(
        [
            *(sys.executable, str(PROGRAMS / "launch.py"), "-n", str(processes), "--keep-going"),
            *(str(PROGRAMS / "cluster.py"), case),
        ],
        env={**environment, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,
    )
    assert job.returncode == status, job.stderr
    said = [line for line in job.stdout.splitlines() if re.match(r"\[\d\] {", line)]
    return [json.loads(line.partition(" ")[2]) for line in sorted(said)]


@pytest.mark.parametrize(
    ("processes", "case", "tcp"), [(3, "connect", False), (2, "connect", True), (2, "late", False)]
)
def test_real_processes(processes, case, tcp):
    seen = run_job(processes, case, JAX_DFCCL_TRANSPORT="tcp" if tcp else "")
    assert len(seen) == processes
    for process, one in enumerate(seen):
        process_of = {str(2048 * p + i): p for p in range(processes) for i in range(2)}
        assert one["joined"] == [[process, process_of]]
        assert one["linked"] == [p for p in range(processes) if p != process]
        assert one["families"] == ["AF_INET" if tcp else "AF_UNIX"]
        assert one["memory"] == ([] if tcp else [4 << 20])
        assert one["down"] == {}
        assert one["listening"] == ([LOOPBACK] if tcp else [])


def test_a_real_process_ends_while_it_waits():
    assert run_job(2, "absent") == [{"linked": [], "down": {}}]


def test_a_real_process_that_has_died_is_found_dead_at_once():
    """Not after the 60 s for which others are tried, which is longer than this test may take."""
    (survivor,) = run_job(2, "killed", status=128 + signal.SIGKILL)
    assert re.fullmatch("process 1 on .* has ended", survivor["down"]["1"])


def test_without_jax_distributed():
    for one in run_job(2, "alone"):
        assert "call jax.distributed.initialize() first" in one["error"]


def test_fork():
    assert run_job(2, "fork") == [{"status": 7}] * 2
