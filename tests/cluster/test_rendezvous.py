"""How processes meet, played by threads over real sockets."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from dflop_jax.cluster import addresses, rendezvous, tree
from dflop_jax.cluster.addresses import LOOPBACK, Address, free_port
from dflop_jax.cluster.ending import TryAgain
from dflop_jax.cluster.handshake import introduce
from dflop_jax.cluster.links import receive_message
from dflop_jax.cluster.rendezvous import Meeting, meet
from dflop_jax.cluster.tree import children_of, parent_of

LONG_S = 60.0  # a wait that ends long before, or the test has failed
SECRET = b"the secret of these tests"


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

    def start(
        index: int,
        number: int,
        versions: str = "1",
        timeout_s: float = LONG_S,
        to: Address = at,
        secret: bytes = SECRET,
        fan_out: int = 32,
    ):
        parts.append(pool.submit(meet, to, index, number, versions, secret, timeout_s, fan_out))
        return parts[-1]

    yield start
    for part in parts:
        if part.exception(LONG_S) is None:
            meeting = part.result()
            for sock in meeting.links.values():
                sock.close()


def refusal(part: Future[Meeting], kind: type[Exception] = ValueError) -> str:
    """The one line with which a part failed."""
    error = part.exception(LONG_S)
    assert isinstance(error, kind)
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
    assert {m.own_host for m in meetings} == {LOOPBACK}
    assert list(meetings[0].links) == list(range(1, number))
    for i in range(1, number):
        (near,) = meetings[i].links.values()
        far = meetings[0].links[i]  # they lead to the right ones, both ways
        near.sendall(b"from %d" % i)
        assert far.recv(9) == b"from %d" % i
        far.sendall(b"to %d" % i)
        assert near.recv(9) == b"to %d" % i
        for sock in (near, far):  # small messages do not wait
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("number, fan_out", [(7, 2), (8, 2), (5, 1)])
def test_many_meet_as_a_tree(join, number, fan_out):
    parts = [join(i, number, fan_out=fan_out) for i in range(number)]
    meetings = [part.result(LONG_S) for part in parts]
    for i, meeting in enumerate(meetings):
        above = [parent_of(i, fan_out)] if i else []
        assert sorted(meeting.links) == [*above, *children_of(i, number, fan_out)]
        for child in children_of(i, number, fan_out):  # they lead to the right ones, both ways
            near, far = meeting.links[child], meetings[child].links[i]
            near.sendall(b"from %d" % i)
            assert far.recv(9) == b"from %d" % i
            far.sendall(b"to %d" % i)
            assert near.recv(9) == b"to %d" % i
            assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_who_does_not_come_to_its_parent_is_waited_for_no_longer(monkeypatch, join):
    monkeypatch.setattr(tree, "BRANCH_S", 1.0)
    monkeypatch.setattr(tree, "introduce", lambda *args: time.sleep(1.5))
    parts = [join(i, 3, fan_out=1) for i in range(3)]
    assert "process 1 was not connected to others in 1 s" in refusal(parts[1], TryAgain)


def test_who_is_in_proves_the_secret_to_its_parent_as_well(monkeypatch, join):
    monkeypatch.setattr(tree, "BRANCH_S", 0.5)
    monkeypatch.setattr(tree, "introduce", lambda sock, secret, *more: introduce(sock, b"x", *more))
    parts = [join(i, 3, fan_out=1) for i in range(3)]
    assert "does not let process 2 in: another secret" in refusal(parts[2], TryAgain)
    assert "process 1 was not connected to others in 0.5 s" in refusal(parts[1], TryAgain)


def test_a_link_ends_with_its_process(join):
    host, other = join(0, 2), join(1, 2)
    other.result(LONG_S).links[0].close()
    assert host.result(LONG_S).links[1].recv(1) == b""


def test_by_another_name_of_this_host(join, at):
    """A coordinator that is not loopback."""
    name = Address(socket.gethostname(), at.port)
    host, other = join(0, 2, to=name), join(1, 2, to=name)
    assert host.result(LONG_S).own_host == LOOPBACK  # since nobody came from elsewhere
    assert other.result(LONG_S).own_host == LOOPBACK


@pytest.mark.parametrize(
    "host, found, interface",
    [
        ("localhost", None, "127.0.0.1"),
        ("127.0.0.1", None, "127.0.0.1"),
        ("::1", None, "::1"),
        ("node7", "127.0.0.1", ""),  # true here, not elsewhere
        ("node7", "127.0.0.2", ""),
        ("node7", "203.0.113.9", ""),  # of no interface of this host: it is translated
        ("no-such-host.invalid", OSError("not known"), ""),
    ],
)
def test_process_0_listens_where_the_others_come_from(monkeypatch, host, found, interface):
    def look_up(name, port, **named):
        if isinstance(found, OSError):
            raise found
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found, 0))]

    monkeypatch.setattr(addresses.socket, "getaddrinfo", look_up)
    assert Address(host, 29400).interface() == interface


def test_an_interface_of_its_own(monkeypatch):
    """With an address of this host that is no loopback, played by one that is."""
    monkeypatch.setattr(addresses, "is_loopback", lambda host: False)
    assert Address("127.0.0.3", 29400).interface() == "127.0.0.3"


# ---- what goes wrong ----


def test_who_is_missing_is_named_to_all(join, at):
    early, host = join(2, 4), join(0, 4, timeout_s=3.0)
    line = refusal(host, TryAgain)
    assert f"2 of 4 processes had not come to {at}: 1, 3;" in line
    assert refusal(early, TryAgain) == line


def test_many_missing_are_not_all_named(join):
    assert ": 1, 2, 3, 4, 5, 6, 7, 8, ...;" in refusal(join(0, 100, timeout_s=0.1), TryAgain)


def test_nobody_at_the_address(join, at):
    line = refusal(join(1, 2, timeout_s=0.5), TryAgain)
    assert f"process 1 did not reach process 0 at {at} within 0.5 s (Connection refused)" in line


def test_a_host_that_is_not_known(join):
    line = refusal(join(1, 2, timeout_s=0.5, to=Address("no-such-host.invalid", 80)), TryAgain)
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
        assert f"coordinator {at}: the port is in use" in refusal(join(0, 2), TryAgain)


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


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.0 400 Bad Request\r\n\r\n", b"[1]\n", b"\xff", b"dflop/1\n"]
)
def test_a_server_that_is_something_else(join, at, answer):
    with socket.create_server((at.host, at.port)) as server:
        part = join(1, 2)
        guest, _ = server.accept()
        with guest:
            guest.sendall(answer)
            assert f"{at} answers, but is not process 0 of a dflop run" in refusal(part, TryAgain)


def test_a_server_that_says_nothing(join, at, monkeypatch):
    monkeypatch.setattr(rendezvous, "ANSWER_S", 0.2)
    with socket.create_server((at.host, at.port)):
        assert "is not process 0 of a dflop run; is the port right?" in refusal(
            join(1, 2), TryAgain
        )


def test_processes_of_different_secrets(join, at):
    host = join(0, 2)
    line = refusal(join(1, 2, secret=b"a secret of others"))
    assert line == f"{at} has another secret than this process; give all processes of the run " + (
        "the same"
    )
    join(1, 2).result(LONG_S)
    assert list(host.result(LONG_S).links) == [1]


def test_a_secret_that_nobody_else_has_is_named_by_process_0_too(join):
    host = join(0, 2, timeout_s=2.0)
    refusal(join(1, 2, secret=b"a secret of others"))
    assert "turned away 1 connection without the run's secret (1 another secret)" in refusal(
        host, TryAgain
    )


def test_one_who_came_and_died_may_come_again(join, at):
    host = join(0, 3)
    hello = {"index": 2, "number": 3, "versions": "1"}
    deadline = time.monotonic() + LONG_S
    while True:
        try:
            sock = socket.create_connection((at.host, at.port))
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    with sock:
        introduce(sock, SECRET, json.dumps(hello).encode(), deadline)
        assert receive_message(sock, deadline) == ("", b"")
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
