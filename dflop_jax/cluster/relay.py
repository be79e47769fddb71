"""Keeps jax's connection to the coordination service open after process 0 has gone.

Where that connection breaks, jax aborts the process from C++ within milliseconds, with a stack
trace that names nobody. Behind this relay it sees silence instead and gives up only after its
heartbeat timeout, so that whoever watches the peers can end the run before that, saying why.
It costs about 0.05 ms a request (measured on loopback).
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from dflop_jax.cluster.rendezvous import LOOPBACK, RETRY_S, Address, send_at_once

CHUNK_BYTES = 1 << 16


class Relay:
    """Relays every connection to a local port on to `service`, until the process ends.

    Attributes:
      address: the local port.
    """

    def __init__(self, service: Address) -> None:
        self._service = service
        self._listener = socket.create_server((LOOPBACK, 0))
        self._far: list[socket.socket] = []
        self._held: list[socket.socket] = []  # open and silent: process 0 has gone
        self.address = Address(LOOPBACK, self._listener.getsockname()[1])
        _start(self._accept)

    def close(self) -> None:
        """End what is relayed; process 0 would wait for it when it leaves."""
        _hang_up(self._listener)
        for far in self._far:
            _hang_up(far)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # closed
                self._listener.close()
                return
            if self._held:  # for good: a run does not outlive its process 0
                self._held.append(near)
            else:
                _start(self._connect, near)

    def _connect(self, near: socket.socket) -> None:
        """Serve one connection of jax's; the service may still be starting."""
        while True:
            try:
                far = socket.create_connection((self._service.host, self._service.port))
                break
            except OSError:
                time.sleep(RETRY_S)
        self._far.append(far)
        for sock in (near, far):
            send_at_once(sock)
        ended = threading.Event()
        _start(self._outward, near, far, ended)
        if _copy(far, near) and not ended.is_set():
            self._held.append(near)
        far.close()

    def _outward(self, near: socket.socket, far: socket.socket, ended: threading.Event) -> None:
        if _copy(near, far):  # jax ended it
            ended.set()
            _hang_up(far)
            near.close()


def _copy(source: socket.socket, target: socket.socket) -> bool:
    """Until either side ends; whether it was the source."""
    while True:
        try:
            data = source.recv(CHUNK_BYTES)
        except OSError:
            data = b""
        if not data:
            return True
        try:
            target.sendall(data)
        except OSError:
            return False


def _hang_up(sock: socket.socket) -> None:
    """End a connection that another thread may be reading."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:  # it has ended already
        return


def _start(run: Callable[..., None], *args: object) -> None:
    threading.Thread(target=run, args=args, daemon=True).start()
