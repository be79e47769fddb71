"""Host-side messages among the processes of a run, and the watch over who is alive.

Every process keeps one connection to process 0, the hub; messages are bytes under a key. What the
devices exchange goes another way (`pipeline.communicator`): this carries schedules, counts, results
and signs of life, from any thread, without touching a device.

A connection that breaks, or stays silent for `timeout_s`, means a process that died or hangs. No
step can then end, so every process says which it was and ends.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import NoReturn

import msgspec

from dflop_jax.cluster.handshake import receive

_HEAD = struct.Struct("!IQ")  # bytes of the key, bytes of the value
_BEAT, _FAILED, _BYE = "", "!failed", "!bye"
_PINGS = 8
_REMEDY = "; the run ends, continue it with --resume auto"


class RunFailed(RuntimeError):
    """The run cannot go on, through no mistake of the user; the message is one line."""


@dataclass
class _Link:
    """A connection to a peer; `offset_s` is what its clock lacks to this one's."""

    process: int
    name: str
    socket: socket.socket
    offset_s: float
    heard_s: float
    sending: threading.Lock
    left: bool = False


class Peers:
    """The processes of a run, of which this is number `process`.

    With one process nothing is sent and nothing waits.

    Args:
      links: open connections: of process 0 to every other, of the others to process 0.
      timeout_s: silence after which a process counts as hung.
      on_failure: called, with a line that names the process and an exit code, instead of ending
        this one.
    """

    def __init__(
        self,
        process: int = 0,
        count: int = 1,
        links: Mapping[int, socket.socket] = MappingProxyType({}),
        *,
        timeout_s: float = 30.0,
        on_failure: Callable[[str, int], None] | None = None,
    ):
        assert set(links) == (set(range(1, count)) if process == 0 else {0}), (process, links)
        self.process, self.count = process, count
        self._timeout_s = timeout_s
        self._on_failure = on_failure or _end
        self._changed = threading.Condition()
        self._arrived: dict[tuple[int, str], list[bytes]] = {}  # in order, not taken yet
        self._run = 0
        self._abandoned: set[str] = set()
        self._closing = False
        self._failed = False
        self._told = False  # of the failure, after which nobody waits any more
        greet = self._greet_peer if process == 0 else self._greet_hub
        self._links = {p: greet(p, s) for p, s in links.items()}
        for link in self._links.values():
            threading.Thread(
                target=self._read, args=(link,), daemon=True, name=f"peer-{link.process}"
            ).start()
        if links:
            threading.Thread(target=self._beat, daemon=True, name="peers-alive").start()

    @property
    def is_hub(self) -> bool:
        return self.process == 0

    # ---- messages ----

    def new_run(self) -> None:
        """Begin another run of the same processes: what is left of the one before is forgotten."""
        with self._changed:
            self._run += 1
            self._abandoned.clear()
            mine = f"{self._run}:"
            self._arrived = {k: v for k, v in self._arrived.items() if k[1].startswith(mine)}

    def abandon(self, prefix: str) -> None:
        """Whoever waits for a key that begins so, in this process, gets RunFailed instead."""
        with self._changed:
            self._abandoned.add(prefix)
            self._changed.notify_all()

    def share(self, key: str, value: bytes | None = None) -> bytes:
        """Process 0's `value`, on every process; the others wait for it."""
        if not self.is_hub:
            return self._take(0, key)
        assert value is not None, key
        for link in self._links.values():
            self._send(link, self._full(key), value)
        return value

    def gather(self, key: str, value: bytes) -> list[bytes]:
        """Everybody's value, by process, on process 0, which waits; nothing on the others."""
        if not self.is_hub:
            self._send(self._links[0], self._full(key), value)
            return []
        return [value, *(self._take(p, key) for p in range(1, self.count))]

    def sums(self, key: str, values: Sequence[float]) -> list[float]:
        """The sums of everybody's values, on every process."""
        # Not as JSON, which has no number for what is not finite.
        gathered = self.gather(key, msgspec.msgpack.encode(list(values)))
        rows = [msgspec.msgpack.decode(v, type=list[float]) for v in gathered]
        total = [sum(column) for column in zip(*rows, strict=True)]
        shared = self.share(key, msgspec.msgpack.encode(total))
        return msgspec.msgpack.decode(shared, type=list[float])

    def first_text(self, key: str, text: str) -> str:
        """The first process's text that is not empty, on every process; "" when all are."""
        found = self.gather(key, text.encode())
        first = next((t for t in found if t), b"")
        return self.share(f"{key}/first", first).decode()

    def barrier(self, key: str) -> None:
        """Wait until every process is here."""
        self.sums(key, ())

    def offset_s(self, process: int) -> float:
        """On process 0: what to add to another's `time.perf_counter` to get this one's."""
        return 0.0 if process == self.process else self._links[process].offset_s

    # ---- the end ----

    def fail(self, why: str, exit_code: int = 1) -> None:
        """Tell every process that this one stops, and why; they end with `exit_code`."""
        with self._changed:
            self._failed = self._told = True
            self._changed.notify_all()
        message = msgspec.json.encode((why, exit_code))
        for link in self._links.values():
            with suppress(OSError):
                self._send(link, _FAILED, message)

    def close(self) -> None:
        """Leave together: after this a broken connection is no failure."""
        if self._closing or self._failed:
            return
        if self.count > 1:
            self.barrier(_BYE)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for link in self._links.values():
            with suppress(OSError):
                link.socket.shutdown(socket.SHUT_RDWR)
            link.socket.close()

    # ---- meeting ----

    def _greet_peer(self, process: int, connection: socket.socket) -> _Link:
        """Process 0: learn a peer's name, and its clock by a few round trips."""
        connection.settimeout(self._timeout_s)
        name = _receive(connection)[1].decode()
        best = (float("inf"), 0.0)
        for _ in range(_PINGS):
            sent_s = time.perf_counter()
            _transmit(connection, _BEAT, b"")
            theirs_s = float(_receive(connection)[1])
            got_s = time.perf_counter()
            best = min(best, (got_s - sent_s, (sent_s + got_s) / 2 - theirs_s))
        _transmit(connection, _BEAT, _name().encode())
        return _link(process, name, connection, best[1])

    def _greet_hub(self, process: int, connection: socket.socket) -> _Link:
        connection.settimeout(self._timeout_s)
        _transmit(connection, _BEAT, _name().encode())
        for _ in range(_PINGS):
            _receive(connection)
            _transmit(connection, _BEAT, repr(time.perf_counter()).encode())
        return _link(process, _receive(connection)[1].decode(), connection, 0.0)

    # ---- threads ----

    def _send(self, link: _Link, key: str, value: bytes) -> None:
        with link.sending:
            _transmit(link.socket, key, value)

    def _take(self, process: int, key: str) -> bytes:
        place = process, self._full(key)

        def given_up() -> bool:
            return self._told or any(key.startswith(p) for p in self._abandoned)

        with self._changed:
            self._changed.wait_for(lambda: place in self._arrived or given_up())
            if place not in self._arrived:
                raise RunFailed(f"waiting for {key!r} of process {process}: the run has ended")
            waiting = self._arrived[place]
            value = waiting.pop(0)
            if not waiting:
                del self._arrived[place]
            return value

    def _full(self, key: str) -> str:
        return f"{self._run}:{key}"

    def _read(self, link: _Link) -> None:
        """Thread: sort what arrives on a connection until it ends."""
        try:
            link.socket.settimeout(None)  # which fails too where it is closed already
            while True:
                key, value = _receive(link.socket)
                link.heard_s = time.monotonic()
                if key == _FAILED:
                    self._lost(*msgspec.json.decode(value, type=tuple[str, int]))
                elif key != _BEAT:
                    with self._changed:
                        self._arrived.setdefault((link.process, key), []).append(value)
                        link.left |= key.endswith(_BYE)
                        self._changed.notify_all()
        except OSError:
            if not link.left:
                self._lost(f"process {link.process} ({link.name}) died{_REMEDY}", told_by=link)

    def _beat(self) -> None:
        """Thread: give signs of life, and miss those of others."""
        every_s = min(1.0, self._timeout_s / 5)
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._closing or self._failed, every_s):
                    return
            for link in self._links.values():
                silent_s = time.monotonic() - link.heard_s
                if silent_s > self._timeout_s and not link.left:
                    self._lost(
                        f"process {link.process} ({link.name}) is silent for {silent_s:.0f} s"
                        f"{_REMEDY}",
                        told_by=link,
                    )
                else:
                    self._give_sign(link)

    def _give_sign(self, link: _Link) -> None:
        """A sign of life, unless it had to wait: who sends to a process that reads nothing waits
        for ever, and would miss that it is silent."""
        if link.sending.acquire(blocking=False):  # else a message is on its way there
            try:
                with suppress(OSError, ValueError):  # the reading thread says so
                    room = select.poll()
                    room.register(link.socket, select.POLLOUT)
                    if room.poll(0):
                        _transmit(link.socket, _BEAT, b"")
            finally:
                link.sending.release()

    def _lost(self, why: str, exit_code: int = 1, told_by: _Link | None = None) -> None:
        with self._changed:
            if self._closing or self._failed:
                return
            self._failed = True
        message = msgspec.json.encode((why, exit_code))
        for link in self._links.values():
            # A hung process may not read any more, so nothing waits for it.
            if link is not told_by:
                link.socket.settimeout(1.0)
                with suppress(OSError):
                    self._send(link, _FAILED, message)
        self._on_failure(why, exit_code)  # does not return in a real run
        with self._changed:
            self._told = True
            self._changed.notify_all()


def _name() -> str:
    return f"{socket.gethostname()}, pid {os.getpid()}"


def _link(process: int, name: str, connection: socket.socket, offset_s: float) -> _Link:
    return _Link(process, name, connection, offset_s, time.monotonic(), threading.Lock())


def _transmit(connection: socket.socket, key: str, value: bytes) -> None:
    name = key.encode()
    connection.sendall(_HEAD.pack(len(name), len(value)) + name + value)


def _receive(connection: socket.socket) -> tuple[str, bytes]:
    """(key, value) of the next message; OSError at the end of the connection."""
    key_bytes, value_bytes = _HEAD.unpack(receive(connection, _HEAD.size))
    return receive(connection, key_bytes).decode(), receive(connection, value_bytes)


def _end(why: str, exit_code: int) -> NoReturn:
    """End this process at once: its other threads may wait for ever for the one that is gone."""
    print(f"dflop: {why}", file=sys.stderr, flush=True)
    os._exit(exit_code)
