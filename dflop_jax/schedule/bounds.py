"""Lower bounds on the simulated step time of every schedule of a batch in a plan's shapes.

A resource is a set of devices that runs one task at a time. It must run its share of the volume of
every module at the best price of its shapes, and the content of the busiest rank. Before the first
task of a resource, other resources run the tasks that its group depends on. After the last task,
the group's remaining tasks run, up to a reduction; updates wait for all reductions. These three
parts do not overlap, so their sum is a bound for any order of the tasks (`fill_and_drain_s`,
`step_bound_s`). The planner passes arrays of seconds, for many layouts of one graph at once.

Shape suffixes: R resources, C shapes, P pieces, S shapes, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    NO_GROUP,
    REDUCE,
    UPDATE,
    Bucket,
    Direction,
    Layout,
    Price,
    Prices,
    ProgramId,
    SegmentPlan,
    Shape,
    Task,
    content_seconds,
)
from dflop_jax.schedule.balance_problem import ROUNDING, Floats, Ints
from dflop_jax.schedule.batch import Batch
from dflop_jax.schedule.costs import GroupCosts, group_costs, segment_directions
from dflop_jax.schedule.count_vectors import fractional_bound, list_covers, volume_conditions
from dflop_jax.simulate.task_graph import segment_links, segment_resources

_SAFE = 1 - ROUNDING  # sums of the same floats in another order differ by less
Seconds = Any  # a number, or an array
Resources = Sequence[Seconds] | np.ndarray


@dataclass(frozen=True)
class BoundTerms:
    """The parts of the lower bound that do not depend on the groups, and the costs of groups."""

    costs: GroupCosts  # every program has the price of its segment's cheaper recompute policy
    content_R: Floats  # seconds of content on each resource
    devices: Mapping[str, Floats]  # by module, number of busy devices of each resource, [R]
    shared_content: float  # seconds times devices, of content
    reduce_R: Floats  # seconds of the reductions and updates at the end of the step
    update_R: Floats
    awaited_R: NDArray[np.bool_]  # whether reductions wait for all tasks of a resource
    concurrency: float  # devices that compute at the same time
    # Maps shapes by module to (seconds before, seconds after) [R]; see `_fill_and_drain`.
    end_times: Callable[[Mapping[str, Sequence[Shape]]], tuple[Floats, Floats]]


def bound_terms(
    batch: Batch, layout: Layout, prices: Prices, trainable: Collection[str]
) -> BoundTerms:
    """Return the terms of a batch's lower bound for all groups, orders and recompute policies."""
    prices = _cheapest_policy(prices)
    costs = group_costs(layout, prices, trainable)
    none_R = np.zeros(costs.n_resources)
    content_R, shared_content, devices_of = none_R.copy(), 0.0, {}
    resource_of = segment_resources(layout)
    devices = {s.name: layout.submesh(s.submesh).n_devices for s in layout.segments}
    for module in layout.modules:
        weight_R = none_R.copy()
        for s in layout.segments_of(module):  # the minimum over a resource's segments
            r, n_devices = resource_of[s.name], min(devices[s.name], prices.concurrency)
            weight_R[r] = min(weight_R[r] or np.inf, n_devices)
        devices_of[module] = weight_R
        shapes = layout.shapes(module)
        if not len(batch.lengths[module]) or not shapes:
            continue
        unit_CFR = np.array([costs.content_s[module, s] for s in shapes])
        ranks = batch.capacity.ranks[module]
        content_F = [busiest_rank_bound(content_P, ranks) for content_P in batch.features[module]]
        content_R += content_seconds(unit_CFR.min(axis=0), content_F)
        shared_content += float(
            content_seconds((unit_CFR * weight_R).sum(axis=2).min(axis=0), content_F)
        )
    end_s = {REDUCE: none_R.copy(), UPDATE: none_R.copy()}
    awaited_R = np.ones(costs.n_resources, bool)
    for s in layout.segments:
        r = resource_of[s.name]
        awaited_R[r] &= s.name in trainable
        if s.name in trainable and len(batch.lengths[s.module]):
            for direction, total_R in end_s.items():
                total_R[r] += prices.step_end.get(Task(s.name, NO_GROUP, direction), 0.0)
    return BoundTerms(
        costs,
        content_R,
        devices_of,
        shared_content,
        end_s[REDUCE],
        end_s[UPDATE],
        awaited_R,
        prices.concurrency,
        partial(_fill_and_drain, layout, prices, trainable),
    )


