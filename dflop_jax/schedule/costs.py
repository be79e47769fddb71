"""Costs of groups by resource, read from the prices and never modelled here.

Their sums order the choices within a search and form lower bounds. Makespans come from the
simulator only.
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

# Ticks of the dearest bucket's seconds: costs that differ by less than a ten-millionth are equal,
# since that is rounding.
_TICKS_OF_MAX = 10_000_000


def segment_directions(
    layout: Layout, trainable: Collection[str]
) -> dict[str, tuple[Direction, ...]]:
    """The tasks that a group has in each segment, as `task_graph.step_graph` lists them."""
    backward = segments_with_backward(layout, trainable)
    senders = {link.source for link in segment_links(layout)}
    tasks: dict[str, tuple[Direction, ...]] = {}
    for s in layout.segments:
        forward: tuple[Direction, ...] = (FORWARD, BACKWARD) if s.name in backward else (FORWARD,)
        tasks[s.name] = forward if s.name in senders else (BACKWARD,)
    return tasks


@dataclass(frozen=True)
class GroupCosts:
    """Seconds of a group of a module and shape on each resource: `static_s` [R] for its shape, and
    `content_s` [features, R] for a unit of each content feature."""

    static_s: dict[tuple[str, Shape], Floats]
    content_s: dict[tuple[str, Shape], Floats]
    n_resources: int

    def bucket_s(self, bucket: Bucket) -> Floats:
        """[R]: static seconds of one group of each module of the bucket."""
        none = np.zeros(self.n_resources)
        return sum((self.static_s[m, s] for m, s in bucket.shapes), none)

    def content_weights(self, module: str) -> Floats | None:
        """[features]: the price of a unit of each content feature in the module's programs,
        relative to the cheapest one above 0; None if content has no price."""
        unit_s = self.unit_s(module)
        return self._content_s(module) / unit_s if unit_s else None

    def unit_s(self, module: str) -> float:
        """Seconds of one unit of weighted content in all programs of a group; 0 if content has no
        price."""
        mean_F = self._content_s(module)
        return float(mean_F[mean_F > 0].min()) if mean_F.any() else 0.0

    def _content_s(self, module: str) -> Floats:
        """[features]: seconds of a unit of each feature in all programs of a group, averaged over
        shapes."""
        each = [v.sum(axis=1) for (m, _), v in self.content_s.items() if m == module]
        return np.mean(each, axis=0) if each else np.zeros(1)


def group_costs(layout: Layout, prices: Prices, trainable: Collection[str]) -> GroupCosts:
    """The costs of groups of all shapes of the plan."""
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
    """Costs of buckets in whole ticks, so that sums are exact in any order and equal costs compare
    equal. `dearest_C` is the cost on the resource that a group keeps busy longest, `rest_C` the
    cost on all others, `sum_C` both."""

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
    """Indices of `chosen` in running order: first the bucket that fills the pipeline fastest, then
    heavier buckets before lighter ones, since a short last group drains fastest. Ties go to the
    lower bucket, then to the lower index."""
    order = sorted(range(len(chosen)), key=lambda i: (-ticks.sum_C[chosen[i]], chosen[i], i))
    if len(order) > 1:
        fastest_fill = min(order, key=lambda i: (ticks.rest_C[chosen[i]], chosen[i], i))
        order.remove(fastest_fill)
        order.insert(0, fastest_fill)
    return order
