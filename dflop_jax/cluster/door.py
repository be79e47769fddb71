"""The only port that dflop itself opens: where a host lets in who proves the run's secret.

Strangers can do little here. Each has a deadline and a bound on what it may send; there are at most
`MOST_STRANGERS` at a time, of which the oldest makes room for the next, so that a flood does not
keep out a process that proves itself within milliseconds; nobody is waited for; and all of them
together are told in one line.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

from dflop_jax.cluster.addresses import host_of
from dflop_jax.cluster.handshake import REFUSAL, Challenge, Refused

PROVE_S = 10.0  # from the connection to its proof
MOST_STRANGERS = 256
ACCEPTED_AT_ONCE = 32  # then those who are here already have their turn
RECOVERY_S = 0.05  # without descriptors for another connection


@dataclass
class _Stranger:
    """A connection that has not proved the secret."""

    challenge: Challenge
    host: str
    deadline: float


@dataclass(frozen=True)
class Guest:
    """A connection that has proved the secret, and the hello that it proved with it."""

    sock: socket.socket
    hello: bytes


class Door:
    """Accepts connections at `listener` and lets in those that prove `secret`."""

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self._listener, self._secret = listener, secret
        self._strangers: dict[socket.socket, _Stranger] = {}  # the oldest first
        self._turned_away: Counter[str] = Counter()
        self._last_host = ""
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def watch(self, sock: socket.socket) -> None:
        """Have `wait` report when there is something to read from a guest, such as its end."""
        self._selector.register(sock, selectors.EVENT_READ)

    def forget(self, sock: socket.socket) -> None:
        """Undo `watch`."""
        with suppress(KeyError):
            self._selector.unregister(sock)

    def wait(self, timeout_s: float) -> tuple[list[Guest], list[socket.socket]]:
        """Who has proved the secret since, and which watched sockets have something to read.

        Returns when there is either, or something else has happened, or the time is over.
        """
        now = time.monotonic()
        next_end = min((s.deadline for s in self._strangers.values()), default=now + timeout_s)
        events = self._selector.select(max(0.0, min(timeout_s, next_end - now)))
        guests, readable, knocked = [], [], False
        for key, _ in events:
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            if sock is self._listener:
                knocked = True
            elif sock not in self._strangers:
                readable.append(sock)
            elif guest := self._hear(sock):
                guests.append(guest)
        self._send_away_the_slow()
        if knocked:  # last, so that a flood of new ones does not delay the others
            self._accept()
        return guests, readable

    def close(self) -> None:
        """Stop listening and send the strangers away; guests stay."""
        for sock in list(self._strangers):
            self._send_away(sock, "nothing yet")
        self._selector.close()
        self._listener.close()

    def turned_away(self) -> str:
        """How many connections did not prove the secret and why, in one line; empty for none."""
        total = self._turned_away.total()
        if not total:
            return ""
        kinds = ", ".join(f"{n} {kind}" for kind, n in self._turned_away.most_common())
        return (
            f"turned away {total} connection{'s' if total > 1 else ''} without the run's secret "
            f"({kinds}), the last from {self._last_host}"
        )

    # ---- strangers ----

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:  # it has gone already
                continue
            except OSError:  # no descriptors are left
                if self._strangers:
                    self._send_away(next(iter(self._strangers)), "too many")
                else:
                    time.sleep(RECOVERY_S)
                return
            if len(self._strangers) >= MOST_STRANGERS:
                self._send_away(next(iter(self._strangers)), "too many")
            sock.setblocking(False)
            deadline = time.monotonic() + PROVE_S
            stranger = _Stranger(Challenge(self._secret), host_of(address), deadline)
            self._strangers[sock] = stranger
            self._selector.register(sock, selectors.EVENT_READ)
            try:
                sock.sendall(stranger.challenge.greeting)
            except OSError:
                self._send_away(sock, "left early")

    def _hear(self, sock: socket.socket) -> Guest | None:
        """Read what a stranger says, never more than is wanted; a guest once it has proved."""
        challenge = self._strangers[sock].challenge
        try:
            part = sock.recv(challenge.wanted_bytes)
            if not part:
                raise Refused("left early")
            challenge.came += part
            if challenge.wanted_bytes:
                return None
            hello, proof = challenge.answer()
            sock.sendall(proof)
        except BlockingIOError:
            return None
        except OSError:
            self._send_away(sock, "left early")
            return None
        except Refused as e:
            if str(e) == "another secret":
                with suppress(OSError):
                    sock.sendall(REFUSAL)
            self._send_away(sock, str(e))
            return None
        del self._strangers[sock]
        self._selector.unregister(sock)
        return Guest(sock, hello)

    def _send_away_the_slow(self) -> None:
        now = time.monotonic()
        for sock, stranger in list(self._strangers.items()):
            if stranger.deadline > now:  # so are those after it
                return
            self._send_away(sock, "too slow")

    def _send_away(self, sock: socket.socket, why: str) -> None:
        self._last_host = self._strangers.pop(sock).host
        self._selector.unregister(sock)
        sock.close()
        self._turned_away[why] += 1
