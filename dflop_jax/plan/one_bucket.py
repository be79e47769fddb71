"""Plans with one bucket, whose groups are all alike: simulated before anything is
scheduled."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from dflop_jax.plan.module_tables import SearchContext
from dflop_jax.plan.options import MemoryOption, with_options
from dflop_jax.plan.space import BASELINES
from dflop_jax.records import (
    Bucket,
    Group,
    Layout,
    Plan,
    Prices,
    Schedule,
    Scheduling,
    Shape,
    Trace,
)
from dflop_jax.schedule.balance_problem import ROUNDING
from dflop_jax.simulate.steps import makespan_function, simulate_step
from dflop_jax.simulate.task_graph import step_graph
from dflop_jax.simulate.task_order import textbook_order


def build_plan(
    layout: Layout,
    policy: str,
    buckets: Sequence[Bucket],
    context: SearchContext,
    options: Mapping[str, MemoryOption] | None = None,
) -> Plan:
    """The plan of a layout of submeshes and segments; `options` by module, None: the simplest."""
    options = options or {m: context.options(m)[0] for m in context.n_layers}
    node = context.spec.config.node
    scheduling = Scheduling("arrival" if policy in BASELINES else "balanced", node=node)
    layout = replace(context.with_edges(layout), buckets=tuple(buckets))
    return with_options(Plan(policy, layout, scheduling), options)


def floor_and_ceil(n: float) -> tuple[int, int]:
    """The whole numbers of groups below and above a number with a fraction."""
    return math.floor(n), math.ceil(n)


@dataclass
class OneBucketSimulator:
    """Simulates steps of a plan with one bucket, by their number of groups.

    content: of each group of a module. price_layout: called for what is simulated only, since a
    search has thousands. sub_microbatches: of each module for a group of the others.
    """

    plan: Plan
    content: Mapping[str, tuple[int, ...]]
    price_layout: Callable[[Layout], Prices]
    trainable: Sequence[str]
    sub_microbatches: Mapping[str, int]
    _makespans: dict[int, float] = field(default_factory=dict)

    @cached_property
    def prices(self) -> Prices:
        return self.price_layout(self.plan.layout)

    def trace(self, n: int) -> Trace:
        schedule = Schedule(0, self._groups(n))
        return simulate_step(self.plan, schedule, self.prices, self.trainable)

    def _groups(self, n: int) -> tuple[Group, ...]:
        """`n` groups of every module of the bucket, with their sub-microbatches, without pieces."""
        layout, (bucket,) = self.plan.layout, self.plan.layout.buckets
        numbers: dict[str, range] = {}  # of the sub-microbatches of each module
        size = 0
        for m in (m for m in layout.modules if bucket.shape(m) is not None):
            numbers[m] = range(size, size + self.sub_microbatches[m])
            size = numbers[m].stop
        groups: list[Group] = []
        for first in range(0, n * size, max(size, 1)):
            for m, group_numbers in numbers.items():
                readers = (i for t in layout.targets(m) for i in numbers.get(t, ()))
                feeds, shape = tuple(first + i for i in readers), bucket.shape(m)
                assert shape is not None
                group = Group(m, shape, feeds, self.content[m], microbatches=layout.group_size)
                groups += [group] * len(group_numbers)
        return tuple(groups)

    def makespan_s(self, n: float) -> float:
        """Seconds of `n` groups; a fraction of a group takes that fraction of what it adds."""
        below, above = floor_and_ceil(n)
        below_s, above_s = self._whole_s(below), self._whole_s(above)
        return below_s + (n - below) * (above_s - below_s)

    def _whole_s(self, n: int) -> float:
        """Simulated once; no trace is stored, since a search has hundreds."""
        if n not in self._makespans:
            groups = self._groups(n)
            graph = step_graph(self.plan.layout, groups, self.trainable)
            order = textbook_order(self.plan, graph, groups)
            step = makespan_function(self.plan, Schedule(0, groups), graph, self.prices)
            self._makespans[n] = step(order)
        return self._makespans[n]


def buckets_with_shares(layout: Layout, context: SearchContext) -> dict[Bucket, float]:
    """A layout's one bucket and the smaller ones that a plan may have beside it, largest first,
    each with its share of the largest. The last group of a batch takes the smallest that holds it.

    A smaller bucket has that share of the rows, rounded up, or of the tokens of a single packed
    row, which still holds the longest piece. The share is the largest of the modules that shrink.
    """
    (largest,) = layout.buckets
    bucket_shares = {largest: 1.0}
    for share in reversed(context.bucket_shares[:-1]):
        smaller = _scaled_bucket(largest, share, layout, context)
        changed = [(m, s) for m, s in largest.shapes if smaller.shape(m) != s]
        token_shares = (smaller.tokens(m) / s.size for m, s in changed)
        bucket_shares.setdefault(smaller, max(token_shares, default=1.0))
    return bucket_shares


def _scaled_bucket(largest: Bucket, share: float, layout: Layout, context: SearchContext) -> Bucket:
    def scale(size: int, unit: int = 1) -> int:
        return math.ceil(size * share / unit - ROUNDING) * unit

    shapes: dict[str, Shape | None] = {}
    for m, shape in largest.shapes:
        rows, tokens = scale(shape.rows), shape.tokens
        if shape.rows == 1 and m not in context.profile.piece_tokens:
            scaled = scale(tokens, context.spec.token_multiple)
            tokens = min(tokens, max(scaled, context.row_tokens(m)))
        shapes[m] = shape if m in layout.divided else Shape(rows, tokens)
    return Bucket.from_shapes(shapes)
