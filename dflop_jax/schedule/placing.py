"""Placing the pieces of a microbatch in the rows of every module, and evening out their content.

A program call takes what its shape takes on every rank, and on each rank what its content adds. The
simulator ends it with the rank that has most (`Group.pairs`); on devices a rank may run ahead until
something is exchanged, and the busiest rank of the whole step counts. So two sums are lowered: that
of the groups' busiest ranks, first, and then the busiest rank of the step, by moving rows of a
microbatch to other ranks, which is free, and by exchanges for which a group's busiest rank may rise
by a few times what the step's falls.

Shape suffixes: P pieces, D data ranks, K microbatches or groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dflop_jax.records import Bucket, RankRows, Shape
from dflop_jax.schedule.batch import Batch, Capacity
from dflop_jax.schedule.dispatch.ranks import deal
from dflop_jax.schedule.packing import Microbatch
from dflop_jax.schedule.solver.balance import pack_within_limits
from dflop_jax.schedule.solver.budget import Budget
from dflop_jax.schedule.solver.improve import Improver
from dflop_jax.schedule.solver.local_search import State
from dflop_jax.schedule.solver.problem import Ints, Problem, make_problem

_RISE = 0.25  # of what the step's busiest rank sheds for each that a group's takes on, at least
_TURNS = 4  # of matching every list of ranks to the others
_REPAIR_WORK = 100  # units that making the pieces of a microbatch fit its rows may take


@dataclass
class Placed:
    """Pieces of one module in one microbatch, and their rows: those of rank 0 first."""

    pieces: Ints
    rows_P: Ints


def place(
    batch: Batch,
    bucket: Bucket,
    microbatch: Microbatch,
    module: str,
    capacity: Capacity,
    budget: Budget,
) -> Placed | None:
    """The module's pieces of a microbatch in its rows; None if no way was found."""
    shape = bucket.shape(module)
    samples = [i for row in microbatch for i in row]
    if module == batch.anchor:
        count_N = batch.count[module]
        rows = [r for r, row in enumerate(microbatch) for i in row if count_N[i]]
        return Placed(batch.pieces(module, samples), np.array(rows, np.int64))
    pieces = batch.pieces(module, samples)
    if shape is None or len(pieces) == 0:
        return None if len(pieces) else Placed(pieces, pieces)
    rows_P = _fitted(batch.lengths[module][pieces], capacity.ranks[module], shape, budget)
    return None if rows_P is None else Placed(pieces, rows_P)


def _fitted(length_P: Ints, ranks: int, shape: Shape, budget: Budget) -> Ints | None:
    """Rows of pieces: of equal ones dealt out over ranks, of others by `deal` or, if that fails,
    first fit decreasing or a search."""
    n, a_row = len(length_P), shape.tokens // int(length_P.max())
    if length_P.min() == length_P.max():
        slot, rank = np.divmod(np.arange(n), ranks)
        return rank * shape.rows + slot // a_row if n <= ranks * shape.rows * a_row else None
    budget.spend(n / 20)
    bins = deal(length_P, ranks, shape)
    if (bins >= 0).all():
        return bins
    bins = _first_fit(length_P, ranks * shape.rows, shape.tokens)
    if (bins >= 0).all():
        return bins
    rng = np.random.default_rng(n)
    problem = _problem(length_P, ranks, shape)
    return pack_within_limits(problem, budget.part(_REPAIR_WORK), rng)


def _first_fit(length_P: Ints, n_rows: int, tokens: int) -> Ints:
    """First fit decreasing, as `batch.rows_needed`; -1 where a piece fits no row."""
    free = np.full(n_rows, tokens)
    bins = np.full(len(length_P), -1)
    for i in np.argsort(-length_P, kind="stable"):
        fits = free >= length_P[i]
        if fits.any():
            bins[i] = int(fits.argmax())
            free[bins[i]] -= length_P[i]
    return bins


