"""What sets of buckets are worth: sampled batches scheduled on the plan that will run with them, by
the scheduler of a run, and simulated."""

from __future__ import annotations

from collections.abc import Sequence

from dflop_jax.records import Bucket, Load, Plan, Prices
from dflop_jax.schedule.batch import Batch
from dflop_jax.schedule.online import solve
from dflop_jax.schedule.shapes.problem import Buckets, ShapeProblem

# Relative: makespans that differ by less are equal, since the last bits of a fit differ from
# machine to machine.
TIE = 1e-6
# Times as long as the best that a set may take on the first batches; with twice the 1% sets are
# given up later, within the same budget of batches.
_HOPELESS = 1.01


def less(a: float, b: float) -> bool:
    """Whether a is less than b by more than rounding, a fit's last bits included."""
    return a < b * (1 - TIE)


def first_least(values: Sequence[float]) -> int:
    """Place of the least value; of equal ones (to rounding) the first."""
    best = 0
    for i, value in enumerate(values):
        if less(value, values[best]):
            best = i
    return best


class BucketEvaluator:
    """Seconds of sampled batches under bucket sets, each batch scheduled once per set, until the
    budget of scheduled batches is spent."""

    def __init__(
        self,
        batches: Sequence[Sequence[Load]],
        problem: ShapeProblem,
        *,
        work: int,
        budget: int,
    ):
        self.problem, self.work, self.left = problem, work, budget
        self.batches = [Batch(b, tuple(problem.ranks)) for b in batches]
        self._plans: dict[Buckets, tuple[Plan, Prices]] = {}
        self._spans: dict[tuple[Buckets, int], float] = {}
        self.rooms: dict[tuple[Buckets, int], dict[str, int]] = {}

    @property
    def spent(self) -> bool:
        return self.left <= 0

    def span_s(self, buckets: Buckets, batch: int) -> float:
        """Simulated seconds of a batch."""
        key = (buckets, batch)
        if key not in self._spans:
            plan, prices = self._as_run(buckets)
            training = self.problem.training
            schedule = solve(self.batches[batch], plan, prices, training, self.work, 0).schedule
            self._spans[key] = schedule.makespan_s
            room = dict.fromkeys(self.problem.ranks, 0)
            for g in schedule.groups:
                tokens = g.shape.size * self.problem.ranks[g.module]
                room[g.module] += tokens * self.problem.capacity.group_size
            self.rooms[key] = room
            self.left -= 1
        return self._spans[key]

    def _as_run(self, buckets: Buckets) -> tuple[Plan, Prices]:
        if buckets not in self._plans:
            plan = self.problem.with_buckets(buckets)
            self._plans[buckets] = plan, self.problem.prices(plan.layout)
        return self._plans[buckets]

    def mean_s(self, buckets: Buckets, n: int) -> float:
        return sum(self.span_s(buckets, i) for i in range(n)) / n

    def beats(self, buckets: Buckets, best: Buckets) -> bool:
        """Whether a set is faster than `best` on all batches; given up early when far behind."""
        set_s = best_s = 0.0
        for i in range(len(self.batches)):
            set_s, best_s = set_s + self.span_s(buckets, i), best_s + self.span_s(best, i)
            if less(best_s * (_HOPELESS if i + 1 < len(self.batches) else 1), set_s):
                return False
        return less(set_s, best_s)


def roomiest_first(buckets: Sequence[Bucket]) -> Buckets:
    """The buckets by their tokens of the last module, then of those before it, most first."""
    modules = list(dict.fromkeys(m for b in buckets for m, _ in b.shapes))[::-1]
    return tuple(sorted(buckets, key=lambda b: ([-b.tokens(m) for m in modules], b.shapes)))
