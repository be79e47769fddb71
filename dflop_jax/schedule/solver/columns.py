"""The configuration LP by column generation: a bound on the makespan, and assignments from it.

A column is a pattern, what one bin holds. The LP asks how few bins cover all samples at a given
makespan; where it needs more than there are, no assignment is that good. Its columns, fixed one
after another and generated anew for what is left (a dive), make an assignment that changes all
bins at once, which exchanges cannot.
"""

from __future__ import annotations

from dataclasses import dataclass

import highspy
import numpy as np

from dflop_jax.schedule.solver.budget import Budget
from dflop_jax.schedule.solver.greedy import by_size, lpt
from dflop_jax.schedule.solver.patterns import (
    Kinds,
    best_filling,
    coarse_step,
    kinds_of,
    random_fillings,
)
from dflop_jax.schedule.solver.problem import Floats, Ints, Problem

MAX_KINDS = 160  # kinds of samples that an LP of a few milliseconds has rows for
_MAX_CELLS = 400_000  # of the table that finds the best pattern
_DIVE_GRID = 100  # cells of a bin
_FILLINGS, _KEPT = 128, 40  # random patterns per round of pricing, and how many become columns
_FEW = 5  # new columns; fewer, and the best pattern is computed
_SURE = 0.8  # part of a column from which on a dive rounds it up along with others
_EPS = 1e-6
_PROOF = 1e-5  # relative: rounding errors of a bound are far smaller
_ITERATIONS_PER_UNIT = 8  # of the simplex
_PRICING_WORK = 40  # of a round of random fillings


@dataclass(frozen=True)
class Cover:
    """Columns' shares of the LP's answer, its value (bins), and a lower bound on it."""

    bins: float
    least_bins: float
    share_P: Floats


class Master:
    """min sum x, sum_p pattern[p, k] x[p] >= left[k], x >= 0, over the patterns known so far."""

    def __init__(self, kinds: Kinds):
        self.kinds = kinds
        self.patterns: list[Ints] = []
        self._seen: set[bytes] = set()
        self._solver = highspy.Highs()
        self._solver.silent()
        for name, value in (("threads", 1), ("parallel", "off")):
            self._solver.setOptionValue(name, value)
        for count in kinds.counts_K:
            nothing = np.zeros(0, np.int32), np.zeros(0)
            self._solver.addRow(float(count), highspy.kHighsInf, 0, *nothing)
        self.add(np.eye(len(kinds.counts_K), dtype=np.int64))

    def add(self, patterns_PK: Ints) -> int:
        """Columns of the patterns that are new; how many."""
        new = [p for p in patterns_PK if p.tobytes() not in self._seen]
        new = list({p.tobytes(): p for p in new}.values())
        if not new:
            return 0
        self._seen |= {p.tobytes() for p in new}
        self.patterns += new
        row, kind = np.nonzero(new)
        starts = np.searchsorted(row, np.arange(len(new))).astype(np.int32)
        values = np.array(new)[row, kind].astype(float)
        ones, zeros = np.ones(len(new)), np.zeros(len(new))
        most = np.full(len(new), highspy.kHighsInf)
        self._solver.addCols(
            len(new), ones, zeros, most, len(row), starts, kind.astype(np.int32), values
        )
        return len(new)

    def cover(
        self, left_K: Ints, n_bins: float, budget: Budget, rng: np.random.Generator
    ) -> Cover | None:
        """The LP for `left_K` samples, with new columns while it needs more than `n_bins` and some
        pattern helps; None when the budget ended first."""
        for row, left in enumerate(left_K.tolist()):
            self._solver.changeRowBounds(row, float(left), highspy.kHighsInf)
        least = 0.0
        while True:
            if not self._run(budget):
                return None
            bins = self._solver.getInfo().objective_function_value
            solution = self._solver.getSolution()
            worth_K = np.maximum(0.0, np.array(solution.row_dual)) * (left_K > 0)
            answer = Cover(bins, least, np.array(solution.col_value))
            if bins <= n_bins + _EPS:
                return answer
            budget.spend(_PRICING_WORK)
            fillings = random_fillings(self.kinds, left_K, worth_K, _FILLINGS, rng)
            value_P = fillings @ worth_K
            ranked = np.argsort(-value_P, kind="stable")[:_KEPT]
            added = self.add(fillings[ranked[value_P[ranked] > 1 + _EPS]])
            if added >= _FEW:
                continue
            best = best_filling(self.kinds, left_K, worth_K, budget)
            if best is None:
                return None
            value, pattern = best
            least = max(least, float(worth_K @ left_K) / max(value, _EPS))
            grew = value > 1 + _EPS and self.add(pattern[None]) + added > 0
            if not grew or least > n_bins * (1 + _PROOF):
                return Cover(bins, least, answer.share_P)

    def _run(self, budget: Budget) -> bool:
        if budget.done:
            return False
        iterations = min(max(1.0, budget.left * _ITERATIONS_PER_UNIT), 1e9)
        self._solver.setOptionValue("simplex_iteration_limit", int(iterations))
        if np.isfinite(budget.left_s):
            # the clock of a solver runs on from one run to the next
            self._solver.setOptionValue("time_limit", self._solver.getRunTime() + budget.left_s)
        self._solver.run()
        spent = max(0, self._solver.getInfo().simplex_iteration_count)
        budget.spend(1 + spent / _ITERATIONS_PER_UNIT)
        return self._solver.getModelStatus() == highspy.HighsModelStatus.kOptimal


