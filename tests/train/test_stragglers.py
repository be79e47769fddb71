"""A process that is slowed is named, with its factor; waiting, hiccups and bad predictions are not
taken for slowness."""

from statistics import median

import numpy as np
import pytest

from dflop_jax.pipeline.task_times import Spans, TaskOrder, TaskTimes, gathered, own_seconds
from dflop_jax.records import BACKWARD, FORWARD, REDUCE, Task
from dflop_jax.train.stragglers import Stragglers, medians_of_others, slowness

FACTOR = 2.0


def tasks(segment: str, n: int = 4) -> list[Task]:
    return [Task(segment, g, d) for g in range(n) for d in (FORWARD, BACKWARD)]


def alone_s(task: Task) -> float:
    return 0.02 if task.direction == BACKWARD else 0.01


def alike(times, alone_s=alone_s):
    """Seconds of tasks by process, with those that ran the same tasks side by side, and those of
    the tasks alone."""
    members = {}
    for p, own in enumerate(times):
        members.setdefault(tuple(own), []).append(p)
    place = {task: i for i, task in enumerate(dict.fromkeys(t for own in times for t in own))}
    groups = [
        TaskTimes(
            tuple(ps),
            np.array([place[t] for t in tasks], int),
            np.array([[times[p][t] for t in tasks] for p in ps]),
        )
        for tasks, ps in members.items()
    ]
    return groups, np.array([alone_s(t) for t in place])


def by_process(groups, order):
    """The reverse."""
    rows = {
        p: dict(zip([order[i] for i in g.places], row.tolist(), strict=True))
        for g in groups
        for p, row in zip(g.processes, g.times, strict=True)
    }
    return [rows[p] for p in sorted(rows)]


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
        watch.after_step(k, slowness(*alike(step(rng, segments, slow, predicted))), 2.0)
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


def test_of_short_steps_a_process_is_named_once_it_stays_slow():
    log: list[str] = []
    watch = Stragglers(log.append)
    for k in range(1000):  # 25 slow steps of each 50, and then all
        is_slow = k % 50 < 25 or k >= 500
        watch.after_step(k, {0: 1.0, 1: 2.0 if is_slow else 1.0}, 0.04)
        assert not log or k > 500 + 2.0 / 0.04
    assert len(log) == 1
    assert log[0].startswith("step 55")
    assert "process 1 takes 2.0 times" in log[0]


def test_a_hiccup_and_a_bad_prediction_name_nobody():
    rng, log = np.random.default_rng(1), []
    watch = Stragglers(log.append)
    for k in range(20):
        times = step(rng, ("a", "b"), predicted=2.0, slow=1 if k == 8 else None)
        watch.after_step(k, slowness(*alike(times)), 2.0)
    assert not log
    # Nothing to tell by: no other process, no times, no prices.
    assert slowness(*alike([step(rng, ("a",))[0]])) == {}
    assert slowness(*alike([{}, {}])) == {}
    assert slowness(*alike(step(rng, ("a", "b")), lambda task: 0.0)) == {}


def spans(*seen):
    """Of tasks that exchange nothing: (place, dispatched, ended) of each."""
    return {place: (begun, 0.0, end, end) for place, begun, end in seen}


def own_by_process(order, parts, resource_of, waits_for):
    seen = gathered([Spans.of(part) for part in parts])
    return by_process(own_seconds(seen, TaskOrder.of(order, waits_for, resource_of)), order)


def test_ranks_that_exchange_are_told_apart_by_what_they_compute():
    """Encoder and LLM on both processes, the second twice as slow: features and gradients are there
    when it has sent them, for both."""
    f, b = ([Task("a", g, d) for g in range(2)] for d in (FORWARD, BACKWARD))
    llm = [Task("b", g, d) for g in range(2) for d in (FORWARD, BACKWARD)]
    order = [f[0], f[1], llm[0], llm[1], llm[2], llm[3], b[0], b[1], Task("b", -1, REDUCE)]
    waits_for = {f[0]: (), f[1]: (), b[0]: (llm[1],), b[1]: (llm[3],), order[-1]: tuple(llm)}
    waits_for |= {llm[0]: (f[0],), llm[1]: (llm[0],), llm[2]: (f[1],), llm[3]: (llm[2],)}
    parts = [{}, {}]
    now = [0.0, 0.0]
    for i, task in enumerate(order):
        received = max(now) if task in b else 0.0
        took = 4.0 if task.direction == REDUCE else 1.0 + (task.direction == BACKWARD)
        begun = list(now)
        now = [max(s, received) + k * took for s, k in zip(now, (1, FACTOR), strict=True)]
        meets = task in f or task.direction == REDUCE
        for p, part in enumerate(parts):
            end = max(now) if meets else now[p]
            part[i] = begun[p], received, now[p], end
        if meets:
            now = [max(now)] * 2
    quick, slow = own_by_process(order, parts, {"a": 0, "b": 0}, waits_for)
    assert quick == {t: 1.0 + (t.direction == BACKWARD) for t in order[1:-1]}
    assert slow == {t: FACTOR * s for t, s in quick.items()}
    assert slowness(*alike([quick, slow])) == {0: 1 / FACTOR, 1: FACTOR}


