"""The schedule of one global batch: which groups of which shapes run, and what each holds.

"balanced": the cheapest set of buckets into which the samples pack (what a group costs is its
shape's), then the content of every group evened out over its ranks. "arrival": the baseline,
samples in order, one a row.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from dflop_jax.records import Load, Maker, Plan, Prices, Schedule, Status
from dflop_jax.schedule.balance_problem import ROUNDING, Budget
from dflop_jax.schedule.batch import Batch, bucket_variants, capacity_of, check_fits
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
    content_tolerance,
    greedy_assignment,
    longest_first_assignment,
    schedule_groups,
)
from dflop_jax.schedule.memory_plan import with_memory_plan
from dflop_jax.schedule.order_search import with_searched_order
from dflop_jax.schedule.rank_permutation import permute_ranks, swap_equal_pieces
from dflop_jax.schedule.sub_microbatches import max_buckets, merge_sub_microbatches, merged_buckets
from dflop_jax.simulate.steps import with_list_order

WORK_PER_S = 10_000  # units of work that a second surely hides, on one core of a slow machine
# Units for a batch of a plan that has no work budget; twice as many take up to twice as long.
DEFAULT_WORK = 4_000
# Shares of the work: for the order of tasks, and for the groups that keep more, where some may. Of
# the rest, what packing takes at most; what is left then evens out content.
_ORDER_SHARE, _MEMORY_SHARE, _PACKING_SHARE = 0.25, 0.05, 0.5


@dataclass(frozen=True)
class GroupSolution:
    """Samples in groups, their schedule with its makespan, who made it, what no other undercuts as
    far as an integer program tells, and the units of work that it took."""

    space: PackingSpace
    assignment: Assignment
    schedule: Schedule
    made_by: Maker
    bound_s: float = 0.0
    work: float = 0.0


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
    """Cut a global batch into groups of the plan's shapes, in a running order.

    The makespan is the simulator's. The search minimises what it is made of: the static seconds of
    the groups on the resource that each keeps busy longest, then, for every group, the content of
    its busiest rank, for which the others wait; then the makespan itself, over orders of the tasks
    (`order_search`), unless the plan is a baseline with an order of its own. The answer depends on
    the arguments alone: work is counted and no clock is read, choices compare whole numbers or with
    a tolerance, and ties go to the earlier bucket, row and piece.

    Args:
      trainable: names of the segments that train.
      program: the integer program of the plan's counts (`count_program.canonicalize`), None: it is
        not asked. It is asked where work is.
      work: units that the solver may spend (`Budget`); 0 gives the greedy answer, None the
        plan's `work_budget`, or `DEFAULT_WORK` where it has none.

    Returns:
      A schedule with its order. Status "optimal": the makespan equals `lower_bound_s`, which holds
      for every choice of groups.

    Raises:
      ValueError: a sample that fits no bucket, or arrival grouping with unequal data ranks.
    """
    start_s = time.perf_counter()
    work = (plan.scheduling.work_budget or DEFAULT_WORK) if work is None else work
    batch = _load_batch(loads, plan)
    solution = assign_groups(batch, plan, prices, trainable, _group_work(plan, work), seed, program)
    schedule = replace(solution.schedule, step=step)
    if plan.scheduling.grouping == "balanced":
        permute_ranks(solution.space, solution.assignment, plan)
        swap_equal_pieces(solution.space, solution.assignment, plan)
        groups = schedule_groups(solution.space, solution.assignment, plan.layout)
        schedule = replace(schedule, groups=groups)
    schedule, order_work = _order_tasks(schedule, plan, prices, trainable, work, seed)
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
        work=round(solution.work + order_work),
        elapsed_s=time.perf_counter() - start_s,
    )


def quick_schedule(
    loads: Sequence[Load], plan: Plan, prices: Prices, trainable: Collection[str], work: int
) -> Schedule:
    """`schedule_batch`'s schedule without what takes time and changes its makespan little: what a
    rank was dealt stays with it, and no bound is proved."""
    group_work = _group_work(plan, work)
    solution = assign_groups(_load_batch(loads, plan), plan, prices, trainable, group_work, seed=0)
    return _order_tasks(solution.schedule, plan, prices, trainable, work, seed=0)[0]


def _group_work(plan: Plan, work: float) -> float:
    """Units of work for the groups."""
    return work * (1 - _ORDER_SHARE - _MEMORY_SHARE * bool(plan.scheduling.kept))


def _load_batch(loads: Sequence[Load], plan: Plan) -> Batch:
    """ValueError for a sample that fits no bucket."""
    batch = Batch(loads, plan.layout.modules)
    if plan.scheduling.grouping == "balanced":
        check_fits(batch, merged_buckets(plan.layout), capacity_of(plan.layout))
    return batch


def _order_tasks(
    schedule: Schedule,
    plan: Plan,
    prices: Prices,
    trainable: Collection[str],
    work: float,
    seed: int,
) -> tuple[Schedule, float]:
    """The schedule with the order of its tasks and with what its groups keep, and the units of work
    that took."""
    if plan.scheduling.grouping != "balanced" or plan.scheduling.order != "1f1b":
        return schedule, 0.0
    order, memory = Budget(_ORDER_SHARE * work), Budget(_MEMORY_SHARE * work)
    schedule = with_searched_order(plan, schedule, prices, trainable, order, seed)
    schedule = with_memory_plan(plan, schedule, prices, trainable, memory)
    return schedule, order.spent + memory.spent


def assign_groups(
    batch: Batch,
    plan: Plan,
    prices: Prices,
    trainable: Collection[str],
    work: float,
    seed: int,
    program: CountProgram | None = None,
) -> GroupSolution:
    """Solve `schedule_batch`'s problem; every sample must fit."""
    merged, merged_prices = merge_sub_microbatches(plan, prices)
    capacity = capacity_of(plan.layout)
    costs = group_costs(merged.layout, merged_prices, trainable)
    budget, balanced = Budget(work), plan.scheduling.grouping == "balanced"
    buckets = plan.layout.buckets
    if balanced:
        buckets = bucket_variants(merged.layout.buckets, batch, max_buckets(plan.layout))
    weights = {m: costs.content_weights(m) for m in plan.layout.modules}
    priced = frozenset(m for m, weight_F in weights.items() if weight_F is not None)
    space = PackingSpace(
        batch.with_content_weights(weights), buckets, capacity, bucket_ticks(costs, buckets), priced
    )
    bound_s, tolerance = 0.0, dict[str, float]()
    assignments: list[tuple[Maker, list[BucketRun]]]
    if not balanced:
        assignments = [("arrival", arrival_assignment(space))]
    else:
        greedy = greedy_assignment(space, len(merged.layout.buckets))
        tolerance = content_tolerance(space, costs, greedy)
        assignments = [("greedy", greedy)]
        if work > 0:
            packing = budget.sub_budget(work * _PACKING_SHARE)
            improved = improve_assignment(space, greedy, packing, seed)
            if spread := longest_first_assignment(space, improved, budget):
                none = Budget(0)
                improved = min(
                    improved,
                    spread,
                    key=lambda a: balance_contents(space, a, none, seed, tolerance),
                )
            same = [t.bucket for t in improved] == [t.bucket for t in greedy]
            others = assignments if space.priced or not same else []
            assignments = [("local", improved), *others]
            if program:
                by_counts, bound_s = assign_by_counts(
                    program, space, merged.layout, merged_prices, trainable, improved, budget
                )
                assignments += [("integer", by_counts)] if by_counts else []
    solution: GroupSolution | None = None
    for index, (made_by, assignment) in enumerate(assignments):
        # A dearer answer has little hope, unless the integer program asked for it.
        promising = made_by == "integer" or space.cost(assignment) == space.cost(assignments[0][1])
        share = budget.remaining / (len(assignments) - index) if promising and balanced else 0
        balance_contents(space, assignment, budget.sub_budget(share), seed, tolerance)
        groups = schedule_groups(space, assignment, plan.layout)
        schedule = with_list_order(plan, Schedule(0, groups), prices, trainable)
        if solution is None or schedule.makespan_s < solution.schedule.makespan_s * (1 - ROUNDING):
            solution = GroupSolution(space, assignment, schedule, made_by)
    assert solution is not None, "there is at least the greedy answer"
    return replace(solution, bound_s=bound_s, work=budget.spent)
