"""Orders of a step's tasks: their evaluator and bound against the event simulator, the search
against every order there is."""

from dataclasses import replace

import numpy as np
import pytest

from dflop_jax.records import BACKWARD, FORWARD
from dflop_jax.schedule.balance_problem import Budget
from dflop_jax.schedule.order_search import (
    order_bound,
    order_problem,
    search_order,
    with_searched_order,
)
from dflop_jax.simulate.numbered_tasks import (
    backward_list_schedule,
    list_schedule,
    peak_in_flight,
    start_ticks,
)
from dflop_jax.simulate.steps import simulate_step, with_list_order
from dflop_jax.simulate.task_graph import in_flight_limit, step_graph
from dflop_jax.simulate.task_order import check_order, peak_groups_in_flight
from tests.simulate.cases import ONE, TWO, batch, chain, graph, names, prices, random_case


def least_makespan(problem):
    """Ticks of the fastest order within the limits of groups in flight. Orders are extended task by
    task; of two of the same tasks, one is dropped if nothing is free or arrives earlier after it.
    A state: when resources and links are free and when tasks' inputs are there."""
    left_out = _idle_ends(problem)
    start = (0.0,) * (problem.n_resources + problem.n_links + problem.n_tasks)
    layer = {0: [start]}  # set of tasks, as bits -> states after it
    for _ in range(problem.n_tasks - left_out.bit_count()):
        following = {}
        for done, states in layer.items():
            for t in _possible(problem, done | left_out):
                front = following.setdefault(done | 1 << t, [])
                for state in states:
                    after = _after(problem, state, t)
                    if not any(all(a <= b for a, b in zip(o, after)) for o in front):
                        front[:] = [o for o in front if any(b > a for a, b in zip(o, after))]
                        front.append(after)
        layer = following
    (final,) = layer.values()
    return min(max(state[: problem.n_resources], default=0.0) for state in final)


def _idle_ends(problem):
    """Tasks, as bits, that take no time and that only such tasks wait for: they may run last."""
    idle = 0
    for t in reversed(range(problem.n_tasks)):
        followed = any(not idle >> reader & 1 for reader, _, _ in problem.successors[t])
        if not problem.ticks[t] and not followed and not problem.live_change[t]:
            idle |= 1 << t
    return idle


def _possible(problem, done):
    """Tasks that may run next, after the set `done`."""
    waits = list(problem.n_inputs)
    kept = [0] * len(problem.max_live)
    for t in range(problem.n_tasks):
        if done >> t & 1:
            kept[problem.segment[t]] += problem.live_change[t]
            for reader, _, _ in problem.successors[t]:
                waits[reader] -= 1
    for t in range(problem.n_tasks):
        full = (
            problem.live_change[t] > 0
            and kept[problem.segment[t]] >= problem.max_live[problem.segment[t]]
        )
        if not done >> t & 1 and not waits[t] and not full:
            yield t


def _after(problem, state, t):
    n_links, base = problem.n_resources, problem.n_resources + problem.n_links
    times = list(state)
    end = max(times[problem.resource[t]], times[base + t]) + problem.ticks[t]
    times[problem.resource[t]], times[base + t] = end, 0.0
    for reader, link, send_s in problem.successors[t]:
        arrives = end
        if link >= 0:
            arrives = times[n_links + link] = max(times[n_links + link], end) + send_s
        times[base + reader] = max(times[base + reader], arrives)
    return tuple(times)


def numbered(plan, schedule, priced, trainable):
    """(ordered schedule, graph, problem, the order in numbers)."""
    ordered = with_list_order(plan, schedule, priced, trainable)
    tasks = step_graph(plan.layout, schedule.groups, trainable)
    order = [tasks.task_index[t] for t in ordered.order]
    return ordered, tasks, order_problem(plan, ordered, tasks, priced, order), order


