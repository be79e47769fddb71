"""`benchmarks/pipeline_search.py`: its rows, the orders of others, and bad arguments."""

from dataclasses import asdict

import pytest

from dflop_jax.schedule.ordering.problem import problem_of
from dflop_jax.tasks.graph import in_flight_limit
from dflop_jax.tasks.order import check_order, most_in_flight

from .scripts import module, refusal

search, cases, methods = (
    module(n) for n in ("pipeline_search", "pipeline_cases", "pipeline_methods")
)


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_a_small_step(seed, monkeypatch):
    monkeypatch.setattr(search, "SMALL_WORK", 300)
    monkeypatch.setattr(search, "TREE_ORDERS", 40)
    rows = search.measure(cases.small_case(seed), small=True)
    assert [r.method for r in rows] == ["1f1b", "interleaved", "tree search", "run", "enumeration"]
    keys = ["instance", "ranks", "tasks", "method", "makespan_over_bound", "elapsed_s"]
    assert all(list(asdict(r)) == keys for r in rows)
    assert all(r.makespan_over_bound >= rows[-1].makespan_over_bound >= 1 for r in rows)
    assert search.behind(rows) == []
    assert search.table(rows).row_count == 5


def test_interleaved_orders_are_orders():
    """Of unlike numbers of groups that feed one, on 3 ranks with two chunks each."""
    plan = cases.chunked_plan(3, {"media": 3, "text": 6}, 2, 3)
    for n in range(5):
        feeding = [{"media": (3 * k) % 4} for k in range(n)]
        schedule = cases.groups_of(plan, feeding, cases.np.random.default_rng(n))
        case = cases.Case("some", plan, schedule, cases.Prices({}))
        problem = problem_of(plan, schedule, case.graph, case.prices, ())
        order = methods.interleaved(plan, schedule, case.graph, problem)
        check_order(case.graph, order)
        most, limit = most_in_flight(order), in_flight_limit(plan, schedule.groups)
        assert all(n <= limit[s] for s, n in most.items())


def test_bad_arguments():
    assert "no such folder" in refusal("pipeline_search", "--json", "nowhere/rows.json")
    assert "negative" in refusal("pipeline_search", "--small", "-1")
