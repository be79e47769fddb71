"""Messages and signs of life among processes, played by threads over socket pairs."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dflop_jax.cluster.peers import Peers, RunFailed
from tests.cluster.conftest import LIMIT_S, SMALL_S, hang_up

SIZES = [0, 1, 1000, 1 << 20]


# ---- messages ----


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("size", SIZES)
def test_share_gives_all_the_value_of_process_0(job, n, size):
    value = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    got = job(n).together(lambda p: p.share("key", value if p.is_hub else None))
    assert got == [value] * n


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("size", SIZES)
def test_gather_gives_process_0_everybodys_values_in_order(job, n, size):
    got = job(n).together(lambda p: p.gather("key", bytes([p.process]) * size))
    assert got == [[bytes([p]) * size for p in range(n)], *([[]] * (n - 1))]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_sums_are_everybodys(job, n):
    rows = [[0.1 * p, 1e300, -p, 0.0] for p in range(n)]
    expected = [sum(column) for column in zip(*rows)]
    assert job(n).together(lambda p: p.sums("key", rows[p.process])) == [expected] * n
    assert job(n).together(lambda p: p.sums("none", [])) == [[]] * n


@pytest.mark.parametrize("n", [1, 2, 4])
def test_nobody_passes_a_barrier_before_all_are_there(job, n):
    came, passed = [], []

    def run(p: Peers) -> None:
        time.sleep(0.05 * p.process)
        came.append(p.process)
        p.barrier("here")
        passed.append(len(came))

    job(n).together(run)
    assert passed == [n] * n


def test_messages_of_different_keys_may_come_in_any_order(job):
    hub, other = job(2).peers
    for key in "abc":
        hub.share(key, key.encode())
        other.gather(key, key.upper().encode())
    assert [other.share(k) for k in "cab"] == [b"c", b"a", b"b"]
    assert [hub.gather(k, b"") for k in "bca"] == [[b"", b"B"], [b"", b"C"], [b"", b"A"]]


def test_messages_of_one_key_keep_their_order(job):
    hub, other = job(2).peers
    for value in (b"1", b"2", b"3"):
        hub.share("key", value)
    hub.share("last", b"")
    assert other.share("last") == b""  # so all of them wait to be taken
    assert [other.share("key") for _ in range(3)] == [b"1", b"2", b"3"]


def test_threads_of_a_process_use_different_keys_at_once(job):
    four = job(4)
    blob = bytes(100_000)

    def run(p: Peers) -> list[Any]:
        def talk(name: str) -> list[Any]:
            said = []
            for i in range(20):
                said.append(p.sums(f"{name}/{i}", [p.process, i]))
                said.append(p.share(f"{name}/{i}/blob", blob if p.is_hub else None) == blob)
            return said

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(talk, ("feed", "steps")))

    expected = [x for i in range(20) for x in ([6, 4 * i], True)]
    assert four.together(run) == [[expected, expected]] * 4


def test_what_is_left_of_a_run_does_not_reach_the_next(job):
    two = job(2)
    hub, other = two.peers
    hub.share("schedule", b"old")
    other.gather("count", b"old")
    hub.share("seen", b"")
    assert other.share("seen") == b""  # so the old one has come, too
    two.together(Peers.new_run)
    hub.share("schedule", b"new")
    assert other.share("schedule") == b"new"
    other.gather("count", b"new")
    assert hub.gather("count", b"") == [b"", b"new"]


def test_a_process_may_be_a_run_ahead(job):
    hub, other = job(2).peers
    hub.new_run()
    hub.share("key", b"second")
    time.sleep(0.05)
    other.new_run()
    assert other.share("key") == b"second"


def test_who_waits_for_what_is_abandoned_is_told(job):
    two = job(2)
    hub, other = two.peers
    with ThreadPoolExecutor(2) as pool:
        feed = pool.submit(other.share, "feed/schedule/7")
        step = pool.submit(other.share, "step/7")
        time.sleep(0.05)
        other.abandon("feed/")
        with pytest.raises(RunFailed, match="'feed/schedule/7': the run has ended"):
            feed.result(LIMIT_S)
        assert not step.done()
        with pytest.raises(RunFailed):  # and from now on
            other.share("feed/schedule/8")
        hub.share("step/7", b"loss")
        assert step.result(LIMIT_S) == b"loss"
        two.together(Peers.new_run)  # until another run begins
        hub.share("feed/schedule/0", b"new")
        assert other.share("feed/schedule/0") == b"new"
    assert two.failures == [[], []]


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("fan_out", [1, 2, 32])
def test_offsets_turn_a_clock_into_process_0s_and_follow_it(job, fan_out):
    """With clocks that are apart, by process, as those of hosts are, and one that then runs on."""
    ahead_s = [1000.0 * p**2 for p in range(4)]

    def clock(p: int) -> Callable[[], float]:
        return lambda: time.perf_counter() + ahead_s[p]

    four = job(4, SMALL_S, clock=clock, fan_out=fan_out)

    def offsets() -> list[float]:
        return [p.offset_s for p in four.peers]

    assert offsets() == [0.0, *(pytest.approx(-1000.0 * p**2, abs=5.0) for p in (1, 2, 3))]
    ahead_s[2] += 500.0
    deadline = time.monotonic() + LIMIT_S
    while offsets()[1:] != pytest.approx([-1000.0, -4500.0, -9000.0], abs=5.0):
        assert time.monotonic() < deadline, offsets()
        time.sleep(0.02)


# ---- failures ----


@pytest.mark.parametrize("n, dead", [(2, 0), (2, 1), (4, 0), (4, 2)])
def test_all_others_hear_of_a_process_that_dies(job, n, dead):
    many = job(n)
    others = [p for p in range(n) if p != dead]
    with ThreadPoolExecutor(n) as pool:
        # Whoever waits for a message gets an error; it never comes.
        waiting = [pool.submit(many.peers[p].barrier, "never") for p in others]
        for end in many.ends_of(dead):  # the dead say nothing
            end.hung = True
        for end in many.ends_of(dead):
            end.released.set()
            hang_up(end)
        many.wait_for_failures(others)
        for wait in waiting:
            assert isinstance(wait.exception(LIMIT_S), RunFailed)
    for p in others:
        (line,) = many.failures[p]
        assert line.startswith(f"process {dead} (")
        assert " died" in line
        assert "pid" in line


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("n, silent", [(2, 0), (2, 1), (4, 0), (4, 2)])
def test_all_others_hear_of_a_process_that_hangs(job, n, silent):
    many = job(n, timeout_s=SMALL_S)
    others = [p for p in range(n) if p != silent]
    time.sleep(1.5 * SMALL_S)
    assert not any(many.failures)  # signs of life are enough
    for end in many.ends_of(silent):
        end.hung = True
    start = time.monotonic()
    many.wait_for_failures(others)
    assert time.monotonic() - start > SMALL_S / 2
    for p in others:
        (line,) = many.failures[p]
        assert line.startswith(f"process {silent} (")
        assert "is silent for" in line


def test_a_process_that_reads_nothing_any_more_is_noticed(job):
    """A stopped one also fills the buffers; what is sent to it then waits for ever."""
    many = job(3, timeout_s=SMALL_S)
    (stopped,) = many.ends_of(1)
    stopped.hung = True
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(many.peers[0].share, "much", bytes(1 << 24))
        try:
            many.wait_for_failures([0, 2])
            assert not sending.done()  # a real process has ended by now
        finally:
            hang_up(stopped)
        assert isinstance(sending.exception(LIMIT_S), RunFailed)
    assert many.failures[0][0].startswith("process 1 (")
    assert many.failures[2] == many.failures[0]


@pytest.mark.parametrize("failing", [0, 2])
def test_a_process_that_stops_says_why(job, failing):
    many = job(4)
    others = [p for p in range(4) if p != failing]
    many.peers[failing].fail("process 2 stopped: no space left on device")
    many.wait_for_failures(others)
    assert [many.failures[p] for p in others] == [
        ["process 2 stopped: no space left on device"]
    ] * 3
    assert many.failures[failing] == []
    many.peers[failing].close()  # no more to say, and nobody to wait for


def test_who_fails_waits_for_nobody_that_reads_nothing(job):
    many = job(4)
    stuck = [end for p in (1, 2) for end in many.ends_of(p)]
    for end in stuck:
        end.hung = True
    with ThreadPoolExecutor(3) as pool:
        for key in "ab":  # one of the two threads ends in the middle of a message to process 1
            pool.submit(many.peers[0].share, key, bytes(1 << 24))
        try:
            failing = pool.submit(many.peers[0].fail, "process 0 stopped: no space left on device")
            many.wait_for_failures([3])
            failing.result(LIMIT_S)
        finally:
            for end in stuck:
                hang_up(end)
    assert many.failures[3] == ["process 0 stopped: no space left on device"]


def test_a_process_that_does_not_greet_is_named():
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(RunFailed, match=r"process 1 did not answer within 0\.2 s"):
        Peers(0, 2, {1: ours}, timeout_s=0.2)
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(RunFailed, match="process 1 died"):
        Peers(0, 2, {1: ours}, timeout_s=0.2)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_close_of_all_is_no_failure(job, n):
    many = job(n, timeout_s=SMALL_S)
    assert (
        many.together(lambda p: p.share("last", b"words" if p.is_hub else None)) == [b"words"] * n
    )
    many.together(Peers.close)
    many.together(Peers.close)
    time.sleep(1.5 * SMALL_S)
    assert not any(many.failures)


def test_an_error_by_a_lost_process_is_told_as_its_loss(job):
    """The thread that computes may meet the end of a connection first."""
    made = job(2)
    begun = time.monotonic()
    made.peers[1].notice(0.05)  # nobody is lost: it was this process's own
    assert 0.05 <= time.monotonic() - begun < LIMIT_S
    assert made.failures == [[], []]
    hang_up(made.wires[1][0])
    made.peers[1].notice(LIMIT_S)
    made.wait_for_failures([1])
    (why,) = made.failures[1]
    assert why.startswith("process 0 ")
    assert not made.peers[1].fail("an error of its own")
