"""How processes meet, played by threads over real sockets, and the relay behind which jax waits."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from dflop_jax.cluster import rendezvous
from dflop_jax.cluster.relay import Relay
from dflop_jax.cluster.rendezvous import LOOPBACK, Address, Meeting, free_port, meet

LONG_S = 60.0  # a wait that ends long before, or the test has failed


@pytest.fixture
def at() -> Address:
    return Address(LOOPBACK, free_port())


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as threads:
        yield threads


@pytest.fixture
def join(pool, at):
    """Start a process's part in a thread; its links are closed at the end."""
    parts: list[Future[Meeting]] = []

    def start(index: int, number: int, versions: str = "1", timeout_s: float = LONG_S, to=at):
        parts.append(pool.submit(meet, to, index, number, versions, timeout_s))
        return parts[-1]

    yield start
    for part in parts:
        if part.exception(LONG_S) is None:
            for link in part.result().links.values():
                link.close()


def refusal(part: Future[Meeting]) -> str:
    """The one line with which a part failed."""
    error = part.exception(LONG_S)
    assert isinstance(error, ValueError)
    assert "\n" not in str(error)
    return str(error)


# ---- addresses ----


@pytest.mark.parametrize(
    "text, host, port",
    [
        ("node7:29400", "node7", 29400),
        (" 10.0.0.1:1 ", "10.0.0.1", 1),
        ("[::1]:65535", "::1", 65535),
        ("a-b.c.d:80", "a-b.c.d", 80),
    ],
)
def test_addresses_are_read(text, host, port):
    address = Address.parse(text)
    assert (address.host, address.port) == (host, port)
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "text",
    ["", "node", "node:", ":80", "node:port", "node:-1", "node:0", "node:65536", "::1:80", "n:8²"],
)
def test_addresses_that_are_wrong(text):
    with pytest.raises(ValueError, match="is no HOST:PORT"):
        Address.parse(text)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.3.2.1", "::1"])
def test_loopback_is_local(host):
    assert Address(host, 1).is_local


@pytest.mark.parametrize("host", ["10.0.0.1", "node7", "::2", "localhost.example.com"])
def test_what_other_hosts_can_mean_is_not_local(host):
    assert not Address(host, 1).is_local


# ---- meeting ----


@pytest.mark.parametrize("number", [2, 5])
def test_all_meet_whatever_the_order(join, number):
    order = [*range(1, number - 1), 0, number - 1]  # some before process 0, one after it
    parts = {i: join(i, number) for i in order}
    meetings = [parts[i].result(LONG_S) for i in range(number)]
    assert len({m.service for m in meetings}) == 1
    assert {m.own_host for m in meetings} == {LOOPBACK}
    assert list(meetings[0].links) == list(range(1, number))
    for i in range(1, number):
        assert list(meetings[i].links) == [0]
        meetings[i].links[0].sendall(b"%d" % i)  # the links lead to the right ones, both ways
        assert meetings[0].links[i].recv(9) == b"%d" % i
        meetings[0].links[i].sendall(b"to %d" % i)
        assert meetings[i].links[0].recv(9) == b"to %d" % i
        for link in (meetings[0].links[i], meetings[i].links[0]):  # small messages do not wait
            assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_link_ends_with_its_process(join):
    host, other = join(0, 2), join(1, 2)
    other.result(LONG_S).links[0].close()
    assert host.result(LONG_S).links[1].recv(1) == b""


def test_by_another_name_of_this_host(join, at):
    """A coordinator that is not loopback: process 0 listens on all interfaces."""
    name = Address(socket.gethostname(), at.port)
    host, other = join(0, 2, to=name), join(1, 2, to=at)
    assert host.result(LONG_S).service.port == other.result(LONG_S).service.port


# ---- what goes wrong ----


def test_who_is_missing_is_named_to_all(join, at):
    early, host = join(2, 4), join(0, 4, timeout_s=3.0)
    line = refusal(host)
    assert f"2 of 4 processes had not come to {at}: 1, 3;" in line
    assert refusal(early) == line


def test_many_missing_are_not_all_named(join):
    assert ": 1, 2, 3, 4, 5, 6, 7, 8, ...;" in refusal(join(0, 100, timeout_s=0.1))


def test_nobody_at_the_address(join, at):
    line = refusal(join(1, 2, timeout_s=0.5))
    assert f"process 1 did not reach process 0 at {at} within 0.5 s (Connection refused)" in line


def test_a_host_that_is_not_known(join):
    line = refusal(join(1, 2, timeout_s=0.5, to=Address("no-such-host.invalid", 80)))
    assert "at no-such-host.invalid:80" in line
    assert "is it the address of process 0's host" in line


def test_two_processes_of_one_number(join):
    host = join(0, 3)
    twins = [join(1, 3), join(1, 3)]
    while not any(t.done() for t in twins):
        time.sleep(0.01)
    (second,) = [t for t in twins if t.done()]
    assert "two processes say they are process 1; give each its own process_id" in refusal(second)
    assert len(join(2, 3).result(LONG_S).links) == 1  # the others can still meet
    assert list(host.result(LONG_S).links) == [1, 2]


def test_a_second_process_0(join, at):
    with socket.create_server((at.host, at.port)):
        assert f"coordinator {at}: the port is in use" in refusal(join(0, 2))


def test_a_port_that_is_not_allowed(join, monkeypatch):
    def deny(*args, **named):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(rendezvous.socket, "create_server", deny)
    assert "process 0 cannot listen there: Permission denied" in refusal(join(0, 2))


def test_different_numbers_of_processes(join):
    host = join(0, 2)
    line = refusal(join(2, 3))
    assert "process 2 says the number of processes is 3, process 0 says 2; start all alike" in line
    assert join(1, 2).exception(LONG_S) is None  # process 0 still waits for the right one
    assert list(host.result(LONG_S).links) == [1]


