"""A lower bound on the simulated step: no schedule of a batch under a plan's shapes is faster.

Every resource must work off its share of every module's volume, at the best price that its shapes
offer, and of the content what groups have on their busiest ranks at least (`content`). Before its
first task something else may have to run, and after its last one too; all that is updated waits for
all reductions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

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
    content_s,
)
from dflop_jax.schedule.batch import Batch, Capacity
from dflop_jax.schedule.bounds.content import least_content
from dflop_jax.schedule.bounds.pipeline import ends_s, step_s
from dflop_jax.schedule.costs import GroupCosts, directions, group_costs
from dflop_jax.schedule.cover import cheap_covers, demand, fractional_cost
from dflop_jax.schedule.solver.problem import ROUNDING, Floats
from dflop_jax.tasks.graph import links, resources

_SAFE = 1 - ROUNDING  # sums of the same floats in another order differ by less


@dataclass(frozen=True)
class Floor:
    """What every schedule of a batch takes, besides the static seconds of its groups.

    Attributes:
      costs: of groups, every program at the price of the cheaper of its segment's policies.
      content_R: seconds of content on each resource.
      devices: by module, how many of each resource's devices its groups keep busy, [R].
      shared_content: seconds times devices of content.
      reduce_R, update_R: seconds of the step's end.
      awaited_R: whether reductions wait for all of a resource's tasks.
      concurrency: devices that really compute at once.
      ends: of groups with these shapes by module, (before [R], after [R]): see `_ends`.
    """

    costs: GroupCosts
    content_R: Floats
    devices: Mapping[str, Floats]
    shared_content: float
    reduce_R: Floats
    update_R: Floats
    awaited_R: NDArray[np.bool_]
    concurrency: float
    ends: Callable[[Mapping[str, Sequence[Shape]]], tuple[Floats, Floats]]


def floor_of(
    batch: Batch, layout: Layout, capacity: Capacity, prices: Prices, trainable: Collection[str]
) -> Floor:
    """The floor of a batch's schedules, whatever their groups, order and recompute policies."""
    prices = _cheapest(prices)
    costs = group_costs(layout, prices, trainable)
    none_R = np.zeros(costs.n_resources)
    content_R, shared, devices_of = none_R.copy(), 0.0, {}
    resource_of = resources(layout)
    ids = sorted({resource_of[s.submesh] for s in layout.segments})
    devices = {s.name: layout.submesh(s.submesh).n_devices for s in layout.segments}
    for module in layout.modules:
        weight_R = none_R.copy()
        for s in layout.segments_of(module):  # of a resource's segments, the one of fewest devices
            r = ids.index(resource_of[s.submesh])
            few = min(devices[s.name], prices.concurrency)
            weight_R[r] = min(weight_R[r] or np.inf, few)
        devices_of[module] = weight_R
        shapes = layout.shapes(module)
        if not len(batch.lengths[module]) or not shapes:
            continue
        unit_CFR = np.array([costs.content_s[module, s] for s in shapes])
        length_P, ranks = batch.lengths[module], capacity.ranks[module]
        content_F = [
            least_content(length_P, content_P, shapes, ranks, capacity.group_size)
            for content_P in batch.features[module]
        ]
        content_R += content_s(unit_CFR.min(axis=0), content_F)
        shared += float(content_s((unit_CFR * weight_R).sum(axis=2).min(axis=0), content_F))
    end_s = {REDUCE: none_R.copy(), UPDATE: none_R.copy()}
    awaited_R = np.ones(costs.n_resources, bool)
    for s in layout.segments:
        r = ids.index(resource_of[s.submesh])
        awaited_R[r] &= s.name in trainable
        if s.name in trainable and len(batch.lengths[s.module]):
            for direction, total_R in end_s.items():
                total_R[r] += prices.step_end.get(Task(s.name, NO_GROUP, direction), 0.0)
    return Floor(
        costs,
        content_R,
        devices_of,
        shared,
        end_s[REDUCE],
        end_s[UPDATE],
        awaited_R,
        prices.concurrency,
        partial(_ends, layout, prices, trainable),
    )