def applies(problem: Problem) -> bool:
    """Whether bins are alike and independent, and some resource comes in coarse steps: where all
    are continuous, rounding to cells loses more than there is to gain."""
    independent = problem.group == 1 or not any(problem.grouped_R)
    return (
        problem.alike
        and independent
        and any(
            coarse_step(size_N, float(size_N.sum()) / problem.n_bins) for size_N in problem.sizes_RN
        )
    )


def excludes_below(
    problem: Problem, makespan: float, grid: int, budget: Budget, rng: np.random.Generator
) -> bool:
    """Whether it is proved that no assignment has a makespan below `makespan`; sizes are rounded
    down to 1 / `grid` of that."""
    kinds = kinds_of(problem, makespan, grid, down=True)
    if (kinds.cells_RK > kinds.room_R[:, None]).any():
        return True
    if not _small(kinds):
        return False
    cover = Master(kinds).cover(kinds.counts_K, problem.n_bins, budget, rng)
    return cover is not None and cover.least_bins > problem.n_bins * (1 + _PROOF)


def dive(problem: Problem, goal: float, budget: Budget, rng: np.random.Generator) -> Ints | None:
    """bins[N] of about the makespan `goal`: sizes are rounded to cells, so some bins exceed it.

    None if the LP says that `goal` is out of reach (not a proof), or the budget ended first, or
    a limit stood in the way.
    """
    kinds = kinds_of(problem, goal, _DIVE_GRID, down=False)
    if not _small(kinds) or (kinds.cells_RK > kinds.room_R[:, None]).any():
        return None
    master, left_K, bins = Master(kinds), kinds.counts_K.copy(), problem.n_bins
    fixed: list[Ints] = []
    while left_K.any() and len(fixed) < bins:
        cover = master.cover(left_K, bins - len(fixed), budget, rng)
        if cover is None or (not fixed and cover.least_bins > bins * (1 + _PROOF)):
            return None
        for pattern in _rounded(master.patterns, cover.share_P, left_K, bins - len(fixed), rng):
            fixed.append(pattern)
            left_K = left_K - pattern
    return _placed(problem, kinds, fixed)


def _rounded(
    patterns: list[Ints], share_P: Floats, left_K: Ints, most: int, rng: np.random.Generator
) -> list[Ints]:
    """The columns with the largest shares as bins, cut to what is left: the first, and others that
    are nearly whole and need no cut."""
    taken: list[Ints] = []
    for j in np.lexsort((rng.random(len(share_P)), -share_P)):
        if taken and share_P[j] < _SURE:
            break
        for _ in range(max(1, int(share_P[j] + _EPS))):
            cut = np.minimum(patterns[j], left_K)
            if len(taken) == most or not cut.any() or (taken and (cut < patterns[j]).any()):
                break
            taken.append(cut)
            left_K = left_K - cut
    return taken


def _placed(problem: Problem, kinds: Kinds, fixed: list[Ints]) -> Ints | None:
    """Samples dealt to the bins' patterns: of each kind the largest where most room is; what no
    pattern holds goes where it fits best."""
    holds_BK = np.zeros((problem.n_bins, len(kinds.counts_K)), np.int64)
    holds_BK[: len(fixed)] = fixed
    size_RN = problem.sizes_RN[: problem.n_costs]
    sized = kinds.kind_N >= 0
    mean_RK = np.stack(
        [
            np.bincount(kinds.kind_N[sized], size_N[sized], len(kinds.counts_K)) / kinds.counts_K
            for size_N in size_RN
        ]
    )
    loads_RB = mean_RK @ holds_BK.T
    bins = np.full(problem.n, -1)
    for i in by_size(size_RN).tolist():
        k = kinds.kind_N[i]
        open_B = np.flatnonzero(holds_BK[:, k]) if k >= 0 else np.zeros(0, np.int64)
        if len(open_B) == 0:
            continue
        j = open_B[loads_RB[:, open_B].max(axis=0).argmin()]
        bins[i] = j
        holds_BK[j, k] -= 1
        loads_RB[:, j] += size_RN[:, i] - mean_RK[:, k]
    rest = np.flatnonzero(bins < 0)
    bins = lpt(problem, rest[by_size(size_RN[:, rest])], bins)
    return bins if (bins >= 0).all() and problem.fits(problem.loads(bins)) else None


def _small(kinds: Kinds) -> bool:
    return len(kinds.counts_K) <= MAX_KINDS and np.prod(kinds.room_R + 1.0) <= _MAX_CELLS
