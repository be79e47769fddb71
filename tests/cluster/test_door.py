"""Attackers at the coordinator's port while two processes meet: raw sockets, nothing of dflop's.

What an attacker knows here: the protocol, byte for byte, everything that was ever said on the wire
in another meeting, and not the secret. Every attack is bounded in number and time.
"""

from __future__ import annotations

import hmac
import itertools
import json
import os
import random
import re
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from dflop_jax.cluster import door
from dflop_jax.cluster.addresses import LOOPBACK, Address, free_port
from dflop_jax.cluster.ending import TryAgain
from dflop_jax.cluster.rendezvous import meet

LONG_S = 60.0  # a wait that ends long before, or the test has failed
SECRET = b"the secret of these tests"
HELLO = json.dumps({"index": 1, "number": 2, "versions": "1"}).encode()
ZEROS = bytes(32)


def knock(port: int) -> socket.socket:
    """A connection to process 0, as soon as it listens."""
    deadline = time.monotonic() + LONG_S
    while True:
        try:
            return socket.create_connection((LOOPBACK, port), timeout=LONG_S)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def exactly(sock: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        part = sock.recv(n - len(data))
        if not part:
            break
        data += part
    return data


def everything(sock: socket.socket) -> bytes:
    """What the host says until it hangs up."""
    data = b""
    try:
        while part := sock.recv(4096):
            data += part
    except ConnectionError:
        pass
    return data


def message(proof: bytes, hello: bytes = HELLO, nonce: bytes = ZEROS) -> bytes:
    return nonce + struct.pack("!H", len(hello)) + hello + proof


class Meeting:
    """Two processes that meet: process 0 from the start, process 1 when told."""

    def __init__(self):
        self.port = free_port()
        self.at = Address(LOOPBACK, self.port)
        self.pool = ThreadPoolExecutor(2)
        self.host = self.pool.submit(meet, self.at, 0, 2, "1", SECRET, LONG_S)

    def complete(self) -> None:
        """Process 1 comes, and the two are linked to each other, not to somebody else."""
        other = self.pool.submit(meet, self.at, 1, 2, "1", SECRET, LONG_S).result(LONG_S)
        host = self.host.result(LONG_S)
        assert list(host.links) == [1]
        with pytest.raises(ConnectionRefusedError):  # the meeting is over
            socket.create_connection((LOOPBACK, self.port))
        near, far = other.links[0], host.links[1]
        assert near.getsockname() == far.getpeername()
        near.sendall(b"here")
        assert far.recv(99) == b"here"
        near.close()
        far.close()
        self.pool.shutdown()


@pytest.fixture
def meeting():
    return Meeting()


@pytest.fixture
def one_line(caplog):
    """The warnings of a meeting: one line, whatever came."""

    def line() -> str:
        (record,) = [r for r in caplog.records if r.name == "dflop_jax"]
        text = record.getMessage()
        assert "\n" not in text
        return text

    return line


# ---- each kind of attack ----


def test_random_bytes(meeting, one_line):
    rng = random.Random(0)
    for _ in range(50):
        with knock(meeting.port) as sock:
            assert exactly(sock, 40)[:8] == b"dflop/4\n"
            with suppress(OSError):  # it has been thrown out by then
                sock.sendall(rng.randbytes(rng.randint(1, 4000)))
                sock.shutdown(socket.SHUT_WR)
            assert everything(sock) in (b"", ZEROS)
    meeting.complete()
    assert one_line().startswith("turned away 50 connections without the run's secret (")
    assert one_line().endswith("the last from 127.0.0.1")


def test_half_hellos(meeting, one_line):
    whole = message(ZEROS)
    for n in range(len(whole)):
        with knock(meeting.port) as sock:
            sock.sendall(whole[:n])
            sock.shutdown(socket.SHUT_WR)
            assert everything(sock)[40:] == b""
    meeting.complete()
    assert f"{len(whole)} left early" in one_line()


def test_the_first_to_come_is_not_believed(meeting, one_line):
    """He claims to be process 1 before process 1 is there, and stays."""
    with knock(meeting.port) as sock:
        exactly(sock, 40)
        guess = hmac.digest(b"a guess at the secret", HELLO, "sha256")
        sock.sendall(message(guess))
        assert everything(sock) == ZEROS  # refused, and nothing learnt
        meeting.complete()
    assert "(1 another secret)" in one_line()


def test_a_forged_index(meeting, one_line):
    """A guest may not change what it said after it has proved it."""
    with knock(meeting.port) as sock:
        nonce = exactly(sock, 40)[8:]
        proof = hmac.digest(SECRET, b"dflop guest\0" + nonce + ZEROS + HELLO, "sha256")
        forged = HELLO.replace(b'"index": 1', b'"index": 7')
        sock.sendall(message(proof, forged))
        assert everything(sock) == ZEROS
    meeting.complete()
    assert "(1 another secret)" in one_line()


def test_what_the_host_says_proves_nothing_for_a_guest(meeting):
    """The host's own proof, sent back to it."""
    with knock(meeting.port) as sock:
        nonce = exactly(sock, 40)[8:]
        proof = hmac.digest(SECRET, b"dflop host\0" + nonce + ZEROS + HELLO, "sha256")
        sock.sendall(message(proof))
        assert everything(sock) == ZEROS
    meeting.complete()


@pytest.mark.parametrize("length", [1025, 4096, 65535])
def test_oversize_hellos(meeting, one_line, length):
    with knock(meeting.port) as sock:
        exactly(sock, 40)
        sock.sendall(ZEROS + struct.pack("!H", length))
        assert everything(sock) == b""  # without waiting for any of it
    meeting.complete()
    assert "(1 no hello)" in one_line()


def test_slow_senders(meeting, one_line, monkeypatch):
    monkeypatch.setattr(door, "PROVE_S", 0.5)
    slow = [knock(meeting.port) for _ in range(20)]
    whole = message(ZEROS)
    began = time.monotonic()
    ended: dict[int, float] = {}
    for k in range(30):  # a byte every 50 ms would take seconds
        for i, sock in enumerate(slow):
            try:
                sock.sendall(whole[k : k + 1])
            except OSError:
                ended.setdefault(i, time.monotonic() - began)
        if len(ended) == len(slow):
            break
        time.sleep(0.05)
    assert len(ended) == len(slow)
    meeting.complete()
    assert "(20 too slow)" in one_line()
    for sock in slow:
        sock.close()


def test_a_flood_of_connections(meeting, one_line, monkeypatch):
    """More than there is room for, all held open; a process still gets through at once."""
    held = [knock(meeting.port) for _ in range(door.MOST_STRANGERS + 100)]
    began = time.monotonic()
    meeting.complete()
    assert time.monotonic() - began < door.PROVE_S
    for sock in held:
        sock.close()
    assert f"turned away {len(held)} connections" in one_line()
    (crowded,) = re.findall(r"(\d+) too many", one_line())
    assert 100 <= int(crowded) <= 101  # one's own came when all places were taken, too


def test_a_flood_that_goes_on_while_the_processes_meet(meeting, one_line):
    done, made = threading.Event(), itertools.count()

    def flood() -> None:
        for _ in range(5000):
            if done.is_set():
                return
            next(made)
            try:
                with socket.create_connection((LOOPBACK, meeting.port), timeout=1.0) as sock:
                    sock.sendall(os.urandom(100))
            except OSError:
                time.sleep(0.001)

    knock(meeting.port).close()
    attackers = [threading.Thread(target=flood) for _ in range(4)]
    for attacker in attackers:
        attacker.start()
    try:
        meeting.complete()
    finally:
        done.set()
        for attacker in attackers:
            attacker.join()
    (turned_away,) = re.findall(r"^turned away (\d+) connections? without", one_line())
    assert 1 <= int(turned_away) <= next(made) + 1  # none of them was let in, nor counted twice


# ---- what was recorded ----


class Recorder:
    """Stands between a process and process 0, and writes down what each says."""

    def __init__(self, target: int):
        self.target, self.said = target, []
        self.listener = socket.create_server((LOOPBACK, 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        near, _ = self.listener.accept()
        far = knock(self.target)
        for source, sink in ((near, far), (far, near)):
            words: list[bytes] = []
            self.said.append(words)
            threading.Thread(target=self._copy, args=(source, sink, words), daemon=True).start()
        self.listener.close()

    def _copy(self, source: socket.socket, sink: socket.socket, words: list[bytes]) -> None:
        with source, sink:
            try:
                while part := source.recv(4096):
                    words.append(part)
                    sink.sendall(part)
            except OSError:
                return


def recorded() -> tuple[bytes, bytes]:
    """What a process really said on its link, and what it was answered."""
    first = Meeting()
    recorder = Recorder(first.port)
    through = Address(LOOPBACK, recorder.port)
    other = first.pool.submit(meet, through, 1, 2, "1", SECRET, LONG_S).result(LONG_S)
    host = first.host.result(LONG_S)
    for part in (host, other):
        for sock in part.links.values():
            sock.close()
    first.pool.shutdown()
    said, answered = (b"".join(words) for words in recorder.said)
    return said, answered


def test_replayed_hellos_and_what_the_wire_shows(one_line):
    said, answered = recorded()
    assert b'"index": 1' in said
    assert not any(s in said + answered for s in (SECRET, SECRET.hex().encode()))
    second = Meeting()
    with knock(second.port) as sock:
        sock.sendall(said)
        assert everything(sock)[40:] == ZEROS
    second.complete()
    assert "(1 another secret)" in one_line()


def test_two_meetings_ask_different_things(meeting):
    nonces = set()
    for _ in range(20):
        with knock(meeting.port) as sock:
            nonces.add(exactly(sock, 40)[8:])
    assert len(nonces) == 20
    meeting.complete()


# ---- a stranger in the place of process 0 ----


@pytest.mark.parametrize("answer", ["nothing", "zeros", "echo", "garbage"])
def test_a_false_process_0_learns_nothing_and_is_not_believed(answer):
    with socket.create_server((LOOPBACK, 0)) as server, ThreadPoolExecutor(1) as pool:
        port = server.getsockname()[1]
        guest = pool.submit(meet, Address(LOOPBACK, port), 1, 2, "1", SECRET, 2.0)
        sock, _ = server.accept()
        with sock:
            sock.settimeout(LONG_S)
            sock.sendall(b"dflop/4\n" + ZEROS)
            said = exactly(sock, 32 + 2 + len(HELLO) + 32)
            assert said[34:-32] == HELLO
            reply = {
                "nothing": b"",
                "zeros": ZEROS,
                "echo": said[-32:],
                "garbage": os.urandom(32),
            }
            sock.sendall(reply[answer])
            error = guest.exception(LONG_S)
            assert isinstance(error, ValueError | TryAgain)
            assert "another secret" in str(error) or "is not process 0" in str(error)
            assert everything(sock) == b""  # nothing more was said to it
