"""Find the cheapest set of buckets into which a global batch packs."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from dflop_jax.records import Layout
from dflop_jax.schedule.balance_problem import ITEMS_PER_WORK, ROUNDING, Budget, Floats, Ints
from dflop_jax.schedule.batch import Batch, bucket_variants, capacity_of, check_fits, merged_buckets
from dflop_jax.schedule.costs import Ticks, running_order
from dflop_jax.schedule.count_vectors import fractional_bound, list_covers
from dflop_jax.schedule.groups import Assignment, BucketRun, PackingSpace, greedy_assignment
from dflop_jax.schedule.packing import pack_samples

# Units of work to pack one set of buckets, in addition to placing the samples initially. With 800,
# fewer sets are tried: of 42 schedules two get 6% longer, four 2% shorter.
_ATTEMPT_WORK = 400
# Relative slack with which sets of buckets usually pack. Failed attempts take longest, so the
# search starts here. With 0.02 or 0.04, schedules of 256 samples in 300 units are up to 3% longer.
_LIKELY_SLACK = 0.03
_VECTORS_PER_WORK = 300  # count vectors listed per unit of work


def improve_assignment(
    space: PackingSpace, greedy: Assignment, budget: Budget, seed: int
) -> list[BucketRun]:
    """Return an assignment that costs no more than the greedy one, in running order.

    Candidate sets of buckets are sorted by cost; each has more slack than all cheaper ones. The
    search for the cheapest set that packs starts at a set that probably packs, moves in doubling
    steps until one set packs and one does not, and then bisects. If content has a price and no
    cheaper set packs, the greedy assignment's buckets are filled evenly.
    """
    rng = np.random.default_rng(seed)
    bucket_sets, slacks = _bucket_sets(space, greedy, budget)
    cheapest, failed_at, packed_at, step = list(greedy), -1, len(bucket_sets), 1
    index = min(bisect_left(slacks, _LIKELY_SLACK), len(bucket_sets) - 1)
    attempt = _ATTEMPT_WORK + space.batch.n_samples / ITEMS_PER_WORK
    while packed_at - failed_at > 1 and not budget.is_spent:
        assignment = pack_into(space, bucket_sets[index], budget.sub_budget(attempt), rng)
        if assignment is None:
            failed_at = index
        else:
            cheapest, packed_at = assignment, index
        if failed_at < 0:
            index, step = max(packed_at - step, 0), 2 * step
        elif packed_at == len(bucket_sets):
            index, step = min(failed_at + step, packed_at - 1), 2 * step
        else:
            index = (failed_at + packed_at) // 2
    if greedy and packed_at == len(bucket_sets) and space.batch.anchor in space.priced:
        greedy_buckets = tuple(t.bucket for t in greedy)
        cheapest = pack_into(space, greedy_buckets, budget.sub_budget(attempt), rng) or cheapest
    return space.sort_runs([space.shrink(t, budget) for t in cheapest])


def min_groups(batch: Batch, layout: Layout, bucket_shares: Sequence[float], work: float) -> float:
    """Estimate the minimum number of groups of a module that hold a batch, under simplified prices.
    Groups that feed the same group count as one. If a smaller bucket is enough for the last group,
    it counts as that bucket's share in `bucket_shares`, which decrease from 1.

    Raises:
      ValueError: the first bucket does not hold some sample.
    """
    batch = batch.with_capacity(capacity_of(layout))
    n = _min_groups_of_one_bucket(batch, replace(layout, buckets=layout.buckets[:1]), work)
    n_buckets = len(layout.buckets)
    buckets, none = merged_buckets(layout)[:n_buckets], np.zeros(n_buckets, np.int64)
    space = PackingSpace(batch, buckets, Ticks(none, none))
    for last in range(n_buckets - 1, 0, -1):
        chosen, rng = [0] * (n - 1) + [last], np.random.default_rng(0)
        has_slack = _slack(np.bincount(chosen, minlength=n_buckets)[None], space)[0] >= 0
        if has_slack and pack_into(space, chosen, Budget(work), rng) is not None:
            return n - 1 + bucket_shares[last]
    return n


def _min_groups_of_one_bucket(batch: Batch, layout: Layout, work: float) -> int:
    """Return `min_groups` of a layout with one bucket. A group costs 1 per part in a module that
    feeds others, and 2 in a last module, which runs forward and backward in one task."""
    merged = merged_buckets(layout)
    check_fits(batch, merged)
    buckets = bucket_variants(layout, batch)
    costs_CM = np.zeros((len(buckets), len(layout.modules)), np.int64)
    for (c, b), (k, m) in product(enumerate(buckets), enumerate(layout.modules)):
        if shape := b.shape(m):
            n_parts = shape.rows // min(s.rows for s in layout.shapes(m))
            costs_CM[c, k] = n_parts if layout.targets(m) else 2
    dearest_C = costs_CM.max(axis=1)
    space = PackingSpace(batch, buckets, Ticks(dearest_C, costs_CM.sum(axis=1) - dearest_C))
    greedy = greedy_assignment(space, len(merged))
    n_greedy = _max_groups(greedy)
    bound = fractional_bound(space.demand, np.ones(len(buckets)))  # groups, each of cost 1
    if n_greedy <= math.ceil(bound - ROUNDING):
        return n_greedy
    return min(n_greedy, _max_groups(improve_assignment(space, greedy, Budget(work), 0)))


def _max_groups(assignment: Assignment) -> int:
    return max(Counter(m for t in assignment for m in t.placements).values())


def pack_into(
    space: PackingSpace,
    chosen: Sequence[int],
    budget: Budget,
    rng: np.random.Generator,
    bucket_N: Ints | None = None,
) -> list[BucketRun] | None:
    """Pack the batch into one group of each bucket in `chosen`; None if no packing is found.

    Args:
      bucket_N: the initial bucket of each sample. None: longest first.
    """
    size = space.batch.capacity.group_size
    buckets = [space.buckets[b] for b in chosen for _ in range(size)]
    initial = None
    if bucket_N is not None:
        initial = np.where(np.isin(bucket_N, chosen), bucket_N, chosen[0]), np.repeat(chosen, size)
    packed = pack_samples(space.batch, buckets, budget, rng, initial)
    if packed is None:
        return None
    assignment = []
    for k, b in enumerate(chosen):
        run = space.build_run(b, packed[k * size : (k + 1) * size], budget)
        if run is None:
            return None
        if run.placements:  # an empty group need not run
            assignment.append(run)
    return assignment


def _bucket_sets(
    space: PackingSpace, greedy: Assignment, budget: Budget
) -> tuple[list[tuple[int, ...]], list[float]]:
    """Return the sets of buckets that cost less than the greedy assignment and have more slack than
    every cheaper set, cheapest first; and their slacks."""
    ticks = space.ticks
    greedy_cost = space.cost(greedy)
    max_cost = float(greedy_cost - ticks.rest_C.min())
    counts_XC, _ = list_covers(space.demand, ticks.dearest_C.astype(float), max_cost)
    budget.spend(1 + len(counts_XC) / _VECTORS_PER_WORK)
    used_XC = counts_XC > 0
    rest_X = np.where(used_XC, ticks.rest_C, np.iinfo(np.int64).max).min(axis=1)
    cost_X = counts_XC @ ticks.dearest_C + np.where(used_XC.any(axis=1), rest_X, 0)
    slack_X = _slack(counts_XC, space)
    useful = np.flatnonzero(cost_X < greedy_cost)
    order = useful[np.lexsort((-slack_X[useful], cost_X[useful]))]
    max_slack_X = np.maximum.accumulate(slack_X[order])
    rising = np.append(True, max_slack_X[1:] > max_slack_X[:-1])[: len(order)]
    sets, useful_sets = [], order[rising]
    for x in useful_sets:
        chosen = np.repeat(np.arange(len(space.buckets)), counts_XC[x]).tolist()
        sets.append(tuple(chosen[i] for i in running_order(chosen, ticks)))
    return sets, slack_X[useful_sets].tolist()


def _slack(counts_XC: Ints, space: PackingSpace) -> Floats:
    """Return (capacity / need - 1) of the tightest condition of each count vector, [X]."""
    need_D, capacity_DC = space.demand.need_D, space.demand.capacity_DC
    share_XD = counts_XC @ capacity_DC.T / need_D
    return np.round(share_XD.min(axis=1) - 1, 9) if len(need_D) else np.zeros(len(counts_XC))
