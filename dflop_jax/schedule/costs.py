"""Costs of groups on each resource, from the prices.

Sums of costs rank the choices of a search and form lower bounds. Makespans come from the simulator
only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from dflop_jax.records import BACKWARD, FORWARD, Bucket, Direction, Layout, Prices, ProgramId, Shape
from dflop_jax.schedule.balance_problem import Floats, Ints
from dflop_jax.simulate.task_graph import segment_links, segment_resources, segments_with_backward

# Relative difference below which seconds are equal; the last bits of a fit depend on the machine.
TIE_TOLERANCE = 1e-6


def segment_directions(
    layout: Layout, trainable: Collection[str]
) -> dict[str, tuple[Direction, ...]]:
    """Return the directions of a group's tasks in each segment, as in `task_graph.step_graph`."""
    backward = segments_with_backward(layout, trainable)
    tasks: dict[str, tuple[Direction, ...]] = {s.name: (BACKWARD,) for s in layout.segments}
    for link in segment_links(layout):
        tasks[link.source] = (FORWARD, BACKWARD) if link.source in backward else (FORWARD,)
    return tasks


@dataclass(frozen=True)
class GroupCosts:
    """Seconds of a group on each resource by module and shape: `static_s` [R] of the shape, and
    `content_s` [features, R] per unit of each content feature."""

    static_s: dict[tuple[str, Shape], Floats]
    content_s: dict[tuple[str, Shape], Floats]
    n_resources: int

    def bucket_s(self, bucket: Bucket) -> Floats:
        """Return the static seconds of one group of each module of the bucket, [R]."""
        none = np.zeros(self.n_resources)
        return sum((self.static_s[m, s] for m, s in bucket.shapes), none)

    def content_unit_s(self, module: str) -> Floats:
        """Return the seconds per unit of each feature in all programs, averaged over shapes."""
        each = [v.sum(axis=1) for (m, _), v in self.content_s.items() if m == module]
        return np.mean(each, axis=0) if each else np.zeros(1)


def group_costs(layout: Layout, prices: Prices, trainable: Collection[str]) -> GroupCosts:
    """Return the costs of groups in all shapes of the layout."""
    tasks = segment_directions(layout, trainable)
    resource_of = segment_resources(layout)
    n_resources = max(resource_of.values()) + 1

    static: dict[tuple[str, Shape], Floats] = {}
    content: dict[tuple[str, Shape], Floats] = {}
    for module, shape in ((m, shape) for m in layout.modules for shape in layout.shapes(m)):
        programs = [
            ProgramId(s.name, shape, d) for s in layout.segments_of(module) for d in tasks[s.name]
        ]
        priced = [
            (resource_of[p.segment], prices.programs[p]) for p in programs if p in prices.programs
        ]
        n_features = max((len(price.content_s) for _, price in priced), default=0)
        static[module, shape] = np.zeros(n_resources)
        content[module, shape] = np.zeros((n_features, n_resources))
        for r, price in priced:
            static[module, shape][r] += price.static_s
            content[module, shape][: len(price.content_s), r] += price.content_s
    return GroupCosts(static, content, n_resources)


@dataclass(frozen=True)
class Ticks:
    """Costs of buckets in integer ticks, so that sums are exact; `TIE_TOLERANCE` of the largest is
    ten ticks. `dearest_C` is the cost on the resource that a group keeps busy longest, `rest_C` the
    cost on all other resources."""

    dearest_C: Ints
    rest_C: Ints

    @property
    def sum_C(self) -> Ints:
        return self.dearest_C + self.rest_C


def bucket_ticks(costs: GroupCosts, buckets: Sequence[Bucket]) -> Ticks:
    seconds_CR = np.array([costs.bucket_s(b) for b in buckets])
    tick_s = (float(seconds_CR.max(initial=0.0)) or 1.0) * TIE_TOLERANCE / 10
    ticks_CR = np.where(seconds_CR > 0, np.maximum(1, np.rint(seconds_CR / tick_s)), 0).astype(
        np.int64
    )
    dearest_C = ticks_CR.max(axis=1)
    return Ticks(np.maximum(dearest_C, 1), ticks_CR.sum(axis=1) - dearest_C)


def running_order(chosen: Sequence[int], ticks: Ticks) -> list[int]:
    """Return the indices of `chosen` in running order: first the bucket that fills the pipeline
    fastest, then the others in decreasing cost, since a short last group drains fastest."""
    order = sorted(range(len(chosen)), key=lambda i: (-ticks.sum_C[chosen[i]], chosen[i], i))
    if len(order) > 1:
        fastest_fill = min(order, key=lambda i: (ticks.rest_C[chosen[i]], chosen[i], i))
        order.remove(fastest_fill)
        order.insert(0, fastest_fill)
    return order
