"""MILP improvement of an assignment: re-solve a few bins (or all, if small) exactly with HiGHS.

The plain assignment model is symmetric and weak (jax-facts.md), so it is used where it is strong:
samples of equal size are one integer count per bin, equal bins are ordered by load, only a few
bins are free, and the incumbent bounds the objective. HiGHS stops by nodes, never by the clock
(but where `balance` sets a deadline). It is called directly: cvxpy takes 20 ms
and more to compile a model, and imports JAX, which the scheduler's process must not.
"""

from __future__ import annotations

from dataclasses import dataclass

import highspy
import numpy as np

from dflop_jax.schedule.solver.budget import Budget
from dflop_jax.schedule.solver.highs import Highs
from dflop_jax.schedule.solver.local_search import State
from dflop_jax.schedule.solver.problem import ROUNDING, Floats, Ints

_GAIN = 1e-4  # an improvement smaller than this is not looked for
_MAX_VARIABLES = 600  # sizes x bins that HiGHS handles in a fraction of a second
# Units of work, measured: a model's own, of a variable, of an iteration of the simplex.
_FIXED_WORK, _VARIABLE_WORK, _ITERATION_WORK = 20, 1, 2
_LIKELY_ITERATIONS = 4  # of a variable, before the first node
_NODE_ITERATIONS = 30  # of the simplex in a node: with half of it, twice as many are allowed


@dataclass(frozen=True)
class Resolve:
    """What re-solving bins gave: whether the state improved, and a bound on their makespan."""

    improved: bool
    lower_bound: float


def work_of(state: State, pool: Ints) -> int | None:
    """Units of work that a model of these bins is likely to take; None: it would be too large."""
    samples = np.concatenate([state.members[j] for j in pool])
    kinds = len(np.unique(state.problem.sizes_RN[:, samples], axis=1).T) if len(samples) else 0
    size = kinds * len(pool)
    if size > _MAX_VARIABLES:
        return None
    return _FIXED_WORK + size * (_VARIABLE_WORK + _LIKELY_ITERATIONS * _ITERATION_WORK)


def resolve(state: State, pool: Ints, budget: Budget, limit_s: float = np.inf) -> Resolve:
    """Re-split the samples of the bins in `pool` to lower their largest score, in place.

    `lower_bound` bounds the makespan over every split of these samples over these bins (0 if
    nothing was proved), so with all bins in the pool it bounds the instance.
    """
    before = float(state.score_B[pool].max())
    samples = np.concatenate([state.members[j] for j in pool])
    if len(samples) == 0:
        return Resolve(False, 0.0)
    sizes_RT, kind_of, counts_T = np.unique(
        state.problem.sizes_RN[:, samples], axis=1, return_inverse=True, return_counts=True
    )
    solver = _model(state, pool, sizes_RT, counts_T, before)
    nodes = budget.left / (_NODE_ITERATIONS * _ITERATION_WORK)
    solver.setOptionValue("mip_max_nodes", int(min(max(1, nodes), 1_000_000)))
    if np.isfinite(limit_s):
        solver.setOptionValue("time_limit", limit_s)
    solver.run()
    info = solver.getInfo()
    iterations = max(0, info.simplex_iteration_count)
    work = _FIXED_WORK + _VARIABLE_WORK * len(counts_T) * len(pool)
    budget.spend(work + _ITERATION_WORK * iterations)
    status = solver.getModelStatus()
    proved = status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kOptimal)
    bound = before * (1 - _GAIN) if proved else 0.0
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return Resolve(False, bound)
    count_TP = np.rint(solver.getSolution().col_value[:-1]).astype(int)
    count_TP = count_TP.reshape(len(counts_T), len(pool))
    members_before = [state.members[j] for j in pool]
    state.refill(pool.tolist(), _deal(samples, kind_of.ravel(), count_TP))
    if not state.score_B[pool].max() < before * (1 - ROUNDING):
        state.refill(pool.tolist(), members_before)
        return Resolve(False, bound)
    return Resolve(True, min(bound, float(info.mip_dual_bound)) if proved else 0.0)


def _deal(samples: Ints, kind_of: Ints, count_TP: Ints) -> list[Ints]:
    """Samples per bin: of each size as many as counted, in sample order."""
    bin_of = np.empty(len(samples), np.int64)
    for kind, count_P in enumerate(count_TP):
        bin_of[kind_of == kind] = np.repeat(np.arange(len(count_P)), count_P)
    return [samples[bin_of == k] for k in range(count_TP.shape[1])]


def _model(state: State, pool: Ints, sizes_RT: Floats, counts_T: Ints, before: float) -> Highs:
    """Variables: count[t, k] of samples of size t in pool bin k, then the makespan."""
    p = state.problem
    n_kinds, n_pool = len(counts_T), len(pool)
    span = n_kinds * n_pool
    solver = Highs(mip_rel_gap=_GAIN)
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
            columns, values = grid_TP[:, bins].ravel(), np.repeat(sizes_RT[r], len(bins))
            rest = _rest(state, pool, r, int(pool[bins[0]]), grouped)
            if r < p.n_costs and p.scale_RB is not None:
                scale = float(p.scale_RB[r, pool[bins[0]]])
                values, rest = values * scale, rest * scale
            if r < p.n_costs:
                add(-np.inf, -rest, np.append(columns, span), np.append(values, -1.0))
            else:
                add(-np.inf, p.limits_R[r] * (1 + ROUNDING) - rest, columns, values)
    if p.group == 1 and p.alike:  # bins are alike: order them by their first load
        for k in range(n_pool - 1):
            pair = np.concatenate([grid_TP[:, k], grid_TP[:, k + 1]])
            add(0.0, np.inf, pair, np.concatenate([sizes_RT[0], -sizes_RT[0]]))
    return solver


def _rest(state: State, pool: Ints, r: int, j: int, grouped: bool) -> float:
    """Load of resource r that bin j, or its group, carries whatever the bins of the pool hold."""
    p = state.problem
    base = 0.0 if p.base_RB is None else float(p.base_RB[r, j])
    if not grouped:
        return base
    first = j - j % p.group
    outside = [b for b in range(first, first + p.group) if b not in pool]
    return base + float(sum(p.sizes_RN[r, state.members[b]].sum() for b in outside))
