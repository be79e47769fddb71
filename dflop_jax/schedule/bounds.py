"""Lower bounds: on the simulated step time of every schedule of a batch in a plan's shapes, on the
content of groups, and on the makespan of every order of tasks.

A resource is a set of devices that no other task shares. It must run its share of the volume of
every module at the best price of its shapes, and the content of each group's busiest rank
(`content_bound`). Before its first task, the tasks that this group depends on have run elsewhere.
After its last task, the tasks that follow the group run, up to a reduction; updates wait for all
reductions. These three parts do not overlap, so they add up in any order of the tasks
(`fill_and_drain_s`, `step_bound_s`). The planner uses the same functions with arrays of seconds,
for many layouts of one graph at once.

Shape suffixes: R resources, C shapes, P pieces, S shapes, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from dflop_jax.schedule.batch import Batch, Capacity, capacity_of
from dflop_jax.schedule.costs import GroupCosts, group_costs, segment_directions
from dflop_jax.schedule.count_vectors import fractional_bound, list_covers, volume_conditions
from dflop_jax.simulate.numbered_tasks import StepTasks
from dflop_jax.simulate.task_graph import segment_links, segment_resources

_SAFE = 1 - ROUNDING  # sums of the same floats in another order differ by less
Seconds = Any  # a number, or an array
Resources = Sequence[Seconds] | np.ndarray


@dataclass(frozen=True)
class BoundTerms:
    """The parts of the lower bound that do not depend on the groups, and the costs of groups.

    Attributes:
      costs: costs of groups; every program has the price of its segment's cheaper recompute policy.
      content_R: seconds of content on each resource.
      devices: by module, devices of each resource that its groups keep busy, [R].
      shared_content: seconds times devices of content.
      reduce_R, update_R: seconds of the reductions and updates at the end of the step.
      awaited_R: whether reductions wait for all tasks of a resource.
      concurrency: devices that compute at the same time.
      ends: maps shapes by module to (seconds before, seconds after) [R]; see `_fill_and_drain`.
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


def bound_terms(
    batch: Batch, layout: Layout, prices: Prices, trainable: Collection[str]
) -> BoundTerms:
    """The terms of the lower bound of a batch, for all groups, orders and recompute policies."""
    prices, capacity = _cheapest_policy(prices), capacity_of(layout)
    costs = group_costs(layout, prices, trainable)
    none_R = np.zeros(costs.n_resources)
    content_R, shared_content, devices_of = none_R.copy(), 0.0, {}
    resource_of = segment_resources(layout)
    devices = {s.name: layout.submesh(s.submesh).n_devices for s in layout.segments}
    for module in layout.modules:
        weight_R = none_R.copy()
        for s in layout.segments_of(module):  # of a resource's segments, the one of fewest devices
            r, n_devices = resource_of[s.name], min(devices[s.name], prices.concurrency)
            weight_R[r] = min(weight_R[r] or np.inf, n_devices)
        devices_of[module] = weight_R
        shapes = layout.shapes(module)
        if not len(batch.lengths[module]) or not shapes:
            continue
        unit_CFR = np.array([costs.content_s[module, s] for s in shapes])
        length_P, ranks = batch.lengths[module], capacity.ranks[module]
        content_F = [
            content_bound(length_P, content_P, shapes, ranks, capacity.group_size)
            for content_P in batch.features[module]
        ]
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
    """Seconds that no schedule of the batch beats in simulation, for all groups, task orders and
    recompute policies."""
    terms, capacity = bound_terms(batch, layout, prices, trainable), capacity_of(layout)
    work_R = np.zeros(terms.costs.n_resources)
    shared = 0.0  # seconds times devices, of all modules
    before_R, after_R = np.full((2, len(work_R)), np.inf)
    for module in layout.modules:
        shapes = layout.shapes(module)
        if not len(batch.lengths[module]) or not shapes:
            continue
        static_CR = np.array([terms.costs.static_s[module, s] for s in shapes])
        total_C = (static_CR * terms.devices[module]).sum(axis=1)
        costs_CR = np.column_stack((static_CR, total_C))
        *each_s, total_s = _volume_bound(batch, module, shapes, capacity, costs_CR)
        work_R, shared = work_R + each_s, shared + total_s
    for missing in batch.missing_modules:
        shapes_of = {m: layout.shapes(m) for m in layout.modules if m not in missing}
        before_s, after_s = terms.ends(shapes_of)
        before_R, after_R = np.minimum(before_R, before_s), np.minimum(after_R, after_s)
    before_R, after_R = (np.where(np.isinf(end_R), 0.0, end_R) for end_R in (before_R, after_R))
    end = terms.reduce_R, terms.update_R, terms.awaited_R
    alone_s = step_bound_s(terms.content_R + work_R, before_R, after_R, *end)
    shared += terms.shared_content
    return max(float(alone_s), shared / terms.concurrency) * _SAFE


