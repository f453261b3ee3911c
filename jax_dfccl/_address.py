# SPDX-License-Identifier: Apache-2.0
"""Where a process of a job can be reached, and which addresses of this host it may listen on."""

import dataclasses
import fcntl
import ipaddress
import json
import os
import socket
import struct
from pathlib import Path

from jax_dfccl import _handshake

_SIOCGIFADDR = 0x8915
_DISCARD_PORT = 9  # nothing is sent there


class AddressError(Exception):
    """What a process has published is of no use; says why."""


@dataclasses.dataclass(frozen=True)
class Address:
    """What a process publishes about itself.

    Attributes:
        incarnation: Random; tells a process from another one that had its index before.
        host: The name of its host, for messages.
        machine: The same for two processes only if AF_UNIX connects them.
        life: Which process it is on its machine (see `life`).
        unix: The name of its AF_UNIX socket (abstract, without the leading 0); "": none.
        tcp: Its TCP addresses and ports; they may come later.
    """

    incarnation: bytes
    host: str
    machine: str
    life: str
    unix: str
    tcp: tuple[tuple[str, int], ...] = ()

    def text(self) -> str:
        """What goes into the key-value store."""
        fields = dataclasses.asdict(self) | {"incarnation": self.incarnation.hex()}
        return json.dumps({"version": _handshake.VERSION, **fields})

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Reads what `text` wrote; AddressError if it cannot be used."""
        try:
            fields = json.loads(text)
            version = fields.pop("version")
            if version != _handshake.VERSION:
                raise AddressError(
                    f"it speaks version {version} of the protocol between processes and this "
                    f"process version {_handshake.VERSION}; install the same jax_dfccl everywhere"
                )
            address = cls(
                incarnation=bytes.fromhex(fields["incarnation"]),
                host=str(fields["host"]),
                machine=str(fields["machine"]),
                life=str(fields["life"]),
                unix=str(fields["unix"]),
                tcp=tuple(
                    (str(ipaddress.ip_address(host)), int(port)) for host, port in fields["tcp"]
                ),
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise AddressError(f"its address makes no sense ({error!r})") from None
        if len(address.incarnation) != _handshake.INCARNATION_BYTES:
            raise AddressError("its address makes no sense (incarnation)")
        return address


def machine() -> str:
    """The running kernel and the network namespace, within which AF_UNIX names are known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{_namespace('net')}"
    except OSError:
        return ""


def life() -> str:
    """Which process this is on its machine: PID namespace, PID and time of its start."""
    try:
        return f"{_namespace('pid')}/{os.getpid()}/{_start_time(os.getpid())}"
    except OSError:
        return ""


def has_ended(life: str) -> bool:
    """Whether a process of this machine is known to have ended."""
    namespace, _, rest = life.partition("/")
    pid, _, started = rest.partition("/")
    try:
        return namespace == _namespace("pid") and _start_time(int(pid)) != started
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False


def _namespace(kind: str) -> str:
    # The link's text tells namespaces apart, and whoever made it need not be alive.
    return str(Path(f"/proc/self/ns/{kind}").readlink())


def _start_time(pid: int) -> str:
    """In clock ticks since boot; "" if it has ended and only its parent has not noticed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]


def listening_addresses(interface: str, coordinator: str) -> list[tuple[str, str]]:
    """Where to listen with TCP: pairs of the address to bind and the one to publish.

    Args:
      interface: An address or the name of an interface (JAX_DFCCL_INTERFACE); "": the address by
        which this host reaches the coordinator.
      coordinator: host:port of jax.distributed's coordination service.
    """
    if not interface:
        address = _source_address(coordinator)
        return [(address, address)]
    try:
        address = ipaddress.ip_address(interface)
    except ValueError:
        return [(address, address) for address in _interface_addresses(interface)]
    if address.is_unspecified:  # asked for: every interface
        return [(str(address), _source_address(coordinator))]
    return [(str(address), str(address))]


def _source_address(coordinator: str) -> str:
    host, _, port = coordinator.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        found = socket.getaddrinfo(host, int(port or _DISCARD_PORT), type=socket.SOCK_DGRAM)
        family, kind, protocol, _, target = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # picks a route, sends nothing
            return probe.getsockname()[0].partition("%")[0]
    except (OSError, ValueError) as error:
        raise OSError(
            f"cannot tell by which address this host reaches the coordinator {coordinator!r} "
            f"({error}); set JAX_DFCCL_INTERFACE"
        ) from None


def _interface_addresses(name: str) -> list[str]:
    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16s24x", name.encode()[:15])
        try:
            reply = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            found.append(socket.inet_ntoa(reply[20:24]))
        except OSError:  # none of this family
            pass
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        lines = []
    for digits, _, _, _, _, device in map(str.split, lines):
        address = ipaddress.IPv6Address(bytes.fromhex(digits))
        if device == name and not address.is_link_local:  # those need a scope
            found.append(str(address))
    if not found:
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise OSError(
            f"JAX_DFCCL_INTERFACE={name!r} is neither an address nor an interface that has one; "
            f"there are {names}"
        )
    return found