def _problem(length_P: Ints, ranks: int, shape: Shape) -> Problem:
    """Rows are bins of `shape.tokens`; the cost is the content of a rank's rows together."""
    return make_problem(
        length_P.astype(float) ** 2,
        ranks * shape.rows,
        capacities=[float(shape.tokens)],
        tokens=length_P.astype(float),
        bin_group=shape.rows,
        grouped=(0,),
    )


def _step_problem(
    length_P: Ints, shape: Shape, others_D: Ints, group_others_D: Ints, most: float
) -> Problem:
    """The same where ranks carry the content of other microbatches: `others_D` of the whole step,
    which counts, and `group_others_D` of the group, which must stay within `most`."""
    ranks = len(others_D)
    plain = _problem(length_P, ranks, shape)
    base_RB = np.zeros((3, ranks * shape.rows))
    base_RB[0] = np.repeat(others_D, shape.rows)
    base_RB[2] = np.repeat(group_others_D, shape.rows)
    return replace(
        plain,
        sizes_RN=plain.sizes_RN[[0, 1, 0]],
        limits_R=np.array([np.inf, shape.tokens, most]),
        grouped_R=(True, False, True),
        base_RB=base_RB,
    )


def rank_pairs(placed: Placed, batch: Batch, module: str, shape: Shape, ranks: int) -> Ints:
    """[D]: content of each rank of a microbatch, the sum of p^2 over its pieces."""
    pairs_P = batch.lengths[module][placed.pieces] ** 2
    pairs_D = np.zeros(ranks, np.int64)
    np.add.at(pairs_D, placed.rows_P // shape.rows, pairs_P)
    return pairs_D


def matched(pairs_KD: Ints) -> Ints:
    """[K, D]: which of its ranks each of K lists puts on rank d, so that the largest sum over the
    lists is small: again and again the heaviest of a list meet the lightest of the others' sums."""
    ranks_KD = np.tile(np.arange(pairs_KD.shape[1]), (len(pairs_KD), 1))
    if len(pairs_KD) < 2:
        return ranks_KD
    order = np.argsort(-(pairs_KD.max(axis=1) - pairs_KD.min(axis=1)), kind="stable")
    placed_KD = np.zeros_like(pairs_KD)
    best, best_KD = None, ranks_KD
    for _ in range(_TURNS):
        for k in order:
            others_D = placed_KD.sum(axis=0) - placed_KD[k]
            ranks_KD[k, np.argsort(others_D, kind="stable")] = np.argsort(
                -pairs_KD[k], kind="stable"
            )
            placed_KD[k] = pairs_KD[k, ranks_KD[k]]
        span = int(placed_KD.sum(axis=0).max())
        if best is not None and span >= best:
            break
        best, best_KD = span, ranks_KD.copy()
    return best_KD


def moved_to(placed: Placed, ranks_D: Ints, shape: Shape) -> None:
    """Put what is on rank `ranks_D[d]` on rank d, in place."""
    place_D = np.empty_like(ranks_D)
    place_D[ranks_D] = np.arange(len(ranks_D))
    rank_P, row_P = np.divmod(placed.rows_P, shape.rows)
    placed.rows_P = place_D[rank_P] * shape.rows + row_P


def as_rows(placed: Placed, shape: Shape, ranks: int) -> tuple[RankRows, ...]:
    """Piece numbers by rank and row; empty rows are ()."""
    rows: list[list[int]] = [[] for _ in range(ranks * shape.rows)]
    for piece, row in sorted(zip(placed.pieces.tolist(), placed.rows_P.tolist())):
        rows[row].append(piece)
    return tuple(
        tuple(tuple(row) for row in rows[d * shape.rows : (d + 1) * shape.rows])
        for d in range(ranks)
    )


def content_bound(pairs_P: Ints, ranks: int) -> int:
    """No placing of these pieces has a lighter busiest rank."""
    if len(pairs_P) == 0:
        return 0
    return max(int(pairs_P.max()), -(-int(pairs_P.sum()) // ranks))


@dataclass
class Content:
    """Groups of one module in a step: their shapes, and what each of their microbatches holds."""

    module: str
    ranks: int
    shapes: list[Shape]
    groups: list[list[Placed]]

    def pairs_GD(self, batch: Batch) -> Ints:
        """Content of each rank in all microbatches of each group."""
        sums_GD = np.zeros((len(self.groups), self.ranks), np.int64)
        for sums_D, group, shape in zip(sums_GD, self.groups, self.shapes):
            for placed in group:
                sums_D += rank_pairs(placed, batch, self.module, shape, self.ranks)
        return sums_GD


def balance_content(content: Content, batch: Batch, budget: Budget, seed: int) -> None:
    """Even out the content of a module's groups, in place: between the ranks of a group's
    microbatches and of all groups, then of the whole step, one microbatch after another, at first
    without making a group's busiest rank busier."""
    places = [(g, m) for g, group in enumerate(content.groups) for m in range(len(group))]
    _match_ranks(content, batch)
    pairs_GD = content.pairs_GD(batch)
    bound = content_bound(batch.lengths[content.module] ** 2, content.ranks)
    for turn in range(_TURNS):
        for left, (g, m) in zip(range(len(places), 0, -1), places):
            part = budget.part(budget.left / left / (_TURNS - turn))
            _even_step(content, batch, pairs_GD, g, m, bound, part, seed, may_rise=turn > 0)


def uneven(content: Content, batch: Batch) -> float:
    """What `balance_content` lowers: the busiest rank of the step, and a share of every group's."""
    if not content.groups:
        return 0.0
    pairs_GD = content.pairs_GD(batch)
    return float(pairs_GD.sum(axis=0).max() + _RISE * pairs_GD.max(axis=1).sum())


def _match_ranks(content: Content, batch: Batch) -> None:
    """Move what microbatches hold to other ranks, in place, so that heavy meets light."""
    if not content.groups:
        return
    for group, shape in zip(content.groups, content.shapes):
        pairs_KD = np.stack(
            [rank_pairs(p, batch, content.module, shape, content.ranks) for p in group]
        )
        for placed, ranks_D in zip(group, matched(pairs_KD)):
            moved_to(placed, ranks_D, shape)
    ranks_GD = matched(content.pairs_GD(batch))
    for group, shape, ranks_D in zip(content.groups, content.shapes, ranks_GD):
        for placed in group:
            moved_to(placed, ranks_D, shape)


def _even_step(
    content: Content,
    batch: Batch,
    pairs_GD: Ints,
    g: int,
    m: int,
    bound: int,
    budget: Budget,
    seed: int,
    may_rise: bool,
) -> None:
    """Lower the busiest rank of the step, at best to `bound`, by what one microbatch holds, in
    place, `pairs_GD` too. The busiest rank of its group `may_rise` by less than that."""
    placed, shape, ranks = content.groups[g][m], content.shapes[g], content.ranks
    group_D, total_D = pairs_GD[g], pairs_GD.sum(axis=0)
    group_max, total_max = int(group_D.max()), int(total_D.max())
    if budget.done or len(placed.pieces) == 0 or total_max <= bound:
        return
    own_D = rank_pairs(placed, batch, content.module, shape, ranks)
    most = group_max + ((total_max - bound) / _RISE if may_rise else 0)
    length_P = batch.lengths[content.module][placed.pieces]
    problem = _step_problem(length_P, shape, total_D - own_D, group_D - own_D, most)
    budget.spend(1)
    state = State(problem, placed.rows_P)
    search = Improver(state, float(bound), 0.0, budget, np.random.default_rng(seed))
    search.run()
    after_RD = problem.loads(search.state.bins)[:, :: shape.rows]
    if after_RD[0].max() + _RISE * after_RD[2].max() < total_max + _RISE * group_max:
        placed.rows_P = search.state.bins
        pairs_GD[g] = after_RD[2]
