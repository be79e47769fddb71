"""Packing samples into the rows of given microbatches: vector bin packing with unequal bins.

A row holds `tokens` of its bucket; a microbatch, all its rows together, holds the bucket's items
on every rank of an encoder. The fill (use over room) is balanced as a makespan is; a largest fill
of at most 1 is a packing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflop_jax.records import Bucket, SampleShape
from dflop_jax.schedule.cover import Capacity
from dflop_jax.schedule.solver.greedy import by_size, lpt
from dflop_jax.schedule.solver.local_search import State, descend, resplit
from dflop_jax.schedule.solver.problem import ROUNDING, Floats, Ints, Problem

_NO_ROOM = 1e-6  # stands for a capacity of 0, so that fills stay finite
_EVEN_ROUNDS = 64  # pairs priced to even out the fill once everything fits

Packed = list[list[list[int]]]  # [microbatch][row] -> sample indices


def rows_per_microbatch(bucket: Bucket, capacity: Capacity) -> int:
    return bucket.rows * capacity.llm_ranks


def pack(
    shapes: Sequence[SampleShape],
    buckets: Sequence[Bucket],
    capacity: Capacity,
    *,
    rounds: int,
    deadline_s: float,
    seed: int,
) -> tuple[Packed | None, int]:
    """(rows of each microbatch, or None if no packing was found; rounds left over).

    `buckets` has one entry per microbatch.
    """
    widths = [rows_per_microbatch(b, capacity) for b in buckets]
    width = max(widths)  # microbatches of fewer rows get rows without room
    problem = _fill_problem(shapes, buckets, capacity, width)
    state = State(problem, lpt(problem, by_size(problem.sizes_RN * _mean_scale(problem))))
    target = 1 + ROUNDING
    rounds = descend(state, target, deadline_s, rounds)
    rng = np.random.default_rng(seed)
    while state.makespan > target and rounds > 0:
        rounds = resplit(state, target, deadline_s, rounds, rng)
        rounds = descend(state, target, deadline_s, rounds)
    if state.makespan > target:
        return None, rounds
    descend(state, 0.0, deadline_s, _EVEN_ROUNDS)
    rows = [sorted(held.tolist()) for held in state.members]
    return [rows[m * width : m * width + n] for m, n in enumerate(widths)], rounds


def _fill_problem(
    shapes: Sequence[SampleShape], buckets: Sequence[Bucket], capacity: Capacity, width: int
) -> Problem:
    encoders = tuple(capacity.encoders)
    row_room = np.concatenate(
        [np.arange(width) < rows_per_microbatch(b, capacity) for b in buckets]
    ) * np.repeat([float(b.tokens) for b in buckets], width)
    item_room = [np.repeat([float(capacity.items(b, m)) for b in buckets], width) for m in encoders]
    n = 1 + len(encoders)
    return Problem(
        sizes_RN=np.array([[s.load(m) for s in shapes] for m in ("llm", *encoders)], float),
        n_costs=n,
        limits_R=np.full(n, np.inf),
        n_bins=len(row_room),
        group=width,
        grouped_R=(False, *(True for _ in encoders)),
        scale_RB=1 / np.maximum(np.stack([row_room, *item_room]), _NO_ROOM),
    )


def _mean_scale(problem: Problem) -> Floats:
    """[R, 1]: about what one unit fills of a bin, to order samples by."""
    assert problem.scale_RB is not None
    room_R = (1 / problem.scale_RB).mean(axis=1, keepdims=True)
    return 1 / np.maximum(room_R, _NO_ROOM)


def first_fit(
    shapes: Sequence[SampleShape],
    order: Sequence[int],
    bucket: Bucket,
    capacity: Capacity,
) -> Packed:
    """As many microbatches of one bucket as first fit opens for the samples, in the given order.

    Every sample must fit an empty microbatch (`capacity.holds`).
    """
    width = rows_per_microbatch(bucket, capacity)
    encoders = tuple(capacity.encoders)
    item_room = np.array([[capacity.items(bucket, m) for m in encoders]], np.int64)
    row_free: Ints = np.zeros(0, np.int64)
    item_free: Ints = np.zeros((0, len(encoders)), np.int64)
    packed: Packed = []
    for i in order:
        tokens = shapes[i].llm_tokens
        items = np.array([shapes[i].load(m) for m in encoders], np.int64)
        fits = (row_free >= tokens) & np.repeat((item_free >= items).all(axis=1), width)
        at = int(fits.argmax()) if fits.any() else len(row_free)
        if at == len(row_free):
            row_free = np.append(row_free, np.full(width, bucket.tokens))
            item_free = np.concatenate([item_free, item_room])
            packed.append([[] for _ in range(width)])
        row_free[at] -= tokens
        item_free[at // width] -= items
        packed[at // width][at % width].append(i)
    return packed
