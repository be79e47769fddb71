"""Packs samples into microbatches: vector bin packing with unequal bins.

The bins are the rows of the batch's anchor module; rows of a microbatch share its capacity in the
other modules. Without an anchor, the bins are the microbatches. The fill of a bin, use over
capacity, is balanced like a makespan; a largest fill of at most 1 is a packing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflop_jax.records import Bucket
from dflop_jax.schedule.balance_problem import ROUNDING, Budget, Floats, Ints, Problem
from dflop_jax.schedule.batch import Batch, Capacity
from dflop_jax.schedule.local_search import State, improve
from dflop_jax.schedule.longest_first import by_size, longest_first

# Samples put into initial bins for a unit of work: 8,192 take 45 ms, into a thousand bins.
SAMPLES_PER_WORK = 16
_ZERO_CAPACITY = 1e-6  # tokens that stand for none, so that fills stay finite

Microbatch = list[list[int]]  # samples of each row of the anchor
Packing = list[Microbatch]


def rows_per_microbatch(bucket: Bucket, batch: Batch, capacity: Capacity) -> int:
    """Rows of a microbatch into which samples are packed; 1 if the bucket lacks the anchor."""
    return capacity.rows(bucket, batch.anchor) or 1 if batch.anchor else 1


def pack_samples(
    batch: Batch,
    buckets: Sequence[Bucket],
    capacity: Capacity,
    budget: Budget,
    rng: np.random.Generator,
    initial: tuple[Ints, Ints] | None = None,
) -> Packing | None:
    """The rows of each microbatch, one microbatch per bucket of `buckets`; None if no packing was
    found.

    Args:
      initial: a number for each sample and for each microbatch; a sample starts in a microbatch
        with its number. None: it starts where it fills least.
    """
    widths = [rows_per_microbatch(b, batch, capacity) for b in buckets]
    width = max(widths)  # microbatches of fewer rows get rows without room
    problem = _fill_problem(batch, buckets, capacity, widths, width)
    budget.spend(1 + problem.n_samples / SAMPLES_PER_WORK)
    order = by_size(problem.sizes_RN * _mean_scale(problem))
    state = State(problem, _initial_bins(problem, order, width, initial))
    improve(state, 1 + ROUNDING, budget, rng)
    if state.makespan > 1 + ROUNDING:
        return None
    rows = [sorted(samples.tolist()) for samples in state.members]
    packed = []
    for m, n in enumerate(widths):
        own = rows[m * width : (m + 1) * width]
        usable, empty_rows = own[:n], own[n:]
        # A row without capacity may hold samples that need none of it; any row can hold these.
        packed.append([[*usable[0], *(i for row in empty_rows for i in row)], *usable[1:]])
    return packed


def _initial_bins(
    problem: Problem, order: Ints, width: int, initial: tuple[Ints, Ints] | None
) -> Ints:
    """Bins of the samples, longest first, each in a microbatch that `initial` gives it."""
    if initial is None:
        return longest_first(problem, order)
    number_N, number_B = initial[0], np.repeat(initial[1], width)
    bins = np.full(problem.n_samples, -1)
    for number in np.unique(number_N).tolist():
        samples, open_bins = order[number_N[order] == number], np.flatnonzero(number_B == number)
        bins = longest_first(problem, samples, bins, open_bins)
    return bins


def _fill_problem(
    batch: Batch, buckets: Sequence[Bucket], capacity: Capacity, widths: Sequence[int], width: int
) -> Problem:
    """The balancing problem whose costs are fills; rows beyond the width hold nothing."""
    empty = [batch.empty_tokens(b, capacity) for b in buckets]
    tokens_BR = [[*shared_M] for _, shared_M in empty for _ in range(width)]
    sizes_NR = batch.shared_tokens_NM
    order = batch.shared
    if batch.anchor:
        rows = [row * (k < n) for (row, _), n in zip(empty, widths) for k in range(width)]
        tokens_BR = [[row, *tokens] for row, tokens in zip(rows, tokens_BR)]
        sizes_NR = np.column_stack((batch.tokens[batch.anchor], sizes_NR))
        order = (batch.anchor, *order)
    return Problem(
        sizes_RN=np.ascontiguousarray(sizes_NR.T, float),
        n_costs=len(order),
        limits_R=np.full(len(order), np.inf),
        n_bins=width * len(buckets),
        group=width,
        grouped_R=tuple(m != batch.anchor for m in order),
        scale_RB=1 / np.maximum(np.array(tokens_BR, float).T, _ZERO_CAPACITY),
    )


def _mean_scale(problem: Problem) -> Floats:
    """[R, 1]: about the share of a bin that one unit fills, by which samples are ordered."""
    assert problem.scale_RB is not None
    room_R = (1 / problem.scale_RB).mean(axis=1, keepdims=True)
    return 1 / np.maximum(room_R, _ZERO_CAPACITY)


def first_fit(batch: Batch, order: Sequence[int], bucket: Bucket, capacity: Capacity) -> Packing:
    """The microbatches of one bucket that first fit opens for the samples, in the given order.

    Every sample must fit an empty microbatch (`Batch.can_hold`).
    """
    width = rows_per_microbatch(bucket, batch, capacity)
    row_tokens, shared_M = batch.empty_tokens(bucket, capacity)
    tokens_N = batch.tokens[batch.anchor] if batch.anchor else np.zeros(batch.n_samples, np.int64)
    tokens_NM = batch.shared_tokens_NM
    empty_GR, empty_GM = np.full((1, width), row_tokens), shared_M[None]
    packed: Packing = []
    free_GR, free_GM = empty_GR[:0], empty_GM[:0]
    for i in order:
        fits_G = (free_GR.max(axis=1) >= tokens_N[i]) & (free_GM >= tokens_NM[i]).all(axis=1)
        if not fits_G.any():
            packed.append([[] for _ in range(width)])
            free_GR, free_GM = np.vstack((free_GR, empty_GR)), np.vstack((free_GM, empty_GM))
            fits_G = np.append(fits_G, True)
        g = int(fits_G.argmax())
        row = int((free_GR[g] >= tokens_N[i]).argmax())
        packed[g][row].append(i)
        free_GR[g, row] -= tokens_N[i]
        free_GM[g] -= tokens_NM[i]
    return packed
