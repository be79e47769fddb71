"""What sets of buckets are worth: sampled batches scheduled with them by the scheduler of a run and
simulated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    Bucket,
    Direction,
    Edge,
    Layout,
    Load,
    Plan,
    Price,
    Prices,
    ProgramId,
    SegmentPlan,
    SubmeshPlan,
)
from dflop_jax.schedule.batch import Batch
from dflop_jax.schedule.online import solve
from dflop_jax.schedule.shapes.sizes import Buckets, BucketSpec, SecondsOf

_FORWARD_SHARE = 1 / 3  # of forward and backward
_GRAIN = 2.0**36  # steps of a second: sums of whole steps are exact, so their order cannot matter
_SAME = 1e-6  # relative: makespans that differ by less are equal
_WORSE = 1.01  # a set that is this much behind after some batches is given up


def less(a: float, b: float) -> bool:
    """Whether a is less than b by more than rounding, a fit's last bits included."""
    return a < b * (1 - _SAME)


def first_least(values: Sequence[float]) -> int:
    """Place of the least value; of equal ones (to rounding) the first."""
    best = 0
    for i, value in enumerate(values):
        if less(value, values[best]):
            best = i
    return best


def model_plan(spec: BucketSpec, buckets: Sequence[Bucket]) -> Plan:
    """A plan that stands for the modules of a bucket set: one segment each, on devices of its own
    unless `spec.devices` says which it shares."""
    submeshes: list[SubmeshPlan] = []
    first_of: dict[int, int] = {}
    free = 0
    for place, (m, ranks) in enumerate(spec.ranks.items()):
        shared = spec.devices.get(m, -1 - place)
        if shared not in first_of:
            sharing = [n for k, n in spec.ranks.items() if spec.devices.get(k) == shared]
            first_of[shared], free = free, free + max([ranks, *sharing])
        submeshes.append(SubmeshPlan(m, first_of[shared], 1, ranks, 1))
    segments = tuple(SegmentPlan(m, m, 0, 1, m, True, True) for m in spec.ranks)
    joined = dict.fromkeys(
        (e.source, e.target) for e in spec.edges if {e.source, e.target} <= set(spec.ranks)
    )
    edges = tuple(Edge(source, target, source) for source, target in joined)
    return Plan(
        "dflop",
        Layout(tuple(submeshes), segments, tuple(buckets), edges=edges, group_size=spec.group_size),
    )


class Evaluator:
    """Seconds of sampled batches under bucket sets, each batch scheduled once per set, until the
    budget of scheduled batches is spent."""

    def __init__(
        self,
        batches: Sequence[Sequence[Load]],
        spec: BucketSpec,
        seconds: SecondsOf,
        *,
        work: int,
        budget: int,
    ):
        self.spec, self.seconds, self.work, self.left = spec, seconds, work, budget
        self.batches = [Batch(b, tuple(spec.ranks)) for b in batches]
        self._seconds: dict[Bucket, Mapping[str, float]] = {}
        self._spans: dict[tuple[Buckets, int], float] = {}
        self.rooms: dict[tuple[Buckets, int], dict[str, int]] = {}

    @property
    def spent(self) -> bool:
        return self.left <= 0

    def prices(self, layout: Layout) -> Prices:
        """Prices of the plan's programs by the spec's seconds, in whole steps."""
        senders = {e.source for e in layout.edges}
        programs: dict[ProgramId, Price] = {}
        for b in layout.buckets:
            if b not in self._seconds:
                self._seconds[b] = self.seconds(b)
            for m, shape in b.shapes:
                total_s = self._seconds[b].get(m, 0.0)
                shares: dict[Direction, float] = {BACKWARD: 1.0}
                if m in senders:
                    shares = {FORWARD: _FORWARD_SHARE, BACKWARD: 1 - _FORWARD_SHARE}
                for direction, share in shares.items():
                    whole = math.floor(total_s * share * _GRAIN + 0.5) / _GRAIN
                    programs.setdefault(ProgramId(m, shape, direction), Price(whole))
        return Prices(programs)

    def span_s(self, buckets: Buckets, batch: int) -> float:
        """Simulated seconds of a batch."""
        key = (buckets, batch)
        if key not in self._spans:
            plan = model_plan(self.spec, buckets)
            prices = self.prices(plan.layout)
            schedule = solve(
                self.batches[batch], plan, prices, plan.layout.modules, self.work, 0
            ).outline
            self._spans[key] = schedule.makespan_s
            self.rooms[key] = {
                m: sum(
                    g.shape.size * self.spec.ranks[m] * self.spec.group_size
                    for g in schedule.groups
                    if g.module == m
                )
                for m in plan.layout.modules
            }
            self.left -= 1
        return self._spans[key]

    def mean_s(self, buckets: Buckets, n: int) -> float:
        return sum(self.span_s(buckets, i) for i in range(n)) / n

    def beats(self, buckets: Buckets, best: Buckets) -> bool:
        """Whether a set is faster than `best` on all batches; given up early when far behind."""
        own = other = 0.0
        for i in range(len(self.batches)):
            own, other = own + self.span_s(buckets, i), other + self.span_s(best, i)
            if less(other * (_WORSE if i + 1 < len(self.batches) else 1), own):
                return False
        return less(own, other)


def roomiest_first(buckets: Sequence[Bucket]) -> Buckets:
    """By tokens of the last module, then of those before it."""
    modules = list(dict.fromkeys(m for b in buckets for m, _ in b.shapes))[::-1]
    return tuple(sorted(buckets, key=lambda b: ([-b.tokens(m) for m in modules], b.shapes)))
