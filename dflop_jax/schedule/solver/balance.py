"""`balance`: assign samples to bins so that the largest load over bins and modules is least.

This is DFLOP's integer program (arXiv 2603.25120, Online Microbatch Scheduler), solved by LPT and
the improvement that a run's batches get too (`improve.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from dflop_jax.schedule.solver.budget import Budget
from dflop_jax.schedule.solver.greedy import by_size, lpt
from dflop_jax.schedule.solver.improve import improve
from dflop_jax.schedule.solver.local_search import State
from dflop_jax.schedule.solver.problem import ROUNDING, Ints, Problem, make_problem


def balance(
    costs: ArrayLike,
    n_bins: int,
    *,
    bin_group: int = 1,
    grouped: Sequence[int] = (),
    work: float = 1_000,
    seed: int = 0,
) -> Ints:
    """The bin of each sample, int64 [samples], such that the largest summed cost over bins and
    modules is small; the same arguments give the same bins.

    Args:
      costs: >= 0, [samples, modules] or [samples]; any one unit.
      n_bins: number of bins, >= 1.
      bin_group, grouped: the cost columns named in `grouped` are summed over each `bin_group`
        consecutive bins, as a source module that runs the union of a microbatch's data ranks.
      work: max. units of work (see `solver.budget`), each about 0.1 ms.
      seed: of the search.

    Raises:
      ValueError: a negative or non-finite cost (its row is named), or arguments that do not match.
    """
    problem = make_problem(costs, n_bins, bin_group=bin_group, grouped=grouped)
    if problem.n == 0:
        return np.empty(0, np.int64)
    state = State(problem, lpt(problem))
    bins_R = np.where(problem.grouped_R, problem.n_groups, n_bins)
    target = max(
        (problem.sizes_RN.sum(axis=1) / bins_R).max(initial=0.0),
        problem.sizes_RN.max(initial=0.0),
    )
    improve(state, target * (1 + ROUNDING), Budget(work), np.random.default_rng(seed))
    return state.bins


def pack_within_limits(problem: Problem, budget: Budget, rng: np.random.Generator) -> Ints | None:
    """Bins that keep the limits, or None, when LPT on costs finds none.

    The fill of a bin, use over limit, is balanced as if it were the cost; a largest fill of at
    most 1 keeps the limits.
    """
    c = problem.n_costs
    limits_R1 = problem.limits_R[c:, None]
    open_R1 = np.isfinite(limits_R1) & (limits_R1 > 0)
    fill_RN = np.where(open_R1, problem.sizes_RN[c:] / np.where(open_R1, limits_R1, 1.0), 0.0)
    filling = replace(
        problem,
        sizes_RN=fill_RN,
        n_costs=len(fill_RN),
        limits_R=np.full(len(fill_RN), np.inf),
        grouped_R=problem.grouped_R[c:],
    )
    packing = State(filling, lpt(filling, by_size(fill_RN)))
    improve(packing, 1 + ROUNDING, budget, rng)
    return packing.bins if problem.fits(problem.loads(packing.bins)) else None
