"""Schedule a global batch: choose the groups, their shapes and the samples in each of them.

"balanced" grouping finds the cheapest set of buckets into which the samples pack (a group costs
what its shape costs), then balances the content of every group over its ranks. "arrival" grouping
is the baseline: samples in order, one per row.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from dflop_jax.records import Load, Plan, Prices, Schedule, ScheduleMaker, Status
from dflop_jax.schedule import batch as batches
from dflop_jax.schedule.balance_problem import ROUNDING, Budget
from dflop_jax.schedule.batch import Batch, merge_sub_microbatches
from dflop_jax.schedule.bounds import lower_bound_s
from dflop_jax.schedule.bucket_search import improve_assignment
from dflop_jax.schedule.costs import bucket_ticks, group_costs
from dflop_jax.schedule.count_program import CountProgram
from dflop_jax.schedule.count_solver import assign_by_counts
from dflop_jax.schedule.groups import (
    Assignment,
    BucketRun,
    PackingSpace,
    arrival_assignment,
    balance_contents,
    greedy_assignment,
    schedule_groups,
)
from dflop_jax.schedule.memory_plan import with_memory_plan
from dflop_jax.schedule.order_search import with_searched_order
from dflop_jax.schedule.rank_permutation import permute_ranks, swap_equal_pieces
from dflop_jax.simulate.steps import with_list_order

WORK_PER_S = 10_000  # units of work that one core of a slow machine does per second
DEFAULT_WORK = 2 * WORK_PER_S // 5  # units of work for a batch if the plan has no work budget
# The order of tasks gets this share of the work; packing gets at most this share of the rest.
# Balancing of content gets the remainder.
_ORDER_SHARE, _PACKING_SHARE = 0.25, 0.5
# Balancing of content stops when it can gain at most this share of a step's seconds.
_TOLERATED_SHARE = 1e-3


@dataclass(frozen=True)
class GroupSolution:
    """An assignment of samples to groups and its schedule."""

    space: PackingSpace
    assignment: Assignment
    schedule: Schedule
    made_by: ScheduleMaker
    bound_s: float = 0.0  # lower bound by the integer program; 0 if it was not solved
    work: float = 0.0  # units spent


def schedule_batch(
    loads: Sequence[Load],
    plan: Plan,
    prices: Prices,
    trainable: Collection[str],
    *,
    step: int = 0,
    program: CountProgram | None = None,
    work: int | None = None,
    seed: int = 0,
) -> Schedule:
    """Return a schedule of a global batch: groups in the plan's shapes and an order of their tasks.

    The search minimises, in this order, the static seconds of the groups on the resource that each
    keeps busy longest; the content of the busiest rank of every group, for which the other ranks
    wait; and the simulated makespan over orders of the tasks (`order_search`), unless the plan is a
    baseline with its own order. The result depends on the arguments only.

    Args:
      trainable: names of the segments that train.
      program: the integer program of the plan's group counts (`count_program.canonicalize`), used
        if `work` is above 0. None: no integer program.
      work: units of work that the solver may spend (`Budget`). 0 returns the greedy result; None
        uses the plan's `work_budget`, or `DEFAULT_WORK` if the plan has none.

    Returns:
      A schedule with its order. Status "optimal" means that the makespan equals `lower_bound_s`, a
        bound for every choice of groups.

    Raises:
      ValueError: a sample fits no bucket, or grouping is "arrival" and modules differ in data
        ranks.
    """
    start_s = time.perf_counter()
    work = (plan.scheduling.work_budget or DEFAULT_WORK) if work is None else work
    batch = _load_batch(loads, plan)
    order_budget = Budget(_ORDER_SHARE * work)
    group_work = work - order_budget.remaining
    solution = assign_groups(batch, plan, prices, trainable, group_work, seed, program)
    schedule = replace(solution.schedule, step=step)
    if plan.scheduling.grouping == "balanced":
        permute_ranks(solution.space, solution.assignment, plan)
        swap_equal_pieces(solution.space, solution.assignment, plan)
        groups = schedule_groups(solution.space, solution.assignment, plan.layout)
        schedule = replace(schedule, groups=groups)
    schedule = _order_tasks(schedule, plan, prices, trainable, order_budget, seed)
    merged, merged_prices = merge_sub_microbatches(plan, prices)
    makespan_s = schedule.makespan_s
    bound_s = max(lower_bound_s(batch, merged.layout, merged_prices, trainable), solution.bound_s)
    status: Status = "greedy" if work <= 0 or plan.scheduling.grouping == "arrival" else "feasible"
    if makespan_s <= bound_s * (1 + ROUNDING):
        status = "optimal"
    return replace(
        schedule,
        lower_bound_s=float(min(bound_s, makespan_s)),
        integer_bound_s=min(solution.bound_s, makespan_s),
        status=status,
        made_by=solution.made_by,
        work=round(solution.work + order_budget.spent),
        elapsed_s=time.perf_counter() - start_s,
    )


def quick_schedule(
    loads: Sequence[Load], plan: Plan, prices: Prices, trainable: Collection[str], work: int
) -> Schedule:
    """Return nearly the schedule of `schedule_batch`, without permuted ranks and lower bound."""
    order_budget = Budget(_ORDER_SHARE * work)
    group_work = work - order_budget.remaining
    solution = assign_groups(_load_batch(loads, plan), plan, prices, trainable, group_work, seed=0)
    return _order_tasks(solution.schedule, plan, prices, trainable, order_budget, seed=0)


def _load_batch(loads: Sequence[Load], plan: Plan) -> Batch:
    """Return the loads in arrays; ValueError if a sample fits no bucket."""
    batch = Batch(loads, batches.capacity_of(plan.layout))
    if plan.scheduling.grouping == "balanced":
        batches.check_fits(batch, batches.merged_buckets(plan.layout))
    return batch


def _order_tasks(
    schedule: Schedule,
    plan: Plan,
    prices: Prices,
    trainable: Collection[str],
    budget: Budget,
    seed: int,
) -> Schedule:
    """Add a searched order and a memory plan to a schedule, unless the plan is a baseline."""
    if plan.scheduling.grouping != "balanced" or plan.scheduling.order != "1f1b":
        return schedule
    schedule = with_searched_order(plan, schedule, prices, trainable, budget, seed)
    return with_memory_plan(plan, schedule, prices, trainable)


def assign_groups(
    batch: Batch,
    plan: Plan,
    prices: Prices,
    trainable: Collection[str],
    work: float,
    seed: int,
    program: CountProgram | None = None,
) -> GroupSolution:
    """Assign samples to groups as in `schedule_batch`, with the order of list scheduling; every
    sample must fit some bucket."""
    merged, merged_prices = merge_sub_microbatches(plan, prices)
    costs = group_costs(merged.layout, merged_prices, trainable)
    budget, balanced = Budget(work), plan.scheduling.grouping == "balanced"
    buckets = batches.bucket_variants(plan.layout, batch) if balanced else plan.layout.buckets
    prices_F = {m: costs.content_unit_s(m) for m in plan.layout.modules}
    priced = {m: float(unit_F[unit_F > 0].min()) for m, unit_F in prices_F.items() if unit_F.any()}
    # Content in units of the cheapest feature.
    batch = batch.with_content_weights({m: prices_F[m] / unit_s for m, unit_s in priced.items()})
    space = PackingSpace(batch, buckets, bucket_ticks(costs, buckets), priced)
    bound_s, tolerance = 0.0, dict[str, float]()
    assignments: list[tuple[ScheduleMaker, list[BucketRun]]]
    if not balanced:
        assignments = [("arrival", arrival_assignment(space))]
    else:
        greedy = greedy_assignment(space, len(merged.layout.buckets))
        step_s = sum(float(costs.bucket_s(buckets[t.bucket]).max()) for t in greedy)
        tolerance = {m: _TOLERATED_SHARE * step_s / unit_s for m, unit_s in priced.items()}
        assignments = [("greedy", greedy)]
        if work > 0:
            packing = budget.sub_budget(work * _PACKING_SHARE)
            improved = improve_assignment(space, greedy, packing, seed)
            same_buckets = [t.bucket for t in improved] == [t.bucket for t in greedy]
            fallbacks = assignments if space.priced or not same_buckets else []
            assignments = [("local", improved), *fallbacks]
            if program:
                by_counts, bound_s = assign_by_counts(
                    program, space, merged.layout, merged_prices, trainable, improved, budget
                )
                assignments += [("integer", by_counts)] if by_counts else []
    solution: GroupSolution | None = None
    for index, (made_by, assignment) in enumerate(assignments):
        # A costlier assignment is not balanced, unless the integer program found it.
        promising = made_by == "integer" or space.cost(assignment) == space.cost(assignments[0][1])
        n_left = len(assignments) - index
        balancing = budget.sub_budget(budget.remaining / n_left * (promising and balanced))
        balance_contents(space, assignment, balancing, seed, tolerance)
        groups = schedule_groups(space, assignment, plan.layout)
        schedule = with_list_order(plan, Schedule(0, groups), prices, trainable)
        if solution is None or schedule.makespan_s < solution.schedule.makespan_s * (1 - ROUNDING):
            solution = GroupSolution(space, assignment, schedule, made_by)
    assert solution is not None
    return replace(solution, bound_s=bound_s, work=budget.spent)
