"""How the processes of a run meet, over plain sockets, before jax connects them.

Whatever goes wrong inside `jax.distributed.initialize` (nobody answers, a process is missing, two
have one number) aborts the process from C++ with a stack trace. So the processes meet here first
and jax is only asked once all of them are there. Process 0 listens at the coordinator address; the
others connect and say who they are, one JSON line each way. The sockets stay open afterwards as
`links`: the end of file on one tells at once that the process behind it is gone.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import random
import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ANSWER_S = 10.0  # longest wait for process 0's first answer to a connection
LINE_BYTES = 4096  # no line said here is longer
RETRY_S = 0.2
LISTEN_PORTS = range(20_000, 32_000)  # below those of outgoing connections on Linux and macOS
LOOPBACK = "127.0.0.1"


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
            raise ValueError(f"{self} is no HOST:PORT with a port from 1 to 65535")

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """The address that `HOST:PORT` (`[HOST]:PORT` for IPv6) says; ValueError for others."""
        host, _, port = text.strip().rpartition(":")
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if not port.isascii() or not port.isdigit() or (":" in bare and bare == host):
            raise ValueError(f"{text!r} is no HOST:PORT (such as node7:29400)")
        return cls(bare, int(port))

    @property
    def is_local(self) -> bool:
        """Whether only processes of the same host can mean it.

        A host's own name is not local, even where it resolves to 127.0.1.1.
        """
        return self.host == "localhost" or _is_loopback(self.host)


@dataclass(frozen=True)
class Meeting:
    """What the processes agreed on.

    Attributes:
      service: where jax's coordination service is to listen (process 0) or found (the others).
      own_host: IP of this process's host, as the others reach it.
      links: open sockets by process: to every other one on process 0, to process 0 elsewhere.
    """

    service: Address
    own_host: str
    links: Mapping[int, socket.socket]


def meet(at: Address, index: int, number: int, versions: str, timeout_s: float) -> Meeting:
    """Wait until all `number` processes are there.

    Args:
      at: where process 0 listens.
      versions: of the software; have to be equal on all processes.

    Raises:
      ValueError: not all came in time, the address is wrong or in use, two processes have the same
        index, or the processes disagree about their number or versions.
    """
    assert 0 <= index < number
    me = {"dflop": "hello", "index": index, "number": number, "versions": versions}
    return _Host(at, me, timeout_s).wait() if index == 0 else _join(at, me, timeout_s)


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
    raise ValueError(f"no free port found from {LISTEN_PORTS[0]} to {LISTEN_PORTS[-1]}")


# ---- process 0 ----


class _Host:
    """Lets the others in, one by one, and sends them on when all are there."""

    def __init__(self, at: Address, me: dict[str, Any], timeout_s: float) -> None:
        self._at, self._me, self._timeout_s = at, me, timeout_s
        self._strangers: dict[socket.socket, bytes] = {}  # connected, but did not say who they are
        self._links: dict[int, socket.socket] = {}

    def wait(self) -> Meeting:
        """The meeting of all processes; ValueError when some did not come in time."""
        deadline = time.monotonic() + self._timeout_s
        others = set(range(1, self._me["number"]))
        with _listen(self._at) as listener, selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while missing := others - self._links.keys():
                if (left := deadline - time.monotonic()) <= 0:
                    break
                for key, _ in selector.select(left):
                    sock = key.fileobj
                    assert isinstance(sock, socket.socket)
                    if sock is listener:
                        sock, _ = listener.accept()
                        sock.setblocking(False)
                        selector.register(sock, selectors.EVENT_READ)
                        self._strangers[sock] = b""
                    elif not self._hear(sock):
                        selector.unregister(sock)
                        sock.close()
        for sock in self._strangers:
            sock.close()
        if missing:
            self._dismiss(missing)
        return self._send_on()

    def _hear(self, sock: socket.socket) -> bool:
        """Read from a connection; False when it is to be closed."""
        try:
            data = sock.recv(LINE_BYTES)
        except OSError:
            data = b""
        if sock not in self._strangers:  # one who waits says nothing more: it has gone
            if not data:
                self._links = {i: s for i, s in self._links.items() if s is not sock}
            return bool(data)
        said = self._strangers[sock] + data
        self._strangers[sock] = said
        if data and b"\n" not in said and len(said) < LINE_BYTES:
            return True
        del self._strangers[sock]
        hello = _parse(said) if b"\n" in said else {}
        if hello.get("dflop") != "hello":
            return False
        if why := self._refusal(hello):
            _say(sock, {"dflop": "refused", "why": why})
            return False
        self._links[hello["index"]] = sock
        _say(sock, {"dflop": "welcome"})
        return True

    def _refusal(self, hello: dict[str, Any]) -> str:
        """Why a process cannot take part; empty when it can."""
        index, mine = hello.get("index"), self._me
        for name, says in (("number", "the number of processes is"), ("versions", "it runs")):
            if hello.get(name) != mine[name]:
                return (
                    f"process {index} says {says} {hello.get(name)}, process 0 says {mine[name]}; "
                    "start all alike"
                )
        if index in self._links:
            return f"two processes say they are process {index}; give each its own process_id"
        return ""

    def _dismiss(self, missing: set[int]) -> None:
        names = ", ".join(map(str, sorted(missing)[:8])) + (", ..." if len(missing) > 8 else "")
        why = (
            f"after {self._timeout_s:g} s, {len(missing)} of {self._me['number']} processes had "
            f"not come to {self._at}: {names}; see their logs, or raise "
            "--distributed.connect_timeout_s"
        )
        for sock in self._links.values():
            _say(sock, {"dflop": "refused", "why": why})
            sock.close()
        raise ValueError(why)

    def _send_on(self) -> Meeting:
        # A process on this host may have come by loopback: others reach it where they reach us.
        seen = {i: _host_of(s.getpeername()) for i, s in self._links.items()}
        remote = [i for i, host in seen.items() if not _is_loopback(host)]
        own_host = _host_of(self._links[remote[0]].getsockname()) if remote else LOOPBACK
        port = free_port()
        for i, sock in self._links.items():
            send_at_once(sock)
            sock.setblocking(True)
            host = seen[i] if i in remote else own_host
            _say(sock, {"dflop": "go", "port": port, "host": host})
        return Meeting(Address(own_host, port), own_host, dict(sorted(self._links.items())))


def _listen(at: Address) -> socket.socket:
    try:
        if at.is_local:
            host = "::1" if ":" in at.host else LOOPBACK
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, at.port), family=family)
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", at.port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
        return socket.create_server(("", at.port), backlog=1024)
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            why = "the port is in use (another run, or a second process 0?); choose another"
        else:
            why = f"process 0 cannot listen there: {e.strerror}"
        raise ValueError(f"coordinator {at}: {why}") from None


# ---- the others ----


def _join(at: Address, me: dict[str, Any], timeout_s: float) -> Meeting:
    deadline = time.monotonic() + timeout_s
    why = "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            sock = socket.create_connection((at.host, at.port), timeout=left)
        except OSError as e:  # process 0, or its name, may not be there yet
            why = "no answer" if isinstance(e, TimeoutError) else e.strerror or str(e)
            time.sleep(min(RETRY_S, left))
            continue
        try:
            # Without a listener, a connection to a port of one's own host may reach itself.
            if sock.getsockname() != sock.getpeername():
                if meeting := _introduce(sock, at, me, deadline):
                    return meeting
                why = "process 0 went away"
        except BaseException:
            sock.close()
            raise
        sock.close()
        time.sleep(RETRY_S)
    raise ValueError(
        f"process {me['index']} did not reach process 0 at {at} within {timeout_s:g} s ({why}); "
        "is it the address of process 0's host, and does process 0 run?"
    )


def _introduce(
    sock: socket.socket, at: Address, me: dict[str, Any], deadline: float
) -> Meeting | None:
    """Say who we are and wait to be sent on; None when process 0 ends before that."""
    _say(sock, me)
    first = min(deadline, time.monotonic() + ANSWER_S)
    welcome = _read(sock, first)
    if welcome == b"":
        return None
    answer = _parse(welcome or b"")
    if answer.get("dflop") == "welcome":
        line = _read(sock, deadline)
        if line is None:
            raise ValueError(f"process 0 at {at} is there, but still waits for other processes")
        if line == b"":
            return None
        answer = _parse(line)
    if answer.get("dflop") == "refused":
        raise ValueError(str(answer.get("why")))
    if answer.get("dflop") != "go":
        raise ValueError(f"{at} answers, but is not process 0 of a dflop run; is the port right?")
    send_at_once(sock)
    sock.settimeout(None)
    host = _host_of(sock.getpeername())
    service = Address(LOOPBACK if _is_loopback(host) else host, answer["port"])
    return Meeting(service, answer["host"], {0: sock})


# ---- words on the wire ----


def send_at_once(sock: socket.socket) -> None:
    """Small messages would wait 40 ms for the other side's delayed acknowledgement."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _say(sock: socket.socket, what: dict[str, Any]) -> None:
    """Send one line; a peer that is gone is noticed by the reader."""
    try:
        sock.sendall(json.dumps(what).encode() + b"\n")
    except OSError:
        return


def _read(sock: socket.socket, deadline: float) -> bytes | None:
    """One line (byte by byte, to leave what follows unread); b"" at the end, None too late."""
    line = b""
    while not line.endswith(b"\n") and len(line) < LINE_BYTES:
        sock.settimeout(max(1e-3, deadline - time.monotonic()))
        try:
            byte = sock.recv(1)
        except TimeoutError:
            return None
        except OSError:
            return b""
        if not byte:
            return line
        line += byte
    return line


def _parse(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:  # not UTF-8, not JSON
        return {}
    return value if isinstance(value, dict) else {}


def _host_of(name: Any) -> str:
    """The IP in a socket's name; IPv4 addresses inside IPv6 become plain IPv4."""
    return str(name[0]).split("%")[0].removeprefix("::ffff:")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False
