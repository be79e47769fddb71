"""Orders of a step's tasks: the search that runs do, beside fixed orders and a tree search.

Command:  python benchmarks/pipeline_search.py [--json FILE] [--small N] [--large N]
Minutes:  about 5 on one core
Expected: `run` is the best of all orders on 95% or more of the small steps and never behind 1F1B or
          interleaved 1F1B (left out where no warm-up fits into memory); on the large ones within 5%
          of the bound in 10 s

Small steps are so small that every order can be gone through (`enumeration`). Large ones have the
scale of a 22B encoder and a 72B LLM on 8 ranks, 128 sub-microbatches: segments of two modules that
each span all ranks in chunks. The bound is `schedule/bounds/order.py`'s.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
from json_rows import Rows, add_json
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from pipeline_cases import Case, large_case, small_case  # noqa: E402
from pipeline_methods import interleaved, tree_search  # noqa: E402
from pipeline_oracle import least_makespan  # noqa: E402

from dflop_jax.records import Task  # noqa: E402
from dflop_jax.schedule.bounds.order import order_bound  # noqa: E402
from dflop_jax.schedule.ordering.problem import problem_of  # noqa: E402
from dflop_jax.schedule.ordering.search import searched  # noqa: E402
from dflop_jax.schedule.solver.budget import Budget  # noqa: E402
from dflop_jax.sim.fastest_order import with_order  # noqa: E402
from dflop_jax.sim.pipeline import simulate_step  # noqa: E402
from dflop_jax.tasks.numbered import starts_of  # noqa: E402
from dflop_jax.tasks.order import order_tasks  # noqa: E402

RUN, ONE, INTERLEAVED, TREE, ALL = "run", "1f1b", "interleaved", "tree search", "enumeration"
SMALL_WORK, LARGE_WORK = 5_000, 20_000  # units of `run`; a unit is about 100 microseconds
TREE_ORDERS = 300  # that the tree search tries
SAME = 1e-6  # relative difference of equal makespans


@dataclass(frozen=True)
class Row:
    instance: str
    ranks: int
    tasks: int
    method: str
    makespan_over_bound: float
    elapsed_s: float


def measure(case: Case, *, small: bool) -> list[Row]:
    """Rows of all methods on one step; where it is small, of the best of all orders too."""
    start = time.perf_counter()
    graph = case.graph
    today = with_order(case.plan, case.schedule, case.prices, case.trainable)
    problem = problem_of(case.plan, today, graph, case.prices, today.order)
    listed_s = time.perf_counter() - start
    bound = order_bound(problem)
    rows: list[Row] = []

    def add(method: str, solve: Callable[[], Sequence[int]], before_s: float = 0.0) -> int:
        start = time.perf_counter()
        order = solve()
        took_s = time.perf_counter() - start + before_s
        makespan = starts_of(problem, order)[1]
        check(case, [graph.tasks[t] for t in order], makespan * problem.tick_s)
        ratio = makespan / max(bound, 1)
        rows.append(Row(case.name, problem.n_resources, problem.n, method, ratio, took_s))
        return makespan

    def numbers(tasks: Sequence[Task]) -> list[int]:
        return [graph.place[t] for t in tasks]

    def run() -> Sequence[int]:
        budget = Budget(SMALL_WORK if small else LARGE_WORK)
        return searched(problem, numbers(today.order), budget, 0).order

    add(ONE, lambda: numbers(order_tasks(case.plan, graph, case.schedule.groups)))
    start = time.perf_counter()
    if (order := interleaved(case.plan, case.schedule, graph, problem)) is not None:
        add(INTERLEAVED, lambda: numbers(order), time.perf_counter() - start)
    add(TREE, lambda: tree_search(problem, case.schedule, graph, TREE_ORDERS))
    reached = add(RUN, run, listed_s)
    if small:
        start = time.perf_counter()
        least = least_makespan(problem, reached)
        took_s = time.perf_counter() - start
        assert least is not None, f"{case.name} has too many orders"
        ratio = least / max(bound, 1)
        rows.append(Row(case.name, problem.n_resources, problem.n, ALL, ratio, took_s))
    return rows


def check(case: Case, order: Sequence[Task], makespan_s: float) -> None:
    """The event simulator finds the same makespan."""
    schedule = replace(case.schedule, order=tuple(order))
    trace = simulate_step(case.plan, schedule, case.prices, case.trainable)
    assert abs(trace.makespan_s - makespan_s) <= SAME * trace.makespan_s, case.name


def table(rows: Sequence[Row]) -> Table:
    """Small steps against the best of all orders, large ones against the bound."""
    out = Table("steps", "tasks", "method", "over", "median", "worst", "best of all", "seconds")
    for kind in dict.fromkeys(r.instance.split()[0] for r in rows):
        some = [r for r in rows if r.instance.split()[0] == kind]
        least = {r.instance: r.makespan_over_bound for r in some if r.method == ALL}
        for method in dict.fromkeys(r.method for r in some):
            mine = [r for r in some if r.method == method]
            took_s = [r.elapsed_s for r in mine]
            over = [r.makespan_over_bound / least.get(r.instance, 1.0) for r in mine]
            optimal = sum(x <= 1 + SAME for x in over)
            out.add_row(
                f"{len(mine)} {kind}",
                f"{min(r.tasks for r in mine)} to {max(r.tasks for r in mine)}",
                method,
                "optimum" if least else "bound",
                f"{np.median(over):.4f}",
                f"{max(over):.4f}",
                f"{optimal}",
                f"{np.median(took_s):.2f} ({max(took_s):.2f})",
            )
    return out


def behind(rows: Sequence[Row]) -> list[str]:
    """Steps on which `run` is slower than a fixed order."""
    ratios = {(r.instance, r.method): r.makespan_over_bound for r in rows}
    return [
        f"{instance}: {RUN} is behind {method}"
        for (instance, method), ratio in ratios.items()
        if method in (ONE, INTERLEAVED) and ratios[instance, RUN] > ratio * (1 + SAME)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_json(parser)
    parser.add_argument("--small", type=int, default=200, help="how many small steps")
    parser.add_argument("--large", type=int, default=5, help="how many large ones")
    args = parser.parse_args()
    if min(args.small, args.large) < 0:
        parser.error("--small and --large must not be negative")
    rows = Rows(args.json)
    small = (measure(small_case(seed), small=True) for seed in range(args.small))
    large = (measure(large_case(seed), small=False) for seed in range(args.large))
    for row in chain.from_iterable(chain(small, large)):
        rows.append(row)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table(rows))
    for line in behind(rows):
        console.print(line)


if __name__ == "__main__":
    main()
