"""What a bin can hold, in whole cells: kinds of samples, and fillings of a bin with them.

Shape suffixes: K kinds of samples, R resources, P patterns (how many of each kind a bin holds).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dflop_jax.schedule.solver.bounds import lattice_step
from dflop_jax.schedule.solver.budget import Budget
from dflop_jax.schedule.solver.problem import Floats, Ints, Problem

_MOST_STEPS = 400  # cells of a bin along a resource that is kept exact
_NEAR = 1e-6  # of a cell: sums of the same sizes differ by less
_NOISE = 0.35  # relative noise on the worth by which random fillings order kinds
_CELLS_PER_UNIT = 10_000  # of a table, looked at once


@dataclass(frozen=True)
class Kinds:
    """Samples of equal size in cells: `cells_RK` of each kind, `counts_K` samples, `room_R` cells
    of a bin; `kind_N` is each sample's kind, -1 for samples of no size."""

    cells_RK: Ints
    counts_K: Ints
    room_R: Ints
    kind_N: Ints


def coarse_step(size_N: Floats, limit: float) -> float:
    """The step of which sizes are multiples, if a bin holds but a few hundred of it; else 0."""
    step = lattice_step(size_N)
    return step if limit <= _MOST_STEPS * step else 0.0


def kinds_of(problem: Problem, makespan: float, grid: int, *, down: bool) -> Kinds:
    """Sizes in cells, exact where a resource has a coarse lattice, else on a grid.

    down=True: sizes are rounded down, so whatever has a makespan *below* `makespan` fits in cells:
    what is impossible in cells is impossible. down=False: costs to the nearest (about as much fits
    as in truth), what has a hard limit up.
    """
    cells, rooms = [], []
    for r, size_N in enumerate(problem.sizes_RN):
        is_cost = r < problem.n_costs
        limit = makespan if is_cost else float(problem.limits_R[r])
        if not 0 < limit < np.inf:  # at a limit of 0 no sample has a size
            continue
        step = coarse_step(size_N, limit)
        strictly = down and is_cost
        if step > 0:
            steps = limit / step
            cells.append(np.rint(size_N / step))
            rooms.append(np.ceil(steps - _NEAR) - 1 if strictly else np.floor(steps + _NEAR))
            continue
        on_grid = size_N * (grid / limit)
        if down:  # sum floor(x) <= floor(sum x) < grid where sum x < grid
            cells.append(np.maximum(0.0, np.floor(on_grid - _NEAR)))
        else:
            cells.append(np.rint(on_grid) if is_cost else np.ceil(on_grid - _NEAR))
        rooms.append(grid - 1.0 if strictly else float(grid))
    sizes_RN = np.array(cells).astype(np.int64)
    sized = np.flatnonzero(sizes_RN.any(axis=0))
    cells_RK, kind, counts_K = np.unique(
        sizes_RN[:, sized], axis=1, return_inverse=True, return_counts=True
    )
    kind_N = np.full(problem.n, -1)
    kind_N[sized] = kind.ravel()
    return Kinds(cells_RK, counts_K, np.array(rooms).astype(np.int64), kind_N)


def random_fillings(
    kinds: Kinds, left_K: Ints, worth_K: Floats, n_patterns: int, rng: np.random.Generator
) -> Ints:
    """[P, K]: bins filled greedily, by noisy worth per size; `left_K` of each kind at most.

    Each filling weighs the resources in its own random proportion.
    """
    useful = np.flatnonzero((worth_K > 0) & (left_K > 0))
    cells_RK, rows = kinds.cells_RK[:, useful], np.arange(n_patterns)
    weight_PR = rng.random((n_patterns, len(kinds.room_R))) + 1e-3
    weight_PR /= weight_PR.sum(axis=1, keepdims=True)
    size_PK = weight_PR @ (cells_RK / np.maximum(kinds.room_R, 1)[:, None])
    density_PK = worth_K[useful] / np.maximum(size_PK, 1e-9)
    density_PK = density_PK * (1 + _NOISE * (2 * rng.random(density_PK.shape) - 1))
    order_PK = np.argsort(-density_PK, axis=1, kind="stable")
    room_RP = np.repeat(kinds.room_R[:, None], n_patterns, axis=1)
    patterns = np.zeros((n_patterns, len(left_K)), np.int64)
    for kind in order_PK.T:
        take = left_K[useful[kind]]
        for cells_K, room_P in zip(cells_RK, room_RP):
            size = cells_K[kind]
            take = np.where(size > 0, np.minimum(take, room_P // np.maximum(size, 1)), take)
        room_RP -= take * cells_RK[:, kind]
        patterns[rows, useful[kind]] = take
    return patterns


def best_filling(
    kinds: Kinds, left_K: Ints, worth_K: Floats, budget: Budget
) -> tuple[float, Ints] | None:
    """(worth, counts_K) of the most worthy filling of a bin; None when the budget ended first.

    A multi-dimensional bounded knapsack by dynamic programming over the cells of one bin; copies
    of a kind are taken in bundles of 1, 2, 4...
    """
    table = np.zeros(tuple(kinds.room_R + 1))
    taken: list[tuple[int, int, tuple[int, ...], np.ndarray]] = []
    for k, bundle in _bundles(kinds, left_K, worth_K):
        budget.spend(table.size / _CELLS_PER_UNIT)
        if budget.done:
            return None
        size = tuple((bundle * kinds.cells_RK[:, k]).tolist())
        above = tuple(slice(s, None) for s in size)
        below = tuple(slice(0, int(room) + 1 - s) for room, s in zip(kinds.room_R, size))
        worth = table[below] + worth_K[k] * bundle
        better = worth > table[above]
        np.copyto(table[above], worth, where=better)
        taken.append((k, bundle, size, better))
    counts_K = np.zeros(len(left_K), np.int64)
    room_R = kinds.room_R.copy()
    for k, bundle, size, better in reversed(taken):
        index = room_R - size
        if (index >= 0).all() and better[tuple(index)]:
            counts_K[k] += bundle
            room_R = index
    return float(table.flat[-1]), counts_K


def _bundles(kinds: Kinds, left_K: Ints, worth_K: Floats) -> list[tuple[int, int]]:
    bundles = []
    for k in np.flatnonzero((worth_K > 0) & (left_K > 0)).tolist():
        cells_R = kinds.cells_RK[:, k]
        fitting = int((kinds.room_R[cells_R > 0] // cells_R[cells_R > 0]).min())
        most, bundle = min(int(left_K[k]), fitting), 1
        while most > 0:
            bundles.append((k, min(bundle, most)))
            most -= bundle
            bundle *= 2
    return bundles
