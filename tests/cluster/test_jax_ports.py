"""Ports that are closed from inside a process, with sockets of its own in place of jax's."""

from __future__ import annotations

import os
import resource
import socket
import sys

import pytest

from dflop_jax.cluster import jax_ports
from dflop_jax.cluster.addresses import LOOPBACK
from dflop_jax.cluster.jax_ports import ClosedPorts

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux closes them")


@pytest.fixture
def server():
    with socket.create_server((LOOPBACK, 0)) as made:
        made.settimeout(10.0)
        yield made


@linux
def test_sockets_that_listen_are_told_from_those_before_and_from_connections(server):
    known = jax_ports.listening_ids()
    with socket.create_server((LOOPBACK, 0)) as later:
        with socket.create_connection(later.getsockname()), socket.socket():
            (found,) = jax_ports.listening(known).values()
        with found:
            assert found.getsockname() == later.getsockname()


@linux
def test_looking_leaves_no_descriptor_behind(server):
    before = os.listdir("/proc/self/fd")
    assert len(jax_ports.listening_ids()) > 0
    assert os.listdir("/proc/self/fd") == before


@linux
def test_a_closed_port_keeps_its_connections_and_takes_no_more(server):
    address = server.getsockname()
    with socket.create_connection(address) as before, server.accept()[0] as far:
        (copy,) = (s for s in jax_ports.listening().values() if s.getsockname() == address)
        with copy:
            closed = ClosedPorts([copy])
            assert closed.dropped() == 0
            with socket.socket() as stranger:
                stranger.settimeout(0.3)
                with pytest.raises(TimeoutError):
                    stranger.connect(address)
            assert closed.dropped() >= 1
            for a, b in ((before, far), (far, before)):
                a.sendall(b"still here")
                assert b.recv(99) == b"still here"


@linux
def test_a_system_that_cannot_close_ports_says_so(caplog):
    class Socket:
        def setsockopt(self, *_):
            raise OSError(92, "Protocol not available")

    ClosedPorts([Socket()])
    assert "jax's ports stay open to strangers: Protocol not available" in caplog.text


@pytest.mark.parametrize(
    "now, most, then", [(1024, 4096, 4096), (1024, 1 << 20, 1 << 16), (1024, -1, 1 << 16)]
)
def test_descriptors(monkeypatch, now, most, then):
    set_to = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (now, most))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_to.append(limits))
    jax_ports.allow_many_descriptors()
    assert set_to == [(then, most)]


@pytest.mark.parametrize("now", [1 << 16, 1 << 18, -1])
def test_more_descriptors_than_needed_stay(monkeypatch, now):
    set_to = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (now, -1))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_to.append(limits))
    jax_ports.allow_many_descriptors()
    assert set_to == []


def test_nccl_stays_on_this_host_unless_told_otherwise(monkeypatch):
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    jax_ports.bind_nccl("10.0.0.1")
    assert "NCCL_SOCKET_IFNAME" not in jax_ports.os.environ
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    jax_ports.bind_nccl(LOOPBACK)
    assert jax_ports.os.environ["NCCL_SOCKET_IFNAME"] == "ib0"
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    jax_ports.bind_nccl(LOOPBACK)
    assert jax_ports.os.environ.pop("NCCL_SOCKET_IFNAME") == "lo"
