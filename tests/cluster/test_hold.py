"""The connection that outlives process 0, with sockets in place of jax and its service."""

from __future__ import annotations

import socket
import threading

import pytest

from dflop_jax.cluster import hold
from dflop_jax.cluster.addresses import LOOPBACK, Address, free_port
from dflop_jax.cluster.ending import TryAgain
from dflop_jax.cluster.hold import connect, hold_open

LONG_S = 60.0  # a wait that ends long before, or the test has failed


@pytest.fixture
def ends(tmp_path):
    """What jax has of a connection, and what its service has."""
    ours, far = socket.socketpair()
    hold_open(tmp_path / "jax", lambda: ours)
    with socket.socket(socket.AF_UNIX) as near, far:
        for sock in (near, far):
            sock.settimeout(LONG_S)
        near.connect(str(tmp_path / "jax"))
        yield near, far
        near.shutdown(socket.SHUT_RDWR)
        while far.fileno() >= 0 and far.recv(1 << 16):  # to the end, which jax's end brings
            pass


def test_both_ways(ends):
    near, far = ends
    data = bytes(range(256)) * 4096
    sender = threading.Thread(target=near.sendall, args=(data,))
    sender.start()
    got = b""
    while len(got) < len(data):
        got += far.recv(1 << 16)
    sender.join()
    assert got == data
    far.sendall(b"answer")
    assert near.recv(99) == b"answer"


def test_that_the_service_is_gone_is_hidden(ends):
    near, far = ends
    near.sendall(b"1")
    assert far.recv(1) == b"1"
    far.close()
    near.settimeout(0.2)
    for _ in range(3):  # the first may be sent before the end is known
        near.sendall(b"still there?")
        with pytest.raises(TimeoutError):  # silence, and no end of file
            near.recv(1)


def test_a_service_that_starts_later_is_waited_for():
    service = Address(LOOPBACK, free_port())
    servers: list[socket.socket] = []
    late = threading.Timer(
        0.1, lambda: servers.append(socket.create_server((LOOPBACK, service.port)))
    )
    late.start()
    with connect(service) as sock:
        late.join()
        assert sock.getpeername() == servers[0].getsockname()
        assert sock.gettimeout() is None
    servers[0].close()


def test_a_service_that_never_starts(monkeypatch):
    monkeypatch.setattr(hold, "SERVICE_S", 0.1)
    with pytest.raises(TryAgain, match="but jax does not answer there"):
        connect(Address(LOOPBACK, free_port()))
