"""Packing samples into microbatches: vector bin packing with unequal bins.

The bins are the rows of the batch's anchor module; what a microbatch has room for in the other
modules is shared by its rows. (Without an anchor the bins are the microbatches.) The fill, use over
room, is balanced as a makespan is; a largest fill of at most 1 is a packing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflop_jax.records import Bucket
from dflop_jax.schedule.balance_problem import ROUNDING, Budget, Floats, Ints, Problem
from dflop_jax.schedule.batch import Batch, Capacity
from dflop_jax.schedule.local_search import State, improve
from dflop_jax.schedule.longest_first import by_size, lpt

# Samples dealt to bins for a unit of work: 8,192 take 45 ms, to a thousand bins.
DEALT_PER_WORK = 16
_ZERO_CAPACITY = 1e-6  # tokens that stand for none, so that fills stay finite

Microbatch = list[list[int]]  # samples of each row of the anchor
Packed = list[Microbatch]


def width_of(bucket: Bucket, batch: Batch, capacity: Capacity) -> int:
    """Rows of a microbatch into which samples are packed; 1 if the bucket lacks the anchor."""
    return capacity.rows(bucket, batch.anchor) or 1 if batch.anchor else 1


def pack(
    batch: Batch,
    buckets: Sequence[Bucket],
    capacity: Capacity,
    budget: Budget,
    rng: np.random.Generator,
    dealt: tuple[Ints, Ints] | None = None,
) -> Packed | None:
    """Rows of each microbatch, one bucket for each; None if no packing was found.

    Args:
      dealt: (of each sample, of each microbatch) a number: a sample goes at first to a microbatch
        of its own number. None: it goes to whichever it fills least.
    """
    widths = [width_of(b, batch, capacity) for b in buckets]
    width = max(widths)  # microbatches of fewer rows get rows without room
    problem = _fill_problem(batch, buckets, capacity, widths, width)
    budget.spend(1 + problem.n / DEALT_PER_WORK)
    order = by_size(problem.sizes_RN * _mean_scale(problem))
    state = State(problem, _start(problem, order, width, dealt))
    improve(state, 1 + ROUNDING, budget, rng)
    if state.makespan > 1 + ROUNDING:
        return None
    rows = [sorted(samples.tolist()) for samples in state.members]
    packed = []
    for m, n in enumerate(widths):
        usable, spare = rows[m * width : m * width + n], rows[m * width + n : (m + 1) * width]
        # A row without room may hold samples that take none of it; any row serves these.
        packed.append([[*usable[0], *(i for row in spare for i in row)], *usable[1:]])
    return packed


def _start(problem: Problem, order: Ints, width: int, dealt: tuple[Ints, Ints] | None) -> Ints:
    """Bins of the samples, longest first, each in a microbatch that it is dealt to."""
    if dealt is None:
        return lpt(problem, order)
    home_N, home_B = dealt[0], np.repeat(dealt[1], width)
    bins = np.full(problem.n, -1)
    for home in np.unique(home_N).tolist():
        bins = lpt(problem, order[home_N[order] == home], bins, np.flatnonzero(home_B == home))
    return bins


def _fill_problem(
    batch: Batch, buckets: Sequence[Bucket], capacity: Capacity, widths: Sequence[int], width: int
) -> Problem:
    shared = [m for m in batch.modules if m != batch.anchor]
    room = [np.repeat([float(batch.room(b, m, capacity)) for b in buckets], width) for m in shared]
    if batch.anchor:
        row_B = [float(batch.row_room(b.shape(batch.anchor), batch.anchor)) for b in buckets]
        is_row = np.concatenate([np.arange(width) < n for n in widths])
        room.insert(0, is_row * np.repeat(row_B, width))
    order = ([batch.anchor] if batch.anchor else []) + shared
    return Problem(
        sizes_RN=np.array([batch.tokens[m] for m in order], float).reshape(len(order), batch.n),
        n_costs=len(order),
        limits_R=np.full(len(order), np.inf),
        n_bins=width * len(buckets),
        group=width,
        grouped_R=tuple(m != batch.anchor for m in order),
        scale_RB=1 / np.maximum(np.stack(room), _ZERO_CAPACITY),
    )


def _mean_scale(problem: Problem) -> Floats:
    """[R, 1]: about what one unit fills of a bin, to order samples by."""
    assert problem.scale_RB is not None
    room_R = (1 / problem.scale_RB).mean(axis=1, keepdims=True)
    return 1 / np.maximum(room_R, _ZERO_CAPACITY)


def first_fit(batch: Batch, order: Sequence[int], bucket: Bucket, capacity: Capacity) -> Packed:
    """The microbatches of one bucket that first fit opens for the samples, in the given order.

    Every sample must fit an empty microbatch (`Batch.able`).
    """
    width = width_of(bucket, batch, capacity)
    shared = [m for m in batch.modules if m != batch.anchor]
    row_room = batch.row_room(bucket.shape(batch.anchor), batch.anchor) if batch.anchor else 0
    tokens_N = batch.tokens[batch.anchor] if batch.anchor else np.zeros(batch.n, np.int64)
    asks_NM = np.array([batch.tokens[m] for m in shared]).reshape(len(shared), batch.n).T
    empty_GR = np.full((1, width), row_room)
    empty_GM = np.array([[batch.room(bucket, m, capacity) for m in shared]])
    packed: Packed = []
    free_GR, free_GM = empty_GR[:0], empty_GM[:0]
    for i in order:
        fits_G = (free_GR.max(axis=1) >= tokens_N[i]) & (free_GM >= asks_NM[i]).all(axis=1)
        if not fits_G.any():
            packed.append([[] for _ in range(width)])
            free_GR, free_GM = np.vstack((free_GR, empty_GR)), np.vstack((free_GM, empty_GM))
            fits_G = np.append(fits_G, True)
        g = int(fits_G.argmax())
        row = int((free_GR[g] >= tokens_N[i]).argmax())
        packed[g][row].append(i)
        free_GR[g, row] -= tokens_N[i]
        free_GM[g] -= asks_NM[i]
    return packed
