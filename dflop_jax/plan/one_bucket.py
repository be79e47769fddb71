"""Plans with one bucket, whose groups are all alike: simulated before anything is
scheduled."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

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
    """The plan of a layout of submeshes and segments; `options` by module, None: the simplest that
    the rules allow."""
    options = options or {m: context.options(m)[0] for m in context.n_layers}
    node = context.spec.config.node
    scheduling = Scheduling("arrival" if policy in BASELINES else "balanced", node=node)
    shaped_layout = replace(context.with_edges(layout), buckets=tuple(buckets))
    return with_options(Plan(policy, shaped_layout, scheduling), options)


def floor_and_ceil(n: float) -> tuple[int, int]:
    """The whole numbers of groups that a number with a part is between, or twice itself."""
    return math.floor(n), math.ceil(n)


@dataclass
class OneBucketSimulator:
    """Steps of a plan with one bucket by its number of groups.

    content: of each group of a module. price: asked once, and only for what is simulated, since a
    search has thousands. parts: groups of each module that go together.
    """

    plan: Plan
    content: Mapping[str, tuple[int, ...]]
    price_layout: Callable[[Layout], Prices]
    trainable: Sequence[str]
    groups_together: Mapping[str, int]
    _makespans: dict[int, float] = field(default_factory=dict)

    @cached_property
    def prices(self) -> Prices:
        return self.price_layout(self.plan.layout)

    def trace(self, n: int) -> Trace:
        schedule = Schedule(0, self._groups(n))
        return simulate_step(self.plan, schedule, self.prices, self.trainable)

    def _groups(self, n: int) -> tuple[Group, ...]:
        """`n` times the groups that go together, of every module that the bucket has a shape of; it
        is not said which pieces they hold."""
        layout, (bucket,) = self.plan.layout, self.plan.layout.buckets
        shapes = [(m, s) for m in layout.modules if (s := bucket.shape(m)) is not None]
        counts = [self.groups_together[m] for m, _ in shapes]
        offsets = accumulate(counts, initial=0)
        group_offsets = {
            m: range(offset, offset + k) for (m, _), k, offset in zip(shapes, counts, offsets)
        }
        groups: list[Group] = []
        for i in range(n):
            for (m, shape), count in zip(shapes, counts, strict=True):
                reader_offsets = (
                    reader_offset
                    for t in layout.targets(m)
                    for reader_offset in group_offsets.get(t, ())
                )
                feeds = tuple(i * sum(counts) + reader_offset for reader_offset in reader_offsets)
                group = Group(m, shape, feeds, self.content[m], microbatches=layout.group_size)
                groups += [group] * count
        return tuple(groups)

    def makespan_s(self, n: float) -> float:
        """Of a part of a group more than a whole number: as far on the way to the next."""
        below, above = floor_and_ceil(n)
        below_s, above_s = self._whole_s(below), self._whole_s(above)
        return below_s + (n - below) * (above_s - below_s)

    def _whole_s(self, n: int) -> float:
        """Simulated once; no trace is kept, since a search has hundreds."""
        if n not in self._makespans:
            groups = self._groups(n)
            graph = step_graph(self.plan.layout, groups, self.trainable)
            order = textbook_order(self.plan, graph, groups)
            step = makespan_function(self.plan, Schedule(0, groups), graph, self.prices)
            self._makespans[n] = step(order)
        return self._makespans[n]


def buckets_with_shares(layout: Layout, context: SearchContext) -> dict[Bucket, float]:
    """The bucket of a layout and as many smaller ones as plans may have beside it, the largest
    first, for what does not fit: a second group of the same size would double the step. Each with
    its share of the only one: of its rows each, rounded up, or of its tokens where there is one
    packed row, which stays long enough for the longest piece. The share is the largest of the
    modules of which something is cut."""
    (largest,) = layout.buckets
    share_by_bucket = {largest: 1.0}
    for share in reversed(context.bucket_shares[:-1]):
        smaller = _scaled_bucket(largest, share, layout, context)
        token_shares = [
            smaller.tokens(m) / s.size for m, s in largest.shapes if smaller.shape(m) != s
        ]
        share_by_bucket.setdefault(smaller, max(token_shares, default=1.0))
    return share_by_bucket


def _scaled_bucket(largest: Bucket, share: float, layout: Layout, context: SearchContext) -> Bucket:
    def cut(size: int, unit: int = 1) -> int:
        return math.ceil(size * share / unit - ROUNDING) * unit

    shapes: dict[str, Shape | None] = {}
    for m, shape in largest.shapes:
        rows, tokens = cut(shape.rows), shape.tokens
        if shape.rows == 1 and m not in context.profile.piece_tokens:
            min_tokens = max(cut(tokens, context.spec.token_multiple), context.row_tokens(m))
            tokens = min(tokens, min_tokens)
        shapes[m] = shape if m in layout.divided else Shape(rows, tokens)
    return Bucket.from_shapes(shapes)
