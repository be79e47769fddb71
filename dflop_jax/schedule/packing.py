"""Packing samples into microbatches: vector bin packing with unequal bins.

The bins are the rows of the batch's anchor module; what a microbatch has room for in the other
modules is shared by its rows. (Without an anchor the bins are the microbatches.) The fill, use over
room, is balanced as a makespan is; a largest fill of at most 1 is a packing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflop_jax.records import Bucket
from dflop_jax.schedule.batch import Batch, Capacity
from dflop_jax.schedule.solver.budget import Budget
from dflop_jax.schedule.solver.greedy import by_size, lpt
from dflop_jax.schedule.solver.improve import Improver
from dflop_jax.schedule.solver.local_search import State, descend
from dflop_jax.schedule.solver.problem import ROUNDING, Floats, Ints, Problem

_NO_ROOM = 1e-6  # stands for a capacity of 0, so that fills stay finite
_EVEN_WORK = 64  # pairs priced to even out the fill once everything fits

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
) -> Packed | None:
    """Rows of each microbatch, one bucket for each; None if no packing was found."""
    widths = [width_of(b, batch, capacity) for b in buckets]
    width = max(widths)  # microbatches of fewer rows get rows without room
    problem = _fill_problem(batch, buckets, capacity, widths, width)
    budget.spend(1 + problem.n * problem.n_bins / 2000)
    state = State(problem, lpt(problem, by_size(problem.sizes_RN * _mean_scale(problem))))
    search = Improver(state, 0.0, 1 + ROUNDING, budget, rng)
    search.run()
    if search.state.makespan > 1 + ROUNDING:
        return None
    descend(search.state, 0.0, budget.part(_EVEN_WORK))
    rows = [sorted(samples.tolist()) for samples in search.state.members]
    return [rows[m * width : m * width + n] for m, n in enumerate(widths)]


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
        scale_RB=1 / np.maximum(np.stack(room), _NO_ROOM),
    )


def _mean_scale(problem: Problem) -> Floats:
    """[R, 1]: about what one unit fills of a bin, to order samples by."""
    assert problem.scale_RB is not None
    room_R = (1 / problem.scale_RB).mean(axis=1, keepdims=True)
    return 1 / np.maximum(room_R, _NO_ROOM)


def gathered(
    batch: Batch, buckets: Sequence[Bucket], packed: Packed, capacity: Capacity
) -> Packed | None:
    """The same rows with long pieces next to each other: microbatches of one bucket get them by
    their longest piece, as far as there is room in the other modules. A group waits for its busiest
    rank, so its long pieces cost least where others are as long. None: some row finds no room."""
    shared = [m for m in batch.modules if m != batch.anchor]
    result: Packed = [[] for _ in packed]
    for bucket in dict.fromkeys(buckets):
        places = [k for k, b in enumerate(buckets) if b == bucket]
        width = len(packed[places[0]])
        free_KM = np.array([[batch.room(bucket, m, capacity) for m in shared] for _ in places])
        rows = [row for k in places for row in packed[k]]
        assert batch.anchor is not None, "rows are the anchor's"
        length_N = batch.longest[batch.anchor]
        peaks = [max((int(length_N[i]) for i in row), default=0) for row in rows]
        for r in sorted(range(len(rows)), key=lambda r: (-peaks[r], r)):
            asks = [int(batch.tokens[m][rows[r]].sum()) for m in shared]
            for k, free in zip(places, free_KM):
                if len(result[k]) < width and (free >= asks).all():
                    result[k].append(rows[r])
                    free -= asks
                    break
            else:
                return None
    return result


def first_fit(batch: Batch, order: Sequence[int], bucket: Bucket, capacity: Capacity) -> Packed:
    """As many microbatches of one bucket as first fit opens for the samples, in the given order.

    Every sample must fit an empty microbatch (`capacity.holds`).
    """
    width = width_of(bucket, batch, capacity)
    shared = [m for m in batch.modules if m != batch.anchor]
    room_M = np.array([[batch.room(bucket, m, capacity) for m in shared]], np.int64)
    row_room = batch.row_room(bucket.shape(batch.anchor), batch.anchor) if batch.anchor else 0
    asks_NM = np.stack([batch.tokens[m] for m in shared] or [np.zeros(batch.n, np.int64)], axis=1)
    asks_NM = asks_NM[:, : len(shared)]
    free_GR: Ints = np.zeros((0, width), np.int64)
    free_GM: Ints = np.zeros((0, len(shared)), np.int64)
    widest_G: Ints = np.zeros(0, np.int64)  # room of the emptiest row
    packed: Packed = []
    for i in order:
        tokens = int(batch.tokens[batch.anchor][i]) if batch.anchor else 0
        fits_G = (widest_G >= tokens) & (free_GM >= asks_NM[i]).all(axis=1)
        g = int(fits_G.argmax()) if fits_G.any() else len(packed)
        if g == len(packed):
            free_GR = np.concatenate([free_GR, np.full((1, width), row_room)])
            free_GM = np.concatenate([free_GM, room_M])
            widest_G = np.append(widest_G, row_room)
            packed.append([[] for _ in range(width)])
        row = int((free_GR[g] >= tokens).argmax())
        free_GR[g, row] -= tokens
        widest_G[g] = free_GR[g].max()
        free_GM[g] -= asks_NM[i]
        packed[g][row].append(i)
    return packed
