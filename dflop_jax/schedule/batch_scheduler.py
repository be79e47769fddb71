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
from dflop_jax.schedule.batch import Batch, capacity_of, check_fits, variants
from dflop_jax.schedule.bounds import lower_bound_s
from dflop_jax.schedule.bucket_search import improved
from dflop_jax.schedule.costs import group_costs, ticks_of
from dflop_jax.schedule.count_program import CountProgram
from dflop_jax.schedule.count_solver import by_counts
from dflop_jax.schedule.groups import (
    BucketRun,
    PackingSpace,
    arrival_answer,
    dealt_answer,
    even_content,
    greedy_answer,
    near_enough,
    schedule_groups,
)
from dflop_jax.schedule.memory_plan import with_memory_plan
from dflop_jax.schedule.order_search import with_searched_order
from dflop_jax.schedule.rank_permutation import bring_home, rename_ranks
from dflop_jax.schedule.sub_microbatches import most_buckets, wide_buckets, widened
from dflop_jax.simulate.steps import with_order

WORK_PER_S = 10_000  # units of work that a second surely hides, on one core of a slow machine
# Units for a batch of a plan that has no work budget; twice as many take up to twice as long.
DEFAULT_WORK = 4_000
# Shares of the work: for the order of tasks, and for the groups that keep more, where some may. Of
# the rest, what packing takes at most; what is left then evens out content.
_ORDER_SHARE, _MEMORY_SHARE, _PACKING_SHARE = 0.25, 0.05, 0.5


@dataclass(frozen=True)
class Solution:
    """Samples in groups, their schedule with its makespan, who made it, what no other undercuts as
    far as an integer program tells, and the units of work that it took."""

    room: PackingSpace
    answer: Sequence[BucketRun]
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
    (`ordering`), unless the plan is a baseline with an order of its own. The answer depends on the
    arguments alone: work is counted and no clock is read, choices compare whole numbers or with a
    tolerance, and ties go to the earlier bucket, row and piece.

    Args:
      trainable: names of the segments that train.
      program: the integer program of the plan's counts (`counts.program.canonical`), None: it is
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
    batch = _checked(loads, plan)
    solution = solve(batch, plan, prices, trainable, _group_work(plan, work), seed, program)
    schedule = replace(solution.schedule, step=step)
    if plan.scheduling.grouping == "balanced":
        rename_ranks(solution.room, solution.answer, plan)
        bring_home(solution.room, solution.answer, plan)
        groups = schedule_groups(solution.room, solution.answer, plan.layout)
        schedule = replace(schedule, groups=groups)
    schedule, order_work = _ordered(schedule, plan, prices, trainable, work, seed)
    wide, wide_prices = widened(plan, prices)
    makespan_s = schedule.makespan_s
    bound_s = max(lower_bound_s(batch, wide.layout, wide_prices, trainable), solution.bound_s)
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
    work_of_groups = _group_work(plan, work)
    solution = solve(_checked(loads, plan), plan, prices, trainable, work_of_groups, seed=0)
    return _ordered(solution.schedule, plan, prices, trainable, work, seed=0)[0]


def _group_work(plan: Plan, work: float) -> float:
    """Units of work for the groups."""
    return work * (1 - _ORDER_SHARE - _MEMORY_SHARE * bool(plan.scheduling.kept))


def _checked(loads: Sequence[Load], plan: Plan) -> Batch:
    """ValueError for a sample that fits no bucket."""
    batch = Batch(loads, plan.layout.modules)
    if plan.scheduling.grouping == "balanced":
        check_fits(batch, wide_buckets(plan.layout), capacity_of(plan.layout))
    return batch


def _ordered(
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


def solve(
    batch: Batch,
    plan: Plan,
    prices: Prices,
    trainable: Collection[str],
    work: float,
    seed: int,
    program: CountProgram | None = None,
) -> Solution:
    """Solve `schedule_batch`'s problem; every sample must fit."""
    wide, wide_prices = widened(plan, prices)
    capacity, costs = capacity_of(plan.layout), group_costs(wide.layout, wide_prices, trainable)
    budget, balanced = Budget(work), plan.scheduling.grouping == "balanced"
    buckets = plan.layout.buckets
    if balanced:
        buckets = variants(wide.layout.buckets, batch, most_buckets(plan.layout))
    weights = {m: costs.weights(m) for m in plan.layout.modules}
    priced = frozenset(m for m, weight_F in weights.items() if weight_F is not None)
    room = PackingSpace(batch.weighed(weights), buckets, capacity, ticks_of(costs, buckets), priced)
    bound_s, near = 0.0, dict[str, float]()
    answers: list[tuple[Maker, list[BucketRun]]]
    if not balanced:
        answers = [("arrival", arrival_answer(room))]
    else:
        greedy = greedy_answer(room, len(wide.layout.buckets))
        near = near_enough(room, costs, greedy)
        answers = [("greedy", greedy)]
        if work > 0:
            better = improved(room, greedy, budget.part(work * _PACKING_SHARE), seed)
            if dealt := dealt_answer(room, better, budget):
                none = Budget(0)
                better = min(better, dealt, key=lambda a: even_content(room, a, none, seed, near))
            alike = [t.bucket for t in better] == [t.bucket for t in greedy]
            answers = [("local", better), *(answers if room.priced or not alike else [])]
            if program:
                counted, bound_s = by_counts(
                    program, room, wide.layout, wide_prices, trainable, better, budget
                )
                answers += [("integer", counted)] if counted else []
    best: Solution | None = None
    for place, (made_by, answer) in enumerate(answers):
        # A dearer answer has little hope, unless the integer program asked for it.
        hopeful = made_by == "integer" or room.cost(answer) == room.cost(answers[0][1])
        share = budget.left / (len(answers) - place) if hopeful and balanced else 0
        even_content(room, answer, budget.part(share), seed, near)
        groups = schedule_groups(room, answer, plan.layout)
        schedule = with_order(plan, Schedule(0, groups), prices, trainable)
        if best is None or schedule.makespan_s < best.schedule.makespan_s * (1 - ROUNDING):
            best = Solution(room, answer, schedule, made_by)
    assert best is not None, "there is at least the greedy answer"
    return replace(best, bound_s=bound_s, work=budget.spent)
