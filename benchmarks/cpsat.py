"""The paper's ILP under CP-SAT, in a process of its own: OR-Tools and HiGHS cannot share one.

Reads {"costs": [[...]], "n_bins": B, "time_limit_s": s, "workers": w} from stdin and writes
{"bins": [...] or null, "seconds": s}. Needs only numpy and ortools.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
from ortools.sat.python import cp_model

RESOLUTION = 1_000_000  # of the total cost of a module: costs are integers in CP-SAT


def solve(costs: np.ndarray, n_bins: int, time_limit_s: float, workers: int) -> list[int] | None:
    """x[i, j] binary, every sample in one bin, the largest load over bins and modules least."""
    whole = np.rint(costs / max(costs.sum(axis=0).max(), 1e-30) * RESOLUTION).astype(int)
    model = cp_model.CpModel()
    x = [[model.new_bool_var("") for _ in range(n_bins)] for _ in range(len(whole))]
    span = model.new_int_var(0, int(whole.sum(axis=0).max()), "")
    for row in x:
        model.add_exactly_one(row)
    for j in range(n_bins):
        column = [row[j] for row in x]
        for cost in whole.T:
            model.add(cp_model.LinearExpr.weighted_sum(column, cost.tolist()) <= span)
    model.minimize(span)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_workers = workers
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return [int(np.argmax([solver.value(v) for v in row])) for row in x]


def main() -> None:
    task = json.load(sys.stdin)
    start = time.perf_counter()
    bins = solve(np.array(task["costs"]), task["n_bins"], task["time_limit_s"], task["workers"])
    json.dump({"bins": bins, "seconds": time.perf_counter() - start}, sys.stdout)


if __name__ == "__main__":
    main()
