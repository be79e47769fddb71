"""The MILP of `choose_buckets`, which selects the candidate buckets to compile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import highspy
import numpy as np

from dflop_jax.records import Bucket
from dflop_jax.schedule.balance_problem import Floats, Ints
from dflop_jax.schedule.batch import Batch
from dflop_jax.schedule.buckets.problem import BucketProblem, Buckets, largest_first
from dflop_jax.schedule.count_vectors import volume_conditions

# Ratios of capacity to volume, since whole samples leave room unused; one solution for each.
SLACKS = (1.004, 1.03)
# Price of a second on other resources, relative to the slowest resource. Doubling it gives a worse
# fill on the slowest resource.
_IDLE_PRICE = 0.2
GAP = SLACKS[0] - 1  # relative MIP gap, as exact as the conditions
MAX_NODES = 1  # maximum nodes of branch and bound, which then returns its best solution


def group_price(problem: BucketProblem, bucket: Bucket) -> tuple[float, float]:
    """Return (price of a group: seconds on its slowest resource plus a share of the seconds on the
    others; price of filling the pipeline: seconds on the others)."""
    seconds_R = problem.costs(bucket).bucket_s(bucket)
    slowest = float(seconds_R.max())
    rest = float(seconds_R.sum()) - slowest
    return slowest + _IDLE_PRICE * rest, rest


def with_variants(candidates: Sequence[Bucket], batches: Sequence[Batch]) -> dict[Bucket, set[int]]:
    """Return the candidates, followed by their variants without modules that some samples lack;
    each bucket with the indices of the candidates that it comes from."""
    parents = {b: {c} for c, b in enumerate(candidates)}
    absences = dict.fromkeys(missing for batch in batches for missing in batch.missing_modules)
    for c, missing in product(range(len(candidates)), absences):
        shapes = {m: s for m, s in candidates[c].shapes if m not in missing}
        if shapes:
            parents.setdefault(Bucket.from_shapes(shapes), set()).add(c)
    return parents


def solve_bucket_milp(
    candidates: Sequence[Bucket],
    batches: Sequence[Batch],
    problem: BucketProblem,
    *,
    must_hold: Batch,
    start: Buckets,
    slacks: Sequence[float] = SLACKS,
) -> list[Buckets]:
    """Solve the MILP; return at most one set of buckets per slack, each largest first.

    Binary z[c] is 1 if candidate c is compiled. Integer n[s, v] is the number of groups of v in
    batch s, where v runs over the candidates and their variants without modules that some samples
    lack; a variant is available if its candidate is compiled.

    min  mean_s sum_v price[v] n[s, v] + fill
    s.t. n[s, v] <= most[s, v] sum_(c of v) z[c], sum z <= K, fill >= rest[c] z[c],
         the conditions of every batch (`volume_conditions`, times the slack),
         each load of `must_hold` fits some c with z[c] = 1.

    Args:
      start: the initial solution of branch and bound.
    """
    import cvxpy as cp  # imports JAX, so only when needed, and never in the worker process

    parents = with_variants(candidates, batches)
    columns = list(parents)
    prices = np.array([group_price(problem, b) for b in columns])
    price_V, rest_V = np.round(prices / prices[:, 0].max(), 9).T
    of_VC = np.array([[c in whole for c in range(len(candidates))] for whole in parents.values()])
    able_CN = np.array([must_hold.can_hold(b) for b in candidates], float)
    n = cp.Variable((len(batches), len(columns)), integer=True)
    z = cp.Variable(len(candidates), integer=True)
    fill_s, slack = cp.Variable(), cp.Parameter(nonneg=True)
    constraints = [
        n >= 0,
        z >= 0,
        z <= 1,
        cp.sum(z) <= problem.n_buckets,
        fill_s >= cp.multiply(rest_V[: len(candidates)], z),
        able_CN.T @ z >= 1,
    ]
    for s, batch in enumerate(batches):
        conditions = volume_conditions(batch, columns)
        most_V = np.ceil(max(slacks) * conditions.alone_C)
        constraints += [
            n[s] <= cp.multiply(most_V, of_VC.astype(float) @ z),
            conditions.capacity_DC @ n[s] >= slack * conditions.need_D,
        ]
    program = cp.Problem(cp.Minimize(cp.sum(n @ price_V) / len(batches) + fill_s), constraints)
    start_C = np.array([c in start for c in candidates], float)
    solutions: dict[Buckets, None] = {}
    for value in slacks:
        slack.value = value
        data, _, _ = program.get_problem_data(cp.HIGHS)
        z_columns = data["param_prob"].var_id_to_col[z.id] + np.arange(len(candidates))
        chosen_C = _solve(_model(data), z_columns, start_C)
        chosen = [b for b, value in zip(candidates, chosen_C, strict=True) if value > 0.5]
        if must_hold.any_can_hold(chosen).all():
            solutions[largest_first(chosen)] = None
    return list(solutions)


def _solve(model: highspy.HighsLp, columns: Ints, start: Floats) -> Floats:
    """Return the values of these columns in the best solution, zeros if there is none. Branch and
    bound starts from the values `start`."""
    solver = _SilentHighs()
    options: dict[str, Any] = {
        "mip_rel_gap": GAP,
        "mip_max_nodes": MAX_NODES,
        "threads": 1,
        "parallel": "off",
    }
    for name, option in options.items():
        solver.setOptionValue(name, option)
    solver.passModel(model)
    solver.setSolution(len(columns), columns.astype(np.int32), start)
    solver.run()
    solution = np.array(solver.getSolution().col_value)
    return solution[columns] if len(solution) else np.zeros(len(columns))


class _SilentHighs(highspy.Highs):
    """A HiGHS solver that prints nothing. highspy 1.16 prints a banner when its constructor enables
    callbacks. (scipy and cvxpy cannot pass an initial solution to HiGHS.)"""

    def enableCallbacks(self) -> None:
        self.silent()
        super().enableCallbacks()


def _model(data: Mapping[str, Any]) -> highspy.HighsLp:
    """Return the HiGHS model of cvxpy's program min c @ x, A x <= b."""
    rows, free = data["A"].tocsr(), np.full(len(data["c"]), np.inf)
    model = highspy.HighsLp()
    model.num_row_, model.num_col_ = rows.shape
    model.col_cost_, model.col_lower_, model.col_upper_ = data["c"], -free, free
    model.row_lower_, model.row_upper_ = np.full(len(data["b"]), -np.inf), data["b"]
    matrix = model.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_, matrix.index_, matrix.value_ = rows.indptr, rows.indices, rows.data
    kinds = np.full(len(free), highspy.HighsVarType.kContinuous)
    kinds[data["int_vars_idx"]] = highspy.HighsVarType.kInteger
    model.integrality_ = kinds.tolist()
    return model
