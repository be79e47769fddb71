"""The relay that carries jax's requests to its service, with sockets in place of both."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from dflop_jax.cluster.relay import Relay, serve

LONG_S = 60.0  # a wait that ends long before, or the test has failed


class Line:
    """A relay in one process, what serves it in process 0, and the service, all in one here."""

    def __init__(self, folder, with_service: bool = True):
        self.near_path, self.service_path = folder / "near", folder / "service"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.settimeout(LONG_S)
        if with_service:
            self.start_service()
        ours, self.theirs = socket.socketpair()
        self.relay = Relay(self.near_path, ours)
        serve(self.service_path, self.theirs)
        self.opened = [self.listener, ours, self.theirs]

    def start_service(self) -> None:
        self.listener.bind(str(self.service_path))
        self.listener.listen()

    def connect(self) -> tuple[socket.socket, socket.socket]:
        """What jax has, and what its service has of the same connection."""
        self.relay.wait(LONG_S)
        near = socket.socket(socket.AF_UNIX)
        near.settimeout(LONG_S)
        near.connect(str(self.near_path))
        far, _ = self.listener.accept()
        far.settimeout(LONG_S)
        self.opened += [near, far]
        return near, far

    def close(self) -> None:
        self.relay.close()
        for sock in [*self.opened, *self.relay._held]:
            sock.close()


@pytest.fixture
def line(tmp_path):
    made = Line(tmp_path)
    yield made
    made.close()


def test_both_ways(line):
    near, far = line.connect()
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


def test_that_the_service_is_gone_is_hidden(line):
    near, far = line.connect()
    near.sendall(b"1")
    assert far.recv(1) == b"1"
    far.close()
    deadline = time.monotonic() + LONG_S
    while not line.relay._held:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    near.settimeout(0.3)
    for _ in range(3):  # the first may be sent before the end is known
        near.sendall(b"still there?")
        with pytest.raises(TimeoutError):  # silence, and no end of file
            near.recv(1)


def test_what_jax_ends_has_ended(line):
    near, far = line.connect()
    near.close()
    assert far.recv(1) == b""


def test_closing_tells_the_service(line):
    near, far = line.connect()
    far.sendall(b"x")
    assert near.recv(1) == b"x"
    line.relay.close()
    assert far.recv(1) == b""


def test_there_is_one_connection_only(line):
    """Whoever comes second, be it with this user's rights, reaches nothing."""
    line.connect()
    deadline = time.monotonic() + LONG_S
    while True:
        with socket.socket(socket.AF_UNIX) as second:
            try:
                second.connect(str(line.near_path))
            except ConnectionRefusedError:
                break
        assert time.monotonic() < deadline


def test_a_service_that_starts_later_is_waited_for(tmp_path):
    line = Line(tmp_path, with_service=False)
    late = threading.Timer(0.1, line.start_service)
    late.start()
    near, far = line.connect()
    near.sendall(b"early")
    assert far.recv(5) == b"early"
    line.close()


def test_a_process_0_that_goes_before_its_service_starts(tmp_path):
    line = Line(tmp_path, with_service=False)
    line.theirs.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ValueError, match="process 0 has gone"):
        line.relay.wait(LONG_S)
    line.start_service()
    line.close()
