"""Search against a goal: bring one bin within it at the expense of another, then repair that.

`descend` lowers the heaviest bin only while no other becomes as heavy, so it stops where several
bins must change at once. Here a makespan is aimed at, and what exceeds it, summed over all bins, is
lowered by exchanges. Where none lowers it, a bin over the goal is relieved whatever that does to
its partner (an ejection), and the others absorb it while the relieved bin keeps what it holds.

Shape suffixes as in `problem.py`; P partners of a bin, S subsets of a bin's samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dflop_jax.schedule.solver.budget import Budget
from dflop_jax.schedule.solver.local_search import State, subsets
from dflop_jax.schedule.solver.problem import ROUNDING, Floats, Ints

# Of one bin that may leave it; drawn anew with the bin's samples where there are more.
_SUBSETS = 40
_DRAWN_FROM = 400
_PARTNERS = 24  # bins that a repair looks at together, the roomiest first
_OVERFULL = 3  # bins that a repair tries to relieve
_EJECTIONS = 3  # cheapest exchanges among which an ejection draws
_REPAIR_WORK = 200  # pairs priced to absorb an ejection


def pursue(
    state: State, goal: float, budget: Budget, patience: int, rng: np.random.Generator
) -> None:
    """Lower the total excess over `goal`, in place, until it is 0 or the last `patience` ejections
    did not lower it."""
    if state.problem.n_bins < 2:
        return
    search = _Pursuit(state, goal, budget, rng)
    search.repair(None, budget)
    vain = 0
    while vain < patience and not search.done:
        vain = 0 if search.eject() else vain + 1


class _Pursuit:
    """`sums_RBS`: size of each subset of each bin's samples (`masks`), the empty one first."""

    def __init__(self, state: State, goal: float, budget: Budget, rng: np.random.Generator):
        self.state, self.goal, self.rng, self.budget = state, goal, rng, budget
        p = state.problem
        self.scale_RB = np.ones((p.n_costs, p.n_bins)) if p.scale_RB is None else p.scale_RB
        self.sums_RBS = np.zeros((len(p.sizes_RN), p.n_bins, _SUBSETS))
        self.masks: list[NDArray[np.bool_]] = [subsets(0, 1)] * p.n_bins
        self._list_subsets(range(p.n_bins))

    @property
    def done(self) -> bool:
        return self.budget.done or not (self.excess() > self.goal * ROUNDING).any()

    def excess(self) -> Floats:
        """[B]: what a bin's cost loads exceed the goal by, summed over costs."""
        over_RB = self.state.problem.costs(self.state.loads_RB) - self.goal
        return np.maximum(0.0, over_RB).sum(axis=0)

    def eject(self) -> bool:
        """Relieve a bin over the goal, repair, and undo both if the total excess grew; whether it
        fell."""
        before_B, n_bins = self.excess(), self.state.problem.n_bins
        a = int(self.rng.choice(np.flatnonzero(before_B > self.goal * ROUNDING)))
        b = (a + int(self.rng.integers(1, n_bins))) % n_bins
        self.budget.spend()
        price_SS = np.where(self._within(a, b), self._price(a, np.array([b]))[0], np.inf)
        few = min(_EJECTIONS, int(np.isfinite(price_SS).sum()))
        if few == 0:
            return False
        kept = list(self.state.members)
        cheapest = np.argsort(price_SS, axis=None, kind="stable")[:few]
        self._exchange(a, b, *divmod(int(self.rng.choice(cheapest)), price_SS.shape[1]))
        self.repair(a, self.budget.part(_REPAIR_WORK))
        change = self.excess().sum() - before_B.sum()
        if change > self.goal * ROUNDING:
            changed = [j for j in range(n_bins) if kept[j] is not self.state.members[j]]
            self.state.refill(changed, [kept[j] for j in changed])
            self._list_subsets(changed)
        return bool(change < -self.goal * ROUNDING)

    def repair(self, frozen: int | None, budget: Budget) -> None:
        """Exchange between bins over the goal and others, but for a frozen one, while the total
        excess falls."""
        while not budget.done:
            over_B = self.excess()
            ranked = np.argsort(-over_B, kind="stable")[:_OVERFULL]
            if not any(
                self._relieve(int(a), over_B, frozen, budget)
                for a in ranked[over_B[ranked] > self.goal * ROUNDING]
            ):
                break

    def _relieve(self, a: int, over_B: Floats, frozen: int | None, budget: Budget) -> bool:
        """Make the exchange of bin a with another that lowers their excess most, if one does."""
        partners = self._absorbers(a, over_B, frozen)
        if len(partners) == 0:
            return False
        budget.spend(len(partners))
        price_PSS = self._price(a, partners)
        price_PSS -= price_PSS[:, :1, :1].copy()  # [:, 0, 0] exchanges nothing
        best = int(price_PSS.argmin())
        if not price_PSS.flat[best] < -self.goal * ROUNDING:
            return False
        which, row, column = np.unravel_index(best, price_PSS.shape)
        self._exchange(a, int(partners[which]), int(row), int(column))
        return True

    def _absorbers(self, a: int, over_B: Floats, frozen: int | None) -> Ints:
        """Bins that could take what bin a has too much, the roomiest first."""
        loads_RB = self.state.problem.costs(self.state.loads_RB)
        # what an even split would still exceed; and, among equals, the room there is
        left_B = np.maximum(0.0, loads_RB + loads_RB[:, [a]] - 2 * self.goal).sum(axis=0)
        room_B = np.maximum(0.0, self.goal - loads_RB).sum(axis=0)
        left_B[a] = np.inf
        if frozen is not None:
            left_B[frozen] = np.inf
        order = np.lexsort((-room_B, left_B))[:_PARTNERS]
        return order[left_B[order] < over_B[a] + over_B[order] - self.goal * ROUNDING]

    def _price(self, a: int, partners: Ints) -> Floats:
        """[P, S, S]: excess of bin a and a partner (inf: over a limit) after subset s of a and
        subset t of the partner changed places."""
        p, loads_RB = self.state.problem, self.state.loads_RB
        n_a, n_b = len(self.masks[a]), max(len(self.masks[j]) for j in partners)
        price = np.zeros((len(partners), n_a, n_b))
        together = partners // p.group == a // p.group
        for r, grouped in enumerate(p.grouped_R):
            load_a, load_P = loads_RB[r, a], loads_RB[r, partners, None, None]
            out_a, out_b = self.sums_RBS[r, a, :n_a, None], self.sums_RBS[r, partners, None, :n_b]
            out = out_a - out_b
            if grouped:  # an exchange within the group does not change its load
                out[together] = 0.0
            if r >= p.n_costs:
                limit = p.limits_R[r] * (1 + ROUNDING)
                price[np.maximum(load_a - out, load_P + out) > limit] = np.inf
                continue
            scale_a, scale_P = self.scale_RB[r, a], self.scale_RB[r, partners, None, None]
            over = np.maximum((load_a - out) * scale_a - self.goal, 0.0)
            over += np.maximum((load_P + out) * scale_P - self.goal, 0.0)
            price += over * p.group if grouped else over
        return price

    def _within(self, a: int, b: int) -> NDArray[np.bool_]:
        """[S, S]: whether bin a is within the goal after an exchange with bin b."""
        p = self.state.problem
        n_a, n_b = len(self.masks[a]), len(self.masks[b])
        within = np.ones((n_a, n_b), bool)
        for r in range(p.n_costs):
            out = np.subtract.outer(self.sums_RBS[r, a, :n_a], self.sums_RBS[r, b, :n_b])
            if p.grouped_R[r] and a // p.group == b // p.group:
                out[:] = 0.0
            left = (self.state.loads_RB[r, a] - out) * self.scale_RB[r, a]
            within &= left <= self.goal * (1 + ROUNDING)
        return within

    def _exchange(self, a: int, b: int, row: int, column: int) -> None:
        in_a, in_b = self.state.members[a], self.state.members[b]
        # subsets beyond those of b are empty
        go_a = self.masks[a][row]
        go_b = self.masks[b][column if column < len(self.masks[b]) else 0]
        new_a = np.concatenate([in_a[~go_a], in_b[go_b]])
        new_b = np.concatenate([in_b[~go_b], in_a[go_a]])
        self.state.refill((a, b), (new_a, new_b))
        self._list_subsets((a, b))

    def _list_subsets(self, bins: Sequence[int]) -> None:
        for j in bins:
            samples = self.state.members[j]
            mask = subsets(len(samples), _DRAWN_FROM)
            if len(mask) > _SUBSETS:
                always = 1 + min(len(samples), _SUBSETS // 2)
                drawn = self.rng.choice(len(mask) - always, _SUBSETS - always, replace=False)
                mask = np.concatenate([mask[:always], mask[always + drawn]])
            self.masks[j] = mask
            self.sums_RBS[:, j] = 0.0
            self.sums_RBS[:, j, : len(mask)] = self.state.problem.sizes_RN[:, samples] @ mask.T
