"""What groups cost, by resource: read from the price list, never modelled here.

Sums of these are costs that order choices within a search and bounds that are proved; the only
makespan is the simulator's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    Bucket,
    Direction,
    Layout,
    Price,
    Prices,
    ProgramId,
    SegmentPlan,
    Shape,
)
from dflop_jax.schedule.balance_problem import Floats, Ints
from dflop_jax.simulate.task_graph import segment_links, segment_resources, segments_with_backward

# Whole units that the dearest bucket's seconds are rounded to; twice as many tell costs apart that
# differ by less than a ten-millionth, which is rounding.
_TICKS_OF_MAX = 10_000_000


def segment_directions(
    layout: Layout, trainable: Collection[str]
) -> dict[str, tuple[Direction, ...]]:
    """Tasks that a group has in each segment, as `task_graph.step_graph` lists them."""
    backward = segments_with_backward(layout, trainable)
    senders = {link.source for link in segment_links(layout)}
    tasks: dict[str, tuple[Direction, ...]] = {}
    for s in layout.segments:
        forward: tuple[Direction, ...] = (FORWARD, BACKWARD) if s.name in backward else (FORWARD,)
        tasks[s.name] = forward if s.name in senders else (BACKWARD,)
    return tasks


@dataclass(frozen=True)
class GroupCosts:
    """Seconds that a group of a module and shape takes on each resource [R]: for its shape
    (`static_s`), and [features, R] for a unit of each feature of content (`content_s`)."""

    static_s: dict[tuple[str, Shape], Floats]
    content_s: dict[tuple[str, Shape], Floats]
    n_resources: int

    def bucket_s(self, bucket: Bucket) -> Floats:
        """[R]: static seconds of one group of each of the bucket's modules."""
        none = np.zeros(self.n_resources)
        return sum((self.static_s[m, s] for m, s in bucket.shapes), none)

    def content_weights(self, module: str) -> Floats | None:
        """What a unit of each feature of content costs in the module's programs, over the cheapest
        that costs something, [features]; None where none does."""
        unit_s = self.unit_s(module)
        return self._content_s(module) / unit_s if unit_s else None

    def unit_s(self, module: str) -> float:
        """Seconds of a unit of content as `weights` weigh it, in all programs of a group; 0 where
        none costs anything."""
        mean_F = self._content_s(module)
        return float(mean_F[mean_F > 0].min()) if mean_F.any() else 0.0

    def _content_s(self, module: str) -> Floats:
        """Seconds of a unit of each feature in all programs of a group, the mean of its shapes."""
        each = [v.sum(axis=1) for (m, _), v in self.content_s.items() if m == module]
        return np.mean(each, axis=0) if each else np.zeros(1)


def group_costs(layout: Layout, prices: Prices, trainable: Collection[str]) -> GroupCosts:
    """Costs of the groups of all the plan's shapes."""
    tasks = segment_directions(layout, trainable)
    resource_of = segment_resources(layout)
    n_resources = max(resource_of.values()) + 1

    def prices_of(segment: SegmentPlan, shape: Shape) -> list[Price]:
        programs = [ProgramId(segment.name, shape, d) for d in tasks[segment.name]]
        return [prices.programs[p] for p in programs if p in prices.programs]

    static: dict[tuple[str, Shape], Floats] = {}
    content: dict[tuple[str, Shape], Floats] = {}
    for module in layout.modules:
        for shape in layout.shapes(module):
            priced = {s.name: prices_of(s, shape) for s in layout.segments_of(module)}
            n_features = max((len(p.content_s) for ps in priced.values() for p in ps), default=0)
            static[module, shape] = np.zeros(n_resources)
            content[module, shape] = np.zeros((n_features, n_resources))
            for name, segment_prices in priced.items():
                for p in segment_prices:
                    static[module, shape][resource_of[name]] += p.static_s
                    content[module, shape][: len(p.content_s), resource_of[name]] += p.content_s
    return GroupCosts(static, content, n_resources)


@dataclass(frozen=True)
class Ticks:
    """Costs of buckets as whole numbers, so that sums are exact in any order and equal costs are
    equal: a choice does not hang on the last bit of a fit. `dearest_C` is the resource that a group
    keeps busy longest; `rest_C` all others together; `sum_C` both."""

    dearest_C: Ints
    rest_C: Ints

    @property
    def sum_C(self) -> Ints:
        return self.dearest_C + self.rest_C


def bucket_ticks(costs: GroupCosts, buckets: Sequence[Bucket]) -> Ticks:
    seconds_CR = np.array([costs.bucket_s(b) for b in buckets])
    tick_s = max(float(seconds_CR.max(initial=0.0)), 1e-30) / _TICKS_OF_MAX
    ticks_CR = np.maximum(1, np.rint(seconds_CR / tick_s)).astype(np.int64)
    ticks_CR[seconds_CR <= 0] = 0
    dearest_C = ticks_CR.max(axis=1)
    return Ticks(np.maximum(dearest_C, 1), ticks_CR.sum(axis=1) - dearest_C)


def running_order(chosen: Sequence[int], ticks: Ticks) -> list[int]:
    """Places of `chosen` in running order: the bucket that fills the pipeline fastest first, then
    the heavier before the lighter (a short last one drains fastest); ties by bucket, then place."""
    order = sorted(range(len(chosen)), key=lambda i: (-ticks.sum_C[chosen[i]], chosen[i], i))
    if len(order) > 1:
        fastest_fill = min(order, key=lambda i: (ticks.rest_C[chosen[i]], chosen[i], i))
        order.remove(fastest_fill)
        order.insert(0, fastest_fill)
    return order
