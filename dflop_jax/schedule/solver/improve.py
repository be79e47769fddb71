"""The solver: improving an assignment by exchanges and re-splits within a budget.

`balance`, the packing of a run's batches and the evening out of their content all end here.
"""

from __future__ import annotations

import numpy as np

from dflop_jax.schedule.solver.budget import Budget
from dflop_jax.schedule.solver.local_search import State, descend, resplit

_RESPLITS = (8, 24)  # of the first turn, of later ones
_CLOSE = 3e-4  # relative gain of a batch of re-splits that is worth another


def improve(state: State, target: float, budget: Budget, rng: np.random.Generator) -> None:
    """Lower the makespan in place, until it is `target` or the budget is spent."""

    def is_done() -> bool:
        return state.makespan <= target or budget.done

    descend(state, target, budget)
    batch, later = _RESPLITS
    while not is_done():
        before = np.inf
        while state.makespan < before * (1 - _CLOSE):
            before = state.makespan
            for _ in range(batch):
                if is_done():
                    return
                resplit(state, target, budget, rng)
                descend(state, target, budget)
        batch = later
