"""How the processes of a run meet, over plain sockets, before jax connects them.

Whatever goes wrong inside `jax.distributed.initialize` (nobody answers, a process is missing, two
have one number) aborts the process from C++ with a stack trace. So the processes meet here first
and jax is only asked once all of them are there. Process 0 listens at the coordinator address until
they are; the others connect, prove the run's secret and say who they are (`handshake`, `door`).
After that a JSON line each way. Each of the others connects twice:

    link     stays with the run (`peers`); its end of file says at once that a process is gone
    channel  carries what jax's coordination service and the process say to each other (`relay`)
"""

from __future__ import annotations

import errno
import json
import logging
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflop_jax.cluster.addresses import (
    ALL_INTERFACES,
    LOOPBACK,
    Address,
    host_of,
    is_same_host,
)
from dflop_jax.cluster.door import Door, Guest
from dflop_jax.cluster.handshake import Refused, introduce

ANSWER_S = 10.0  # longest wait for each of process 0's first answers to a connection
LINE_BYTES = 4096  # no line said here is longer
RETRY_S = 0.2
BACKLOG = 1024
LINK, CHANNEL = PURPOSES = ("link", "channel")

log = logging.getLogger("dflop_jax")


@dataclass(frozen=True)
class Meeting:
    """What the processes agreed on.

    Attributes:
      own_host: IP of this process's host, as the others reach it; loopback when all are on one.
      links: open sockets by process: to every other one on process 0, to process 0 elsewhere.
      channels: the same, for what jax says.
    """

    own_host: str
    links: Mapping[int, socket.socket]
    channels: Mapping[int, socket.socket]


def meet(
    at: Address, index: int, number: int, versions: str, secret: bytes, timeout_s: float
) -> Meeting:
    """Wait until all `number` processes are there.

    Args:
      at: where process 0 listens.
      versions: of the software; have to be equal on all processes.
      secret: has to be equal on all processes, too, and is never sent.

    Raises:
      ValueError: not all came in time, the address is wrong or in use, two processes have the same
        index, or the processes disagree about their number, versions or secret.
    """
    assert 0 <= index < number
    me = {"index": index, "number": number, "versions": versions}
    if index == 0:
        return _Host(at, me, secret, timeout_s).wait()
    return _Guest(at, me, secret, timeout_s).join()


# ---- process 0 ----


class _Host:
    """Lets the others in, one by one, and sends them on when all are there."""

    def __init__(self, at: Address, me: dict[str, Any], secret: bytes, timeout_s: float) -> None:
        self._at, self._me, self._secret, self._timeout_s = at, me, secret, timeout_s
        self._came: dict[tuple[int, str], socket.socket] = {}  # by index and purpose

    def wait(self) -> Meeting:
        """The meeting of all processes; ValueError when some did not come in time."""
        deadline = time.monotonic() + self._timeout_s
        wanted = {(i, p) for i in range(1, self._me["number"]) for p in PURPOSES}
        door = Door(_listen(self._at), self._secret)
        try:
            while missing := wanted - self._came.keys():
                if (left := deadline - time.monotonic()) <= 0:
                    break
                guests, gone = door.wait(left)
                for sock in gone:  # one who waits says nothing more: it has ended
                    self._part_from(sock, door)
                for guest in guests:
                    self._let_in(guest, door)
        finally:
            door.close()
        if missing:
            self._dismiss({i for i, _ in missing}, door.turned_away())
        if said := door.turned_away():
            log.warning("%s", said)
        return self._send_on()

    def _let_in(self, guest: Guest, door: Door) -> None:
        hello = _parse(guest.hello)
        if why := self._refusal(hello):
            _say(guest.sock, {"dflop": "refused", "why": why})
            guest.sock.close()
            return
        self._came[hello["index"], hello["purpose"]] = guest.sock
        door.watch(guest.sock)
        _say(guest.sock, {"dflop": "welcome"})

    def _refusal(self, hello: dict[str, Any]) -> str:
        """Why a process cannot take part; empty when it can."""
        index, mine = hello.get("index"), self._me
        for name, says in (("number", "the number of processes is"), ("versions", "it runs")):
            if hello.get(name) != mine[name]:
                return (
                    f"process {index} says {says} {hello.get(name)}, process 0 says {mine[name]}; "
                    "start all alike"
                )
        if (index, hello.get("purpose")) in self._came:
            return f"two processes say they are process {index}; give each its own process_id"
        return ""

    def _part_from(self, sock: socket.socket, door: Door) -> None:
        """A process has gone; it may come again, with both connections."""
        gone = {index for (index, _), s in self._came.items() if s is sock}
        for place in [p for p in self._came if p[0] in gone]:
            door.forget(self._came[place])
            self._came.pop(place).close()

    def _dismiss(self, missing: set[int], turned_away: str) -> None:
        names = ", ".join(map(str, sorted(missing)[:8])) + (", ..." if len(missing) > 8 else "")
        why = (
            f"after {self._timeout_s:g} s, {len(missing)} of {self._me['number']} processes had "
            f"not come to {self._at}: {names}; see their logs, or raise "
            "--distributed.connect_timeout_s"
        )
        for sock in self._came.values():
            _say(sock, {"dflop": "refused", "why": why})
            sock.close()
        raise ValueError(f"{why}; {turned_away}" if turned_away else why)

    def _send_on(self) -> Meeting:
        links, channels = (
            {i: s for (i, purpose), s in sorted(self._came.items(), key=_place) if purpose == p}
            for p in PURPOSES
        )
        # A process on this host may have come by loopback: others reach it where they reach us.
        remote = [i for i, s in links.items() if not is_same_host(s)]
        own_host = host_of(links[remote[0]].getsockname()) if remote else LOOPBACK
        for sock in self._came.values():
            send_at_once(sock)
            sock.setblocking(True)
        for i, sock in links.items():
            host = host_of(sock.getpeername()) if i in remote else own_host
            _say(sock, {"dflop": "go", "host": host})
        return Meeting(own_host, links, channels)


