"""MILP improvement of an assignment: re-solve a few bins (or all, if small) exactly with HiGHS.

The plain assignment model is symmetric and weak (jax-facts.md), so it is used where it is strong:
samples of equal shape are one integer count per bin, equal bins are ordered by load, only a few
bins are free, and the incumbent bounds the objective. HiGHS is called directly: cvxpy takes 20 ms
and more to compile a model, and imports JAX, which the scheduler's process must not.
"""

from __future__ import annotations

from dataclasses import dataclass

import highspy
import numpy as np

from dflop_jax.schedule.solver.local_search import State
from dflop_jax.schedule.solver.problem import ROUNDING, Floats, Ints

_GAIN = 1e-4  # an improvement smaller than this is not looked for
MAX_VARIABLES = 600  # shapes x bins that HiGHS handles in a fraction of a second


@dataclass(frozen=True)
class Resolve:
    """What re-solving bins gave: whether the state improved, and a bound on their makespan."""

    improved: bool
    lower_bound: float


def resolve(state: State, pool: Ints, time_limit_s: float) -> Resolve | None:
    """Re-split the samples of the bins in `pool` to lower their largest score, in place.

    `lower_bound` bounds the makespan over every split of these samples over these bins (0 if
    nothing was proved), so with all bins in the pool it bounds the instance. None: the model would
    be too large.
    """
    before = float(state.score_B[pool].max())
    samples = np.concatenate([state.members[j] for j in pool])
    if len(samples) == 0:
        return Resolve(False, 0.0)
    shapes_RT, kind_of, counts_T = np.unique(
        state.problem.sizes_RN[:, samples], axis=1, return_inverse=True, return_counts=True
    )
    if len(counts_T) * len(pool) > MAX_VARIABLES:
        return None
    solver = _model(state, pool, shapes_RT, counts_T, before)
    solver.setOptionValue("time_limit", time_limit_s)
    solver.run()
    info, status = solver.getInfo(), solver.getModelStatus()
    proved = status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kOptimal)
    bound = before * (1 - _GAIN) if proved else 0.0
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return Resolve(False, bound)
    count_TP = np.rint(solver.getSolution().col_value[:-1]).astype(int)
    count_TP = count_TP.reshape(len(counts_T), len(pool))
    kept = [state.members[j] for j in pool]
    state.refill(pool.tolist(), _deal(samples, kind_of.ravel(), count_TP))
    if not state.score_B[pool].max() < before * (1 - ROUNDING):
        state.refill(pool.tolist(), kept)
        return Resolve(False, bound)
    return Resolve(True, min(bound, float(info.mip_dual_bound)) if proved else 0.0)


def _deal(samples: Ints, kind_of: Ints, count_TP: Ints) -> list[Ints]:
    """Samples per bin: of each shape as many as counted, in sample order."""
    bin_of = np.empty(len(samples), np.int64)
    for kind, count_P in enumerate(count_TP):
        bin_of[kind_of == kind] = np.repeat(np.arange(len(count_P)), count_P)
    return [samples[bin_of == k] for k in range(count_TP.shape[1])]


def _model(
    state: State, pool: Ints, shapes_RT: Floats, counts_T: Ints, before: float
) -> highspy.Highs:
    """Variables: count[t, k] of shape t in pool bin k, then the makespan."""
    p = state.problem
    n_kinds, n_pool = len(counts_T), len(pool)
    span = n_kinds * n_pool
    solver = highspy.Highs()
    solver.silent()
    for name, value in (("threads", 1), ("parallel", "off"), ("mip_rel_gap", _GAIN)):
        solver.setOptionValue(name, value)
    upper = np.append(np.repeat(counts_T, n_pool).astype(float), before * (1 - _GAIN))
    solver.addVars(span + 1, np.zeros(span + 1), upper)
    whole = np.full(span, highspy.HighsVarType.kInteger)
    solver.changeColsIntegrality(span, np.arange(span, dtype=np.int32), whole)
    solver.changeColCost(span, 1.0)

    def add(low: float, high: float, columns: Ints, values: Floats) -> None:
        solver.addRow(low, high, len(columns), columns.astype(np.int32), values)

    grid_TP = np.arange(span).reshape(n_kinds, n_pool)
    for t, count in enumerate(counts_T):
        add(count, count, grid_TP[t], np.ones(n_pool))
    group_of_P = pool // p.group
    for r, grouped in enumerate(p.grouped_R):
        sets = [np.flatnonzero(group_of_P == g) for g in np.unique(group_of_P)]
        if not grouped:
            sets = [np.array([k]) for k in range(n_pool)]
        for bins in sets:
            columns, values = grid_TP[:, bins].ravel(), np.repeat(shapes_RT[r], len(bins))
            rest = _rest(state, pool, r, int(pool[bins[0]])) if grouped else 0.0
            if r < p.n_costs:
                add(-np.inf, -rest, np.append(columns, span), np.append(values, -1.0))
            else:
                add(-np.inf, p.limits_R[r] * (1 + ROUNDING) - rest, columns, values)
    if p.group == 1:  # bins are alike: order them by the load of the first resource
        for k in range(n_pool - 1):
            pair = np.concatenate([grid_TP[:, k], grid_TP[:, k + 1]])
            add(0.0, np.inf, pair, np.concatenate([shapes_RT[0], -shapes_RT[0]]))
    return solver


def _rest(state: State, pool: Ints, r: int, j: int) -> float:
    """Load of resource r that the group of bin j keeps in bins outside the pool."""
    first = j - j % state.problem.group
    outside = [b for b in range(first, first + state.problem.group) if b not in pool]
    return float(sum(state.problem.sizes_RN[r, state.members[b]].sum() for b in outside))
