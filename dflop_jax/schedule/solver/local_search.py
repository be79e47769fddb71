"""Local search by exchanges between two bins, and re-splitting of a few bins when that is stuck.

All exchanges of a few samples of bin a against a few of bin b are priced at once: for subset sums
s of a and r of b the new loads are A - s + r and B + s - r, i.e. for each resource
(A+B)/2 +- |s - r - (A-B)/2|. Bins of few samples are so re-split exactly (every subset).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import combinations, pairwise

import numpy as np

from dflop_jax.schedule.solver.budget import Budget
from dflop_jax.schedule.solver.greedy import lpt
from dflop_jax.schedule.solver.problem import ROUNDING, Floats, Ints, Problem

_MAX_SUBSETS = 192  # of one bin; pricing 192 x 192 exchanges takes about 0.1 ms per resource
_RESPLIT_WORK = 40  # pairs priced while re-splitting three or four bins
_NOISE = 0.5  # relative noise on the sizes by which a re-split orders its samples; uniform, since
# the last bit of an exponential differs from one CPU to another


class State:
    """A complete assignment with its loads, changed in place."""

    def __init__(self, problem: Problem, bins: Ints):
        self.problem = problem
        self.bins = bins.copy()
        self.loads_RB = problem.loads(bins)
        self.score_B = problem.scores(self.loads_RB)
        order = np.argsort(bins, kind="stable")
        starts = np.searchsorted(bins[order], np.arange(problem.n_bins + 1))
        self.members: list[Ints] = [order[lo:hi] for lo, hi in pairwise(starts)]

    @property
    def makespan(self) -> float:
        return float(self.score_B.max())

    def refill(self, bins: Iterable[int], members: Iterable[Ints]) -> None:
        """Replace what some bins hold (the same samples in all)."""
        p, changed = self.problem, list(bins)
        for j, samples in zip(changed, members, strict=True):
            self.members[j] = samples
            self.bins[samples] = j
        for first in {j - j % p.group for j in changed}:
            span = slice(first, first + p.group)
            samples = np.concatenate(self.members[span])
            bin_of, n_bins = self.bins[samples] - first, len(self.members[span])
            for r, grouped in enumerate(p.grouped_R):
                load_b = np.bincount(bin_of, p.sizes_RN[r, samples], n_bins)
                self.loads_RB[r, span] = sum(load_b.tolist()) if grouped else load_b
            if p.base_RB is not None:
                self.loads_RB[:, span] += p.base_RB[:, span]
            self.score_B[span] = p.scores(self.loads_RB[:, span], span)


@lru_cache(maxsize=256)
def subsets(m: int, most: int) -> Floats:
    """[m, S] memberships, 0 or 1, of the subsets of m samples up to the largest size that keeps
    S <= most (size 1 in any case), the empty one first."""
    chosen: list[tuple[int, ...]] = [(), *((i,) for i in range(m))]
    for size in range(2, m + 1):
        more = list(combinations(range(m), size))
        if len(chosen) + len(more) > most:
            break
        chosen += more
    member_MS = np.zeros((m, len(chosen)))
    for column, subset in enumerate(chosen):
        member_MS[list(subset), column] = 1
    return member_MS


def exchange(state: State, a: int, b: int) -> bool:
    """Make the best exchange between bins a and b if it lowers the larger score of the two."""
    p, in_a, in_b = state.problem, state.members[a], state.members[b]
    worth = max(state.score_B[a], state.score_B[b]) * (1 - ROUNDING)
    member_a_MS, member_b_MS = subsets(len(in_a), _MAX_SUBSETS), subsets(len(in_b), _MAX_SUBSETS)
    out_a_RS, out_b_RS = p.sizes_RN[:, in_a] @ member_a_MS, p.sizes_RN[:, in_b] @ member_b_MS
    together = p.group > 1 and a // p.group == b // p.group
    price_SS: Floats = np.zeros((out_a_RS.shape[1], out_b_RS.shape[1]))
    for r, grouped in enumerate(p.grouped_R):
        load_a, load_b = float(state.loads_RB[r, a]), float(state.loads_RB[r, b])
        stays = grouped and together  # the group's load does not change
        if r >= p.n_costs:
            if not stays:
                load_SS = _larger_after(load_a, load_b, out_a_RS[r], out_b_RS[r])
                price_SS[load_SS > p.limits_R[r] * (1 + ROUNDING)] = np.inf
            continue
        scale_a, scale_b = 1.0, 1.0
        if p.scale_RB is not None:
            scale_a, scale_b = float(p.scale_RB[r, a]), float(p.scale_RB[r, b])
        if stays:
            np.maximum(price_SS, load_a * scale_a, out=price_SS)
        elif scale_a != scale_b:
            moved_SS = np.subtract.outer(out_a_RS[r], out_b_RS[r])
            np.maximum(price_SS, (load_a - moved_SS) * scale_a, out=price_SS)
            np.maximum(price_SS, (load_b + moved_SS) * scale_b, out=price_SS)
        else:
            load_SS = _larger_after(load_a, load_b, out_a_RS[r], out_b_RS[r])
            np.maximum(price_SS, load_SS * scale_a if scale_a != 1 else load_SS, out=price_SS)
        if not price_SS.min() < worth:
            return False
    best = int(price_SS.argmin())
    if not price_SS.flat[best] < worth:
        return False
    row, column = divmod(best, price_SS.shape[1])
    go_a, go_b = member_a_MS[:, row] > 0, member_b_MS[:, column] > 0
    new_a = np.concatenate([in_a[~go_a], in_b[go_b]])
    new_b = np.concatenate([in_b[~go_b], in_a[go_a]])
    state.refill((a, b), (new_a, new_b))
    return True


def _larger_after(load_a: float, load_b: float, out_a_S: Floats, out_b_S: Floats) -> Floats:
    """[S, S]: the larger of two loads after every exchange of what leaves them."""
    load_SS = np.subtract.outer(out_a_S - (load_a - load_b) / 2, out_b_S)
    np.abs(load_SS, out=load_SS)
    load_SS += (load_a + load_b) / 2
    return load_SS


def descend(state: State, target: float, budget: Budget, only: Ints | None = None) -> None:
    """Exchange from the heaviest bin until no exchange lowers it, `target` is reached or the budget
    is spent. `only` restricts the search to some bins."""
    among = np.arange(state.problem.n_bins) if only is None else only
    moved = True
    while moved and not budget.done and state.score_B[among].max() > target:
        moved = False
        for a in _heaviest(state, among):
            for b in _partners(state, a, among):
                budget.spend()
                moved = exchange(state, a, b)
                if moved or budget.done:
                    break
            if moved or budget.done:
                break


def _heaviest(state: State, among: Ints) -> list[int]:
    """The heaviest bin; where loads are shared, also its group's other bins of the same score."""
    first = int(among[state.score_B[among].argmax()])
    group = state.problem.group
    peers = among[among // group == first // group]
    return peers[state.score_B[peers] >= state.score_B[first]].tolist()


def _partners(state: State, a: int, among: Ints) -> list[int]:
    """Bins that could relieve bin a, the most promising first: by the load that an even split of
    the two would leave."""
    p = state.problem
    costs_RB = state.loads_RB[: p.n_costs]
    together_RB = costs_RB[:, among] + costs_RB[:, [a]]
    if p.scale_RB is None:
        even = (together_RB / 2).max(axis=0)
    else:
        room_RB = 1 / p.scale_RB
        even = (together_RB / (room_RB[:, among] + room_RB[:, [a]])).max(axis=0)
    even[among == a] = np.inf
    order = np.argsort(even, kind="stable")
    useful = order[even[order] < state.score_B[a] * (1 - ROUNDING)]
    return among[useful].tolist()


def resplit(state: State, target: float, budget: Budget, rng: np.random.Generator) -> None:
    """Pool the heaviest bin with two or three random ones, split anew (noisy LPT, exchanges), keep
    it if their largest score falls."""
    p = state.problem
    pool = choose_pool(state, rng)
    budget.spend()
    before = state.score_B[pool].max()
    of_a_bin = [r for r in range(p.n_costs) if not p.grouped_R[r]]
    total_R = state.loads_RB[of_a_bin][:, pool].sum(axis=1)
    room_R = len(pool) if p.scale_RB is None else (1 / p.scale_RB[of_a_bin][:, pool]).sum(axis=1)
    if len(pool) < 2 or (total_R / room_R).max(initial=0.0) >= before * (1 - ROUNDING):
        return  # even a perfect split would not help
    members_before = [state.members[j] for j in pool]
    samples = np.concatenate(members_before)
    noise_N = 1 + _NOISE * (2 * rng.random(len(samples)) - 1)
    noisy_N = p.sizes_RN[: p.n_costs, samples].max(axis=0) * noise_N
    emptied = state.bins.copy()
    emptied[samples] = -1
    bins = lpt(p, samples[np.argsort(-noisy_N, kind="stable")], emptied, pool)
    if (bins[samples] < 0).any():
        return
    state.refill(pool.tolist(), [samples[bins[samples] == j] for j in pool])
    descend(state, target, budget.part(_RESPLIT_WORK), pool)
    if not state.score_B[pool].max() < before * (1 - ROUNDING):
        state.refill(pool.tolist(), members_before)


def choose_pool(state: State, rng: np.random.Generator) -> Ints:
    """The heaviest bin and two or three random others."""
    n_bins = state.problem.n_bins
    heaviest = int(rng.choice(_heaviest(state, np.arange(n_bins))))
    others = rng.permutation(n_bins)[: int(rng.integers(3, 5))]
    return np.concatenate([[heaviest], others[others != heaviest][:3]]).astype(np.int64)
