"""What buckets are chosen for (the plan and its prices), and the evaluation of bucket sets: sampled
batches, scheduled by the scheduler of a run and simulated."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial

from dflop_jax.records import Bucket, Layout, Load, Plan, Prices
from dflop_jax.schedule.batch import Batch, Capacity, capacity_of
from dflop_jax.schedule.batch_scheduler import assign_groups
from dflop_jax.schedule.costs import GroupCosts, group_costs

Buckets = tuple[Bucket, ...]

# Relative: makespans that differ by less are equal, since the last bits of a fit depend on the
# machine.
TIE_TOLERANCE = 1e-6
# Seconds of a set over those of the best set, on the first batches, above which it is given up.
# With 1.02 sets are given up later, within the same budget of batches.
_GIVE_UP_RATIO = 1.01
_UNCHANGED_PLAN = partial(Plan, "")  # the plan of a layout


@dataclass(frozen=True, eq=False)
class BucketProblem:
    """What buckets are chosen for.

    Attributes:
      layout: the modules' devices; its own buckets are ignored.
      prices: the prices of all programs of a layout.
      global_batch: samples per step.
      n_buckets: largest number of buckets.
      trainable: names of the trainable segments; None: all.
      piece_tokens: tokens of a row, for modules whose rows take one piece each.
      token_multiple: tokens of packed rows are a multiple of it (128 on GPU).
      max_tokens: by module, the tokens of a microbatch on one rank that memory allows.
      max_microbatches: largest number of microbatches that an average batch is split into.
      make_plan: makes the plan of a layout with chosen buckets.
    """

    layout: Layout
    prices: Callable[[Layout], Prices]
    global_batch: int
    n_buckets: int = 4
    trainable: Collection[str] | None = None
    piece_tokens: Mapping[str, int] = field(default_factory=dict)
    token_multiple: int = 128
    max_tokens: Mapping[str, int] = field(default_factory=dict)
    max_microbatches: int = 16
    make_plan: Callable[[Layout], Plan] = _UNCHANGED_PLAN

    @cached_property
    def capacity(self) -> Capacity:
        return capacity_of(self.layout)

    @property
    def ranks(self) -> Mapping[str, int]:
        """Data ranks by module, in topological order."""
        return self.capacity.ranks

    @cached_property
    def trained(self) -> Collection[str]:
        """Names of the trainable segments."""
        all_segments = [s.name for s in self.layout.segments]
        return all_segments if self.trainable is None else self.trainable

    def with_buckets(self, buckets: Buckets) -> Plan:
        """The plan with these buckets."""
        return self.make_plan(replace(self.layout, buckets=buckets))

    def costs(self, bucket: Bucket) -> GroupCosts:
        """The costs of groups of a bucket on each resource."""
        layout = replace(self.layout, buckets=(bucket,))
        return group_costs(layout, self.prices(layout), self.trained)


def is_less(a: float, b: float) -> bool:
    """Whether a is less than b by more than rounding, including the last bits of a fit."""
    return a < b * (1 - TIE_TOLERANCE)


def first_min(values: Sequence[float]) -> int:
    """The index of the minimum; the first one among values that are equal to rounding."""
    best_index = 0
    for i, value in enumerate(values):
        if is_less(value, values[best_index]):
            best_index = i
    return best_index


class BucketEvaluator:
    """Simulated seconds of sampled batches under bucket sets. Each batch is scheduled once per set,
    until the budget of scheduled batches is spent."""

    def __init__(
        self, batches: Sequence[Sequence[Load]], problem: BucketProblem, *, work: int, budget: int
    ):
        self.problem, self.work, self.remaining = problem, work, budget
        self.batches = [Batch(b, tuple(problem.ranks)) for b in batches]
        self.schedule_seconds = cache(self._scheduled)

    @property
    def is_spent(self) -> bool:
        return self.remaining <= 0

    def _scheduled(self, buckets: Buckets, batch: int) -> tuple[float, dict[str, int]]:
        """(simulated seconds of a batch, tokens of each module for which its groups have room)."""
        problem = self.problem
        plan = problem.with_buckets(buckets)
        prices = problem.prices(plan.layout)
        loads, trained = self.batches[batch], problem.trained
        schedule = assign_groups(loads, plan, prices, trained, self.work, 0).schedule
        capacity_tokens = dict.fromkeys(problem.ranks, 0)
        for g in schedule.groups:
            tokens = g.shape.size * problem.ranks[g.module]
            capacity_tokens[g.module] += tokens * problem.capacity.group_size
        self.remaining -= 1
        return schedule.makespan_s, capacity_tokens

    def mean_s(self, buckets: Buckets, n: int) -> float:
        """Mean simulated seconds of the first `n` batches."""
        return sum(self.schedule_seconds(buckets, i)[0] for i in range(n)) / n

    def is_faster(self, buckets: Buckets, best_set: Buckets) -> bool:
        """Whether a set is faster than `best` on all batches; False as soon as it is far behind."""
        set_s = best_s = 0.0
        for i in range(len(self.batches)):
            set_s += self.schedule_seconds(buckets, i)[0]
            best_s += self.schedule_seconds(best_set, i)[0]
            if is_less(best_s * (_GIVE_UP_RATIO if i + 1 < len(self.batches) else 1), set_s):
                return False
        return is_less(set_s, best_s)


def largest_first(buckets: Sequence[Bucket]) -> Buckets:
    """The buckets by their tokens of the last module, then of the modules before it, largest
    first."""
    modules = list(dict.fromkeys(m for b in buckets for m, _ in b.shapes))[::-1]
    return tuple(sorted(buckets, key=lambda b: ([-b.tokens(m) for m in modules], b.shapes)))
