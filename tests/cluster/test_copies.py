"""What an agent keeps of copies, asked over real sockets."""

from __future__ import annotations

import socket
import time
import zlib

import pytest

from dflop_jax.cluster import shelf as shelf_module
from dflop_jax.cluster.addresses import LOOPBACK, Address
from dflop_jax.cluster.assembly import Assembly
from dflop_jax.cluster.copy_client import CopyClient
from dflop_jax.cluster.copy_keeper import CopyKeeper
from dflop_jax.cluster.copy_server import CopyServer
from dflop_jax.cluster.decide import Order, Report
from dflop_jax.cluster.job import Place
from dflop_jax.cluster.shelf import CopyName, Held, Shelf

SECRET, BLOCK, LIMIT_S = b"the secret of these tests", 100, 15.0
CONTENT = bytes(range(256)) * 3  # seven blocks and a part


@pytest.fixture
def agent():
    """A shelf, and a client of the server that serves it."""
    shelf = Shelf()
    server = CopyServer(shelf, LOOPBACK, SECRET)
    yield shelf, CopyClient(server.address, SECRET)
    server.close()


def name(step: int, run: str = "run", start: int = 1) -> CopyName:
    return CopyName(run, start, step)


def crc32s(content: bytes) -> list[int]:
    return [zlib.crc32(content[i : i + BLOCK]) for i in range(0, len(content), BLOCK)]


def put(
    client: CopyClient,
    copy: CopyName,
    process: int = 0,
    content: bytes = CONTENT,
    told: bytes | None = b"",
) -> None:
    """Put a file whose checksums are those that are `told`; of None it is cut off by an error."""
    with client.putting(copy, process, len(content), BLOCK):
        client.send(memoryview(content[:130]))
        if told is None:
            raise ZeroDivisionError
        client.send(memoryview(content[130:]))
        client.end_put(crc32s(told or content))


def test_a_file_comes_back_to_the_byte(agent):
    _, client = agent
    put(client, name(5))
    put(client, name(5), 3, b"x")
    assert client.held("run") == [Held(name(5), False, {0: len(CONTENT), 3: 1})]
    assert client.read(name(5), 0, 0, 10_000) == CONTENT
    assert client.read(name(5), 0, 700, 40) == CONTENT[700:740]
    assert client.read(name(5), 3, 0, 40) == b"x"
    for nothing in ((name(5), 1), (name(6), 0), (name(5, start=2), 0), (name(5, "other"), 0)):
        assert client.read(*nothing, 0, 40) == b""
    assert client.manifest(name(5)) == b""
    client.seal(name(5), b"manifest")
    assert client.manifest(name(5)) == b"manifest"
    assert client.held("run")[0].sealed
    assert client.room().held == len(CONTENT) + 1


def test_the_newest_whole_copy_stays_until_the_next_is(agent):
    _, client = agent
    put(client, name(5))
    client.seal(name(5), b"5")
    put(client, name(9, "other"))
    put(client, name(10))  # never gets its manifest
    assert [h.name.step for h in client.held("run")] == [5, 10]
    put(client, name(15))
    assert [h.name.step for h in client.held("run")] == [5, 15]
    client.seal(name(15), b"15")
    assert [h.name.step for h in client.held("run")] == [15]
    assert [h.name.step for h in client.held("other")] == [9]
    client.keep_only("run", name(15))
    assert client.manifest(name(15)) == b"15"
    client.keep_only("run", None)
    assert client.held("run") == []
    assert client.room().held == len(CONTENT)  # of the other run


def test_what_does_not_fit_is_refused(agent, monkeypatch):
    shelf, client = agent
    free = shelf_module.LEAST_FREE_BYTES + len(CONTENT)
    monkeypatch.setattr(shelf_module, "free_bytes", lambda: free)
    put(client, name(5))
    with pytest.raises(OSError, match=r"for a copy, .* are free"):
        put(client, name(5), 1, CONTENT + b"x")
    assert shelf.held("run")[0].files == {0: len(CONTENT)}  # and the connection goes on


def test_what_is_cut_off_or_damaged_on_its_way_is_no_file(agent):
    shelf, client = agent
    with pytest.raises(ZeroDivisionError):
        put(client, name(5), 0, told=None)
    with pytest.raises(OSError, match="damaged on its way"):
        put(client, name(5), 1, told=CONTENT[::-1])
    assert all(h.files.keys() <= {1} for h in shelf.held("run"))


def test_strangers_and_nonsense_get_nothing(agent):
    _, client = agent
    put(client, name(5))
    with pytest.raises(OSError, match="lets nobody in: another secret"):
        CopyClient(client.address, b"another").held("run")
    stranger = socket.create_connection((LOOPBACK, client.address.port), LIMIT_S)
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    stranger.close()
    with pytest.raises(OSError, match=r"."):
        client._asked("no such question", "")
    assert client.held("run")[0].files == {0: len(CONTENT)}  # over a new connection


def test_an_agent_that_is_gone_is_an_error_at_once():
    gone = CopyClient(Address(LOOPBACK, 1), SECRET)
    begun = time.monotonic()
    with pytest.raises(OSError, match=r"."):
        gone.held("run")
    assert time.monotonic() - begun < LIMIT_S


# ---- an agent's part ----


def test_agents_learn_where_the_others_keep_copies():
    """Two agents on this host: the first says where both are, and drops what it missed."""
    listener = socket.create_server((LOOPBACK, 0))
    near = socket.create_connection(listener.getsockname())
    far = listener.accept()[0]
    keepers = [CopyKeeper(SECRET, on=True) for _ in range(2)]
    try:
        addresses = (Address(LOOPBACK, 29400),)
        keepers[0].meet(Place(0, 2, addresses), Assembly((0, 1), {1: far}))
        keepers[1].meet(Place(1, 2, addresses), Assembly((0, 1), {0: near}))
        reports = [k.told_in(Report(number=1, name="a")) for k in keepers]
        order = keepers[0].told_of(Order(start=3, after=2), reports)
        clients = [CopyClient(Address.parse(at), SECRET) for at in order.copies]
        for client in clients:
            put(client, name(5))
        keepers[0].follow(order, last=2)
        keepers[1].follow(order, last=1)  # start 2 went on without it
        assert [len(client.held("run")) for client in clients] == [1, 0]
    finally:
        for k in keepers:
            k.close()
        for sock in (near, far, listener):
            sock.close()


def test_who_starts_nothing_again_keeps_nothing():
    keeper = CopyKeeper(SECRET, on=False)
    keeper.meet(Place(), Assembly((0,), {}))
    assert keeper.told_in(Report(number=1, name="a")).copies == 0
    assert keeper.told_of(Order(), [Report(number=1, name="a")]).copies == ()
    keeper.close()
