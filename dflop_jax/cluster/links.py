"""A connection between two processes of a run: messages, signs of life, and the time over there.

A message is bytes under a key. Any thread may send; one reads.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec

from dflop_jax.cluster.clocks import ROUND_TRIPS, ClockOffset
from dflop_jax.cluster.handshake import receive

BEAT = ""  # the key of a sign of life
_HEAD = struct.Struct("!IQ")  # bytes of the key, bytes of the value


def send_message(sock: socket.socket, key: str, value: bytes) -> None:
    name = key.encode()
    sock.sendall(_HEAD.pack(len(name), len(value)) + name + value)


def receive_message(sock: socket.socket, deadline: float | None = None) -> tuple[str, bytes]:
    """(key, value); OSError when the connection ends before, or nothing comes by `deadline`."""
    key_bytes, value_bytes = _HEAD.unpack(receive(sock, _HEAD.size, deadline))
    return receive(sock, key_bytes, deadline).decode(), receive(sock, value_bytes, deadline)


def send_at_once(sock: socket.socket) -> None:
    """Small messages would wait 40 ms for the other side's delayed acknowledgement."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class PeerLink:
    """A connection to process `process`.

    Args:
      asks: whether this end compares clocks; the other then answers, and is told the result.
      now_s: this process's clock.
      called: what the other one is called; "" for its number.

    Attributes:
      name: of the other process, once it has greeted.
      heard_s: `time.monotonic` of its last message.
      left: it has said that it leaves, so that the end of the connection is no failure.
      clock: what its clock lacks, where this end asks.
      offset_s: what this one's lacks to process 0's, as the end that asks has told.
    """

    def __init__(
        self,
        process: int,
        connection: socket.socket,
        asks: bool,
        now_s: Callable[[], float],
        called: str = "",
    ) -> None:
        self.process, self.name, self.left = process, "not greeted yet", False
        self.heard_s, self.called = time.monotonic(), called or f"process {process}"
        self.clock, self.offset_s = ClockOffset(), 0.0
        self._passing_on = False
        self._socket, self._asks, self._now_s = connection, asks, now_s
        self._sending = threading.Lock()
        self._asked: tuple[float, ...] = ()  # the other's time, and when it came

    def __str__(self) -> str:
        return f"{self.called} ({self.name})"

    @property
    def is_heard(self) -> bool:
        """Whether what the other says is read now, so that its silence means something."""
        return not (self.left or self._passing_on)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While what came is passed on to others, who may take their time, nothing is read."""
        self._passing_on = True
        try:
            yield
        finally:
            self.heard_s = time.monotonic()
            self._passing_on = False

    def greet(self, deadline: float, offset_s: Callable[[], float] = lambda: 0.0) -> None:
        """Learn each other's names, and what time it is there; the other end does the same.

        Raises:
          OSError: it has gone, or did not answer by `deadline` (TimeoutError).
        """
        if self._asks:
            self.name = self.receive(deadline)[1].decode()
        else:
            self.send(BEAT, _my_name().encode())
        for _ in range(ROUND_TRIPS):
            if self._asks:
                self.send(BEAT, self.sign(offset_s()))
            self.compare(self.receive(deadline)[1])
            if not self._asks:
                self.send(BEAT, self.sign())
        if self._asks:
            self.send(BEAT, self.sign(offset_s()))
            self.send(BEAT, _my_name().encode())
        else:
            self.compare(self.receive(deadline)[1])
            self.name = self.receive(deadline)[1].decode()
        self._socket.settimeout(None)

    # ---- messages ----

    def send(self, key: str, value: bytes) -> None:
        """Send a message of any length; to a process that reads nothing this waits for ever.

        Raises:
          OSError: the connection has ended.
        """
        with self._sending:
            send_message(self._socket, key, value)

    def post(self, key: str, value: bytes) -> bool:
        """Send a short message unless that has to wait; whether nothing is left to send."""
        if not self._sending.acquire(blocking=False):  # a message is on its way there
            return False
        try:
            room = select.poll()
            room.register(self._socket, select.POLLOUT)
            if not room.poll(0):
                return False
            send_message(self._socket, key, value)
        except (OSError, ValueError):  # it has gone, as who reads will notice
            return True
        finally:
            self._sending.release()
        return True

    def receive(self, deadline: float | None = None) -> tuple[str, bytes]:
        """(key, value) of the next message.

        Raises:
          OSError: the connection has ended, or nothing came by `deadline` (TimeoutError).
        """
        key, value = receive_message(self._socket, deadline)
        self.heard_s = time.monotonic()
        return key, value

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    # ---- clocks ----

    def sign(self, offset_s: float = 0.0) -> bytes:
        """What a sign of life says: this process's time, with what the other's clock lacks to
        process 0's where this end asks (this one's lacks `offset_s`), or after what it was asked
        and when."""
        if self._asks:
            return msgspec.json.encode((self._now_s(), offset_s + self.clock.seconds))
        return msgspec.json.encode((*self._asked, self._now_s()))

    def compare(self, sign: bytes) -> None:
        """Take in what a sign of life of the other says."""
        now_s, times = self._now_s(), msgspec.json.decode(sign, type=list[float])
        if self._asks:
            sent_s, received_s, answered_s = times
            self.clock.add(sent_s, received_s, answered_s, now_s)
        else:
            self._asked, self.offset_s = (times[0], now_s), times[1]


def _my_name() -> str:
    return f"{socket.gethostname()}, pid {os.getpid()}"