def lower_bound_s(
    batch: Batch, layout: Layout, capacity: Capacity, prices: Prices, trainable: Collection[str]
) -> float:
    """Seconds that no schedule of the batch can beat in simulation, whatever groups it has and in
    whatever order and under whatever recompute policies they run."""
    floor = floor_of(batch, layout, capacity, prices, trainable)
    work_R = np.zeros(floor.costs.n_resources)
    shared = 0.0  # seconds times devices, of all modules
    before_R, after_R = np.full((2, len(work_R)), np.inf)
    for module in layout.modules:
        shapes = layout.shapes(module)
        if not len(batch.lengths[module]) or not shapes:
            continue
        static_CR = np.array([floor.costs.static_s[module, s] for s in shapes])
        work_R += _volume_s(batch, module, shapes, capacity, static_CR)
        total_C = (static_CR * floor.devices[module]).sum(axis=1)
        shared += float(_volume_s(batch, module, shapes, capacity, total_C[:, None])[0])
    for lacks in batch.absences:
        before, after = floor.ends({m: layout.shapes(m) for m in layout.modules if m not in lacks})
        before_R, after_R = np.minimum(before_R, before), np.minimum(after_R, after)
    before_R[np.isinf(before_R)] = 0.0
    after_R[np.isinf(after_R)] = 0.0
    alone_s = step_s(
        floor.content_R + work_R,
        before_R,
        after_R,
        floor.reduce_R,
        floor.update_R,
        floor.awaited_R,
    )
    shared += floor.shared_content
    return max(float(alone_s), shared / floor.concurrency) * _SAFE


def _cheapest(prices: Prices) -> Prices:
    """Every program at the price of the cheaper of its segment's recompute policies."""
    programs = dict(prices.programs)
    for less, price in prices.programs.items():
        if less.remat_less:
            usual = replace(less, remat_less=False)
            static_s = min(price.static_s, programs[usual].static_s)
            least_s = map(min, price.content_s, programs[usual].content_s)
            programs[usual] = Price(static_s, tuple(least_s))
    return replace(prices, programs=programs)


def _volume_s(
    batch: Batch, module: str, shapes: tuple[Shape, ...], capacity: Capacity, static_CR: Floats
) -> Floats:
    """[R]: least static seconds of groups of these shapes that hold all pieces of a module: the
    cheapest whole numbers of groups that meet the conditions on volume, or, where these are too
    many to list, fractions of groups."""
    buckets = [Bucket.of({module: s}) for s in shapes]
    wanted = demand(batch, buckets, capacity, [module], is_bound=True)
    least_R = np.zeros(static_CR.shape[1])
    for r, cost_C in enumerate(static_CR.T):
        least_R[r] = fractional_cost(wanted, cost_C)
        if (cost_C <= 0).any() or len(wanted.need_D) == 0:
            continue
        alone_C = np.where(
            ((wanted.room_DC <= 0) & (wanted.need_D[:, None] > 0)).any(axis=0),
            np.inf,
            np.ceil((wanted.need_D[:, None] / np.maximum(wanted.room_DC, 1e-9)).max(axis=0)),
        )
        ceiling = float((alone_C * cost_C).min())  # the best answer of equal groups
        if np.isfinite(ceiling):
            counts_XC, complete = cheap_covers(wanted, cost_C, ceiling * (1 + ROUNDING))
            if complete and len(counts_XC):
                least_R[r] = max(least_R[r], float((counts_XC @ cost_C).min()))
    return least_R


def _ends(
    layout: Layout,
    prices: Prices,
    trainable: Collection[str],
    shapes: Mapping[str, Sequence[Shape]],
) -> tuple[Floats, Floats]:
    """[R] twice: seconds that pass at least before a resource's first task of a group, and from
    its last one to the end of a reduction, because of what must follow it; inf where none of these
    modules runs.

    A group holds pieces of some sample, and with them runs what that sample's pieces in other
    modules need, in one of these `shapes`: forward before it, backward after it.
    """
    tasks, resource_of = directions(layout, trainable), resources(layout)
    ids = sorted({resource_of[s.submesh] for s in layout.segments})

    def least_s(s: SegmentPlan, direction: Direction) -> float:
        if direction not in tasks[s.name]:
            return 0.0
        known = [prices.programs.get(ProgramId(s.name, x, direction)) for x in shapes[s.module]]
        return min((p.static_s if p else 0.0 for p in known), default=0.0)

    def reduce_s(s: SegmentPlan) -> float:
        task = Task(s.name, NO_GROUP, REDUCE)
        return prices.step_end.get(task, 0.0) if s.name in trainable else 0.0

    active = [s for s in layout.segments if s.module in shapes]
    number = {s.name: i for i, s in enumerate(active)}
    sources: list[list[int]] = [[] for _ in active]
    for link in links(layout):
        if link.source in number and link.target in number:
            sources[number[link.target]].append(number[link.source])
    ends = ends_s(
        sources,
        [least_s(s, FORWARD) for s in active],
        [least_s(s, BACKWARD) for s in active],
        [reduce_s(s) for s in active],
    )
    before_R, after_R = np.full((2, len(ids)), np.inf)
    for s, before_s, after_s in zip(active, *ends, strict=True):
        r = ids.index(resource_of[s.submesh])
        before_R[r] = min(before_R[r], before_s)
        after_R[r] = min(after_R[r], max(after_s, reduce_s(s)))
    return before_R, after_R
