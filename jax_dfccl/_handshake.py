# SPDX-License-Identifier: Apache-2.0
"""How the two ends of a connection prove to each other which processes of the job they are.

    acceptor                      initiator
    hello                   ->
                            <-    hello, proof
    verdict, proof          ->

A hello says who speaks to whom, with a nonce. A proof is an HMAC under the job's secret over both
hellos, so over all they say, and who proves; the acceptor's also covers its verdict. The
initiator proves first: a stranger who connects learns nothing that depends on the secret.

An acceptance is final: the acceptor never takes it back, and the initiator, once it has sent its
proof, waits for it. If the connection is AF_UNIX the process with the smaller index then passes a
memory file, and the other one acknowledges it. If it is TCP the initiator makes as many more as
there are to be, with a handshake each, in which it says the number of the connection. After that
nothing is left unread in the sockets.
"""

import array
import asyncio
import dataclasses
import enum
import fcntl
import hashlib
import hmac
import os
import secrets
import socket
import struct

VERSION = 3
INCARNATION_BYTES = 16

_MAGIC = b"jaxdfccl"
_NONCE_BYTES = 32
# magic, version, role, transport, process, peer, incarnation, peer's incarnation, ring, sockets,
# number, nonce
_HELLO = struct.Struct(f"<8sHBBII{INCARNATION_BYTES}s{INCARNATION_BYTES}sQBB{_NONCE_BYTES}s")
_PROOF_BYTES = hashlib.sha256().digest_size
_VERDICT = struct.Struct("<B")
_ANYONE = 0xFFFFFFFF  # the acceptor does not know yet who has connected
_MEMORY, _TAKEN = b"M", b"T"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class HandshakeError(Exception):
    """The other end is not what it should be."""


class Role(enum.IntEnum):
    """Which end of a connection."""

    ACCEPTOR = 1
    INITIATOR = 2


class Transport(enum.IntEnum):
    """What kind of connection."""

    UNIX = 1
    TCP = 2


class Verdict(enum.IntEnum):
    """What the acceptor says to a connection that has been proven."""

    ACCEPTED = 1
    CROSSED = 2  # the acceptor has offered a connection itself, which goes first
    LINKED = 3  # there is a connection already
    RESTARTED = 4  # another process has had this index
    GIVEN_UP = 5  # the acceptor has told its runtime that this process never comes


@dataclasses.dataclass(frozen=True)
class Identity:
    """Who this process is."""

    process: int
    incarnation: bytes
    secret: bytes = dataclasses.field(repr=False)
    ring_bytes: int
    sockets: int


@dataclasses.dataclass(frozen=True)
class Hello:
    """What an end says of itself.

    Attributes:
        role: Which end it is.
        transport: What kind of connection it takes this for.
        process: Its index.
        peer: Whom it believes to speak to.
        incarnation: Which process it is.
        peer_incarnation: Which process it believes to speak to.
        ring_bytes: How large it wants rings to be.
        sockets: How many TCP connections it wants.
        number: Which of them this is; the acceptor does not know.
        nonce: Random.
    """

    role: Role
    transport: Transport
    process: int
    peer: int
    incarnation: bytes
    peer_incarnation: bytes
    ring_bytes: int
    sockets: int
    number: int
    nonce: bytes

    def pack(self) -> bytes:
        """The bytes that go over the connection."""
        return _HELLO.pack(_MAGIC, VERSION, *dataclasses.astuple(self))

    @classmethod
    def unpack(cls, data: bytes) -> "Hello":
        """Reads what `pack` wrote."""
        magic, version, role, transport, *rest = _HELLO.unpack(data)
        if magic != _MAGIC:
            raise HandshakeError("it does not speak this protocol")
        if version != VERSION:
            raise HandshakeError(f"it speaks version {version} of the protocol, not {VERSION}")
        try:
            return cls(Role(role), Transport(transport), *rest)
        except ValueError as error:
            raise HandshakeError(str(error)) from None


@dataclasses.dataclass(frozen=True)
class Greeting:
    """Both hellos of a connection, as they were sent."""

    acceptor: bytes
    initiator: bytes

    def proof(self, secret: bytes, role: Role, verdict: bytes = b"") -> bytes:
        """What only a process that knows the secret can say after these hellos."""
        text = b"".join((role.name.encode(), self.acceptor, self.initiator, verdict))
        return hmac.digest(secret, text, "sha256")

    def terms(self) -> Hello:
        """What counts where the two ends want different things: the smaller index's hello."""
        ends = map(Hello.unpack, (self.acceptor, self.initiator))
        return min(ends, key=lambda hello: hello.process)


async def _receive(connection: socket.socket, size: int) -> bytes:
    """Exactly so many bytes, and none that come after them."""
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < size:
        part = await loop.sock_recv(connection, size - len(data))
        if not part:
            raise HandshakeError("it closed the connection")
        data += part
    return data


async def _send(connection: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, data)


