"""The solver: improving an assignment within a budget.

Exchanges and re-splits lower the heaviest bin; where they are stuck HiGHS re-solves a few bins, or
all of a small instance, which also proves a bound. `balance`, the packing of a run's batches and
the evening out of their content all end here.
"""

from __future__ import annotations

import numpy as np

from dflop_jax.schedule.solver import milp
from dflop_jax.schedule.solver.budget import Budget
from dflop_jax.schedule.solver.local_search import State, choose_pool, descend, resplit
from dflop_jax.schedule.solver.problem import ROUNDING, Ints

_RESPLITS = (8, 24)  # of the first turn, of later ones
_CLOSE = 3e-4  # relative gain of a batch of re-splits that is worth another
_SOLVER_LEFT_S = 0.15  # time that must remain before HiGHS is worth starting
_SHARE = 4  # part of what is left that a MILP of all bins may take
_MILP_SLICE_S = 0.1  # of one neighbourhood
_MILP_SLICE = 500  # units of work, likewise


class Improver:
    """The best assignment so far (`state`) and the bound on all (`bound`). It stops at the bound or
    at `stop_at`, a makespan that is good enough."""

    def __init__(
        self, state: State, bound: float, stop_at: float, budget: Budget, rng: np.random.Generator
    ):
        self.state, self.bound, self.stop_at = state, bound, stop_at
        self.budget, self.rng = budget, rng

    @property
    def target(self) -> float:
        return max(self.bound * (1 + ROUNDING), self.stop_at)

    @property
    def done(self) -> bool:
        return self.state.makespan <= self.target or self.budget.done

    def run(self) -> None:
        """Descend, then take turns until the target is met or the budget spent."""
        descend(self.state, self.target, self.budget)
        every = np.arange(self.state.problem.n_bins)
        if not self.done:
            self._resplit(_RESPLITS[0])
            self._milp(every, self.budget.left / _SHARE)
        while not self.done:
            before = self.budget.left
            self._resplit(_RESPLITS[1])
            self._milp(choose_pool(self.state, self.rng), _MILP_SLICE)
            if self.budget.left >= before:  # nothing can be tried
                break

    def _resplit(self, batch: int) -> None:
        """Re-splits in batches while a batch lowers the makespan noticeably."""
        before = np.inf
        while self.state.makespan < before * (1 - _CLOSE):
            before = self.state.makespan
            for _ in range(batch):
                if self.done:
                    return
                resplit(self.state, self.target, self.budget, self.rng)
                descend(self.state, self.target, self.budget)

    def _milp(self, pool: Ints, work: float) -> None:
        """Re-solve some bins, if that is small enough to try (all of an instance: may prove a
        bound)."""
        if self.done or self.budget.left_s <= _SOLVER_LEFT_S:
            return
        likely = milp.work_of(self.state, pool)
        if likely is None or likely > min(work, self.budget.left):
            return
        everything = len(pool) == self.state.problem.n_bins
        limit_s = self.budget.left_s / _SHARE if everything else _MILP_SLICE_S
        limit_s = limit_s if np.isfinite(self.budget.left_s) else np.inf
        result = milp.resolve(self.state, pool, self.budget.part(work), limit_s)
        if everything:
            self.bound = max(self.bound, min(result.lower_bound, self.state.makespan))
        descend(self.state, self.target, self.budget)
