"""How the processes of a run meet, over plain sockets, before jax connects them.

Whatever goes wrong inside `jax.distributed.initialize` (nobody answers, a process is missing, two
have one number) aborts the process from C++ with a stack trace. So the processes meet here first
and jax is only asked once all of them are there. Process 0 listens at the coordinator address until
they are; the others connect, prove the run's secret and say who they are (`handshake`, `door`).
After that JSON messages from process 0. Each of the others connects twice:

    link     stays with the run (`peers`); its end of file says at once that a process is gone
    channel  carries what jax's coordination service and the process say to each other (`relay`)
"""

from __future__ import annotations

import errno
import json
import logging
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
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
from dflop_jax.cluster.handshake import Refused, introduce, receive

ANSWER_S = 10.0  # longest wait for each of process 0's first answers to a connection
RETRY_S = 0.2
LOOK_S = 0.02  # process 0 looks so often for who has come or gone
BACKLOG = 1024
PURPOSES = ("link", "channel")
_LENGTH = struct.Struct("!I")

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
            while wanted - self._came.keys() and (left := deadline - time.monotonic()) > 0:
                door.accept(min(left, LOOK_S))
                if guests := door.guests():
                    self._part_from_the_gone()
                for guest in guests:
                    self._let_in(guest)
        finally:
            door.close()
        if wanted - self._came.keys():
            self._part_from_the_gone()
            missing = {i for i, _ in wanted - self._came.keys()}
            self._dismiss(missing, door.turned_away())
        if said := door.turned_away():
            log.warning("%s", said)
        return self._send_on()

    def _let_in(self, guest: Guest) -> None:
        hello = json.loads(guest.hello)
        if why := self._refusal(hello):
            _say(guest.sock, refused=why)
            guest.sock.close()
            return
        self._came[hello["index"], hello["purpose"]] = guest.sock
        _say(guest.sock)

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

    def _part_from_the_gone(self) -> None:
        """Forget processes that have ended; they may come again, with both connections."""
        gone = {index for (index, _), sock in self._came.items() if _has_ended(sock)}
        for place in [p for p in self._came if p[0] in gone]:
            self._came.pop(place).close()

    def _dismiss(self, missing: set[int], turned_away: str) -> None:
        names = ", ".join(map(str, sorted(missing)[:8])) + (", ..." if len(missing) > 8 else "")
        why = (
            f"after {self._timeout_s:g} s, {len(missing)} of {self._me['number']} processes had "
            f"not come to {self._at}: {names}; see their logs, or raise "
            "--distributed.connect_timeout_s"
        )
        for sock in self._came.values():
            _say(sock, refused=why)
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
            _say(sock, host=host)
        return Meeting(own_host, links, channels)


def _has_ended(sock: socket.socket) -> bool:
    """Whether there is something to read: one who waits says nothing, so it has gone."""
    sock.setblocking(False)
    try:
        sock.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


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
                return self._come(came)
            except BaseException as e:
                for sock in came:
                    sock.close()
                if not isinstance(e, OSError):
                    raise
                # Process 0, or its name, may not be there yet.
                why = "no answer" if isinstance(e, TimeoutError) else e.strerror or str(e)
            time.sleep(min(RETRY_S, left))
        raise ValueError(
            f"process {self._me['index']} did not reach process 0 at {self._at} within "
            f"{self._timeout_s:g} s ({why}); is it the address of process 0's host, and does "
            "process 0 run?"
        )

    def _come(self, came: list[socket.socket]) -> Meeting:
        """Connect for every purpose and wait to be sent on; OSError when process 0 goes."""
        for purpose in PURPOSES:
            left = max(1e-3, self._deadline - time.monotonic())
            came.append(socket.create_connection((self._at.host, self._at.port), timeout=left))
            self._enter(came[-1], purpose)
        link, channel = came
        try:
            answer = _answer(link, self._deadline)
        except TimeoutError:
            raise ValueError(
                f"process 0 at {self._at} is there, but still waits for other processes"
            ) from None
        for sock in came:
            send_at_once(sock)
            sock.settimeout(None)
        return Meeting(answer["host"], {0: link}, {0: channel})

    def _enter(self, sock: socket.socket, purpose: str) -> None:
        """Prove the secret and be welcomed.

        Raises:
          ValueError: process 0 refuses us, or does not prove the secret itself.
        """
        # Without a listener, a connection to a port of one's own host may reach itself.
        if sock.getsockname() == sock.getpeername():
            raise ConnectionRefusedError("no answer")
        first = min(self._deadline, time.monotonic() + ANSWER_S)
        hello = json.dumps({**self._me, "purpose": purpose}).encode()
        try:
            introduce(sock, self._secret, hello, first)
        except Refused as e:
            raise ValueError(f"{self._at} {_MEANINGS[str(e)]}") from None
        _answer(sock, first)


_MEANINGS = {
    "no host": "answers, but is not process 0 of a dflop run; is the port right?",
    "another secret": "has another secret than this process; give all processes of the run the "
    "same",
}


# ---- words on the wire, once the secret is proved ----


def send_at_once(sock: socket.socket) -> None:
    """Small messages would wait 40 ms for the other side's delayed acknowledgement."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _say(sock: socket.socket, **words: str) -> None:
    """Send one message; a peer that is gone is noticed by the reader."""
    message = json.dumps(words).encode()
    with suppress(OSError):
        sock.sendall(_LENGTH.pack(len(message)) + message)


def _answer(sock: socket.socket, deadline: float) -> dict[str, str]:
    """What process 0 says next; ValueError when it refuses us, saying why."""
    (length,) = _LENGTH.unpack(receive(sock, _LENGTH.size, deadline))
    words = json.loads(receive(sock, length, deadline))
    if "refused" in words:
        raise ValueError(words["refused"])
    return words
