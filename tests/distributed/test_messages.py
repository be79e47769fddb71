"""Messages, signs of life, clocks and failures among processes: threads over a stand-in of the
coordination service, and two processes over jax's own."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dflop_jax.distributed import messages
from dflop_jax.distributed.messages import ProcessGroup
from dflop_jax.distributed.process_exit import TRANSIENT_FAILURE, RunFailed, TransientError
from tests.distributed.service import LIMIT_S, job, wait_for  # noqa: F401

SILENCE_S = 1.0


@pytest.mark.parametrize("n", [1, 2, 32])
@pytest.mark.parametrize("size", [0, 1, 10_000_000])
def test_broadcast_gives_all_the_value_of_process_0(job, n, size):
    value = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    made = job(n)
    got = made.together(lambda g: g.broadcast("key", value if g.is_primary else None, bytes))
    assert got == [value] * n
    assert made.service.messages() == []  # all are deleted


@pytest.mark.parametrize("n", [1, 2, 32])
@pytest.mark.parametrize("size", [0, 1, 100_000])
def test_gather_gives_process_0_all_values_in_order(job, n, size):
    made = job(n)
    got = made.together(lambda g: g.gather("key", bytes([g.process_index]) * size, bytes))
    assert got == [[bytes([p]) * size for p in range(n)], *([[]] * (n - 1))]
    assert made.service.messages() == []


@pytest.mark.parametrize("n", [1, 2, 32])
def test_no_process_passes_a_barrier_before_all_are_there(job, n):
    came, passed = [], []

    def run(group: ProcessGroup) -> None:
        time.sleep(0.01 * group.process_index)
        came.append(group.process_index)
        group.barrier("here")
        passed.append(len(came))

    job(n).together(run)
    assert passed == [n] * n


def test_messages_of_different_keys_come_in_any_order(job):
    hub, other = job(2).groups
    for key in "abc":
        hub.broadcast(key, key, str)
        other.gather(key, key.upper(), str)
    assert [other.broadcast(k, None, str) for k in "cab"] == ["c", "a", "b"]
    assert [hub.gather(k, "", str) for k in "bca"] == [["", "B"], ["", "C"], ["", "A"]]
    for step in range(3):
        hub.broadcast("schedule", step, int, step=step)
    assert other.broadcast("schedule", None, int, step=2) == 2  # steps may be left out
    assert not hub._call_counts.keys() & {"broadcast/schedule"}


def test_no_message_of_a_run_reaches_the_next(job):
    two = job(2)
    hub, other = two.groups
    hub.broadcast("schedule", "old", str)
    other.gather("count", "old", str)
    two.together(ProcessGroup.begin_run)
    hub.broadcast("schedule", "new", str)
    assert other.broadcast("schedule", None, str) == "new"
    other.gather("count", "new", str)
    assert hub.gather("count", "", str) == ["", "new"]
    two.together(ProcessGroup.begin_run)
    assert two.service.messages() == []


def test_a_thread_that_waits_for_an_abandoned_key_is_told(job):
    two = job(2)
    hub, other = two.groups
    with ThreadPoolExecutor(2) as pool:
        feed = pool.submit(other.broadcast, "feed/schedule", None, str, step=7)
        step = pool.submit(other.broadcast, "step", None, str, step=7)
        time.sleep(0.05)
        other.cancel_waits("feed/")
        with pytest.raises(RunFailed, match="'feed/schedule': the run has ended"):
            feed.result(LIMIT_S)
        assert not step.done()
        with pytest.raises(RunFailed):  # and from now on
            other.broadcast("feed/schedule", None, str, step=8)
        hub.broadcast("step", "loss", str, step=7)
        assert step.result(LIMIT_S) == "loss"
        two.together(ProcessGroup.begin_run)  # until another run begins
        hub.broadcast("feed/schedule", "new", str, step=0)
        assert other.broadcast("feed/schedule", None, str, step=0) == "new"
    assert two.failures == [[], []]


def test_waits_have_a_deadline(job):
    hub, other = job(2, wait_s=0.3).groups
    with pytest.raises(TransientError, match=r"process 0.* did not send 'schedule' in 0\.3 s"):
        other.broadcast("schedule", None, str)
    with pytest.raises(TransientError, match=r"process 1.* did not send 'counts' in 0\.3 s"):
        hub.gather("counts", "", str)


def test_a_service_that_is_gone_is_told_in_a_line(job, monkeypatch):
    made = job(2)

    def gone(*_: Any, **__: Any) -> None:
        raise messages.jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect\nmore")

    for call in ("key_value_set_bytes", "blocking_key_value_get_bytes"):
        monkeypatch.setattr(made.service, call, gone)
    for send in (made.groups[1].gather, made.groups[0].broadcast):
        with pytest.raises(TransientError, match=r"\(UNAVAILABLE: failed to connect\): start"):
            send("count", "", str)
    with pytest.raises(TransientError, match="cannot exchange 'plan' with process 0"):
        made.groups[1].broadcast("plan", None, str)


def test_offsets_turn_a_clock_into_process_0s_and_follow_it(job, monkeypatch):
    """With clocks that are apart, as those of hosts are, and one that then runs on."""
    monkeypatch.setattr(messages, "CLOCK_INTERVAL_S", 0.1)
    ahead_s = [1000.0 * p**2 for p in range(4)]

    def clock(p: int) -> Callable[[], float]:
        return lambda: time.perf_counter() + ahead_s[p]

    four = job(4, clock=clock)

    def await_offsets(*expected: float) -> None:
        wait_for(
            lambda: [g.clock_offset_s for g in four.groups] == pytest.approx(expected, abs=0.5)
        )

    await_offsets(0.0, -1000.0, -4000.0, -9000.0)
    ahead_s[2] += 500.0
    await_offsets(0.0, -1000.0, -4500.0, -9000.0)


def test_a_silent_process_ends_the_run(job):
    many = job(4, timeout_s=SILENCE_S)
    time.sleep(1.5 * SILENCE_S)
    assert not any(many.failures)  # signs of life are enough
    silent, hung = many.groups[1], []
    many.groups[0].on_hang = hung.append
    silent.status = lambda: time.sleep(3 * SILENCE_S) or b""
    others = [0, 2, 3]
    many.wait_for_failures(others)
    for p in others:
        ((line, code),) = many.failures[p]
        assert re.match(r"process 1 \(.*pid.*has been silent for", line)
        assert code == TRANSIENT_FAILURE
    assert len(hung) == 1  # before the end


def test_a_pause_of_all_processes_is_no_silence(job, monkeypatch):
    two = job(2, timeout_s=SILENCE_S)
    time.sleep(0.3)
    now_s = time.monotonic
    monkeypatch.setattr(messages.time, "monotonic", lambda: now_s() + 100.0)
    time.sleep(0.5)
    assert two.failures == [[], []]


@pytest.mark.parametrize("failing", [0, 2])
def test_a_failure_reaches_all_processes_and_all_waiting_threads(job, failing):
    many = job(4)
    others = [p for p in range(4) if p != failing]
    with ThreadPoolExecutor(8) as pool:
        waiting = [
            pool.submit(g.broadcast if not g.is_primary else g.gather, f"never{i}", "", str)
            for g in many.groups
            for i in range(2)
        ]
        time.sleep(0.1)
        many.groups[failing].fail("process 2 stopped: no space left on device", 2)
        many.wait_for_failures(others)
        for wait in waiting:
            assert isinstance(wait.exception(LIMIT_S), RunFailed)
    line = ("process 2 stopped: no space left on device", 2)
    assert [many.failures[p] for p in others] == [[line]] * 3
    assert many.failures[failing] == []
    many.groups[others[0]].fail("another, which comes too late")
    many.groups[failing].close()  # no more to say, and nobody to wait for


def test_a_close_of_all_is_no_failure(job):
    many = job(4, timeout_s=SILENCE_S)
    many.together(ProcessGroup.close)
    many.together(ProcessGroup.close)
    time.sleep(1.5 * SILENCE_S)
    assert not any(many.failures)


def test_one_process_closes_alone():
    assert ProcessGroup().gather("key", "value", str) == ["value"]
    ProcessGroup().wait_for_peer_loss()
    ProcessGroup().close()


def test_an_error_by_a_lost_process_is_told_as_its_loss(job):
    """The thread that computes may meet the end of a connection first."""
    made = job(2, timeout_s=SILENCE_S)
    made.groups[1].status = lambda: time.sleep(3 * SILENCE_S) or b""
    made.groups[0].wait_for_peer_loss()
    made.wait_for_failures([0])
    assert made.failures[0][0][0].startswith("process 1 ")
    made.groups[0].fail("an error of its own")
    assert len(made.failures[0]) == 1
