"""Exact answer for a handful of samples: breadth-first branch and bound in array form.

Samples are placed one after another, largest first; a level holds every partial assignment that
could still beat the incumbent. Bins are alike, so a sample may open only the first empty bin (of
the first empty group, where loads are shared).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dflop_jax.schedule.solver.budget import Budget
from dflop_jax.schedule.solver.greedy import by_size
from dflop_jax.schedule.solver.problem import ROUNDING, Ints, Problem

MAX_SAMPLES = 12  # each more multiplies the partial assignments by the bins
_MAX_STATES = 60_000  # partial assignments of one level; more, and the search gives up
_CELLS_PER_UNIT = 5_000  # loads looked at


def enumerate_exactly(
    problem: Problem, incumbent: float, budget: Budget
) -> tuple[Ints | None, bool]:
    """(bins, complete): an assignment better than `incumbent`, or None if there is none.

    When `complete` is False the search ran out of budget or states and None proves nothing.
    """
    if problem.n > MAX_SAMPLES:
        return None, False
    c, n_bins = problem.n_costs, problem.n_bins
    order = by_size(problem.sizes_RN)
    ceiling_R1 = (problem.limits_R * (1 + ROUNDING))[:, None]
    ceiling_R1[:c] = incumbent * (1 - ROUNDING)
    loads_SRB = np.zeros((1, len(problem.sizes_RN), n_bins))
    placed_SN = np.zeros((1, 0), np.int64)
    group_of_B = np.arange(n_bins) // problem.group
    grouped_R = np.array(problem.grouped_R, bool)
    for i in order:
        budget.spend(1 + loads_SRB.size / _CELLS_PER_UNIT)
        if budget.done:
            return None, False
        size_R1 = problem.sizes_RN[:, i, None]
        below = loads_SRB + size_R1 <= ceiling_R1
        state, j = np.nonzero(below.all(axis=1) & _may_open(placed_SN, group_of_B))
        if len(state) > _MAX_STATES:
            return None, False
        placed_SN = np.concatenate([placed_SN[state], j[:, None]], axis=1)
        loads_SRB = loads_SRB[state]
        alone = np.arange(n_bins) == j[:, None]
        shared = group_of_B == group_of_B[j][:, None]
        adds = np.where(grouped_R[:, None], shared[:, None, :], alone[:, None, :])
        loads_SRB += size_R1 * adds
    if len(placed_SN) == 0:
        return None, True
    best = int(loads_SRB[:, :c].max(axis=(1, 2), initial=0.0).argmin())
    bins = np.empty(problem.n, np.int64)
    bins[order] = placed_SN[best]
    return bins, True


def _may_open(placed_SN: Ints, group_of_B: Ints) -> NDArray[np.bool_]:
    """[S, B]: bins in use, and the first unused bin of each group in use and of one new group."""
    bins = np.arange(len(group_of_B))
    used_SB = (placed_SN[:, :, None] == bins).any(axis=1)
    group = int((group_of_B == 0).sum())
    by_group = used_SB.reshape(len(used_SB), len(bins) // group, group)
    # bins of a group are filled from its first, groups from the first: "unused so far" is a count
    first_free = by_group.sum(axis=2)
    groups_used = (first_free > 0).sum(axis=1)
    rank_in_group = bins % group
    return (rank_in_group <= first_free[:, group_of_B]) & (group_of_B <= groups_used[:, None])
