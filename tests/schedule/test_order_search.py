"""Orders of a step's tasks: their evaluator and bound against the event simulator, the search
against every order there is."""

from dataclasses import replace

import numpy as np
import pytest

from dflop_jax.records import BACKWARD, FORWARD, NO_GROUP, REDUCE, UPDATE, Bucket, Load, Shape, Task
from dflop_jax.schedule import schedule_batch
from dflop_jax.schedule.balance_problem import Budget
from dflop_jax.schedule.batch import Batch
from dflop_jax.schedule.bounds import lower_bound_s, order_bound
from dflop_jax.schedule.order_search import order_problem, search_order, with_searched_order
from dflop_jax.simulate.numbered_tasks import (
    backward_list_schedule,
    list_schedule,
    peak_in_flight,
    start_ticks,
)
from dflop_jax.simulate.steps import simulate_step, with_list_order
from dflop_jax.simulate.task_graph import in_flight_limit, step_graph
from dflop_jax.simulate.task_order import check_order, peak_groups_in_flight
from tests.schedule.conftest import TILE, bucket, make_batch, make_plan, make_prices
from tests.schedule.order_oracle import least_makespan
from tests.simulate.cases import batch, chain, graph, names, prices, random_case, same_prices


def numbered(plan, schedule, priced, trainable):
    """(ordered schedule, graph, problem, the order in numbers)."""
    ordered = with_list_order(plan, schedule, priced, trainable)
    tasks = step_graph(plan.layout, schedule.groups, trainable)
    order = [tasks.task_index[t] for t in ordered.order]
    return ordered, tasks, order_problem(plan, ordered, tasks, priced, order), order


def feasible(problem, tasks, order):
    check_order(tasks, [tasks.tasks[t] for t in order])
    return problem.is_within_limits(order)


@pytest.mark.parametrize("seed", range(25))
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
        both = [
            (most.get(s.name, 0), n)
            for s, n in zip(plan.layout.segments, peak_in_flight(problem, some))
        ]
        assert all(a == b or (a, b) == (1, 0) for a, b in both)
    # A mirrored order takes as long, and keeps as much.
    if not priced.sends:
        back = start_ticks(problem.mirrored, order[::-1])[1]
        assert back == pytest.approx(start_ticks(problem, order)[1], rel=1e-8)
    assert peak_in_flight(problem.mirrored, order[::-1]) == peak_in_flight(problem, order)


@pytest.mark.parametrize("seed", range(25))
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
def test_small_steps_get_the_optimal_order(seed):
    rng = np.random.default_rng(seed)
    _, tasks, problem, order = numbered(*tiny(rng))
    found, makespan = search_order(problem, order, Budget(800), seed)
    assert feasible(problem, tasks, found)
    starts, again = start_ticks(problem, found)
    assert makespan == again >= order_bound(problem)
    by_start = [starts[t] for t in found] == sorted(starts)  # as they are dispatched
    assert by_start or found == order
    assert makespan == least_makespan(problem)


def test_lower_limits_in_flight_make_the_best_order_slower():
    """A first segment that may keep two groups: with one the best order is slower."""
    plan = chain(3)
    seconds = same_prices(plan, 1.0, 2.0, 3.0)
    _, _, problem, _ = numbered(plan, batch(plan, 4), seconds, names(plan))
    least = {}
    for limit in (1, 2, 3):
        tight = replace(problem, max_live=tuple(min(limit, n) for n in problem.max_live))
        start = list_schedule(tight, list(range(tight.n_tasks)))
        assert tight.is_within_limits(start)
        found, least[limit] = search_order(tight, start, Budget(500), 0)
        assert tight.is_within_limits(found)
        assert least[limit] == least_makespan(tight)
    assert least[1] > least[2] > least[3]


def uneven(program):
    """Prices of unlike segments and shapes."""
    return 1.0 + 0.7 * (program.shape.size % 3) + 0.5 * (program.segment == "b")


def three_modules(seed):
    """A module that reads one and is read by one, which shares devices with the first; loads are
    unlike."""
    shapes = {"a": Shape(8, TILE), "b": Shape(8, TILE), "c": Shape(1, 128)}
    plan = make_plan(
        [Bucket.from_shapes(shapes)],
        {"a": 1, "b": 1, "c": 1},
        edges=[("a", "b"), ("b", "c"), ("a", "c")],
        shared=("a", "c"),
    )
    rng = np.random.default_rng(seed)
    loads = [
        Load({m: (TILE,) * int(rng.integers(0, 5)) for m in "ab"} | {"c": (60,)}) for _ in range(16)
    ]
    return plan, loads


def test_schedules_use_the_searched_order():
    """It is never slower than list scheduling, often faster, and the baselines' stays as it is."""
    faster = 0
    for seed in range(6):
        plan, loads = three_modules(seed)
        prices = make_prices(plan, factor=uneven)
        got = schedule_batch(loads, plan, prices, plan.layout.modules, work=600)
        listed = with_list_order(plan, replace(got, order=()), prices, plan.layout.modules)
        assert got.lower_bound_s <= got.makespan_s <= listed.makespan_s
        faster += got.makespan_s < listed.makespan_s * (1 - 1e-6)
        greedy = schedule_batch(loads, plan, prices, plan.layout.modules, work=0)
        assert greedy.order == with_list_order(plan, greedy, prices, plan.layout.modules).order
        fixed = schedule_batch(
            loads, plan.with_scheduling(order="gpipe"), prices, plan.layout.modules, work=600
        )
        again = with_list_order(
            plan.with_scheduling(order="gpipe"), fixed, prices, plan.layout.modules
        )
        assert fixed.order == again.order
    assert faster >= 3


@pytest.mark.parametrize("seed", range(8))
def test_lower_bound_is_below_the_best_order(seed):
    """With reductions and updates; of plans whose modules all train, or only one."""
    rng = np.random.default_rng(seed)
    plan = make_plan([bucket(8, (1, 128))], {"a": 1, "b": 1}, shared=("a", "b") * (seed % 3 == 0))
    trainable = plan.layout.modules if seed % 2 else ("b",)
    prices = make_prices(plan, trainable=trainable, factor=lambda p: float(rng.lognormal(0, 0.5)))
    end_s = {
        Task(m, NO_GROUP, d): float(rng.exponential(0.3))
        for m in plan.layout.modules
        for d in (REDUCE, UPDATE)
    }
    prices = replace(prices, step_end=end_s)
    loads = make_batch(rng, 6, most_tiles=8)
    got = schedule_batch(loads, plan, prices, trainable, work=400)
    tasks = step_graph(plan.layout, got.groups, trainable)
    order = [tasks.task_index[t] for t in got.order]
    problem = order_problem(plan, got, tasks, prices, order)
    least_s = least_makespan(problem) * problem.tick_s
    batch = Batch(loads, plan.layout.modules)
    bound_s = lower_bound_s(batch, plan.layout, prices, trainable)
    assert 0 < bound_s <= least_s * (1 + 1e-9)
    assert got.makespan_s <= least_s * (1 + 1e-8)
