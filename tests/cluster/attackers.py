"""Attackers of a run's own port, with raw sockets on loopback, bounded in number and time.

They know all that a user of the same machine can see, the port and the protocol included, but not
the run's secret; only `recorded_hello` is given it, to make what was once said on the wire.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import random
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dflop_jax.cluster.addresses import free_port
from dflop_jax.cluster.handshake import GREETING, introduce
from dflop_jax.cluster.secret import SECRET_ENV, new_secret
from dflop_jax.cluster.variables import (
    COORDINATOR_ENV,
    DEVICES_ENV,
    NUM_PROCESSES_ENV,
    PROCESS_ID_ENV,
)

LOOPBACK = "127.0.0.1"
KINDS = ("random bytes", "half hello", "replayed hello", "forged hello", "slow sender")
CONNECT_S = 0.2  # at a port that answers nothing, nobody waits longer
_HELLO = b'{"index": 1, "number": 2, "versions": "1"}'


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
                if PROCESS_ID_ENV in values:
                    found[int(folder.name)] = values
    return found


def recorded_hello(secret: bytes) -> bytes:
    """What a process of the run once said to prove itself, on another connection."""
    near, far = socket.socketpair()
    with near, far:
        far.sendall(GREETING + bytes(32))
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
        if kind == "slow sender":
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


# ---- an attacked run ----


def besieged(
    train: list[str], connections: int, limit_s: float
) -> tuple[list[int], list[str], Attackers]:
    """Run a job of two processes, of which the second comes when strangers have made `connections`
    to the port where the first waits for it.

    Args:
      train: the command line of each process.

    Returns:
      Exit codes and outputs of the two, and the attackers.
    """
    job = {
        COORDINATOR_ENV: f"{LOOPBACK}:{free_port()}",
        NUM_PROCESSES_ENV: "2",
        DEVICES_ENV: "2",
        SECRET_ENV: new_secret(),
        "JAX_PLATFORMS": "cpu",
    }
    port, pipes = int(job[COORDINATOR_ENV].rpartition(":")[2]), {"stdout": subprocess.PIPE}
    command = [sys.executable, "-m", "dflop_jax.cli", *train[1:]]
    processes: list[subprocess.Popen[str]] = []

    def start() -> None:
        environment = os.environ | job | {PROCESS_ID_ENV: str(len(processes))}
        processes.append(
            subprocess.Popen(command, env=environment, text=True, stderr=subprocess.STDOUT, **pipes)
        )

    try:
        start()
        deadline = time.monotonic() + limit_s
        with attackers(job[SECRET_ENV].encode()) as strangers:
            while strangers.connected < connections:
                strangers.attack(port, KINDS)
                assert time.monotonic() < deadline
                assert processes[0].poll() is None, processes[0].communicate()[0]
            start()
            outputs = [p.communicate(timeout=limit_s)[0] for p in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert not any(job[SECRET_ENV] in output for output in outputs)
    return [p.returncode for p in processes], outputs, strangers
