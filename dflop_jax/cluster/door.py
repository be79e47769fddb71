"""The only ports that dflop itself opens: where a process lets in who proves the run's secret.

Strangers can do little here. Each is heard in a thread of its own, with a deadline and a bound on
what it may send; there are at most `MOST_STRANGERS` at a time, of which the oldest makes room for
the next, so that a flood does not keep out a process that proves itself within milliseconds; nobody
is waited for; and all of them together are told in one line.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass

from dflop_jax.cluster.addresses import ALL_INTERFACES, Address, host_of
from dflop_jax.cluster.ending import TryAgain
from dflop_jax.cluster.handshake import Refused, admit

PROVE_S = 10.0  # from the connection to its proof
MOST_STRANGERS = 256  # connections without a proof yet, of which each holds a descriptor
LOOK_S = 0.02  # who lets others in looks so often for who has come or gone
RECOVERY_S = 0.005  # in which a descriptor becomes free again
BACKLOG = 1024  # connections that wait to be accepted: of so many processes at once


@dataclass(frozen=True)
class Guest:
    """A connection that has proved the secret, and the hello that it proved with it."""

    sock: socket.socket
    hello: bytes


class Door:
    """Accepts connections at `listener` and lets in those that prove `secret`."""

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self._listener, self._secret = listener, secret
        self._lock = threading.Lock()  # over all that follows
        self._strangers: dict[socket.socket, str] = {}  # and their hosts, the oldest first
        self._guests: deque[Guest] = deque()
        self._turned_away: Counter[str] = Counter()
        self._last_host = ""

    def accept(self, timeout_s: float) -> None:
        """Begin to hear the next connection, if one comes in time."""
        self._listener.settimeout(timeout_s)
        try:
            sock, address = self._listener.accept()
        except (TimeoutError, BlockingIOError, ConnectionError):  # none, or it has gone already
            return
        except OSError:  # no descriptors are left
            self._send_oldest_away()
            time.sleep(RECOVERY_S)
            return
        if len(self._strangers) >= MOST_STRANGERS:
            self._send_oldest_away()
        with self._lock:
            self._strangers[sock] = host_of(address)
        threading.Thread(target=self._hear, args=(sock,), daemon=True).start()

    def guests(self) -> list[Guest]:
        """Who has proved the secret since this was asked last."""
        with self._lock:
            guests = list(self._guests)
            self._guests.clear()
        return guests

    def close(self) -> None:
        """Stop listening and send the strangers away; guests stay."""
        self._listener.close()
        while self._send_oldest_away("nothing yet"):
            pass
        for guest in self.guests():
            guest.sock.close()

    def turned_away(self) -> str:
        """How many connections did not prove the secret and why, in one line; empty for none."""
        with self._lock:
            total = self._turned_away.total()
            kinds = ", ".join(f"{n} {kind}" for kind, n in self._turned_away.most_common())
        if not total:
            return ""
        return (
            f"turned away {total} connection{'s' if total > 1 else ''} without the run's secret "
            f"({kinds}), the last from {self._last_host}"
        )

    def _hear(self, sock: socket.socket) -> None:
        """Thread: hear one stranger, who becomes a guest or goes."""
        hello, why = b"", ""
        try:
            hello = admit(sock, self._secret, time.monotonic() + PROVE_S)
        except Refused as e:
            why = str(e)
        with self._lock:
            stays = sock in self._strangers and not why
            if stays:
                del self._strangers[sock]
                self._guests.append(Guest(sock, hello))
            else:
                self._count(sock, why)
        if not stays:
            sock.close()

    def _send_oldest_away(self, why: str = "too many") -> bool:
        """Hang up on the oldest stranger, whose thread then closes; False when there is none."""
        with self._lock:
            sock = next(iter(self._strangers), None)
            if sock is None:
                return False
            self._count(sock, why)
        with suppress(OSError):  # it has gone already
            sock.shutdown(socket.SHUT_RDWR)
        return True

    def _count(self, sock: socket.socket, why: str) -> None:
        """Note a stranger that is sent away, once."""
        host = self._strangers.pop(sock, None)
        if host is not None:
            self._last_host = host
            self._turned_away[why] += 1


def listen(address: Address) -> socket.socket:
    """A socket that listens where others reach this host at `address`.

    Raises:
      TryAgain: the port is in use.
      ValueError: this host cannot listen there.
    """
    host = address.interface()
    try:
        if host == ALL_INTERFACES and socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", address.port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG
            )
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, address.port), family=family, backlog=BACKLOG)
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            why = "the port is in use (another run, or a second process 0?); choose another"
            raise TryAgain(f"coordinator {address}: {why}") from None
        why = f"process 0 cannot listen there: {e.strerror}"
        raise ValueError(f"coordinator {address}: {why}") from None
