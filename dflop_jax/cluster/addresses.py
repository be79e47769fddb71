"""Hosts, ports and interfaces of the processes of a run."""

from __future__ import annotations

import ipaddress
import random
import socket
from dataclasses import dataclass
from typing import Any

LISTEN_PORTS = range(20_000, 32_000)  # below those of outgoing connections on Linux and macOS
LOOPBACK = "127.0.0.1"
ALL_INTERFACES = ""


@dataclass(frozen=True)
class Address:
    """A host (name or IP) and a port.

    Raises:
      ValueError: the port is not in 1..65535.
    """

    host: str
    port: int

    def __post_init__(self) -> None:
        if not (self.host and 1 <= self.port <= 65535):
            raise ValueError(f"{self} is no HOST:PORT with a port from 1 to 65535; give one")

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """The address that `HOST:PORT` (`[HOST]:PORT` for IPv6) says; ValueError for others."""
        host, _, port = text.strip().rpartition(":")
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if not port.isascii() or not port.isdigit() or (":" in bare and bare == host):
            raise ValueError(f"{text!r} is no HOST:PORT (such as node7:29400); give one")
        return cls(bare, int(port))

    @property
    def is_local(self) -> bool:
        """Whether only processes of the same host can mean it.

        A host's own name is not local, even where it resolves to 127.0.1.1.
        """
        return self.host == "localhost" or is_loopback(self.host)

    def interface(self) -> str:
        """The IP of this host that a process listens on so that others reach it at this address.

        ALL_INTERFACES where that cannot be told: this host's name means loopback here, though
        not elsewhere, or the address is translated on the way to this host.
        """
        if self.is_local:
            return "::1" if ":" in self.host else LOOPBACK
        try:
            family, _, _, _, name = socket.getaddrinfo(
                self.host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            with socket.socket(family) as s:
                s.bind((str(name[0]), 0))
        except OSError:
            return ALL_INTERFACES
        return ALL_INTERFACES if is_loopback(str(name[0])) else str(name[0])


def free_port() -> int:
    """A port of this host that nothing uses now.

    Not one that the system gives to outgoing connections: one of those could take it before we
    listen, even a connection to that very port, which then reaches itself.
    """
    for port in random.SystemRandom().sample(LISTEN_PORTS, 100):
        with socket.socket() as s:
            try:
                s.bind(("", port))
            except OSError:
                continue
            return port
    raise ValueError(
        f"no free port found from {LISTEN_PORTS[0]} to {LISTEN_PORTS[-1]}; end what holds them"
    )


def host_of(name: Any) -> str:
    """The IP in a socket's name; IPv4 addresses inside IPv6 become plain IPv4."""
    return str(name[0]).split("%")[0].removeprefix("::ffff:")


def is_loopback(host: str) -> bool:
    """Whether an IP is one of loopback's; a name is none."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def is_same_host(connection: socket.socket) -> bool:
    """Whether both ends of a connection are on this host."""
    there, here = host_of(connection.getpeername()), host_of(connection.getsockname())
    return is_loopback(there) or there == here
