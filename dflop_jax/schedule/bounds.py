"""Lower bounds on the simulated step time of every schedule of a batch in a plan's shapes.

A resource is a set of devices that runs one task at a time. It must run its share of the volume of
every module at the best price of its shapes, and the content of the busiest rank. Before the first
task of a resource, other resources run the tasks that its group depends on. After the last task,
the group's remaining tasks run, up to a reduction; updates wait for all reductions. These three
parts do not overlap, so their sum is a bound for any order of the tasks (`fill_and_drain_s`,
`step_bound_s`). The planner passes arrays of seconds, for many layouts of one graph at once.

If devices share cores, tasks slow each other down. If a second of work of each task has a weight,
and running tasks do at most 1 of weighted work per second, all weighted work is a bound, too. Each
resource has such a bound, and there is one of all cores (`_work_weights`).

Shape suffixes: R resources, L bounds (of each resource, of all cores), C and S shapes, P pieces, G
groups, F content features.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import product
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
    SendId,
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
    # By module, weights of a second of work on each resource in each bound [L, R]: `_work_weights`.
    weights: Mapping[str, Floats]
    rest_L: Floats  # weighted seconds of content, and of step ends beside those of the resource
    idle_R: Floats  # weight of a second in which a resource is idle
    reduce_R: Floats  # seconds of the reductions and updates at the end of the step
    update_R: Floats
    awaited_R: NDArray[np.bool_]  # whether reductions wait for all tasks of a resource
    # Maps shapes by module to (seconds before, seconds after) [R]; see `_fill_and_drain`.
    end_times: Callable[[Mapping[str, Sequence[Shape]]], tuple[Floats, Floats]]


def bound_terms(
    batch: Batch, layout: Layout, prices: Prices, trainable: Collection[str]
) -> BoundTerms:
    """Return the terms of a batch's lower bound for all groups, orders and recompute policies."""
    prices = _cheapest_policy(prices)
    costs = group_costs(layout, prices, trainable)
    resource_of, none_R = segment_resources(layout), np.zeros(costs.n_resources)
    weight_of, idle_R = _work_weights(layout, resource_of, prices.concurrency)
    rest_L, weights = np.zeros(costs.n_resources + 1), {}
    for module in layout.modules:
        weight_LR = np.full((len(rest_L), costs.n_resources), np.inf)
        for s in layout.segments_of(module):  # the minimum over a resource's segments
            r = resource_of[s.name]
            weight_LR[:, r] = np.minimum(weight_LR[:, r], weight_of[s.name])
        weights[module] = weight_LR = np.where(np.isinf(weight_LR), 0.0, weight_LR)
        shapes = layout.shapes(module)
        if not len(batch.lengths[module]) or not shapes:
            continue
        unit_CFL = np.array([costs.content_s[module, s] for s in shapes]) @ weight_LR.T
        ranks = batch.capacity.ranks[module]
        content_F = [busiest_rank_bound(content_P, ranks) for content_P in batch.features[module]]
        rest_L += content_seconds(unit_CFL.min(axis=0), content_F)
    end_s = {REDUCE: none_R.copy(), UPDATE: none_R.copy()}
    awaited_R = np.ones(costs.n_resources, bool)
    for s in layout.segments:
        r = resource_of[s.name]
        awaited_R[r] &= s.name in trainable
        if s.name in trainable and len(batch.lengths[s.module]):
            weight_L = weight_of[s.name].copy()
            weight_L[r] = 1 - idle_R[r]  # the rest is part of the time after its last task
            for direction, total_R in end_s.items():
                seconds = prices.step_end.get(Task(s.name, NO_GROUP, direction), 0.0)
                total_R[r] += seconds
                rest_L += seconds * weight_L
    return BoundTerms(
        costs,
        weights,
        rest_L,
        idle_R,
        end_s[REDUCE],
        end_s[UPDATE],
        awaited_R,
        partial(_fill_and_drain, layout, prices, trainable),
    )


