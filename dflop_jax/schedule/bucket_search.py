"""The cheapest set of buckets into which a global batch packs."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dflop_jax.records import Bucket, Layout
from dflop_jax.schedule.balance_problem import ROUNDING, Budget, Floats, Ints
from dflop_jax.schedule.batch import Batch, capacity_of, check_fits, variants
from dflop_jax.schedule.costs import Ticks, running_order
from dflop_jax.schedule.count_vectors import Demand, cheap_covers, fractional_cost
from dflop_jax.schedule.groups import BucketRun, PackingSpace, greedy_answer
from dflop_jax.schedule.packing import DEALT_PER_WORK, pack
from dflop_jax.schedule.sub_microbatches import most_buckets, wide_buckets

# Units for packing one set of buckets, beside dealing it; twice as many try half as many sets where
# they are spent: of the 42 batches of benchmarks/schedule_run.py two are then 6% longer, four 2%
# shorter.
_ATTEMPT_WORK = 400
# Room over need, as a share, with which sets of buckets mostly pack; those with less are tried once
# one does, since what fails takes longest. With 2 or 4% schedules of 256 samples are up to 3%
# longer where they get 300 units.
_LIKELY_SLACK = 0.03
_VECTORS_PER_WORK = 300  # count vectors listed for a unit of work


def improved(
    room: PackingSpace, greedy: Sequence[BucketRun], budget: Budget, seed: int
) -> list[BucketRun]:
    """An answer that costs no more than the greedy one, in running order.

    Of the sets of buckets that could hold the batch, each dearer and roomier than the one before,
    the cheapest that packs is looked for: from one with room enough to pack, in doubling steps
    until one packs and one does not, then by bisection.
    Where content counts and nothing is cheaper, the greedy answer's buckets are filled evenly.
    """
    rng = np.random.default_rng(seed)
    choices, slacks = _choices(room, greedy, budget)
    best, failed, packed, step = list(greedy), -1, len(choices), 1
    place = min(bisect_left(slacks, _LIKELY_SLACK), len(choices) - 1)
    attempt = _ATTEMPT_WORK + room.batch.n / DEALT_PER_WORK
    while packed - failed > 1 and not budget.done:
        answer = packed_into(room, choices[place], budget.part(attempt), rng)
        if answer is None:
            failed = place
        else:
            best, packed = answer, place
        if failed < 0:
            place, step = max(packed - step, 0), 2 * step
        elif packed == len(choices):
            place, step = min(failed + step, packed - 1), 2 * step
        else:
            place = (failed + packed) // 2
    if greedy and packed == len(choices) and room.batch.anchor in room.priced:
        same = tuple(t.bucket for t in greedy)
        best = packed_into(room, same, budget.part(attempt), rng) or best
    return room.in_order([room.shrunk(t, budget) for t in best])


def fewest_groups(batch: Batch, layout: Layout, shares: Sequence[float], work: float) -> float:
    """About the least number of groups of a module that hold a batch, by textbook prices; those
    that feed one together count once. The buckets after the first are smaller ones, as what
    `shares` of it say, which fall from 1; so counts the last group where such a bucket will do.

    Raises:
      ValueError: a sample that the first bucket does not hold.
    """
    n = _fewest_of_one(batch, replace(layout, buckets=layout.buckets[:1]), work)
    n_buckets, capacity = len(layout.buckets), capacity_of(layout)
    buckets, none = wide_buckets(layout)[:n_buckets], np.zeros(n_buckets, np.int64)  # of most parts
    room = PackingSpace(batch, buckets, capacity, Ticks(none, none))
    for last in range(n_buckets - 1, 0, -1):
        chosen, rng = [0] * (n - 1) + [last], np.random.default_rng(0)
        if _slack(np.bincount(chosen, minlength=n_buckets)[None], room.demand)[0] < 0:
            continue
        if packed_into(room, chosen, Budget(work), rng) is not None:
            return n - 1 + shares[last]
    return n


def _fewest_of_one(batch: Batch, layout: Layout, work: float) -> int:
    """The same in a layout of one bucket."""
    capacity, wide = capacity_of(layout), wide_buckets(layout)
    check_fits(batch, wide, capacity)
    every = variants(wide, batch, most_buckets(layout))
    costs_CM = np.array([[_textbook(layout, b, m) for m in layout.modules] for b in every])
    dearest_C = costs_CM.max(axis=1)
    room = PackingSpace(batch, every, capacity, Ticks(dearest_C, costs_CM.sum(axis=1) - dearest_C))
    greedy = greedy_answer(room, len(wide))
    known = _most_of_a_module(greedy)
    least = fractional_cost(room.demand, np.ones(len(every)))  # groups, each of cost 1
    if known <= math.ceil(least - ROUNDING):
        return known
    return min(known, _most_of_a_module(improved(room, greedy, Budget(work), 0)))


def _most_of_a_module(answer: Sequence[BucketRun]) -> int:
    return max(Counter(m for t in answer for m in t.placed).values())


def _textbook(layout: Layout, bucket: Bucket, module: str) -> int:
    """What a group takes of a module: one for a forward, two for a task with a backward in it."""
    shape = bucket.shape(module)
    if shape is None:
        return 0
    parts = shape.rows // min(s.rows for s in layout.shapes(module))
    return parts if layout.targets(module) else 2


def packed_into(
    room: PackingSpace,
    chosen: Sequence[int],
    budget: Budget,
    rng: np.random.Generator,
    home_N: Ints | None = None,
) -> list[BucketRun] | None:
    """The batch in these buckets, one group of each; None if no packing was found.

    Args:
      home_N: the bucket of each sample at first; None: it goes to whichever it fills least.
    """
    size = room.capacity.group_size
    buckets = [room.buckets[b] for b in chosen for _ in range(size)]
    dealt = None
    if home_N is not None:
        dealt = np.where(np.isin(home_N, chosen), home_N, chosen[0]), np.repeat(chosen, size)
    packed = pack(room.batch, buckets, room.capacity, budget, rng, dealt)
    if packed is None:
        return None
    answer = []
    for k, b in enumerate(chosen):
        together = room.together(b, packed[k * size : (k + 1) * size], budget)
        if together is None:
            return None
        if together.placed:  # an empty group need not run
            answer.append(together)
    return answer


def _choices(
    room: PackingSpace, greedy: Sequence[BucketRun], budget: Budget
) -> tuple[list[tuple[int, ...]], list[float]]:
    """Buckets of the groups, in running order, of sets that cost less than the greedy answer: the
    cheapest first, and only those with more room than any cheaper one (no other is worth packing);
    with the room of each."""
    ticks = room.ticks
    greedy_cost = room.cost(greedy)
    ceiling = float(greedy_cost - ticks.rest_C.min())
    wanted = room.demand
    counts_XC, _ = cheap_covers(wanted, ticks.dearest_C.astype(float), ceiling)
    budget.spend(1 + len(counts_XC) / _VECTORS_PER_WORK)
    used_XC = counts_XC > 0
    rest_X = np.where(used_XC, ticks.rest_C, np.iinfo(np.int64).max).min(axis=1)
    cost_X = counts_XC @ ticks.dearest_C + np.where(used_XC.any(axis=1), rest_X, 0)
    slack_X = _slack(counts_XC, wanted)
    useful = np.flatnonzero(cost_X < greedy_cost)
    order = useful[np.lexsort((-slack_X[useful], cost_X[useful]))]
    record_X = np.maximum.accumulate(slack_X[order])
    rising = np.append(True, record_X[1:] > record_X[:-1])[: len(order)]
    choices, kept = [], order[rising]
    for x in kept:
        chosen = np.repeat(np.arange(len(room.buckets)), counts_XC[x]).tolist()
        choices.append(tuple(chosen[i] for i in running_order(chosen, ticks)))
    return choices, slack_X[kept].tolist()


def _slack(counts_XC: Ints, wanted: Demand) -> Floats:
    """[X]: room over need, less 1, of each vector's tightest condition."""
    if len(wanted.need_D) == 0:
        return np.zeros(len(counts_XC))
    share_XD = counts_XC @ wanted.room_DC.T / wanted.need_D
    return np.round(share_XD.min(axis=1) - 1, 9)
