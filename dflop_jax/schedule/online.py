"""The schedule of one global batch: how many microbatches of which bucket, and what each holds.

"balanced": the cheapest set of buckets into which the samples pack (the executed cost of a
microbatch is its bucket's). "arrival": the baseline, samples in order, one a row.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from dflop_jax.records import Bucket, Microbatch, Plan, SampleShape, Schedule
from dflop_jax.schedule.costs import BucketCosts
from dflop_jax.schedule.cover import Capacity, demand, fractional_cost
from dflop_jax.schedule.groups import arrival_groups, check_fits, predict_s
from dflop_jax.schedule.search import best_groups

ROUNDS_PER_S = 20_000  # pairs of rows priced in a nominal second
_CAP = 20  # times the time limit, at which the clock does stop the search


def capacity_of(plan: Plan) -> Capacity:
    ranks = {m: plan.data_ranks(m) for m in plan.modules}
    return Capacity(ranks.get("vision", 0), ranks["llm"], plan.group_size, ranks.get("audio", 0))


def schedule_batch(
    shapes: Sequence[SampleShape],
    plan: Plan,
    costs: BucketCosts,
    *,
    step: int = 0,
    time_limit_s: float = 0.2,
    max_rounds: int | None = None,
    seed: int = 0,
) -> Schedule:
    """Cut a global batch into groups of microbatches under the plan's buckets.

    `time_limit_s` is turned into work (`ROUNDS_PER_S`, or `max_rounds` if given), so the answer is
    a pure function of the arguments on a fast or a busy machine; the clock stops the search only
    at 20 times the limit. `max_rounds=0` gives the greedy answer (status "greedy"). Status
    "optimal": no choice of buckets is cheaper under `pipeline_makespan`. `lower_bound_s` holds for
    every choice of buckets and every packing.

    Raises:
      ValueError: a sample that fits no bucket, or costs that do not match the plan.
    """
    start_s = time.perf_counter()
    if len(costs.seconds) != len(plan.buckets):
        raise ValueError(
            f"costs of {len(costs.seconds)} buckets for a plan of {len(plan.buckets)}; "
            "predict them from the same plan"
        )
    if not 1 <= len(costs.seconds[0]) <= len(plan.modules):
        raise ValueError(
            f"bucket costs name {len(costs.seconds[0])} modules, the plan has {plan.modules}"
        )
    capacity = capacity_of(plan)
    bound_s, status = _volume_bound_s(shapes, plan.buckets, capacity, costs), "greedy"
    if plan.grouping == "arrival":
        groups = arrival_groups(shapes, plan.buckets, capacity, costs)
    else:
        check_fits(shapes, plan.buckets, capacity)
        groups, found_s, status = best_groups(
            shapes,
            plan.buckets,
            capacity,
            costs,
            max_rounds=int(time_limit_s * ROUNDS_PER_S) if max_rounds is None else max_rounds,
            deadline_s=start_s + _CAP * time_limit_s,
            seed=seed,
        )
        bound_s = max(bound_s, found_s)
    makespan_s = predict_s(groups, costs)
    return Schedule(
        step=step,
        groups=tuple(tuple(_microbatch(b, rows, capacity) for rows in held) for b, held in groups),
        makespan_s=makespan_s,
        lower_bound_s=min(bound_s, makespan_s),
        status=status,
        elapsed_s=time.perf_counter() - start_s,
    )


def _microbatch(bucket: int, rows: list[list[int]], capacity: Capacity) -> Microbatch:
    per_rank = len(rows) // capacity.llm_ranks
    ranks = [rows[i : i + per_rank] for i in range(0, len(rows), per_rank)]
    return Microbatch(bucket, tuple(tuple(tuple(row) for row in rank) for rank in ranks))


def _volume_bound_s(
    shapes: Sequence[SampleShape],
    buckets: Sequence[Bucket],
    capacity: Capacity,
    costs: BucketCosts,
) -> float:
    """Each station must work off the whole volume, at the best price per token and item."""
    wanted = demand(shapes, buckets, capacity)
    by_module = np.array(costs.seconds).T * capacity.group_size
    return max(fractional_cost(wanted, cost_C) for cost_C in by_module)
