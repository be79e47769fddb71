"""A process that is slowed is named, with its factor; waiting, hiccups and bad predictions are not
taken for slowness."""

import numpy as np
import pytest

from dflop_jax.pipeline.watcher import Span, own_seconds
from dflop_jax.records import BACKWARD, FORWARD, REDUCE, Task
from dflop_jax.train.stragglers import Stragglers, slowness

FACTOR = 2.0


def tasks(segment: str, n: int = 4) -> list[Task]:
    return [Task(segment, g, d) for g in range(n) for d in (FORWARD, BACKWARD)]


def alone_s(task: Task) -> float:
    return 0.02 if task.direction == BACKWARD else 0.01


def step(rng, segments, slow=None, predicted=1.0):
    """Made times of the processes: scatter, every eighth task waits, the slow one takes longer."""
    # Data ranks wait alike for what both are sent.
    wait_s = 0.05 if len(set(segments)) > 1 else 0.002
    times = []
    for p, segment in enumerate(segments):
        own = {}
        for task in tasks(segment):
            took = alone_s(task) * predicted * rng.lognormal(0, 0.03)
            took *= FACTOR if p == slow else 1.0
            own[task] = took + (wait_s if rng.random() < 0.125 else 0.0)
        times.append(own)
    return times


# Data ranks of one program, by a profile that is right or far off; and encoder against LLM.
@pytest.mark.parametrize(
    "segments, predicted",
    [(("b", "b"), 1.0), (("b", "b"), 3.0), (("b", "b"), 0.3), (("a", "b"), 1.0), (("b",) * 4, 0.5)],
)
def test_a_slowed_process_is_named_once_and_forgiven(segments, predicted):
    rng, log = np.random.default_rng(0), []
    watch = Stragglers(log.append)
    for k in range(45):
        slow = 1 if 10 <= k < 25 else None
        watch.after_step(k, slowness(step(rng, segments, slow, predicted), alone_s))
        if k == 9:
            assert not log
        if k == 24:
            assert watch.factors["1"] == pytest.approx(FACTOR, rel=0.15)
            assert watch.factors["0"] < 1.1
            assert len(log) == 1
            assert "process 1 takes " in log[0]
            assert "--resume auto" in log[0]
    assert len(log) == 2
    assert "process 1 is no longer slow" in log[1]
    assert watch.factors["1"] < 1.1


def test_a_hiccup_and_a_bad_prediction_name_nobody():
    rng, log = np.random.default_rng(1), []
    watch = Stragglers(log.append)
    for k in range(20):
        times = step(rng, ("a", "b"), predicted=2.0, slow=1 if k == 8 else None)
        watch.after_step(k, slowness(times, alone_s))
    assert not log
    # Nothing to tell by: no other process, no times, no prices.
    assert slowness([step(rng, ("a",))[0]], alone_s) == {}
    assert slowness([{}, {}], alone_s) == {}
    assert slowness(step(rng, ("a", "b")), lambda task: 0.0) == {}


def spans(*seen):
    """Of tasks that exchange nothing: (place, dispatched, ended) of each."""
    return [Span(place, begun, 0.0, end, end) for place, begun, end in seen]


def test_ranks_that_exchange_are_told_apart_by_what_they_compute():
    """Encoder and LLM on both processes, the second twice as slow: features and gradients are there
    when it has sent them, for both."""
    f, b = ([Task("a", g, d) for g in range(2)] for d in (FORWARD, BACKWARD))
    llm = [Task("b", g, d) for g in range(2) for d in (FORWARD, BACKWARD)]
    order = [f[0], f[1], llm[0], llm[1], llm[2], llm[3], b[0], b[1], Task("b", -1, REDUCE)]
    waits_for = {f[0]: (), f[1]: (), b[0]: (llm[1],), b[1]: (llm[3],), order[-1]: tuple(llm)}
    waits_for |= {llm[0]: (f[0],), llm[1]: (llm[0],), llm[2]: (f[1],), llm[3]: (llm[2],)}
    parts = [[], []]
    now = [0.0, 0.0]
    for i, task in enumerate(order):
        received = max(now) if task in b else 0.0
        took = 4.0 if task.direction == REDUCE else 1.0 + (task.direction == BACKWARD)
        begun = list(now)
        now = [max(s, received) + k * took for s, k in zip(now, (1, FACTOR), strict=True)]
        meets = task in f or task.direction == REDUCE
        for p, part in enumerate(parts):
            end = max(now) if meets else now[p]
            part.append(Span(i, begun[p], received, now[p], end))
        if meets:
            now = [max(now)] * 2
    quick, slow = own_seconds(order, parts, {"a": 0, "b": 0}, waits_for)
    assert quick == {t: 1.0 + (t.direction == BACKWARD) for t in order[1:-1]}
    assert slow == {t: FACTOR * s for t, s in quick.items()}
    assert slowness([quick, slow], alone_s) == {0: 1 / FACTOR, 1: FACTOR}


def test_times_of_a_process_are_its_own():
    """Two processes run forward, then backward of the same groups; the second is slower."""
    order = [Task("b", g, d) for d in (FORWARD, BACKWARD) for g in range(2)]
    waits_for = {
        t: (Task("b", t.group, FORWARD),) if t.direction == BACKWARD else () for t in order
    }
    quick = spans((0, 0.0, 1.0), (1, 0.0, 2.0), (2, 0.0, 4.0), (3, 0.0, 6.0))
    late = spans((0, 0.0, 2.0), (1, 0.0, 4.0), (2, 0.0, 8.0), (3, 9.0, 13.0))
    found = own_seconds(order, [quick, late], {"b": 0}, waits_for)
    # The first task of a resource may have waited; what was dispatched late began late.
    assert found[0] == {order[1]: 1.0, order[2]: 2.0, order[3]: 2.0}
    assert found[1] == {order[1]: 2.0, order[2]: 4.0, order[3]: 4.0}
    # A task of another process makes the input: the time until it is there is no work.
    chain = [Task("a", 0, FORWARD), Task("b", 1, FORWARD), Task("b", 0, FORWARD)]
    waits = {chain[0]: (), chain[1]: (), chain[2]: (chain[0],)}
    parts = [spans((0, 0.0, 5.0)), spans((1, 0.0, 1.0), (2, 0.0, 6.0))]
    assert own_seconds(chain, parts, {"a": 0, "b": 1}, waits) == ({}, {chain[2]: 1.0})
