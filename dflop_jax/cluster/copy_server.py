"""How an agent keeps copies for the processes of its run, over a port behind the run's secret.

Who has proved the secret asks, again and again, over one connection: a message with the name of a
question and what it is about, answered by one message. A file that is put follows its message.
"""

from __future__ import annotations

import mmap
import socket
import threading
import zlib
from collections.abc import Callable
from contextlib import suppress

import msgspec

from dflop_jax.cluster.addresses import Address, free_port
from dflop_jax.cluster.door import LOOK_S, Door, listen
from dflop_jax.cluster.ending import TryAgain
from dflop_jax.cluster.host_memory import free_bytes
from dflop_jax.cluster.links import receive_message, send_at_once, send_message
from dflop_jax.cluster.shelf import CopyName, NoRoom, Shelf

# Questions, and the two kinds of answers.
PUT, SEAL, HELD, MANIFEST, READ, KEEP_ONLY, ROOM = (
    "put", "seal", "held", "manifest", "read", "keep only", "room",
)  # fmt: skip
OK, NO = "ok", "no"
SILENT_S = 30.0  # without a byte of a file that is being put
PORTS_TRIED = 10  # free ones, each of which another process may take first


class Room(msgspec.Struct, frozen=True):
    """Bytes that an agent holds, and that its host has free beside them; None: nobody knows."""

    held: int
    free: int | None


class CopyServer:
    """Serves a shelf at a port of this host.

    Args:
      host: where others reach this host.
    """

    def __init__(self, shelf: Shelf, host: str, secret: bytes):
        self._shelf = shelf
        for _ in range(PORTS_TRIED):
            try:
                self.address = Address(host, free_port())
                self._door = Door(listen(self.address), secret)
                break
            except TryAgain:  # somebody was faster
                continue
        else:
            raise TryAgain(f"no port is free on {host}: end what holds them")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="copies", daemon=True)
        self._thread.start()
        self._answers: dict[str, Callable[[bytes], bytes]] = {
            SEAL: self._seal,
            HELD: lambda v: msgspec.msgpack.encode(shelf.held(v.decode())),
            MANIFEST: lambda v: shelf.manifest(msgspec.msgpack.decode(v, type=CopyName)),
            READ: self._read,
            KEEP_ONLY: self._keep_only,
            ROOM: lambda v: msgspec.msgpack.encode(Room(shelf.n_bytes, free_bytes())),
        }

    def close(self) -> None:
        """Let nobody in any more; who is in goes with this process."""
        self._over.set()
        self._thread.join()
        self._door.close()

    def _run(self) -> None:
        while not self._over.is_set():
            self._door.accept(10 * LOOK_S)
            for guest in self._door.guests():
                threading.Thread(target=self._serve, args=(guest.sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, suppress(OSError, msgspec.MsgspecError, KeyError):  # it has gone, or talks rot
            sock.settimeout(None)
            send_at_once(sock)
            while True:
                question, value = receive_message(sock)
                if question == PUT:
                    self._put(sock, value)
                else:
                    send_message(sock, OK, self._answers[question](value))

    def _put(self, sock: socket.socket, value: bytes) -> None:
        """Take a file in; the answer is the CRC-32 of each of its blocks."""
        form = tuple[CopyName, int, int, int]
        name, process, n_bytes, block_bytes = msgspec.msgpack.decode(value, type=form)
        self._shelf.begin(name)
        try:
            file = self._shelf.room_for(n_bytes)
        except NoRoom as e:
            return send_message(sock, NO, str(e).encode())
        send_message(sock, OK, b"")
        sock.settimeout(SILENT_S)
        crc32s = [_receive(sock, file, a, min(a + block_bytes, n_bytes))
                  for a in range(0, n_bytes, block_bytes)]  # fmt: skip
        sock.settimeout(None)
        self._shelf.put(name, process, file)
        return send_message(sock, OK, msgspec.msgpack.encode(crc32s))

    def _seal(self, value: bytes) -> bytes:
        self._shelf.seal(*msgspec.msgpack.decode(value, type=tuple[CopyName, bytes]))
        return b""

    def _keep_only(self, value: bytes) -> bytes:
        self._shelf.keep_only(*msgspec.msgpack.decode(value, type=tuple[str, CopyName | None]))
        return b""

    def _read(self, value: bytes) -> bytes:
        """Bytes of a file from an offset; fewer at its end, none where it is not here."""
        name, process, offset, n = msgspec.msgpack.decode(
            value, type=tuple[CopyName, int, int, int]
        )
        file = self._shelf.file(name, process)
        return file[offset : offset + n] if file is not None else b""


def _receive(sock: socket.socket, file: mmap.mmap, start: int, stop: int) -> int:
    """Fill a part of a file; its CRC-32."""
    with memoryview(file) as whole, whole[start:stop] as block:
        done = 0
        while done < len(block):
            with block[done:] as left:
                n = sock.recv_into(left)
            if not n:
                raise ConnectionResetError("the other end hung up")
            done += n
        return zlib.crc32(block)
