"""Plans with one bucket, whose groups are all alike: simulated before anything is
scheduled."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from dflop_jax.plan.estimate import Rules
from dflop_jax.plan.options import Option, with_options
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


def as_plan(
    layout: Layout,
    policy: str,
    buckets: Sequence[Bucket],
    rules: Rules,
    options: Mapping[str, Option] | None = None,
) -> Plan:
    """The plan of a layout of submeshes and segments; `options` by module, None: the simplest that
    the rules allow."""
    options = options or {m: rules.options(m)[0] for m in rules.n_layers}
    node = rules.spec.config.node
    scheduling = Scheduling("arrival" if policy in BASELINES else "balanced", node=node)
    shaped = replace(rules.joined(layout), buckets=tuple(buckets))
    return with_options(Plan(policy, shaped, scheduling), options)


def around(n: float) -> tuple[int, int]:
    """The whole numbers of groups that a number with a part is between, or twice itself."""
    return math.floor(n), math.ceil(n)


@dataclass
class Uniform:
    """Steps of a plan with one bucket by its number of groups.

    content: of each group of a module. price: asked once, and only for what is simulated, since a
    search has thousands. parts: groups of each module that go together.
    """

    plan: Plan
    content: Mapping[str, tuple[int, ...]]
    price: Callable[[Layout], Prices]
    trainable: Sequence[str]
    parts: Mapping[str, int]
    _makespans: dict[int, float] = field(default_factory=dict)

    @cached_property
    def prices(self) -> Prices:
        return self.price(self.plan.layout)

    def trace(self, n: int) -> Trace:
        schedule = Schedule(0, self._groups(n))
        return simulate_step(self.plan, schedule, self.prices, self.trainable)

    def _groups(self, n: int) -> tuple[Group, ...]:
        """`n` times the groups that go together, of every module that the bucket has a shape of; it
        is not said which pieces they hold."""
        layout, (bucket,) = self.plan.layout, self.plan.layout.buckets
        shapes = [(m, s) for m in layout.modules if (s := bucket.shape(m)) is not None]
        counts = [self.parts[m] for m, _ in shapes]
        first = accumulate(counts, initial=0)
        places = {m: range(at, at + k) for (m, _), k, at in zip(shapes, counts, first)}
        groups: list[Group] = []
        for i in range(n):
            for (m, shape), count in zip(shapes, counts, strict=True):
                read_by = (f for t in layout.targets(m) for f in places.get(t, ()))
                feeds = tuple(i * sum(counts) + f for f in read_by)
                group = Group(m, shape, feeds, self.content[m], microbatches=layout.group_size)
                groups += [group] * count
        return tuple(groups)

    def makespan_s(self, n: float) -> float:
        """Of a part of a group more than a whole number: as far on the way to the next."""
        below, above = around(n)
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


def ladder_of(layout: Layout, rules: Rules) -> dict[Bucket, float]:
    """The bucket of a layout and as many smaller ones as plans may have beside it, the largest
    first, for what does not fit: a second group of the same size would double the step. Each with
    its share of the only one: of its rows each, rounded up, or of its tokens where there is one
    packed row, which stays long enough for the longest piece. The share is the largest of the
    modules of which something is cut."""
    (whole,) = layout.buckets
    ladder = {whole: 1.0}
    for share in reversed(rules.shares[:-1]):
        part = _part(whole, share, layout, rules)
        cut = [part.tokens(m) / s.size for m, s in whole.shapes if part.shape(m) != s]
        ladder.setdefault(part, max(cut, default=1.0))
    return ladder


def _part(whole: Bucket, share: float, layout: Layout, rules: Rules) -> Bucket:
    def cut(size: int, unit: int = 1) -> int:
        return math.ceil(size * share / unit - ROUNDING) * unit

    shapes: dict[str, Shape | None] = {}
    for m, shape in whole.shapes:
        rows, tokens = cut(shape.rows), shape.tokens
        if shape.rows == 1 and m not in rules.profile.piece_tokens:
            least = max(cut(tokens, rules.spec.token_multiple), rules.row_tokens(m))
            tokens = min(tokens, least)
        shapes[m] = shape if m in layout.divided else Shape(rows, tokens)
    return Bucket.of(shapes)
