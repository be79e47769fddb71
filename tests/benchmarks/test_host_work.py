"""`benchmarks/host_work.py`: whose seconds are whose."""

import sys
import threading
from types import SimpleNamespace

import pytest

from .scripts import module, refusal

host = module("host_work")


def test_what_a_call_spends_in_another_part_is_that_parts(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(host.time, "thread_time", lambda: clock[0])
    owner = SimpleNamespace()

    def send(seconds):
        clock[0] += seconds

    def step(*sends):
        clock[0] += 1.0
        for seconds in sends:
            owner.send(seconds)
        if not sends:
            raise KeyError

    owner.send, owner.step = send, step
    monkeypatch.setattr(host, "FUNCTIONS", (("t", owner, "send"), ("d", owner, "step")))
    main = host.MainThread()
    with main.measured():
        owner.step(2.0, 3.0)
        owner.send(4.0)
        with pytest.raises(KeyError):
            owner.step()
    assert main.seconds == {"d": 2.0, "t": 9.0}
    assert (owner.send, owner.step) == (send, step)


def test_every_function_that_is_measured_is_there():
    main = host.MainThread()
    with main.measured():
        assert all(hasattr(getattr(o, name), "__wrapped__") for _, o, name in host.FUNCTIONS)
    assert not any(hasattr(getattr(o, name), "__wrapped__") for _, o, name in host.FUNCTIONS)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_threads_are_told_by_their_names():
    go, done = threading.Event(), threading.Event()

    def work():
        sum(range(200_000))
        done.set()
        go.wait(60)

    thread = threading.Thread(target=work, name="dflop-decode_0")
    before = host.thread_seconds()
    thread.start()
    assert done.wait(60)
    after = host.thread_seconds()
    go.set()
    thread.join()
    assert after["decode"] > before["decode"] == 0
    assert after["main"] >= before["main"] > 0
    assert host.part_of("schedule-worker") == host.SCHEDULE


def test_a_run_of_warm_up_alone_is_refused():
    assert "must be above 6" in refusal("host_work", "--steps", 6)