def _place(item: tuple[tuple[int, str], socket.socket]) -> tuple[int, str]:
    return item[0]


def _listen(at: Address) -> socket.socket:
    host = at.interface()
    try:
        if host == ALL_INTERFACES and socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", at.port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG
            )
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, at.port), family=family, backlog=BACKLOG)
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            why = "the port is in use (another run, or a second process 0?); choose another"
        else:
            why = f"process 0 cannot listen there: {e.strerror}"
        raise ValueError(f"coordinator {at}: {why}") from None


# ---- the others ----


class _Guest:
    """Finds process 0 and comes to it, again where it goes away meanwhile."""

    def __init__(self, at: Address, me: dict[str, Any], secret: bytes, timeout_s: float) -> None:
        self._at, self._me, self._secret, self._timeout_s = at, me, secret, timeout_s
        self._deadline = time.monotonic() + timeout_s

    def join(self) -> Meeting:
        why = "no answer"
        while (left := self._deadline - time.monotonic()) > 0:
            came: list[socket.socket] = []
            try:
                if meeting := self._come(came):
                    return meeting
                why = "process 0 went away"
            except OSError as e:  # process 0, or its name, may not be there yet
                why = "no answer" if isinstance(e, TimeoutError) else e.strerror or str(e)
            except BaseException:
                _close(came)
                raise
            _close(came)
            time.sleep(min(RETRY_S, left))
        raise ValueError(
            f"process {self._me['index']} did not reach process 0 at {self._at} within "
            f"{self._timeout_s:g} s ({why}); is it the address of process 0's host, and does "
            "process 0 run?"
        )

    def _come(self, came: list[socket.socket]) -> Meeting | None:
        """Connect for every purpose and wait to be sent on; None when process 0 ends before."""
        for purpose in PURPOSES:
            left = max(1e-3, self._deadline - time.monotonic())
            came.append(socket.create_connection((self._at.host, self._at.port), timeout=left))
            if not self._enter(came[-1], purpose):
                return None
        link, channel = came
        line = _read(link, self._deadline)
        if line is None:
            raise ValueError(
                f"process 0 at {self._at} is there, but still waits for other processes"
            )
        if line == b"":
            return None
        answer = self._expect("go", line)
        for sock in came:
            send_at_once(sock)
            sock.settimeout(None)
        return Meeting(answer["host"], {0: link}, {0: channel})

    def _enter(self, sock: socket.socket, purpose: str) -> bool:
        """Prove the secret and be welcomed; False when process 0 has gone.

        Raises:
          ValueError: process 0 refuses us, or does not prove the secret itself.
        """
        # Without a listener, a connection to a port of one's own host may reach itself.
        if sock.getsockname() == sock.getpeername():
            return False
        first = min(self._deadline, time.monotonic() + ANSWER_S)
        hello = json.dumps({**self._me, "purpose": purpose}).encode()
        try:
            if not introduce(sock, self._secret, hello, first):
                return False
        except Refused as e:
            raise ValueError(f"{self._at} {_meaning(e)}") from None
        line = _read(sock, first)
        if line == b"":
            return False
        self._expect("welcome", line or b"")
        return True

    def _expect(self, word: str, line: bytes) -> dict[str, Any]:
        answer = _parse(line)
        if answer.get("dflop") == "refused":
            raise ValueError(str(answer.get("why")))
        if answer.get("dflop") != word:
            raise ValueError(f"{self._at} {_NO_HOST}")
        return answer


_NO_HOST = "answers, but is not process 0 of a dflop run; is the port right?"


def _meaning(refused: Refused) -> str:
    if str(refused) != "another secret":
        return _NO_HOST
    return "has another secret than this process; give all processes of the run the same"


def _close(socks: list[socket.socket]) -> None:
    for sock in socks:
        sock.close()


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
