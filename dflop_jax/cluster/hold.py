"""Keeps jax's connection to its coordination service open after process 0 has gone.

Where that connection breaks, jax ends its process from C++ within milliseconds, in words that name
nobody, and no public option keeps it from that (jax 0.10 to 0.12: `PollForError` is not retried).
So jax connects to a socket in a folder of this process's own, and what it says is copied to the
service's port and back. After process 0 has gone it sees silence and gives up only after its
heartbeat time-out: whoever watches the peers (`peers`) has ended the process by then and said why.
No proxy is asked on the way either, which gRPC does where `http_proxy` is set.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dflop_jax.cluster.addresses import Address
from dflop_jax.cluster.ending import TryAgain
from dflop_jax.cluster.links import send_at_once
from dflop_jax.cluster.rendezvous import RETRY_S

SERVICE_S = 30.0  # longest wait for the service, which process 0 starts as soon as all have met
CHUNK_BYTES = 1 << 16  # passed on at once


def connect(service: Address) -> socket.socket:
    """A connection to the coordination service, which may start a little later.

    Raises:
      TryAgain: it does not start, or cannot be reached.
    """
    deadline = time.monotonic() + SERVICE_S
    while True:
        try:
            sock = socket.create_connection((service.host, service.port), SERVICE_S)
            break
        except OSError as e:
            if time.monotonic() > deadline:
                raise TryAgain(
                    f"process 0 came to {service}, but jax does not answer there "
                    f"({e.strerror or e}); see the log of process 0"
                ) from None
        time.sleep(RETRY_S / 10)
    send_at_once(sock)
    sock.settimeout(None)
    return sock


def hold_open(path: Path, reach: Callable[[], socket.socket]) -> None:
    """Let jax connect to `path`, once, and carry what it says through the connection that `reach`
    then makes."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    _start(_serve, listener, reach)


def _serve(listener: socket.socket, reach: Callable[[], socket.socket]) -> None:
    with listener:
        near, _ = listener.accept()
    far = reach()
    _start(_answers, far, near)
    with near, far, suppress(OSError):
        while words := near.recv(CHUNK_BYTES):
            with suppress(OSError):  # process 0 has gone: nobody hears it, jax shall not know
                far.sendall(words)
        far.shutdown(socket.SHUT_RDWR)


def _answers(far: socket.socket, near: socket.socket) -> None:
    with suppress(OSError):  # jax has ended it
        while words := far.recv(CHUNK_BYTES):
            near.sendall(words)


def _start(run: Callable[..., None], *args: object) -> None:
    threading.Thread(target=run, args=args, daemon=True).start()