def lower_bound_s(
    batch: Batch, layout: Layout, prices: Prices, trainable: Collection[str]
) -> float:
    """Return a lower bound on the simulated step seconds of every schedule of the batch, under any
    recompute policies."""
    terms = bound_terms(batch, layout, prices, trainable)
    work_R = np.zeros(terms.costs.n_resources)
    shared = 0.0  # seconds times devices, of all modules
    for module in layout.modules:
        shapes = layout.shapes(module)
        if not len(batch.lengths[module]) or not shapes:
            continue
        static_CR = np.array([terms.costs.static_s[module, s] for s in shapes])
        total_C = (static_CR * terms.devices[module]).sum(axis=1)
        costs_CR = np.column_stack((static_CR, total_C))
        *each_s, total_s = _volume_bound(batch, module, shapes, costs_CR)
        work_R, shared = work_R + each_s, shared + total_s
    ends = [
        terms.end_times({m: layout.shapes(m) for m in layout.modules if m not in missing})
        for missing in batch.missing_modules
    ]
    ends_2R = np.reshape(ends, (-1, 2, len(work_R))).min(axis=0, initial=np.inf)
    before_R, after_R = np.where(np.isinf(ends_2R), 0.0, ends_2R)
    end = terms.reduce_R, terms.update_R, terms.awaited_R
    alone_s = step_bound_s(terms.content_R + work_R, before_R, after_R, *end)
    shared += terms.shared_content
    return max(float(alone_s), shared / terms.concurrency) * _SAFE


def _cheapest_policy(prices: Prices) -> Prices:
    """Return the prices with every program at the lower price of its two recompute policies."""
    programs = dict(prices.programs)
    for less, price in prices.programs.items():
        if less.remat_less:
            usual = replace(less, remat_less=False)
            static_s = min(price.static_s, programs[usual].static_s)
            content_s = map(min, price.content_s, programs[usual].content_s)
            programs[usual] = Price(static_s, tuple(content_s))
    return replace(prices, programs=programs)


def _volume_bound(batch: Batch, module: str, shapes: tuple[Shape, ...], costs_CR: Floats) -> Floats:
    """Return a lower bound, [R], on the cost of groups that hold all pieces of a module. The bound
    is for fractional groups if there are too many integer counts to list."""
    buckets = [Bucket.from_shapes({module: s}) for s in shapes]
    conditions = volume_conditions(batch, buckets, [module], is_bound=True)
    suffices_C = (conditions.capacity_DC > 0).all(axis=0)
    alone_C = np.where(suffices_C, np.ceil(conditions.alone_C), np.inf)
    bound_R = np.zeros(costs_CR.shape[1])
    for r, cost_C in enumerate(costs_CR.T):
        bound_R[r] = fractional_bound(conditions, cost_C)
        if suffices_C.any() and (cost_C > 0).all():
            ceiling = float((alone_C * cost_C).min())  # the lowest cost of equal groups
            counts_XC, complete = list_covers(conditions, cost_C, ceiling * (1 + ROUNDING))
            if complete and len(counts_XC):
                bound_R[r] = max(bound_R[r], float((counts_XC @ cost_C).min()))
    return bound_R


