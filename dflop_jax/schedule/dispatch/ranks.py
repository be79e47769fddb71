"""Which data rank takes which piece of a phase, so that the busiest rank has least to do.

OrchMLLM's post-balancing dispatcher (arXiv 2503.23830): every phase is balanced on its own, after
the batch is drawn. Costs that add up are balanced by the project's solver, from longest first to
the lightest rank on. A padded cost has an optimum that is cut from the sorted pieces: if the rank
with the longest piece takes the longest ones only, its cost stays and no other's rises, and so on
with the rest. The least bound under which such cuts suffice is found by bisection.

Shape suffixes: P pieces, D data ranks.
"""

from __future__ import annotations

import heapq
import time

import numpy as np
from numpy.typing import ArrayLike

from dflop_jax.records import Shape
from dflop_jax.schedule.dispatch.cost import PAIRS, PhaseCost
from dflop_jax.schedule.solver.balance import Assignment, balance
from dflop_jax.schedule.solver.problem import ROUNDING, Floats, Ints

_CLOSE = 4 * ROUNDING  # relative: bounds that differ by less are one


def dispatch(
    lengths: ArrayLike,
    n_ranks: int,
    cost: PhaseCost,
    *,
    work: float = 0,
    time_limit_s: float = 2.0,
    seed: int = 0,
) -> Assignment:
    """Ranks (`bins`) of pieces such that the largest cost of a rank is least.

    Args:
      lengths: of every piece, >= 0, [P].
      work: units that the solver may spend on what the greedy answer leaves; a padded cost needs
        none.
      time_limit_s: after which the solver stops in any case.

    Raises:
      ValueError: no rank, or a length that is negative or not a number.
    """
    if not cost.padded:
        each = cost.each(np.asarray(lengths, float))
        return balance(each, n_ranks, time_limit_s=time_limit_s, seed=seed, work=work)
    start_s = time.perf_counter()
    length_P = np.asarray(lengths, float)
    if n_ranks < 1 or length_P.ndim != 1:
        raise ValueError(f"dispatch needs a rank and [pieces], got {n_ranks}, {length_P.shape}")
    if not (length_P >= 0).all():
        raise ValueError("every length must be a number >= 0; check the loads")
    bins = _padded(cost.each(length_P), n_ranks)
    makespan = float(cost.of_ranks(length_P, bins, n_ranks).max(initial=0.0))
    return Assignment(bins, makespan, makespan, "optimal", time.perf_counter() - start_s)


def _padded(each_P: Floats, n_ranks: int) -> Ints:
    """Ranks under the cost count * largest."""
    order = np.argsort(-each_P, kind="stable")
    sorted_P = each_P[order]
    low = float(each_P.max(initial=0.0))  # no rank of the longest has less
    counts = _runs(sorted_P, n_ranks, low)
    if counts is None:
        counts = _runs(sorted_P, n_ranks, -(-len(each_P) // n_ranks) * low)
        assert counts is not None, "an equal deal suffices"
        high = _busiest(sorted_P, counts)
        while high - low > _CLOSE * high:
            fewer = _runs(sorted_P, n_ranks, middle := (low + high) / 2)
            if fewer is None:
                low = middle
            else:
                counts, high = fewer, min(high, _busiest(sorted_P, fewer))
    bins = np.empty(len(each_P), np.int64)
    bins[order] = np.repeat(np.arange(len(counts)), counts)
    return bins


def _runs(sorted_P: Floats, n_ranks: int, bound: float) -> Ints | None:
    """How many pieces each rank takes, longest first, as many as the bound lets it; None if some
    are left."""
    counts, begin, n = [], 0, len(sorted_P)
    for _ in range(n_ranks):
        if begin == n:
            break
        each = float(sorted_P[begin])
        count = min(n - begin, int(bound / each * (1 + ROUNDING))) if each else n - begin
        counts.append(count)
        begin += count
    return np.array(counts, np.int64) if begin == n else None


def _busiest(sorted_P: Floats, counts: Ints) -> float:
    begins = np.cumsum(counts) - counts
    return float((counts * sorted_P[begins]).max(initial=0.0))


def deal(length_P: Ints, n_ranks: int, shape: Shape) -> Ints:
    """Rows of pieces, those of rank 0 first, so that the pairs of the busiest rank are few: longest
    first to the lightest rank that has room, there into the emptiest row; -1 where none has."""
    free = [[shape.tokens] * shape.rows for _ in range(n_ranks)]
    lightest = [(0.0, rank) for rank in range(n_ranks)]  # a heap of (pairs, rank)
    rows = np.full(len(length_P), -1)
    pairs_P = PAIRS.each(length_P).tolist()
    for i in np.argsort(-length_P, kind="stable").tolist():
        length, full = int(length_P[i]), []
        while lightest:
            pairs, rank = lightest[0]
            room = max(free[rank])
            if room >= length:
                row = free[rank].index(room)
                free[rank][row] -= length
                rows[i] = rank * shape.rows + row
                heapq.heapreplace(lightest, (pairs + pairs_P[i], rank))
                break
            full.append(heapq.heappop(lightest))
        for entry in full:
            heapq.heappush(lightest, entry)
    return rows
