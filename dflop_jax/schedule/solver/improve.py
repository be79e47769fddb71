"""The solver: improving an assignment within a budget, in turns of searches that get stuck
differently.

Re-splits lower the heaviest bin with a few others; a pursuit aims at a goal between bound and
makespan; the configuration LP proves bounds and starts pursuits elsewhere, and HiGHS re-solves a
few bins. `balance` and the packing of a run's batches both end here.
"""

from __future__ import annotations

import numpy as np

from dflop_jax.schedule.solver import columns, exact, milp
from dflop_jax.schedule.solver.budget import Budget
from dflop_jax.schedule.solver.ejection import pursue
from dflop_jax.schedule.solver.local_search import State, choose_pool, descend, resplit
from dflop_jax.schedule.solver.problem import ROUNDING, Ints

_RESPLITS = (8, 24)  # of the first turn, of later ones
_PATIENCE = 2  # ejections in vain, per bin, that end a pursuit; doubled when every goal was missed
_CLOSE = 3e-4  # relative distance to the makespan, of bound or missed goal, not worth halving
_SOLVER_LEFT_S = 0.15  # time that must remain before a solver is worth starting
_SHARE = 4  # part of what is left that the configuration LP or a MILP of all bins may take
_MILP_SLICE_S = 0.1  # of one neighbourhood
_MILP_SLICE = 500  # units of work, likewise
_GRID, _FINEST_GRID = 500, 2000  # cells of a bin in proofs


class Improver:
    """The best assignment so far (`state`) and the bound on all (`bound`). It stops at the bound or
    at `stop_at`, a makespan that is good enough."""

    def __init__(
        self, state: State, bound: float, stop_at: float, budget: Budget, rng: np.random.Generator
    ):
        self.state, self.bound, self.stop_at = state, bound, stop_at
        self.budget, self.rng = budget, rng
        self._missed = bound  # the highest goal that was missed
        self._patience = _PATIENCE * state.problem.n_bins
        self._grid = _GRID
        self._covered = np.inf  # least makespan that the configuration LP allows on that grid

    @property
    def target(self) -> float:
        return max(self.bound * (1 + ROUNDING), self.stop_at)

    @property
    def done(self) -> bool:
        return self.state.makespan <= self.target or self.budget.done

    def run(self) -> None:
        """Descend, enumerate a small instance, then take turns until the target is met or the
        budget spent."""
        self._descend(self.state)
        self._enumerate()
        turn = 0
        while not self.done:
            before = self.budget.left
            self._resplit(_RESPLITS[min(turn, 1)])
            if not self.done and not self._is_close:
                self._pursue(State(self.state.problem, self.state.bins))
            if not self.done and self.budget.left_s > _SOLVER_LEFT_S:
                self._solve(turn)
            turn += 1
            if self.budget.left >= before:  # nothing can be tried
                break

    def _enumerate(self) -> None:
        problem = self.state.problem
        if self.done or not problem.alike or problem.n > exact.MAX_SAMPLES:
            return
        better, complete = exact.enumerate_exactly(problem, self.state.makespan, self.budget)
        self.state = self.state if better is None else State(problem, better)
        self.bound = self.state.makespan if complete else self.bound

    def _resplit(self, batch: int) -> None:
        """Re-splits in batches while a batch lowers the makespan noticeably."""
        before = np.inf
        while self.state.makespan < before * (1 - _CLOSE):
            before = self.state.makespan
            for _ in range(batch):
                if self.done:
                    return
                resplit(self.state, self.target, self.budget, self.rng)
                self._descend(self.state)

    def _descend(self, state: State) -> None:
        descend(state, self.target, self.budget)

    @property
    def _is_close(self) -> bool:
        return self.state.makespan - self.bound < _CLOSE * self.bound

    def _goal(self) -> float:
        """A makespan halfway between what was missed and what was reached, not below `stop_at`."""
        if self.state.makespan - self._missed < _CLOSE * self.bound:
            self._missed = self.bound
            self._patience *= 2
        return max(self.stop_at, (self._missed + self.state.makespan) / 2)

    def _pursue(self, start: State, goal: float | None = None) -> None:
        """Pursue a goal from `start` (changed), adopt what is better."""
        aim = self._goal() if goal is None else goal
        pursue(start, aim, self.budget, self._patience, self.rng)
        self._descend(start)
        if start.makespan < self.state.makespan:
            self.state = start
        if goal is None and self.state.makespan > aim:
            self._missed = aim

    def _solve(self, turn: int) -> None:
        problem = self.state.problem
        if turn == 0 and self._milp(np.arange(problem.n_bins), self.budget.left / _SHARE):
            return
        if turn % 3 == 2 or not columns.applies(problem):
            self._milp(choose_pool(self.state, self.rng), _MILP_SLICE)
        else:
            (self._dive if turn % 3 == 0 else self._prove)()

    def _part(self) -> Budget:
        part = self.budget.part(self.budget.left / _SHARE)
        if np.isfinite(self.budget.deadline_s):
            part.deadline_s -= self.budget.left_s * (1 - 1 / _SHARE)
        return part

    def _prove(self) -> None:
        """Raise the bound: to the makespan if that is proved, else by bisection, then with finer
        cells."""
        budget = self._part()
        while not budget.done and not self.done:
            span = self.state.makespan
            ask = span if span < self._covered else (self.bound + self._covered) / 2
            if ask - self.bound < _CLOSE * span:
                if self._grid >= _FINEST_GRID:
                    return
                self._grid, self._covered = 2 * self._grid, np.inf
            elif columns.excludes_below(self.state.problem, ask, self._grid, budget, self.rng):
                self.bound = ask
                self._missed = max(self._missed, ask)
            else:
                self._covered = ask

    def _dive(self) -> None:
        goal = self._goal()
        bins = columns.dive(self.state.problem, goal, self._part(), self.rng)
        if bins is not None:
            self._pursue(State(self.state.problem, bins), goal)

    def _milp(self, pool: Ints, work: float) -> bool:
        """Re-solve some bins (all of a small instance, which may prove a bound); whether that was
        small enough to try."""
        likely = milp.work_of(self.state, pool)
        if likely is None or likely > min(work, self.budget.left):
            return False
        everything = len(pool) == self.state.problem.n_bins
        limit_s = self.budget.left_s / _SHARE if everything else _MILP_SLICE_S
        limit_s = limit_s if np.isfinite(self.budget.left_s) else np.inf
        result = milp.resolve(self.state, pool, self.budget.part(work), limit_s)
        if everything:
            self.bound = max(self.bound, min(result.lower_bound, self.state.makespan))
        self._descend(self.state)
        return True
