"""`balance`: assign samples to bins so that the largest load over bins and modules is least.

This is DFLOP's ILP (arXiv 2603.25120, Online Microbatch Scheduler), solved anytime: LPT, a handful
of samples exactly, others by the improvement in turns that a run's batches get too (`improve.py`),
with a lower bound that proves optimality when the two meet.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from dflop_jax.schedule.bounds.bins import cannot_fit, lower_bound
from dflop_jax.schedule.solver import exact
from dflop_jax.schedule.solver.budget import Budget
from dflop_jax.schedule.solver.greedy import by_size, lpt
from dflop_jax.schedule.solver.improve import Improver
from dflop_jax.schedule.solver.local_search import State
from dflop_jax.schedule.solver.problem import ROUNDING, Ints, Problem, make_problem


@dataclass(frozen=True)
class Assignment:
    """Outcome of `balance`.

    bins: bin of each sample, int64 [samples]; -1 where the sample fits nowhere.
    makespan: largest load of a bin over modules, in the unit of the costs.
    lower_bound: no assignment has a smaller makespan.
    status: "optimal" (proved: makespan equals the bound, to 1e-9), "feasible", "infeasible"
      (proved: the capacities cannot hold the samples) or "unknown" (no feasible assignment was
      found, none excluded). In the last two `bins` is a best effort within the capacities.
    elapsed_s: wall seconds spent.
    """

    bins: Ints
    makespan: float
    lower_bound: float
    status: str
    elapsed_s: float


def balance(
    costs: ArrayLike,
    n_bins: int,
    *,
    time_limit_s: float = 0.1,
    capacities: ArrayLike | None = None,
    tokens: ArrayLike | None = None,
    seed: int = 0,
    bin_group: int = 1,
    grouped: Sequence[int] = (),
    grouped_tokens: Sequence[int] = (),
    work: float | None = None,
    stop_at: float = 0.0,
) -> Assignment:
    """Minimise the largest summed cost over bins and modules.

    Args:
      costs: >= 0, [samples, modules] or [samples]; any one unit.
      n_bins: number of bins, >= 1.
      time_limit_s: deadline; kept to within 20 ms.
      capacities, tokens: what a bin holds [k] and what each sample uses [samples, k] (or
        [samples]); a hard limit for each of the k resources.
      seed: of the search. The order of exploration depends on it alone; how far it gets depends
        on the clock, unless `work` ends it first.
      bin_group, grouped, grouped_tokens: the cost (token) columns named in `grouped`
        (`grouped_tokens`) are summed over each `bin_group` consecutive bins, as a source module
        that runs the union of a microbatch's data ranks; a grouped capacity is per group.
      work: most units of work (pairs of bins priced; see `solver.budget`). With it the answer is a
        pure function of the other arguments as long as the time limit is not reached.
      stop_at: a makespan that is good enough; the search ends there.

    Raises:
      ValueError: a negative or non-finite cost (its row is named), or arguments that do not match.
    """
    start_s = time.perf_counter()
    problem = make_problem(costs, n_bins, capacities, tokens, bin_group, grouped, grouped_tokens)
    budget = Budget(np.inf if work is None else work, start_s + time_limit_s)
    rng = np.random.default_rng(seed)

    def done(bins: Ints, bound: float, status: str) -> Assignment:
        makespan = problem.makespan(bins)
        if status == "feasible" and makespan <= bound * (1 + ROUNDING):
            status, bound = "optimal", makespan
        return Assignment(bins, makespan, bound, status, time.perf_counter() - start_s)

    bound = lower_bound(problem)
    bins = lpt(problem)
    if cannot_fit(problem):
        return done(bins, bound, "infeasible")
    if (bins < 0).any():
        packed, complete = exact.enumerate_exactly(problem, np.inf, budget)
        if packed is None and not complete:
            packed = pack_within_limits(problem, budget, rng)
        if packed is None:
            return done(bins, bound, "infeasible" if complete else "unknown")
        bins = packed
    better, complete = exact.enumerate_exactly(problem, problem.makespan(bins), budget)
    bins = bins if better is None else better
    if complete:
        return done(bins, problem.makespan(bins), "feasible")
    improver = Improver(State(problem, bins), bound, stop_at, budget, rng)
    improver.run()
    return done(improver.state.bins, improver.bound, "feasible")


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
    packing = Improver(State(filling, lpt(filling, by_size(fill_RN))), 1.0, 1.0, budget, rng)
    packing.run()
    bins = packing.state.bins
    return bins if problem.fits(problem.loads(bins)) else None
