"""A connection of a run's process to an agent that keeps copies."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from dflop_jax.cluster.addresses import Address
from dflop_jax.cluster.copy_server import (
    HELD,
    KEEP_ONLY,
    MANIFEST,
    OK,
    PUT,
    READ,
    ROOM,
    SEAL,
    SILENT_S,
    Room,
)
from dflop_jax.cluster.handshake import Refused, introduce
from dflop_jax.cluster.links import receive_message, send_at_once, send_message
from dflop_jax.cluster.shelf import CopyName, Held

CONNECT_S = 5.0  # longest wait for a launcher; one that is gone costs a copy that long
ANSWER_S = 60.0  # longest wait for an answer


class CopyClient:
    """Asks the agent at an address; threads share it. Connects when it is asked first, and again
    after an error.

    Every method raises OSError where the agent is gone, does not answer in time, or says no.
    """

    def __init__(self, address: Address, secret: bytes):
        self.address, self._secret = address, secret
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None

    def __del__(self) -> None:
        self._hang_up()

    @contextmanager
    def putting(
        self, name: CopyName, process: int, n_bytes: int, block_bytes: int
    ) -> Iterator[None]:
        """Have the agent keep a process's file, which `send` and `end_put` send in here; questions
        of other threads wait. A file that is not sent to its end ends the connection."""
        with self._lock:
            self._ask(PUT, (name, process, n_bytes, block_bytes))
            try:
                yield
            except BaseException:
                self._hang_up()
                raise

    def send(self, part: memoryview) -> None:
        """Send the next part of the file that is being put."""
        sock = self._connected()
        sock.settimeout(SILENT_S)
        sock.sendall(part)

    def end_put(self, crc32s: Sequence[int]) -> None:
        """Wait until the agent has the file, whose blocks have these checksums."""
        if msgspec.msgpack.decode(self._answer(), type=list[int]) != list(crc32s):
            raise OSError(f"the file was damaged on its way to {self.address}")

    def seal(self, name: CopyName, manifest: bytes) -> None:
        """See `Shelf.seal`."""
        self._asked(SEAL, (name, manifest))

    def keep_only(self, run: str, name: CopyName | None) -> None:
        """See `Shelf.keep_only`."""
        self._asked(KEEP_ONLY, (run, name))

    def held(self, run: str) -> list[Held]:
        """See `Shelf.held`."""
        return msgspec.msgpack.decode(self._asked(HELD, run), type=list[Held])

    def manifest(self, name: CopyName) -> bytes:
        """A copy's manifest; b"" where the agent has none."""
        return self._asked(MANIFEST, name)

    def read(self, name: CopyName, process: int, offset: int, n_bytes: int) -> bytes:
        """So many bytes of a process's file; fewer at its end, none where the agent has no such."""
        return self._asked(READ, (name, process, offset, n_bytes))

    def room(self) -> Room:
        """What memory the agent has and takes."""
        return msgspec.msgpack.decode(self._asked(ROOM, None), type=Room)

    # ---- the connection ----

    def _asked(self, question: str, about: Any) -> bytes:
        with self._lock:
            return self._ask(question, about)

    def _ask(self, question: str, about: Any) -> bytes:
        value = about.encode() if isinstance(about, str) else msgspec.msgpack.encode(about)
        try:
            sock = self._connected()
            sock.settimeout(ANSWER_S)
            send_message(sock, question, value)
            return self._answer()
        except _No:
            raise
        except OSError:
            self._hang_up()
            raise

    def _answer(self) -> bytes:
        kind, value = receive_message(self._connected(), time.monotonic() + ANSWER_S)
        if kind != OK:
            raise _No(value.decode())
        return value

    def _connected(self) -> socket.socket:
        if self._sock is None:
            deadline = time.monotonic() + CONNECT_S
            sock = socket.create_connection((self.address.host, self.address.port), CONNECT_S)
            try:
                introduce(sock, self._secret, b"copies", deadline)
            except (Refused, OSError) as e:
                sock.close()
                raise OSError(f"{self.address} lets nobody in: {e}") from None
            send_at_once(sock)
            self._sock = sock
        return self._sock

    def _hang_up(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()


class _No(OSError):
    """The agent has answered, and does not do it."""