def test_different_versions(join):
    host = join(0, 2, versions="jax 1")
    line = refusal(join(1, 2, versions="jax 2"))
    assert "process 1 says it runs jax 2, process 0 says jax 1" in line
    assert join(1, 2, versions="jax 1").exception(LONG_S) is None
    assert list(host.result(LONG_S).links) == [1]


@pytest.mark.parametrize("answer", [b"HTTP/1.0 400 Bad Request\r\n\r\n", b"[1]\n", b"\xff\n"])
def test_a_server_that_is_something_else(join, at, answer):
    with socket.create_server((at.host, at.port)) as server:
        part = join(1, 2)
        guest, _ = server.accept()
        with guest:
            guest.sendall(answer)
            assert f"{at} answers, but is not process 0 of a dflop run" in refusal(part)


def test_a_server_that_says_nothing(join, at, monkeypatch):
    monkeypatch.setattr(rendezvous, "ANSWER_S", 0.2)
    with socket.create_server((at.host, at.port)):
        assert "is not process 0 of a dflop run; is the port right?" in refusal(join(1, 2))


def guest(at: Address) -> socket.socket:
    """A connection to process 0, as soon as it listens."""
    deadline = time.monotonic() + LONG_S
    while True:
        try:
            return socket.create_connection((at.host, at.port))
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_strangers_do_not_disturb(join, at):
    """A port scan, a health check, half a sentence, binary noise, an endless line."""
    host = join(0, 2)
    noises = [b"", b"GET / HTTP/1.0\r\n\r\n", b'{"dflop": "hel', b"\xff\x00\n", b"x" * 20000]
    guests = [guest(at) for _ in noises]
    for sock, noise in zip(guests, noises):
        sock.sendall(noise)
    assert list(join(1, 2).result(LONG_S).links) == [0]
    assert list(host.result(LONG_S).links) == [1]
    for sock in guests:
        sock.close()


def test_one_who_came_and_died_may_come_again(join, at):
    host = join(0, 3)
    hello = {"dflop": "hello", "index": 2, "number": 3, "versions": "1"}
    with guest(at) as sock, sock.makefile() as answers:
        sock.sendall(json.dumps(hello).encode() + b"\n")
        assert json.loads(answers.readline()) == {"dflop": "welcome"}
    again, first = join(2, 3), join(1, 3)
    assert list(host.result(LONG_S).links) == [1, 2]
    assert list(again.result(LONG_S).links) == list(first.result(LONG_S).links) == [0]


def test_a_process_0_that_dies_is_waited_for(join, at):
    with socket.create_server((at.host, at.port)) as server:
        part = join(1, 2)
        guest, _ = server.accept()
        guest.close()  # before it has said anything
    host = join(0, 2)
    assert list(part.result(LONG_S).links) == [0]
    assert list(host.result(LONG_S).links) == [1]


# ---- the relay ----


@pytest.fixture
def service():
    """A server on loopback and its address."""
    with socket.create_server((LOOPBACK, 0)) as server:
        server.settimeout(LONG_S)
        yield server, Address(LOOPBACK, server.getsockname()[1])


def connect(relay: Relay) -> socket.socket:
    return socket.create_connection((relay.address.host, relay.address.port), LONG_S)


def test_the_relay_passes_both_ways(service):
    server, address = service
    relay = Relay(address)
    data = bytes(range(256)) * 4096
    with connect(relay) as near:
        far, _ = server.accept()
        with far:
            sender = threading.Thread(target=near.sendall, args=(data,))
            sender.start()
            got = b""
            while len(got) < len(data):
                got += far.recv(1 << 16)
            sender.join()
            assert got == data
            far.sendall(b"answer")
            assert near.recv(99) == b"answer"
    relay.close()


def test_the_relay_hides_that_the_service_is_gone(service):
    server, address = service
    relay = Relay(address)
    with connect(relay) as near:
        far, _ = server.accept()
        near.sendall(b"1")
        assert far.recv(1) == b"1"
        far.close()
        server.close()
        while not relay._held:
            time.sleep(0.01)
        near.settimeout(0.3)
        for _ in range(3):  # the first may be sent before the end is known
            near.sendall(b"still there?")
            with pytest.raises(TimeoutError):  # silence, and no end of file
                near.recv(1)
        with connect(relay) as again:
            again.settimeout(0.3)
            with pytest.raises(TimeoutError):
                again.recv(1)
    relay.close()
    for sock in relay._held:
        sock.close()


def test_the_relay_ends_what_jax_ends(service):
    server, address = service
    relay = Relay(address)
    with connect(relay):
        far, _ = server.accept()
    with far:
        far.settimeout(LONG_S)
        assert far.recv(1) == b""
    with connect(relay):  # and serves the next
        far, _ = server.accept()
        far.close()
    relay.close()


def test_closing_the_relay_tells_the_service(service):
    server, address = service
    relay = Relay(address)
    with connect(relay) as near:
        far, _ = server.accept()
        with far:
            far.settimeout(LONG_S)
            far.sendall(b"x")
            assert near.recv(1) == b"x"  # so the relay has both ends now
            relay.close()
            assert far.recv(1) == b""
    for sock in relay._held:
        sock.close()


def test_the_relay_waits_for_a_service_that_starts_later():
    address = Address(LOOPBACK, free_port())
    relay = Relay(address)
    with connect(relay) as near:
        near.sendall(b"early")
        with socket.create_server((address.host, address.port)) as server:
            server.settimeout(LONG_S)
            far, _ = server.accept()
            with far:
                assert far.recv(5) == b"early"
    relay.close()