def _cheapest_policy(prices: Prices) -> Prices:
    """The prices with every program at the price of its segment's cheaper recompute policy."""
    programs = dict(prices.programs)
    for less, price in prices.programs.items():
        if less.remat_less:
            usual = replace(less, remat_less=False)
            static_s = min(price.static_s, programs[usual].static_s)
            content_s = map(min, price.content_s, programs[usual].content_s)
            programs[usual] = Price(static_s, tuple(content_s))
    return replace(prices, programs=programs)


def _volume_bound(
    batch: Batch, module: str, shapes: tuple[Shape, ...], capacity: Capacity, costs_CR: Floats
) -> Floats:
    """[R]: the lowest cost of groups of these shapes that hold all pieces of a module: of whole
    groups that satisfy the volume conditions, or of fractional groups if there are too many counts
    to list."""
    buckets = [Bucket.from_shapes({module: s}) for s in shapes]
    conditions = volume_conditions(batch, buckets, capacity, [module], is_bound=True)
    suffices_C = (conditions.capacity_DC > 0).all(axis=0)
    alone_C = np.where(suffices_C, np.ceil(conditions.alone_C), np.inf)
    bound_R = np.zeros(costs_CR.shape[1])
    for r, cost_C in enumerate(costs_CR.T):
        bound_R[r] = fractional_bound(conditions, cost_C)
        if suffices_C.any() and (cost_C > 0).all():
            ceiling = float((alone_C * cost_C).min())  # the best answer of equal groups
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
    """Two arrays [R]: the least seconds before a resource's first task of a group, and the least
    seconds from its last task to the end of a reduction; inf if no segment of `shapes` runs there.

    A group holds pieces of some sample. The pieces of that sample in other modules run in one of
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
    ends = fill_and_drain_s(
        sources,
        [min_s(s, FORWARD) for s in active],
        [min_s(s, BACKWARD) for s in active],
        [reduce_s(s) for s in active],
    )
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
    """For every segment, in topological order, lower bounds on the seconds before its first task
    and on the seconds from the end of its last backward to the last reduction elsewhere that waits
    for it.

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
    """A lower bound on the seconds of a step, from the seconds of every resource.

    Args:
      work_R: of all its groups.
      before_R, after_R: as from `fill_and_drain_s`, the minimum over its segments.
      reduce_R, update_R: of the reductions and updates of all its segments.
      awaited_R: whether reductions wait for all its tasks; None: they do.
    """
    bound_s: Seconds = 0.0
    tails = drain_s(after_R, reduce_R, update_R, awaited_R)
    for before_s, work_s, tail_s in zip(before_R, work_R, tails, strict=True):
        bound_s = np.maximum(bound_s, before_s + work_s + tail_s)
    return bound_s


def drain_s(
    after_R: Resources, reduce_R: Resources, update_R: Resources, awaited_R: Resources | None = None
) -> list[Seconds]:
    """Least seconds from the end of every resource's last backward to the end of the step;
    arguments as for `step_bound_s`."""
    update_s = np.maximum.reduce(np.broadcast_arrays(*update_R))
    tails = []
    for r, after_s in enumerate(after_R):
        tail_s = np.maximum(reduce_R[r], after_s) + update_s
        if awaited_R is not None:
            alone_s = np.maximum(reduce_R[r] + update_R[r], after_s)
            tail_s = np.where(awaited_R[r], tail_s, alone_s)
        tails.append(tail_s)
    return tails


