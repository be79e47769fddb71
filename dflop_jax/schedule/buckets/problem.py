"""For what shapes are chosen: the plan that will run with them, at the prices that it runs at; and
what sets of them are worth: sampled batches scheduled on it, by the scheduler of a run, and
simulated."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial

from dflop_jax.records import Bucket, Layout, Load, Plan, Prices
from dflop_jax.schedule.batch import Batch, Capacity, capacity_of
from dflop_jax.schedule.batch_scheduler import assign_groups
from dflop_jax.schedule.costs import GroupCosts, group_costs

Buckets = tuple[Bucket, ...]

# Relative: makespans that differ by less are equal, since the last bits of a fit differ from
# machine to machine.
TIE_TOLERANCE = 1e-6
# Times as long as the best that a set may take on the first batches; with twice the 1% sets are
# given up later, within the same budget of batches.
_GIVE_UP_RATIO = 1.01
_UNCHANGED_PLAN = partial(Plan, "")  # the plan of a layout


@dataclass(frozen=True, eq=False)
class BucketProblem:
    """What buckets are chosen for.

    Attributes:
      layout: where the modules lie; its own buckets do not matter.
      prices: of all that runs in a layout.
      global_batch: samples of a step.
      n_buckets: at most so many are chosen.
      trainable: names of the segments that train; None: all.
      piece_tokens: modules whose rows take one piece each, and its tokens.
      token_multiple: tokens of packed rows are a multiple of it (128 on GPU).
      max_tokens: by module, most tokens of a microbatch on one rank that memory allows.
      max_microbatches: most microbatches that an average batch is cut into.
      as_run: the plan that a policy makes of the layout with chosen buckets.
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
        """Names of the segments that train."""
        all_segments = [s.name for s in self.layout.segments]
        return all_segments if self.trainable is None else self.trainable

    def with_buckets(self, buckets: Buckets) -> Plan:
        """The plan that runs with these buckets."""
        return self.make_plan(replace(self.layout, buckets=buckets))

    def costs(self, bucket: Bucket) -> GroupCosts:
        """What groups of a bucket take on each resource."""
        layout = replace(self.layout, buckets=(bucket,))
        return group_costs(layout, self.prices(layout), self.trained)


def is_less(a: float, b: float) -> bool:
    """Whether a is less than b by more than rounding, a fit's last bits included."""
    return a < b * (1 - TIE_TOLERANCE)


def first_min(values: Sequence[float]) -> int:
    """Place of the least value; of equal ones (to rounding) the first."""
    best_index = 0
    for i, value in enumerate(values):
        if is_less(value, values[best_index]):
            best_index = i
    return best_index


class BucketEvaluator:
    """Seconds of sampled batches under bucket sets, each batch scheduled once per set, until the
    budget of scheduled batches is spent."""

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
        """(simulated seconds of a batch, tokens of each module that its groups have room for)."""
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
        return sum(self.schedule_seconds(buckets, i)[0] for i in range(n)) / n

    def is_faster(self, buckets: Buckets, best_set: Buckets) -> bool:
        """Whether a set is faster than `best` on all batches; given up early when far behind."""
        set_s = best_s = 0.0
        for i in range(len(self.batches)):
            set_s += self.schedule_seconds(buckets, i)[0]
            best_s += self.schedule_seconds(best_set, i)[0]
            if is_less(best_s * (_GIVE_UP_RATIO if i + 1 < len(self.batches) else 1), set_s):
                return False
        return is_less(set_s, best_s)


def largest_first(buckets: Sequence[Bucket]) -> Buckets:
    """The buckets by their tokens of the last module, then of those before it, most first."""
    modules = list(dict.fromkeys(m for b in buckets for m, _ in b.shapes))[::-1]
    return tuple(sorted(buckets, key=lambda b: ([-b.tokens(m) for m in modules], b.shapes)))