def _work_weights(
    layout: Layout, resource_of: Mapping[str, int], concurrency: float
) -> tuple[dict[str, Floats], Floats]:
    """Return by segment the weights [L] of a second of its work, and the weight [R] of a second in
    which a resource is idle.

    A task on d devices alone does min(1, concurrency / d) units of work per second; each of tasks
    on D devices does 1 / max(1, D / concurrency). So units may weigh as much as all of any running
    tasks sum to at most max(1, D / concurrency): d / concurrency each, or max(1, d / concurrency)
    on one resource and max(0, d / concurrency - spare) on others, where `spare` is the share of
    cores that the one leaves idle.
    """
    n_resources = max(resource_of.values()) + 1
    low_R, high_R = np.full(n_resources, np.inf), np.zeros(n_resources)  # devices of a task
    share_of = {}  # devices / concurrency
    for s in layout.segments:
        r = resource_of[s.name]
        share_of[s.name] = share = layout.submesh(s.submesh).n_devices / concurrency
        low_R[r], high_R[r] = min(low_R[r], share), max(high_R[r], share)
    spare_R = np.maximum(0.0, 1 - low_R)
    weight_of = {}
    for name, share in share_of.items():
        unit_L = np.append(np.maximum(0.0, share - spare_R), share)
        weight_of[name] = unit_L / max(1.0, share)
        weight_of[name][resource_of[name]] = 1.0
    # Most weighted work of the others per second while a resource is idle.
    others_R = high_R.sum() - high_R
    unit_RR = np.maximum(0.0, high_R - spare_R[:, None])
    np.fill_diagonal(unit_RR, 0.0)
    busy_R = np.maximum(0.0, others_R - spare_R) / np.maximum(1.0, others_R)
    return weight_of, 1 - np.minimum(busy_R, unit_RR.sum(axis=1))


def lower_bound_s(
    batch: Batch, layout: Layout, prices: Prices, trainable: Collection[str]
) -> float:
    """Return a lower bound on the simulated step seconds of every schedule of the batch, under any
    recompute policies."""
    terms = bound_terms(batch, layout, prices, trainable)
    work_L = terms.rest_L.copy()
    for module in layout.modules:
        shapes = layout.shapes(module)
        if len(batch.lengths[module]) and shapes:
            static_CR = np.array([terms.costs.static_s[module, s] for s in shapes])
            work_L += _volume_bound(batch, module, shapes, static_CR @ terms.weights[module].T)
    ends = [
        terms.end_times({m: layout.shapes(m) for m in layout.modules if m not in missing})
        for missing in batch.missing_modules
    ]
    ends_2R = np.reshape(ends, (-1, 2, len(work_L) - 1)).min(axis=0, initial=np.inf)
    before_R, after_R = np.where(np.isinf(ends_2R), 0.0, ends_2R)
    tail_R = np.array(drain_s(after_R, terms.reduce_R, terms.update_R, terms.awaited_R))
    work_L[:-1] += terms.idle_R * (before_R + tail_R)
    return float(work_L.max()) * _SAFE


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
    send_s: dict[tuple[int, int], tuple[float, float]] = {}
    for link in segment_links(layout):
        if link.source in number and link.target in number:
            u, i = number[link.source], number[link.target]
            sources[i].append(u)
            if active[u].submesh != active[i].submesh:
                each_s = [
                    [prices.sends.get(SendId(link.source, link.target, x, d), 0.0) for x in of]
                    for of, d in product([shapes[active[i].module]], (FORWARD, BACKWARD))
                ]
                send_s[u, i] = min(each_s[0], default=0.0), min(each_s[1], default=0.0)
    forward_s, back_s = ([min_s(s, d) for s in active] for d in (FORWARD, BACKWARD))
    reduce_ends_s = [reduce_s(s) for s in active]
    ends = fill_and_drain_s(sources, forward_s, back_s, reduce_ends_s, send_s)
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
    send_s: Mapping[tuple[int, int], tuple[float, float]] | None = None,
) -> tuple[list[Seconds], list[Seconds]]:
    """Return lower bounds for every segment on the seconds before its first task, and from its last
    backward to the last reduction elsewhere that waits for it; segments in topological order.

    Args:
      sources: the segments that each segment reads.
      forward_s, back_s: seconds of a group; 0 if a segment runs no such task.
      send_s: seconds of sends to a reader and back, by (segment, reader); None: no sends.
    """
    before_s: list[Seconds] = [0.0] * len(sources)
    after_s: list[Seconds] = list(before_s)
    for i, read in enumerate(sources):
        for u in read:
            there_s, back_there_s = send_s.get((u, i), (0.0, 0.0)) if send_s else (0.0, 0.0)
            before_s[i] = np.maximum(before_s[i], before_s[u] + forward_s[u] + there_s)
            from_back_s = back_there_s + back_s[u] + np.maximum(after_s[u], reduce_s[u])
            reader_s = np.where(back_s[u] > 0, from_back_s, 0.0)
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