async def greet_acceptor(
    connection: socket.socket,
    me: Identity,
    transport: Transport,
    peer: int,
    peer_incarnation: bytes,
    number: int = 0,
) -> Greeting:
    """The initiator's first step: hears who the acceptor is. Nothing is promised yet."""
    data = await _receive(connection, _HELLO.size)
    hello = Hello.unpack(data)
    if hello.role is not Role.ACCEPTOR or hello.transport is not transport:
        raise HandshakeError("it does not answer as an acceptor does")
    if (hello.process, hello.incarnation) != (peer, peer_incarnation):
        raise HandshakeError(f"another process answers (process {hello.process})")
    mine = Hello(
        role=Role.INITIATOR,
        transport=transport,
        process=me.process,
        peer=peer,
        incarnation=me.incarnation,
        peer_incarnation=peer_incarnation,
        ring_bytes=me.ring_bytes,
        sockets=me.sockets,
        number=number,
        nonce=secrets.token_bytes(_NONCE_BYTES),
    )
    return Greeting(data, mine.pack())


async def offer(connection: socket.socket, me: Identity, greeting: Greeting) -> Verdict:
    """The initiator's second step: proves who it is and gets the acceptor's verdict."""
    proof = greeting.proof(me.secret, Role.INITIATOR)
    await _send(connection, greeting.initiator + proof)
    answer = await _receive(connection, _VERDICT.size + _PROOF_BYTES)
    verdict, proof = answer[: _VERDICT.size], answer[_VERDICT.size :]
    if not hmac.compare_digest(proof, greeting.proof(me.secret, Role.ACCEPTOR, verdict)):
        raise HandshakeError("it does not know the job's secret")
    return Verdict(*_VERDICT.unpack(verdict))


async def greet_initiator(
    connection: socket.socket, me: Identity, transport: Transport
) -> tuple[Hello, Greeting]:
    """The acceptor's first step: finds out who has connected, with proof."""
    mine = Hello(
        role=Role.ACCEPTOR,
        transport=transport,
        process=me.process,
        peer=_ANYONE,
        incarnation=me.incarnation,
        peer_incarnation=bytes(INCARNATION_BYTES),
        ring_bytes=me.ring_bytes,
        sockets=me.sockets,
        number=0,
        nonce=secrets.token_bytes(_NONCE_BYTES),
    ).pack()
    await _send(connection, mine)
    data = await _receive(connection, _HELLO.size)
    hello = Hello.unpack(data)
    if hello.role is not Role.INITIATOR or hello.transport is not transport:
        raise HandshakeError("it does not speak as an initiator does")
    if (hello.peer, hello.peer_incarnation) != (me.process, me.incarnation):
        raise HandshakeError("it takes this process for another one")
    greeting = Greeting(mine, data)
    proof = await _receive(connection, _PROOF_BYTES)
    if not hmac.compare_digest(proof, greeting.proof(me.secret, Role.INITIATOR)):
        raise HandshakeError("it does not know the job's secret")
    if hello.process == me.process:
        raise HandshakeError("it claims this process's own index")
    return hello, greeting


async def answer(
    connection: socket.socket, me: Identity, greeting: Greeting, verdict: Verdict
) -> None:
    """The acceptor's second step."""
    data = _VERDICT.pack(verdict)
    await _send(connection, data + greeting.proof(me.secret, Role.ACCEPTOR, data))


def create_memory(ring_bytes: int) -> int:
    """A file in memory for two rings, which no one can make smaller under a mapping of it."""
    memory = os.memfd_create("jax_dfccl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(memory, 2 * ring_bytes)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(memory)
        raise
    return memory


def _check_memory(memory: int, ring_bytes: int) -> None:
    try:
        seals = fcntl.fcntl(memory, fcntl.F_GET_SEALS)
    except OSError:  # not a file in memory
        seals = 0
    writable = fcntl.fcntl(memory, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    if seals & _SEALS != _SEALS or not writable or os.fstat(memory).st_size != 2 * ring_bytes:
        raise HandshakeError("the memory it passed is not as agreed")


async def share_memory(connection: socket.socket, ring_bytes: int, gives: bool) -> int:
    """Passes a new memory file, or takes the one that the other end passes: its descriptor."""
    if gives:
        memory = create_memory(ring_bytes)
        try:
            socket.send_fds(connection, [_MEMORY], [memory])  # there is room for one byte
            if await _receive(connection, len(_TAKEN)) != _TAKEN:
                raise HandshakeError("it did not take the memory")
        except BaseException:
            os.close(memory)
            raise
        return memory
    await _readable(connection)
    data, descriptors = _receive_descriptors(connection)
    try:
        if data != _MEMORY or len(descriptors) != 1:
            raise HandshakeError("it passed no memory")
        _check_memory(descriptors[0], ring_bytes)
        await _send(connection, _TAKEN)
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return descriptors[0]


def _receive_descriptors(connection: socket.socket) -> tuple[bytes, list[int]]:
    # socket.recv_fds does not pass flags on (Python 3.11), and a child must not inherit them.
    one = array.array("i", [-1])
    data, messages, _, _ = connection.recvmsg(
        len(_MEMORY), socket.CMSG_LEN(one.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    descriptors = array.array("i")
    for level, kind, content in messages:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) // one.itemsize * one.itemsize])
    return data, list(descriptors)


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(connection, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(connection)
