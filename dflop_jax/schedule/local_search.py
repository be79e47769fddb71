"""Local search: exchanges between two bins, and re-splits of a few bins when no exchange helps.

All exchanges of a few samples of bin a for a few of bin b are evaluated at once. For subset sums s
of a and r of b, the new loads of a resource are A - s + r and B + s - r, i.e. (A+B)/2 +- |s - r -
(A-B)/2|. For two bins with few samples, all subsets are evaluated, so their split is optimal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import ArrayLike

from dflop_jax.schedule.balance_problem import (
    ROUNDING,
    Budget,
    Floats,
    Ints,
    Problem,
    longest_first,
    order_by_size,
)

_MAX_SUBSETS = 192  # of one bin; evaluating 192 x 192 exchanges takes about 0.1 ms per resource
_RESPLIT_WORK = 40  # units of work to re-split three or four bins
# Relative noise on the sizes by which a re-split sorts its samples; uniform, since the last bit of
# an exponential differs between CPUs.
_NOISE = 0.5


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
        """Redistribute the samples of some bins among these bins."""
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


def improve(state: State, target: float, budget: Budget, rng: np.random.Generator) -> None:
    """Lower the makespan in place until it is at most `target` or the budget is spent."""

    descend(state, target, budget)
    while state.makespan > target and not budget.is_spent:
        resplit(state, target, budget, rng)
        descend(state, target, budget)


@lru_cache(maxsize=256)
def subsets(m: int, max_subsets: int) -> Floats:
    """Return 0/1 memberships, [m, S], of the subsets of m samples, smallest first, up to the
    largest subset size for which S <= max_subsets (size 1 is always included)."""
    chosen: list[tuple[int, ...]] = [(), *((i,) for i in range(m))]
    for size in range(2, m + 1):
        more = list(combinations(range(m), size))
        if len(chosen) + len(more) > max_subsets:
            break
        chosen += more
    member_MS = np.zeros((m, len(chosen)))
    for column, subset in enumerate(chosen):
        member_MS[list(subset), column] = 1
    return member_MS


def exchange(state: State, a: int, b: int) -> bool:
    """Make the exchange between bins a and b that lowers the larger of their scores most; return
    whether there is one."""
    p, in_a, in_b = state.problem, state.members[a], state.members[b]
    max_new_score = max(state.score_B[a], state.score_B[b]) * (1 - ROUNDING)
    member_a_MS, member_b_MS = subsets(len(in_a), _MAX_SUBSETS), subsets(len(in_b), _MAX_SUBSETS)
    out_a_RS, out_b_RS = p.sizes_RN[:, in_a] @ member_a_MS, p.sizes_RN[:, in_b] @ member_b_MS
    same_group = p.group > 1 and a // p.group == b // p.group
    price_SS: Floats = np.zeros((out_a_RS.shape[1], out_b_RS.shape[1]))
    for r, grouped in enumerate(p.grouped_R):
        load_a, load_b = float(state.loads_RB[r, a]), float(state.loads_RB[r, b])
        stays = grouped and same_group  # the group's load does not change
        if r >= p.n_costs:
            if not stays:
                load_SS = _larger_after(load_a, load_b, out_a_RS[r], out_b_RS[r])
                price_SS[load_SS > p.limits_R[r] * (1 + ROUNDING)] = np.inf
            continue
        scale_a, scale_b = (1.0, 1.0) if p.scale_RB is None else p.scale_RB[r, [a, b]].tolist()
        if stays:
            np.maximum(price_SS, load_a * scale_a, out=price_SS)
        elif scale_a != scale_b:
            moved_SS = np.subtract.outer(out_a_RS[r], out_b_RS[r])
            np.maximum(price_SS, (load_a - moved_SS) * scale_a, out=price_SS)
            np.maximum(price_SS, (load_b + moved_SS) * scale_b, out=price_SS)
        else:
            load_SS = _larger_after(load_a, load_b, out_a_RS[r], out_b_RS[r])
            np.maximum(price_SS, load_SS * scale_a if scale_a != 1 else load_SS, out=price_SS)
        if not price_SS.min() < max_new_score:
            return False
    best_exchange = int(price_SS.argmin())
    if not price_SS.flat[best_exchange] < max_new_score:
        return False
    row, column = divmod(best_exchange, price_SS.shape[1])
    go_a, go_b = member_a_MS[:, row] > 0, member_b_MS[:, column] > 0
    new_a = np.append(in_a[~go_a], in_b[go_b])
    state.refill((a, b), (new_a, np.append(in_b[~go_b], in_a[go_a])))
    return True


def _larger_after(load_a: float, load_b: float, out_a_S: Floats, out_b_S: Floats) -> Floats:
    """Return the larger of two loads after every exchange, [S, S]."""
    load_SS = np.subtract.outer(out_a_S - (load_a - load_b) / 2, out_b_S)
    np.abs(load_SS, out=load_SS)
    load_SS += (load_a + load_b) / 2
    return load_SS


def descend(state: State, target: float, budget: Budget, bins: Ints | None = None) -> None:
    """Exchange samples of the heaviest of `bins` (None: all) until no exchange lowers its score,
    `target` is reached or the budget is spent."""
    among = np.arange(state.problem.n_bins) if bins is None else bins
    exchanged = True
    while exchanged and not budget.is_spent and state.score_B[among].max() > target:
        exchanged = False
        for a in _heaviest_bins(state, among):
            for b in _partner_bins(state, a, among):
                budget.spend()
                exchanged = exchange(state, a, b)
                if exchanged or budget.is_spent:
                    break
            if exchanged or budget.is_spent:
                break


def _heaviest_bins(state: State, among: Ints) -> list[int]:
    """Return the heaviest bin, and the other bins of its group with the same score."""
    first = int(among[state.score_B[among].argmax()])
    group = state.problem.group
    peers = among[among // group == first // group]
    return peers[state.score_B[peers] >= state.score_B[first]].tolist()


def _partner_bins(state: State, a: int, among: Ints) -> list[int]:
    """Return the bins with which an even split lowers the load of bin a, lowest load first."""
    p = state.problem
    costs_RB = state.loads_RB[: p.n_costs]
    room_RB = np.ones_like(costs_RB) if p.scale_RB is None else 1 / p.scale_RB
    together_RB = costs_RB[:, among] + costs_RB[:, [a]]
    even = (together_RB / (room_RB[:, among] + room_RB[:, [a]])).max(axis=0)
    even[among == a] = np.inf
    order = np.argsort(even, kind="stable")
    useful = order[even[order] < state.score_B[a] * (1 - ROUNDING)]
    return among[useful].tolist()


def resplit(state: State, target: float, budget: Budget, rng: np.random.Generator) -> None:
    """Pool the heaviest bin with two or three random bins and split the samples again (noisy
    longest-first, then exchanges), if that lowers the largest of their scores."""
    p, n_bins = state.problem, state.problem.n_bins
    heaviest = int(rng.choice(_heaviest_bins(state, np.arange(n_bins))))
    random_bins = rng.permutation(n_bins)[: int(rng.integers(3, 5))]
    pool = np.concatenate([[heaviest], random_bins[random_bins != heaviest][:3]]).astype(np.int64)
    budget.spend()
    score_before = state.score_B[pool].max()
    of_a_bin = [r for r in range(p.n_costs) if not p.grouped_R[r]]
    total_R = state.loads_RB[of_a_bin][:, pool].sum(axis=1)
    room_R = len(pool) if p.scale_RB is None else (1 / p.scale_RB[of_a_bin][:, pool]).sum(axis=1)
    if len(pool) < 2 or (total_R / room_R).max(initial=0.0) >= score_before * (1 - ROUNDING):
        return  # even a perfect split would not help
    members_before = [state.members[j] for j in pool]
    samples = np.concatenate(members_before)
    noise_N = 1 + _NOISE * (2 * rng.random(len(samples)) - 1)
    noisy_N = p.sizes_RN[: p.n_costs, samples].max(axis=0) * noise_N
    emptied = state.bins.copy()
    emptied[samples] = -1
    bins = longest_first(p, samples[np.argsort(-noisy_N, kind="stable")], emptied, pool)
    if (bins[samples] < 0).any():
        return
    state.refill(pool.tolist(), [samples[bins[samples] == j] for j in pool])
    descend(state, target, budget.sub_budget(_RESPLIT_WORK), pool)
    if not state.score_B[pool].max() < score_before * (1 - ROUNDING):
        state.refill(pool.tolist(), members_before)


def balance(
    costs: ArrayLike,
    n_bins: int,
    *,
    bin_group: int = 1,
    grouped: Sequence[int] = (),
    work: float = 1_000,
    seed: int = 0,
) -> Ints:
    """Return the bin of each sample, int64 [samples], such that the largest summed cost over bins
    and modules is small; deterministic.

    This is DFLOP's integer program (arXiv 2603.25120, Online Microbatch Scheduler), solved by LPT
    and the local search of the scheduler.

    Args:
      costs: >= 0, [samples, modules] or [samples]; in any unit, the same for all.
      bin_group, grouped: the cost columns in `grouped` are summed over each `bin_group` consecutive
        bins, as for a source module that runs the samples of all data ranks of a microbatch.
      work: maximum units of work (see `Budget`), each about 0.1 ms.

    Raises:
      ValueError: a negative or non-finite cost (its row is named), or arguments that do not match.
    """
    costs_NC = np.asarray(costs, dtype=np.float64)
    costs_NC = costs_NC[:, None] if costs_NC.ndim == 1 else costs_NC
    if costs_NC.ndim != 2:
        raise ValueError(f"costs must be [samples, columns], got shape {costs_NC.shape}")
    for row, column in np.argwhere(~np.isfinite(costs_NC) | (costs_NC < 0))[:1]:
        raise ValueError(
            f"costs[{row}, {column}] is {costs_NC[row, column]}; "
            "every entry must be a finite number >= 0 (check the profile it was predicted from)"
        )
    n, c = costs_NC.shape
    if n_bins < 1 or bin_group < 1 or n_bins % bin_group:
        raise ValueError(f"bin_group={bin_group} must divide n_bins={n_bins}, both at least 1")
    if not set(grouped) <= set(range(c)):
        raise ValueError(f"grouped={tuple(grouped)} names columns outside 0..{c - 1}")
    if n == 0:
        return np.empty(0, np.int64)
    problem = Problem(
        sizes_RN=np.ascontiguousarray(costs_NC.T),
        n_costs=c,
        limits_R=np.full(c, np.inf),
        n_bins=n_bins,
        group=bin_group,
        grouped_R=tuple(i in grouped for i in range(c)),
    )
    state = State(problem, longest_first(problem, order_by_size(problem.sizes_RN)))
    bins_R = np.where(problem.grouped_R, n_bins // bin_group, n_bins)
    mean_R = problem.sizes_RN.sum(axis=1) / bins_R
    target = max(mean_R.max(initial=0.0), problem.sizes_RN.max(initial=0.0))
    improve(state, target * (1 + ROUNDING), Budget(work), np.random.default_rng(seed))
    return state.bins