@pytest.mark.parametrize("seed", range(16))
def test_makespan_of_an_order_equals_the_simulators(seed):
    """With sends, shared devices and several producers, of orders made in four ways; and it is
    never below the bound."""
    rng = np.random.default_rng(seed)
    plan, schedule, priced, trainable = random_case(rng, sends=True)
    ordered, tasks, problem, order = numbered(plan, schedule, priced, trainable)
    keys = rng.integers(0, 1000, problem.n_tasks).tolist()
    orders = [order, list_schedule(problem, keys), list_schedule(problem, keys, alternate=True)]
    orders.append(backward_list_schedule(problem, backward_list_schedule(problem.mirrored, order)))
    bound_s = order_bound(problem) * problem.tick_s
    for some in orders:
        check_order(tasks, named := tuple(tasks.tasks[t] for t in some))
        makespan_s = start_ticks(problem, some)[1] * problem.tick_s
        trace = simulate_step(plan, replace(ordered, order=named), priced, trainable)
        assert makespan_s == pytest.approx(trace.makespan_s, rel=1e-8)
        assert bound_s <= trace.makespan_s * (1 + 1e-8)
        most = peak_groups_in_flight(named)  # in which a loss keeps its group while it runs
        for s, n in zip(plan.layout.segments, peak_in_flight(problem, some), strict=True):
            assert most.get(s.name, 0) == n or (most.get(s.name, 0), n) == (1, 0)
    # A mirrored order takes as long, and keeps as much.
    if not priced.sends:
        back = start_ticks(problem.mirrored, order[::-1])[1]
        assert back == pytest.approx(start_ticks(problem, order)[1], rel=1e-8)
    assert peak_in_flight(problem.mirrored, order[::-1]) == peak_in_flight(problem, order)


@pytest.mark.parametrize("seed", range(16))
def test_searched_order_is_never_slower_or_above_the_limits(seed):
    rng = np.random.default_rng(100 + seed)
    concurrency = float(rng.choice([1.5, np.inf]))
    plan, schedule, priced, trainable = random_case(rng, sends=True, concurrency=concurrency)
    ordered, tasks, problem, _ = numbered(plan, schedule, priced, trainable)
    budget = Budget(60)
    answer = with_searched_order(plan, ordered, priced, trainable, budget, seed)
    check_order(tasks, answer.order)
    again = simulate_step(plan, answer, priced, trainable)
    assert answer.makespan_s == pytest.approx(again.makespan_s)
    assert answer.makespan_s <= ordered.makespan_s
    before, after = peak_groups_in_flight(ordered.order), peak_groups_in_flight(answer.order)
    limit = in_flight_limit(plan, schedule.groups)
    assert all(n <= max(limit[s], before[s]) for s, n in after.items())
    same = with_searched_order(plan, ordered, priced, trainable, Budget(60), seed)
    assert same.order == answer.order
    assert 0 <= budget.spent < 60 + problem.n_tasks


def tiny(rng):
    """Two segments of two modules on two devices, and a few unlike groups."""
    shared = rng.random() < 0.5
    plan = graph("a:2", "b:2", edges=["ab"], first=(0, 1, 0, 1)) if shared else chain(3)
    schedule = batch(plan, int(rng.integers(0, 3)))
    seconds = {
        (n, d): float(rng.lognormal(0, 0.7)) for n in names(plan) for d in (FORWARD, BACKWARD)
    }
    sends = {("a1", "b0", FORWARD): 0.2} if rng.random() < 0.5 else {}
    return plan, schedule, prices(plan, seconds, sends), names(plan)


@pytest.mark.parametrize("seed", range(12))
def test_order_search_waits_for_a_fast_end(seed):
    """A group without an encoder's features can start at once, but the step ends sooner if it is
    last. Unlike groups, few units of work."""
    rng = np.random.default_rng(seed)
    plan = graph("a", "b", edges=["ab"])
    n = int(rng.integers(3, 5))
    schedule = batch(
        plan, {"a": n - 1, "b": n}, shapes=[(ONE, TWO)[k] for k in rng.integers(2, size=n)]
    )
    seconds = {("a0", FORWARD): 0.2, ("a0", BACKWARD): 0.5, ("b0", BACKWARD): 1.0}
    seconds = {
        (*k, x): s * f * rng.lognormal(0, 0.1)
        for k, s in seconds.items()
        for x, f in ((ONE, 1.0), (TWO, 1.9))
    }
    _, _, problem, order = numbered(plan, schedule, prices(plan, seconds), names(plan))
    assert search_order(problem, order, Budget(30), seed)[1] == least_makespan(problem)


@pytest.mark.parametrize("seed", range(12))
def test_small_steps_get_the_optimal_order(seed):
    rng = np.random.default_rng(seed)
    _, tasks, problem, order = numbered(*tiny(rng))
    found, makespan = search_order(problem, order, Budget(800), seed)
    check_order(tasks, [tasks.tasks[t] for t in found])
    assert problem.is_within_limits(found)
    starts, again = start_ticks(problem, found)
    assert makespan == again >= order_bound(problem)
    by_start = [starts[t] for t in found] == sorted(starts)  # as they are dispatched
    assert by_start or found == order
    assert makespan == least_makespan(problem)