def test_times_of_a_process_are_its_own():
    """Two processes run forward, then backward of the same groups; the second is slower."""
    order = [Task("b", g, d) for d in (FORWARD, BACKWARD) for g in range(2)]
    waits_for = {
        t: (Task("b", t.group, FORWARD),) if t.direction == BACKWARD else () for t in order
    }
    quick = spans((0, 0.0, 1.0), (1, 0.0, 2.0), (2, 0.0, 4.0), (3, 0.0, 6.0))
    late = spans((0, 0.0, 2.0), (1, 0.0, 4.0), (2, 0.0, 8.0), (3, 9.0, 13.0))
    found = own_by_process(order, [quick, late], {"b": 0}, waits_for)
    # The first task of a resource may have waited; what was dispatched late began late.
    assert found[0] == {order[1]: 1.0, order[2]: 2.0, order[3]: 2.0}
    assert found[1] == {order[1]: 2.0, order[2]: 4.0, order[3]: 4.0}
    # A task of another process makes the input: the time until it is there is no work.
    chain = [Task("a", 0, FORWARD), Task("b", 1, FORWARD), Task("b", 0, FORWARD)]
    waits = {chain[0]: (), chain[1]: (), chain[2]: (chain[0],)}
    parts = [spans((0, 0.0, 5.0)), spans((1, 0.0, 1.0), (2, 0.0, 6.0))]
    assert own_by_process(chain, parts, {"a": 0, "b": 1}, waits) == [{}, {chain[2]: 1.0}]


# ---- the same by the definitions, process by process and task by task ----


def own_seconds_by_definition(order, parts, resource_of, waits_for):
    last_end = {}
    for part in parts:
        for place, (*_, end) in part.items():
            last_end[order[place]] = max(end, last_end.get(order[place], end))
    for part in parts:
        own_end = {order[place]: end for place, (*_, end) in part.items()}
        took, free_s = {}, {}
        for place, (dispatched, received, computed, end) in part.items():
            task, resource = order[place], resource_of[order[place].segment]
            if resource in free_s and task.direction in (FORWARD, BACKWARD):
                inputs = [own_end.get(t, last_end[t]) for t in waits_for[task]]
                start = max(dispatched, received, free_s[resource], *inputs)
                took[task] = max(computed - start, 0.0)
            free_s[resource] = end
        yield took


def slowness_by_definition(times, alone_s):
    by_price = {}
    for p, own in enumerate(times):
        ratios = sorted(s / alone_s(t) for t, s in own.items() if alone_s(t) > 0)
        if ratios and ratios[len(ratios) // 4]:
            by_price[p] = ratios[len(ratios) // 4]
    slow = {}
    for p, own in enumerate(times):
        rest = {}
        for t in own:
            others = [other[t] for q, other in enumerate(times) if q != p and t in other]
            if others:
                rest[t] = median(others)
        others = [ratio for q, ratio in by_price.items() if q != p]
        if sum(rest.values()) > 0:
            slow[p] = sum(own[t] for t in rest) / sum(rest.values())
        elif p in by_price and others:
            slow[p] = min(by_price[p], by_price[p] / median(others))
    return slow


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 8, 9])
def test_the_median_of_others_is_that_without_one(n):
    values = np.random.default_rng(n).integers(0, 4, (50, n)).astype(float)  # with ties
    for row, got in zip(values.tolist(), medians_of_others(values).tolist(), strict=True):
        rest = [row[:i] + row[i + 1 :] for i in range(n)]
        assert got == [median(r) if r else pytest.approx(np.nan, nan_ok=True) for r in rest]


@pytest.mark.parametrize("seed", range(12))
def test_many_processes_are_judged_as_one_by_one(seed):
    """Processes that hold some of four segments, two of which share a resource: from none to nine,
    in groups of unequal size; some tasks without a price, some that take no time."""
    rng = np.random.default_rng(seed)
    resource_of = {"a": 0, "b": 1, "c": 1, "d": 2}
    order = [Task(s, g, d) for g in range(3) for s in "abcd" for d in (FORWARD, BACKWARD)]
    order += [Task(s, -1, REDUCE) for s in "abcd"]
    waits_for = {t: [] for t in order}
    for i, task in enumerate(order[1:], 1):
        waits_for[task] = [order[k] for k in {*rng.integers(i, size=rng.integers(4)).tolist()}]
    parts = []
    for _ in range(seed % 10):
        held = {s for s in "abcd" if rng.random() < 0.6}
        mine = [i for i, task in enumerate(order) if task.segment in held]
        moments = np.sort(rng.integers(0, 40, (len(mine), 4)) / 8, axis=1)
        parts.append(dict(zip(mine, map(tuple, moments.tolist()), strict=True)))
    ran = {order[i] for part in parts for i in part}
    waits_for = {t: [d for d in waits_for[t] if d in ran] for t in order}
    expected = [*own_seconds_by_definition(order, parts, resource_of, waits_for)]
    assert own_by_process(order, parts, resource_of, waits_for) == expected
    price_s = {t: float(rng.integers(0, 3)) for t in order}
    got = slowness(*alike(expected, price_s.__getitem__))
    assert got == pytest.approx(slowness_by_definition(expected, price_s.__getitem__), rel=1e-12)


def test_clocks_are_made_equal():
    parts = [spans((0, 1.0, 2.0), (1, 1.0, 3.0)), spans((0, 11.0, 13.0), (1, 11.0, 14.0))]
    (seen,) = gathered([Spans.of(p, o) for p, o in zip(parts, (0.0, -10.0), strict=True)])
    assert (seen.processes, seen.places.tolist()) == ((0, 1), [0, 1])
    assert seen.times[:, 3].tolist() == [[2.0, 3.0], [3.0, 4.0]]


def test_a_row_of_metrics_names_the_slowest_only():
    watch = Stragglers([].append)
    watch.after_step(0, {p: 1.0 + p / 1000 for p in range(1000)}, 2.0)
    assert list(watch.factors) == [str(p) for p in range(968, 1000)]
