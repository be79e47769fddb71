"""Improving an assignment until a deadline, in turns of searches that get stuck differently.

Re-splits lower the heaviest bin with a few others; a pursuit aims at a goal between bound and
makespan; and where time allows, the configuration LP proves bounds and starts pursuits elsewhere,
and HiGHS re-solves a few bins.
"""

from __future__ import annotations

import time

import numpy as np

from dflop_jax.schedule.solver import columns, milp
from dflop_jax.schedule.solver.ejection import pursue
from dflop_jax.schedule.solver.local_search import State, choose_pool, descend, resplit
from dflop_jax.schedule.solver.problem import ROUNDING, Ints

_RESPLITS = (8, 24)  # of the first turn, of later ones
_PATIENCE = 2  # ejections in vain, per bin, that end a pursuit; doubled when every goal was missed
_CLOSE = 3e-4  # relative distance to the makespan, of bound or missed goal, not worth halving
_SOLVER_AFTER_S = 0.15  # time that must remain before a solver is worth starting
_SHARE = 4  # part of the time left that the configuration LP or a MILP of all bins may take
_MILP_SLICE_S = 0.1  # of one neighbourhood
_GRID, _FINEST_GRID = 500, 2000  # cells of a bin in proofs


class Improver:
    """The best assignment so far (`state`) and the bound on all (`bound`)."""

    def __init__(
        self,
        state: State,
        bound: float,
        stop_at: float,
        deadline_s: float,
        rounds: int,
        rng: np.random.Generator,
    ):
        self.state, self.bound, self.stop_at = state, bound, stop_at
        self.deadline_s, self.rounds = deadline_s, rounds
        self.rng = rng
        self._missed = bound  # the highest goal that was missed
        self._patience = _PATIENCE * state.problem.n_bins
        self._grid = _GRID
        self._covered = np.inf  # least makespan that the configuration LP allows on that grid

    @property
    def target(self) -> float:
        return max(self.bound * (1 + ROUNDING), self.stop_at)

    @property
    def left_s(self) -> float:
        return self.deadline_s - time.perf_counter()

    @property
    def done(self) -> bool:
        return self.state.makespan <= self.target or self.rounds <= 0 or self.left_s <= 0

    def run(self, with_solver: bool) -> None:
        """Turns until the target, the deadline or the end of the rounds."""
        turn = 0
        while not self.done:
            self._resplit(_RESPLITS[min(turn, 1)])
            if not self.done and not self._is_close:
                self._pursue(State(self.state.problem, self.state.bins))
            if with_solver and not self.done and self.left_s > _SOLVER_AFTER_S:
                self._solve(turn)
            turn += 1

    def _resplit(self, batch: int) -> None:
        """Re-splits in batches while a batch lowers the makespan noticeably."""
        before = np.inf
        while self.state.makespan < before * (1 - _CLOSE):
            before = self.state.makespan
            for _ in range(batch):
                if self.done:
                    return
                self.rounds = resplit(
                    self.state, self.target, self.deadline_s, self.rounds, self.rng
                )
                self._descend(self.state)

    def _descend(self, state: State) -> None:
        self.rounds = descend(state, self.target, self.deadline_s, self.rounds)

    @property
    def _is_close(self) -> bool:
        return self.state.makespan - self.bound < _CLOSE * self.bound

    def _goal(self) -> float:
        """Halfway between what was missed and the makespan."""
        if self.state.makespan - self._missed < _CLOSE * self.bound:
            self._missed = self.bound
            self._patience *= 2
        return (self._missed + self.state.makespan) / 2

    def _pursue(self, start: State, goal: float | None = None) -> None:
        """Pursue a goal from `start` (changed), adopt what is better."""
        aim = self._goal() if goal is None else goal
        self.rounds = pursue(start, aim, self.deadline_s, self.rounds, self._patience, self.rng)
        self._descend(start)
        if start.makespan < self.state.makespan:
            self.state = start
        if goal is None and self.state.makespan > aim:
            self._missed = aim

    def _solve(self, turn: int) -> None:
        problem = self.state.problem
        if turn == 0 and self._milp(np.arange(problem.n_bins), self.left_s / _SHARE):
            return
        if turn % 3 == 2:
            self._milp(choose_pool(self.state, self.rng), _MILP_SLICE_S)
        elif columns.applies(problem):
            (self._dive if turn % 3 == 0 else self._prove)()

    def _prove(self) -> None:
        """Raise the bound: to the makespan if that is proved, else by bisection, then with finer
        cells."""
        limit_s = time.perf_counter() + self.left_s / _SHARE
        while time.perf_counter() < limit_s and not self.done:
            span = self.state.makespan
            ask = span if span < self._covered else (self.bound + self._covered) / 2
            if ask - self.bound < _CLOSE * span:
                if self._grid >= _FINEST_GRID:
                    return
                self._grid, self._covered = 2 * self._grid, np.inf
            elif columns.excludes_below(self.state.problem, ask, self._grid, limit_s, self.rng):
                self.bound = ask
                self._missed = max(self._missed, ask)
            else:
                self._covered = ask

    def _dive(self) -> None:
        goal = self._goal()
        limit_s = time.perf_counter() + self.left_s / _SHARE
        bins = columns.dive(self.state.problem, goal, limit_s, self.rng)
        if bins is not None:
            self._pursue(State(self.state.problem, bins), goal)

    def _milp(self, pool: Ints, limit_s: float) -> bool:
        """Re-solve some bins (all of a small instance, which may prove a bound); whether that was
        small enough to try."""
        result = milp.resolve(self.state, pool, limit_s)
        if result is None:
            return False
        if len(pool) == self.state.problem.n_bins:
            self.bound = max(self.bound, min(result.lower_bound, self.state.makespan))
        self._descend(self.state)
        return True