def content_bound(
    length_P: Ints, content_P: Ints, shapes: Sequence[Shape], ranks: int, microbatches: int = 1
) -> float:
    """A lower bound on the sum over groups of the content of each group's busiest rank, for all
    groups of these shapes that hold the pieces.

    Sort the groups by their largest piece, largest first. The first k groups hold a limited number
    of pieces of a given length; if more pieces have content c or more, group k + 1 has at least
    content c (`_largest_pieces`). The first k groups hold at most the content that fits into k of
    the largest groups; the other groups hold the rest, with at least its mean over the ranks. The
    sum of both is a bound for every k; k = 0 gives the mean of all content.

    Args:
      shapes: each holds some piece; every piece fits one of them.
      microbatches: per group.
    """
    assert len(length_P), "there is a piece"
    widest = max(shape.size for shape in shapes) * ranks * microbatches
    largest_G = _largest_pieces(length_P, content_P, shapes, ranks * microbatches)
    dense_first = np.argsort(-content_P / np.maximum(length_P, 1), kind="stable")
    tokens = np.concatenate([[0], np.cumsum(length_P[dense_first])])
    content = np.concatenate([[0], np.cumsum(content_P[dense_first])]).astype(float)
    room_G = widest * np.arange(len(largest_G) + 1)
    others_G = (content[-1] - np.interp(room_G, tokens, content)) / ranks
    others_G = np.ceil(others_G * (1 - ROUNDING))  # contents are whole numbers
    first_G = np.concatenate([[0], np.cumsum(largest_G)])
    return float((first_G + others_G).max())


def _largest_pieces(length_P: Ints, content_P: Ints, shapes: Sequence[Shape], bins: int) -> Ints:
    """[G]: a lower bound on the content of each group's largest piece, largest first, for groups
    that every schedule has. A group has `bins` times the rows of a shape."""
    order = np.argsort(-content_P, kind="stable")
    shortest_P = np.maximum(np.minimum.accumulate(length_P[order]), 1)  # of the pieces so far
    # The largest number of pieces of at least that length in one group.
    held_P = np.max([bins * s.rows * (s.tokens // shortest_P) for s in shapes], axis=0)
    # p // held_P groups cannot hold the pieces up to index p.
    groups_P = np.maximum.accumulate(np.arange(len(order)) // np.maximum(held_P, 1))
    first = np.searchsorted(groups_P, np.arange(groups_P[-1] + 1))
    return np.asarray(content_P[order[first]])


def busiest_rank_bound(content_P: Ints, ranks: int) -> int:
    """A lower bound on the content of the busiest rank, for every placement of these pieces."""
    if len(content_P) == 0:
        return 0
    return max(int(content_P.max()), -(-int(content_P.sum()) // ranks))


def earliest_starts(problem: StepTasks) -> list[int]:
    """A lower bound on the start of each task in every order, in ticks.

    All inputs of a task must have run. A resource runs its inputs one after another, and the last
    of them takes at least the shortest of their sends to arrive.
    """
    start_ticks, n_pending = [0] * problem.n_tasks, list(problem.n_inputs)
    inputs: list[dict[int, list[tuple[int, int, int]]]] = [{} for _ in range(problem.n_tasks)]
    ready_tasks = [t for t in range(problem.n_tasks) if not n_pending[t]]
    for t in ready_tasks:  # which grows
        for rows in inputs[t].values():
            end = 0
            for head, ticks, send in sorted(rows):
                start_ticks[t] = max(start_ticks[t], head + ticks + send)
                end = max(end, head) + ticks
            start_ticks[t] = max(start_ticks[t], end + min(row[2] for row in rows))
        for reader, _, send in problem.successors[t]:
            row = start_ticks[t], problem.ticks[t], send
            inputs[reader].setdefault(problem.resource[t], []).append(row)
            n_pending[reader] -= 1
            if not n_pending[reader]:
                ready_tasks.append(reader)
    return start_ticks


def order_bound(problem: StepTasks) -> int:
    """A lower bound on the makespan of every order, in ticks: a resource runs its tasks one at a
    time, after the least head and before the least tail among them."""
    bound, heads, tails = 0, earliest_starts(problem), earliest_starts(problem.mirrored)
    for r in range(problem.n_resources):
        own_tasks = [t for t in range(problem.n_tasks) if problem.resource[t] == r]
        busy = sum(problem.ticks[t] for t in own_tasks)
        ends = [min((end[t] for t in own_tasks), default=0) for end in (heads, tails)]
        through = [heads[t] + problem.ticks[t] + tails[t] for t in own_tasks]
        bound = max(bound, busy + sum(ends), *through)
    return bound
