"""The problem of choosing buckets, and the evaluation of bucket sets by simulated schedules of
sampled batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial

from dflop_jax.records import Bucket, Layout, Load, Plan, Prices
from dflop_jax.schedule.batch import Batch, Capacity, capacity_of
from dflop_jax.schedule.batch_scheduler import assign_groups
from dflop_jax.schedule.costs import TIE_TOLERANCE, GroupCosts, group_costs

Buckets = tuple[Bucket, ...]

# A set is given up if its seconds on the first batches exceed those of the best set by this factor.
_GIVE_UP_RATIO = 1.01


_UNCHANGED_PLAN = partial(Plan, "")


@dataclass(frozen=True, eq=False)
class BucketProblem:
    """The plan, prices, batch size and limits for which buckets are chosen."""

    layout: Layout  # the modules' devices; its buckets are ignored
    prices: Callable[[Layout], Prices]  # returns the prices of all programs of a layout
    global_batch: int  # samples per step
    n_buckets: int = 4  # maximum number of buckets
    trainable: Collection[str] | None = None  # names of the trainable segments; None: all
    # Tokens of a row, for modules whose rows take one piece each.
    piece_tokens: Mapping[str, int] = field(default_factory=dict)
    token_multiple: int = 128  # the tokens of packed rows are a multiple of it (128 on GPU)
    # By module, the maximum tokens of a microbatch on one rank that fit into memory.
    max_tokens: Mapping[str, int] = field(default_factory=dict)
    max_microbatches: int = 16  # maximum number of microbatches of an average batch
    make_plan: Callable[[Layout], Plan] = _UNCHANGED_PLAN  # makes a plan of a layout with buckets

    @cached_property
    def capacity(self) -> Capacity:
        return capacity_of(self.layout)

    @property
    def ranks(self) -> Mapping[str, int]:
        """Data ranks by module, in topological order."""
        return self.capacity.ranks

    @cached_property
    def trainable_names(self) -> Collection[str]:
        """Names of the trainable segments."""
        all_segments = [s.name for s in self.layout.segments]
        return all_segments if self.trainable is None else self.trainable

    def with_buckets(self, buckets: Buckets) -> Plan:
        return self.make_plan(replace(self.layout, buckets=buckets))

    def costs(self, bucket: Bucket) -> GroupCosts:
        """Return the costs of a bucket's groups on each resource."""
        layout = replace(self.layout, buckets=(bucket,))
        return group_costs(layout, self.prices(layout), self.trainable_names)


def is_less(a: float, b: float) -> bool:
    """Return whether a is less than b by more than `TIE_TOLERANCE`, relative."""
    return a < b * (1 - TIE_TOLERANCE)


def first_min(values: Sequence[float]) -> int:
    """Return the index of the first minimal value."""
    best_index = 0
    for i, value in enumerate(values):
        if is_less(value, values[best_index]):
            best_index = i
    return best_index


class BucketEvaluator:
    """Simulates sampled batches under bucket sets, within a budget of batches."""

    def __init__(
        self, batches: Sequence[Sequence[Load]], problem: BucketProblem, *, work: int, budget: int
    ):
        self.problem, self.work, self.remaining = problem, work, budget
        self.batches = [Batch(b, problem.capacity) for b in batches]
        self.schedule_seconds = cache(self._simulated_s)

    @property
    def is_spent(self) -> bool:
        return self.remaining <= 0

    def _simulated_s(self, buckets: Buckets, batch: int) -> float:
        """Return the simulated seconds of a batch."""
        problem, plan = self.problem, self.problem.with_buckets(buckets)
        prices = problem.prices(plan.layout)
        batched, names = self.batches[batch], problem.trainable_names
        self.remaining -= 1
        return assign_groups(batched, plan, prices, names, self.work, 0).schedule.makespan_s

    def mean_s(self, buckets: Buckets, n: int) -> float:
        """Return the mean simulated seconds of the first `n` batches."""
        return sum(self.schedule_seconds(buckets, i) for i in range(n)) / n

    def is_faster(self, buckets: Buckets, best_set: Buckets) -> bool:
        """Return whether a set is faster over all batches; stop early if it is much slower."""
        set_s = best_s = 0.0
        for i in range(len(self.batches)):
            set_s += self.schedule_seconds(buckets, i)
            best_s += self.schedule_seconds(best_set, i)
            if is_less(best_s * (_GIVE_UP_RATIO if i + 1 < len(self.batches) else 1), set_s):
                return False
        return is_less(set_s, best_s)


def largest_first(buckets: Sequence[Bucket]) -> Buckets:
    """Sort buckets, largest first by tokens of the last module, then of earlier modules."""
    modules = list(dict.fromkeys(m for b in buckets for m, _ in b.shapes))[::-1]
    return tuple(sorted(buckets, key=lambda b: ([-b.tokens(m) for m in modules], b.shapes)))
