"""Attackers of a running job, with raw sockets on loopback, bounded in number and time.

They know all that a user of the same machine can see, the job's ports and protocols included, but
not its secret; only `recorded_hello` is given it, to make what was once said on the wire.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import random
import re
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dflop_jax.cluster.handshake import introduce

LOOPBACK = "127.0.0.1"
KINDS = ("random bytes", "half hello", "replayed hello", "forged hello", "slow sender",
         "transfer packet", "sequence number")  # fmt: skip
CONNECT_S = 0.2  # at a port that answers nothing, nobody waits longer
_HELLO = b'{"index": 1, "number": 2, "versions": "1", "purpose": "link"}'


@dataclass(frozen=True)
class Port:
    """A TCP socket of the job that listens."""

    pid: int
    host: str
    port: int


# ---- what can be seen ----


def trainers(launcher: int) -> dict[int, dict[str, str]]:
    """Environments of a launcher's processes, by process id."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher:
                entries = (folder / "environ").read_bytes().decode().split("\0")
                values = dict(e.partition("=")[::2] for e in entries)
                if "DFLOP_PROCESS_ID" in values:
                    found[int(folder.name)] = values
    return found


def listening_ports(pids: Iterator[int]) -> list[Port]:
    """Every TCP socket on which one of these processes, or a descendant, listens."""
    inodes = {}
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with suppress(OSError):
            for row in Path("/proc/net", table).read_text().splitlines()[1:]:
                columns = row.split()
                if columns[3] == "0A":
                    inodes[columns[9]] = _address(columns[1], family)
    found = set()
    for pid in _descendants(set(pids)):
        with suppress(OSError):
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    inode = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(file))
                    if inode and inode[1] in inodes:
                        found.add(Port(pid, *inodes[inode[1]]))
    return sorted(found, key=lambda p: (p.pid, p.port))


def _address(text: str, family: int) -> tuple[str, int]:
    host, _, port = text.partition(":")
    words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
    return socket.inet_ntop(family, b"".join(words)), int(port, 16)


def _descendants(pids: set[int]) -> set[int]:
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(stat[1])
    found = set(pids)
    while more := {p for p, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def recorded_hello(secret: bytes) -> bytes:
    """What a process of the run once said to prove itself, on another connection."""
    near, far = socket.socketpair()
    with near, far:
        far.sendall(b"dflop/3\n" + bytes(32))
        guest = threading.Thread(target=_introduce, args=(near, secret))
        guest.start()
        said = b""
        while len(said) < 32 + 2 + len(_HELLO) + 32:
            said += far.recv(4096)
        far.close()
        guest.join()
    return said


def _introduce(near: socket.socket, secret: bytes) -> None:
    with suppress(OSError):  # nobody answers
        introduce(near, secret, _HELLO, time.monotonic() + 10.0)


# ---- attacks ----


class Attackers:
    """Makes connections of every kind to ports, and holds those of slow senders until closed."""

    def __init__(self, replayed: bytes, seed: int = 0) -> None:
        self._replayed, self._rng = replayed, random.Random(seed)
        self._held: list[socket.socket] = []
        self.connected = self.unanswered = 0

    def attack(self, port: int, kinds: tuple[str, ...]) -> None:
        """One connection of each of these kinds (they may repeat), all at the same time."""
        waiting = {}
        deadline = time.monotonic() + CONNECT_S
        with selectors.DefaultSelector() as ready:  # not select(): descriptors may be above 1,024
            for kind in kinds:
                sock = socket.socket()
                sock.setblocking(False)
                sock.connect_ex((LOOPBACK, port))
                waiting[sock] = kind
                ready.register(sock, selectors.EVENT_WRITE)
            while waiting and (left := deadline - time.monotonic()) > 0:
                for sock in (key.fileobj for key, _ in ready.select(left)):
                    ready.unregister(sock)
                    self._speak(sock, waiting.pop(sock))
        self.unanswered += len(waiting)
        for sock in waiting:
            sock.close()

    def _speak(self, sock: socket.socket, kind: str) -> None:
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.unanswered += 1
            sock.close()
            return
        self.connected += 1
        with suppress(OSError):
            sock.sendall(self._words(kind))
        if kind in ("slow sender", "sequence number"):
            self._held.append(sock)
        else:
            sock.close()

    def _words(self, kind: str) -> bytes:
        rng = self._rng
        if kind == "random bytes":
            return rng.randbytes(rng.randint(1, 4000))
        if kind == "half hello":
            return self._replayed[: rng.randrange(len(self._replayed))]
        if kind == "replayed hello":
            return self._replayed
        if kind == "forged hello":
            proof = hmac.digest(b"a guess at the secret", _HELLO, hashlib.sha256)
            return rng.randbytes(32) + struct.pack("!H", len(_HELLO)) + _HELLO + proof
        if kind == "transfer packet":  # which ends a process whose port takes it
            return bytes(8)
        if kind == "sequence number":  # with which gloo tells its connections apart
            return struct.pack("<q", rng.randrange(100))
        assert kind == "slow sender"
        return b"d"

    def close(self) -> None:
        for sock in self._held:
            sock.close()


@contextmanager
def attackers(secret: bytes, seed: int = 0) -> Iterator[Attackers]:
    """Attackers who recorded a process with this secret."""
    made = Attackers(recorded_hello(secret), seed)
    try:
        yield made
    finally:
        made.close()
