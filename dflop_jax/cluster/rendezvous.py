"""How the processes of a run meet, over plain sockets, before jax connects them.

Whatever goes wrong inside `jax.distributed.initialize` (nobody answers, a process is missing, two
have one number) aborts the process from C++ with a stack trace. So the processes meet here first
and jax is only asked once all of them are there. Process 0 listens at the coordinator address until
they are; the others connect, prove the run's secret and say who they are (`handshake`, `door`).
After that messages from process 0, the last of which makes a tree of them (`tree`). The connections
stay with the run (`peers`), since an end of file says at once that a process is gone; the port is
then jax's, for its coordination service.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from dflop_jax.cluster.addresses import (
    LOOPBACK,
    Address,
    host_of,
    is_same_host,
    reached_at,
)
from dflop_jax.cluster.door import LOOK_S, Door, Guest, listen
from dflop_jax.cluster.ending import TryAgain
from dflop_jax.cluster.handshake import Refused, introduce
from dflop_jax.cluster.links import receive_message, send_at_once, send_message
from dflop_jax.cluster.tree import FAN_OUT, branch

ANSWER_S = 10.0  # longest wait for each of process 0's first answers to a connection
RETRY_S = 0.2  # between two attempts to reach process 0

log = logging.getLogger("dflop_jax")


@dataclass(frozen=True)
class Meeting:
    """What the processes agreed on.

    Attributes:
      own_host: IP of this process's host, as the others reach it; loopback when all are on one.
      links: open sockets by process, to this one's parent and children in the tree.
    """

    own_host: str
    links: Mapping[int, socket.socket]


def meet(
    address: Address,
    index: int,
    number: int,
    versions: str,
    secret: bytes,
    timeout_s: float,
    fan_out: int = FAN_OUT,
) -> Meeting:
    """Wait until all `number` processes are there.

    Args:
      address: where process 0 listens.
      versions: of the software; have to be equal on all processes.
      secret: has to be equal on all processes, too, and is never sent.
      fan_out: children of a process at most.

    Raises:
      TryAgain: not all came in time, or the address is in use.
      ValueError: process 0 cannot listen there, two processes have the same index, or the
        processes disagree about their number, versions or secret.
    """
    assert 0 <= index < number
    me = {"index": index, "number": number, "versions": versions}
    if index == 0:
        met = _Host(address, me, secret, timeout_s).wait()
    else:
        met = _join(address, me, secret, timeout_s)
    links = branch(met.links, met.own_host, index, number, secret, fan_out)
    return Meeting(met.own_host, links)


# ---- process 0 ----


class _Host:
    """Lets the others in, one by one, and sends them on when all are there."""

    def __init__(
        self, address: Address, me: dict[str, Any], secret: bytes, timeout_s: float
    ) -> None:
        self._address, self._me, self._secret, self._timeout_s = address, me, secret, timeout_s
        self._came: dict[int, socket.socket] = {}

    def wait(self) -> Meeting:
        """The meeting of all processes; TryAgain when some did not come in time."""
        deadline = time.monotonic() + self._timeout_s
        wanted = set(range(1, self._me["number"]))
        door = Door(listen(self._address), self._secret)
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
            self._dismiss(wanted - self._came.keys(), door.turned_away())
        if said := door.turned_away():
            log.warning("%s", said)
        return self._send_on()

    def _let_in(self, guest: Guest) -> None:
        hello = json.loads(guest.hello)
        if why := self._refusal(hello):
            _say(guest.sock, refused=why)
            guest.sock.close()
            return
        self._came[hello["index"]] = guest.sock
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
        if index in self._came:
            return f"two processes say they are process {index}; give each its own process_id"
        return ""

    def _part_from_the_gone(self) -> None:
        """Forget processes that have ended; they may come again."""
        for index in [i for i, sock in self._came.items() if has_ended(sock)]:
            self._came.pop(index).close()

    def _dismiss(self, missing: set[int], turned_away: str) -> None:
        names = ", ".join(map(str, sorted(missing)[:8])) + (", ..." if len(missing) > 8 else "")
        why = (
            f"after {self._timeout_s:g} s, {len(missing)} of {self._me['number']} processes had "
            f"not come to {self._address}: {names}; see their logs, or raise "
            "--distributed.connect_timeout_s"
        )
        for sock in self._came.values():
            _say(sock, host=_PASSES, refused=why)
            sock.close()
        raise TryAgain(f"{why}; {turned_away}" if turned_away else why)

    def _send_on(self) -> Meeting:
        links = dict(sorted(self._came.items()))
        # A process on this host may have come by loopback: others reach it where they reach us.
        remote = [i for i, s in links.items() if not is_same_host(s)]
        own_host = host_of(links[remote[0]].getsockname()) if remote else LOOPBACK
        for sock in links.values():
            send_at_once(sock)
            sock.setblocking(True)
            _say(sock, host=reached_at(sock, own_host))
        return Meeting(own_host, links)


def has_ended(sock: socket.socket) -> bool:
    """Whether there is something to read: one who waits says nothing, so it has gone."""
    sock.setblocking(False)
    try:
        sock.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


# ---- the others ----


def _join(address: Address, me: dict[str, Any], secret: bytes, timeout_s: float) -> Meeting:
    """Find process 0 and come to it, again where it goes away meanwhile."""
    deadline, why = time.monotonic() + timeout_s, "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with ExitStack() as stack:
                link = socket.create_connection((address.host, address.port), timeout=left)
                stack.callback(link.close)
                _enter(link, address, me, secret, deadline)
                host = _wait(link, address, deadline)
                stack.pop_all()
            return Meeting(host, {0: link})
        except OSError as e:  # process 0, or its name, may not be there yet
            why = "no answer" if isinstance(e, TimeoutError) else e.strerror or str(e)
        time.sleep(min(RETRY_S, left))
    raise TryAgain(
        f"process {me['index']} did not reach process 0 at {address} within {timeout_s:g} s "
        f"({why}); is it the address of process 0's host, and does process 0 run? check"
    )


def _enter(
    link: socket.socket, address: Address, me: dict[str, Any], secret: bytes, deadline: float
) -> None:
    """Prove the secret and be welcomed.

    Raises:
      ValueError: process 0 refuses us, or has another secret.
      TryAgain: somebody else answers there.
    """
    # Without a listener, a connection to a port of one's own host may reach itself.
    if link.getsockname() == link.getpeername():
        raise ConnectionRefusedError("no answer")
    first = min(deadline, time.monotonic() + ANSWER_S)
    try:
        introduce(link, secret, json.dumps(me).encode(), first)
    except Refused as e:
        # Whoever else answers there has a port that a run was to have.
        kind = TryAgain if str(e) == "no host" else ValueError
        raise kind(f"{address} {_MEANINGS[str(e)]}") from None
    _answer(link, first)


def _wait(link: socket.socket, address: Address, deadline: float) -> str:
    """Wait for the others; this process's host, as they reach it."""
    try:
        host = _answer(link, deadline)
    except TimeoutError:
        raise TryAgain(
            f"process 0 at {address} is there, but still waits for other processes: start them all"
        ) from None
    send_at_once(link)
    link.settimeout(None)
    return host


_MEANINGS = {
    "no host": "answers, but is not process 0 of a dflop run; is the port right?",
    "another secret": "has another secret than this process; give all processes of the run the "
    "same",
}


# ---- words on the wire, once the secret is proved ----

_PASSES = "again"  # in place of a host: what process 0 refuses for may pass


def _say(sock: socket.socket, host: str = "", refused: str = "") -> None:
    """Send one message; a peer that is gone is noticed by the reader."""
    with suppress(OSError):
        send_message(sock, refused, host.encode())


def _answer(sock: socket.socket, deadline: float) -> str:
    """What process 0 says next; ValueError or TryAgain when it refuses us, saying why."""
    refused, host = receive_message(sock, deadline)
    if refused:
        raise (TryAgain if host.decode() == _PASSES else ValueError)(refused)
    return host.decode()