def _fill_and_drain(
    layout: Layout,
    prices: Prices,
    trainable: Collection[str],
    shapes: Mapping[str, Sequence[Shape]],
) -> tuple[Floats, Floats]:
    """Return two arrays [R]: the minimum seconds before a resource's first task of a group, and
    from its last task to the end of a reduction; inf if no module of `shapes` runs there.

    A group holds pieces of some sample. That sample's pieces in other modules run in one of
    `shapes`: forward before the group, backward after it.
    """
    tasks, resource_of = segment_directions(layout, trainable), segment_resources(layout)

    def min_s(s: SegmentPlan, direction: Direction) -> float:
        if direction not in tasks[s.name]:
            return 0.0
        prices_S = [prices.programs.get(ProgramId(s.name, x, direction)) for x in shapes[s.module]]
        return min((p.static_s if p else 0.0 for p in prices_S), default=0.0)

    def reduce_s(s: SegmentPlan) -> float:
        task = Task(s.name, NO_GROUP, REDUCE)
        return prices.step_end.get(task, 0.0) if s.name in trainable else 0.0

    active = [s for s in layout.segments if s.module in shapes]
    number = {s.name: i for i, s in enumerate(active)}
    sources: list[list[int]] = [[] for _ in active]
    for link in segment_links(layout):
        if link.source in number and link.target in number:
            sources[number[link.target]].append(number[link.source])
    forward_s, back_s = ([min_s(s, d) for s in active] for d in (FORWARD, BACKWARD))
    ends = fill_and_drain_s(sources, forward_s, back_s, [reduce_s(s) for s in active])
    before_R, after_R = np.full((2, max(resource_of.values()) + 1), np.inf)
    for s, before_s, after_s in zip(active, *ends, strict=True):
        r = resource_of[s.name]
        before_R[r] = min(before_R[r], before_s)
        after_R[r] = min(after_R[r], max(after_s, reduce_s(s)))
    return before_R, after_R


def fill_and_drain_s(
    sources: Sequence[Sequence[int]],
    forward_s: Sequence[Seconds],
    back_s: Sequence[Seconds],
    reduce_s: Sequence[Seconds],
) -> tuple[list[Seconds], list[Seconds]]:
    """Return lower bounds for every segment on the seconds before its first task, and from its last
    backward to the last reduction elsewhere that waits for it; segments in topological order.

    Args:
      sources: the segments that each segment reads.
      forward_s, back_s: seconds of a group; 0 if a segment runs no such task.
    """
    before_s: list[Seconds] = [0.0] * len(sources)
    after_s: list[Seconds] = list(before_s)
    for i, read in enumerate(sources):
        for u in read:
            before_s[i] = np.maximum(before_s[i], before_s[u] + forward_s[u])
            reader_s = np.where(back_s[u] > 0, back_s[u] + np.maximum(after_s[u], reduce_s[u]), 0.0)
            after_s[i] = np.maximum(after_s[i], reader_s)
    return before_s, after_s


def step_bound_s(
    work_R: Resources,
    before_R: Resources,
    after_R: Resources,
    reduce_R: Resources,
    update_R: Resources,
    awaited_R: Resources | None = None,
) -> Seconds:
    """Return a lower bound on the seconds of a step, from the seconds of every resource.

    Args:
      work_R: seconds of all groups on the resource.
      before_R, after_R: results of `fill_and_drain_s`, the minimum over the resource's segments.
      reduce_R, update_R: seconds of reductions and updates of all the resource's segments.
      awaited_R: whether reductions wait for all the resource's tasks; None: all do.
    """
    tails = drain_s(after_R, reduce_R, update_R, awaited_R)
    return reduce(np.maximum, map(sum, zip(before_R, work_R, tails, strict=True)), 0.0)


def drain_s(
    after_R: Resources, reduce_R: Resources, update_R: Resources, awaited_R: Resources | None = None
) -> list[Seconds]:
    """Return the minimum seconds from each resource's last backward to the end of the step; see
    `step_bound_s`."""
    update_s = np.maximum.reduce(np.broadcast_arrays(*update_R))
    tails = []
    for r, after_s in enumerate(after_R):
        tail_s = np.maximum(reduce_R[r], after_s) + update_s
        if awaited_R is not None:
            alone_s = np.maximum(reduce_R[r] + update_R[r], after_s)
            tail_s = np.where(awaited_R[r], tail_s, alone_s)
        tails.append(tail_s)
    return tails


def busiest_rank_bound(content_P: Ints, ranks: int) -> int:
    """Return a lower bound on the busiest rank's content for every placement of these pieces."""
    if len(content_P) == 0:
        return 0
    return max(int(content_P.max()), -(-int(content_P.sum()) // ranks))
