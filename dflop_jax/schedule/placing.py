"""Placing the pieces of a microbatch in the rows of every module, and evening out their content.

A program call takes what its shape takes on every rank, and on each rank what its content adds. The
simulator ends it with the rank that has most (`Group.content`); on devices a rank may run ahead
until something is exchanged, and the busiest rank of the whole step counts. So two sums are
lowered: that of the groups' busiest ranks, first, and then the busiest rank of the step, by moving
rows of a microbatch to other ranks, which is free, and by exchanges for which a group's busiest
rank may rise by a few times what the step's falls.

Shape suffixes: P pieces, D data ranks, K microbatches or groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dflop_jax.records import Bucket, PiecePlaces, Shape
from dflop_jax.schedule.batch import Batch, Capacity
from dflop_jax.schedule.dispatch.ranks import deal
from dflop_jax.schedule.packing import Microbatch, Packed
from dflop_jax.schedule.solver.balance import pack_within_limits
from dflop_jax.schedule.solver.budget import Budget
from dflop_jax.schedule.solver.improve import improve
from dflop_jax.schedule.solver.local_search import State
from dflop_jax.schedule.solver.problem import ROUNDING, Ints, Problem, make_problem

# What the groups' busiest ranks count beside the step's. A group's may take on up to four of
# content for each that the step's sheds; with twice the weight, two: steps in which every group
# waits for its busiest rank were 0.03% shorter, those in which only the step's counts no longer.
_GROUP_WEIGHT = 0.25
# Times that every list of ranks is matched to the others, which ends before when nothing is gained.
# On random lists 2 left 0.07% of the largest sum, 4 left 0.001%.
_MAX_MATCHINGS = 4
# Turns over all microbatches, among which the work is shared; the first raises no group. With two
# or eight, steps took the same to 0.02%.
_EVENING_TURNS = 4
# Units that making the pieces of a microbatch fit its rows may take; where they do not suffice, the
# microbatch counts as not to be packed.
_REPAIR_WORK = 100


def place(
    batch: Batch,
    bucket: Bucket,
    microbatches: Packed,
    module: str,
    capacity: Capacity,
    budget: Budget,
) -> PiecePlaces | None:
    """The module's pieces of microbatches in its rows; None if no way was found."""
    pieces = [batch.pieces(module, [i for r in rows for i in r]) for rows in microbatches]
    columns, start = np.empty((4, sum(map(len, pieces))), np.int64), 0
    for m, (piece, microbatch) in enumerate(zip(pieces, microbatches)):
        slots = slots_of(batch, bucket, microbatch, piece, module, capacity, budget)
        if slots is None:
            return None
        stop = start + len(piece)
        columns[0, start:stop], columns[1, start:stop], columns[2, start:stop] = piece, m, slots
        start = stop
    shape = bucket.shape(module)
    np.divmod(columns[2], shape.rows if shape else 1, out=(columns[2], columns[3]))
    return PiecePlaces(columns)


def slots_of(
    batch: Batch,
    bucket: Bucket,
    microbatch: Microbatch,
    pieces: Ints,
    module: str,
    capacity: Capacity,
    budget: Budget,
) -> Ints | None:
    """[P]: rows of the module's pieces of a microbatch, those of rank 0 first; None if no way was
    found."""
    if module == batch.anchor:
        count_N = batch.count[module]
        return np.array([r for r, row in enumerate(microbatch) for i in row if count_N[i]], int)
    shape = bucket.shape(module)
    if shape is None or len(pieces) == 0:
        return None if len(pieces) else pieces
    length_P, content_P = batch.lengths[module][pieces], batch.content[module][pieces]
    return _fitted(length_P, content_P, capacity.ranks[module], shape, budget)


def _fitted(
    length_P: Ints, content_P: Ints, ranks: int, shape: Shape, budget: Budget
) -> Ints | None:
    """Rows of pieces: of equal ones dealt out over ranks, of others by `deal` or, if that fails,
    first fit decreasing or a search."""
    n, a_row = len(length_P), shape.tokens // int(length_P.max())
    if length_P.min() == length_P.max():
        slot, rank = np.divmod(np.arange(n), ranks)
        return rank * shape.rows + slot // a_row if n <= ranks * shape.rows * a_row else None
    budget.spend(n / 20)
    bins = deal(length_P, content_P, ranks, shape)
    if (bins >= 0).all():
        return bins
    bins = first_fit_decreasing(length_P, ranks * shape.rows, shape.tokens)
    if (bins >= 0).all():
        return bins
    rng = np.random.default_rng(n)
    problem = _problem(length_P, content_P, ranks, shape)
    return pack_within_limits(problem, budget.part(_REPAIR_WORK), rng)


def first_fit_decreasing(length_P: Ints, n_rows: int, tokens: int) -> Ints:
    """First fit decreasing, as `batch.rows_needed`; -1 where a piece fits no row."""
    free = np.full(n_rows, tokens)
    bins = np.full(len(length_P), -1)
    for i in np.argsort(-length_P, kind="stable"):
        fits = free >= length_P[i]
        if fits.any():
            bins[i] = int(fits.argmax())
            free[bins[i]] -= length_P[i]
    return bins


def _problem(length_P: Ints, content_P: Ints, ranks: int, shape: Shape) -> Problem:
    """Rows are bins of `shape.tokens`; the cost is the content of a rank's rows together."""
    return make_problem(
        content_P.astype(float),
        ranks * shape.rows,
        capacities=[float(shape.tokens)],
        tokens=length_P.astype(float),
        bin_group=shape.rows,
        grouped=(0,),
    )


def _step_problem(
    length_P: Ints,
    content_P: Ints,
    shape: Shape,
    others_D: Ints,
    group_others_D: Ints,
    limit: float,
) -> Problem:
    """The same where ranks carry the content of other microbatches: `others_D` of the whole step,
    which counts, and `group_others_D` of the group, which must stay within `limit`."""
    ranks = len(others_D)
    plain = _problem(length_P, content_P, ranks, shape)
    base_RB = np.zeros((3, ranks * shape.rows))
    base_RB[0] = np.repeat(others_D, shape.rows)
    base_RB[2] = np.repeat(group_others_D, shape.rows)
    return replace(
        plain,
        sizes_RN=plain.sizes_RN[[0, 1, 0]],
        limits_R=np.array([np.inf, shape.tokens, limit]),
        grouped_R=(True, False, True),
        base_RB=base_RB,
    )


def rank_content(places: PiecePlaces, content_P: Ints, microbatches: int, ranks: int) -> Ints:
    """[K, D]: content of each rank of the microbatches of a group; `content_P` has all pieces of
    the batch."""
    content_KD = np.zeros((microbatches, ranks), np.int64)
    np.add.at(content_KD, (places.microbatch, places.rank), content_P[places.piece])
    return content_KD


def matched(content_KD: Ints) -> Ints:
    """[K, D]: which of its ranks each of K lists puts on rank d, so that the largest sum over the
    lists is small: again and again the heaviest of a list meet the lightest of the others' sums."""
    ranks_KD = np.tile(np.arange(content_KD.shape[1]), (len(content_KD), 1))
    if len(content_KD) < 2:
        return ranks_KD
    order = np.argsort(-(content_KD.max(axis=1) - content_KD.min(axis=1)), kind="stable")
    placed_KD = np.zeros_like(content_KD)
    best, best_KD = None, ranks_KD
    for _ in range(_MAX_MATCHINGS):
        for k in order:
            others_D = placed_KD.sum(axis=0) - placed_KD[k]
            ranks_KD[k, np.argsort(others_D, kind="stable")] = np.argsort(
                -content_KD[k], kind="stable"
            )
            placed_KD[k] = content_KD[k, ranks_KD[k]]
        span = int(placed_KD.sum(axis=0).max())
        if best is not None and span >= best:
            break
        best, best_KD = span, ranks_KD.copy()
    return best_KD


def moved_to(places: PiecePlaces, ranks_KD: Ints) -> PiecePlaces:
    """What is on rank `ranks_KD[k, d]` of microbatch k, put on its rank d."""
    place_KD = np.argsort(ranks_KD, axis=1)  # of permutations: their inverse
    return places.moved(place_KD[places.microbatch, places.rank], places.row)


def content_bound(content_P: Ints, ranks: int) -> int:
    """No placing of these pieces has a lighter busiest rank."""
    if len(content_P) == 0:
        return 0
    return max(int(content_P.max()), -(-int(content_P.sum()) // ranks))


@dataclass
class GroupContents:
    """Groups of one module in a step: their shapes, and what their `microbatches` hold.
    `length_P` and `content_P` have all pieces of the batch."""

    length_P: Ints
    content_P: Ints
    ranks: int
    microbatches: int
    shapes: list[Shape]
    groups: list[PiecePlaces]

    def content_KD(self, group: int) -> Ints:
        """Content of each rank in each microbatch of a group."""
        return rank_content(self.groups[group], self.content_P, self.microbatches, self.ranks)

    def content_GD(self) -> Ints:
        """Content of each rank in all microbatches of each group."""
        sums = [self.content_KD(g).sum(axis=0) for g in range(len(self.groups))]
        return np.array(sums, np.int64).reshape(-1, self.ranks)


def balance_content(content: GroupContents, budget: Budget, seed: int, near: float = 0.0) -> None:
    """Even out the content of a module's groups, in place: between the ranks of a group's
    microbatches and of all groups, then of the whole step, one microbatch after another, at first
    without making a group's busiest rank busier. It ends where the busiest ranks of the step, and
    those of its groups together, have at most `near` more than some must have."""
    each = [(g, m) for g in range(len(content.groups)) for m in range(content.microbatches)]
    _match_ranks(content)
    content_GD = content.content_GD()
    bound = content_bound(content.content_P, content.ranks)
    of_groups = [content.content_P[places.piece] for places in content.groups]
    bound_G = sum(content_bound(content_P, content.ranks) for content_P in of_groups)
    for turn in range(_EVENING_TURNS):
        for left, (g, m) in zip(range(len(each), 0, -1), each):
            step_over = content_GD.sum(axis=0).max() - bound
            if max(step_over, content_GD.max(axis=1).sum() - bound_G) <= near:
                return
            part = budget.part(budget.left / left / (_EVENING_TURNS - turn))
            _even_step(content, content_GD, g, m, bound, part, seed, may_rise=turn > 0)


def uneven(content: GroupContents) -> float:
    """What `balance_content` lowers: the busiest rank of the step, and a share of every group's."""
    if not content.groups:
        return 0.0
    content_GD = content.content_GD()
    return float(content_GD.sum(axis=0).max() + _GROUP_WEIGHT * content_GD.max(axis=1).sum())


def _match_ranks(content: GroupContents) -> None:
    """Move what microbatches hold to other ranks, in place, so that heavy meets light."""
    if not content.groups:
        return
    for g, places in enumerate(content.groups):
        content.groups[g] = moved_to(places, matched(content.content_KD(g)))
    for g, ranks_D in enumerate(matched(content.content_GD())):
        alike_KD = np.broadcast_to(ranks_D, (content.microbatches, content.ranks))
        content.groups[g] = moved_to(content.groups[g], alike_KD)


def _even_step(
    content: GroupContents,
    content_GD: Ints,
    g: int,
    m: int,
    bound: int,
    budget: Budget,
    seed: int,
    may_rise: bool,
) -> None:
    """Lower the busiest rank of the step, at best to `bound`, by what one microbatch holds, in
    place, `content_GD` too. The busiest rank of its group `may_rise` by less than that."""
    places, shape = content.groups[g], content.shapes[g]
    group_D, total_D = content_GD[g], content_GD.sum(axis=0)
    group_max, total_max = int(group_D.max()), int(total_D.max())
    here = np.flatnonzero(places.microbatch == m)
    if budget.done or len(here) == 0 or total_max <= bound:
        return
    alone_D = content.content_KD(g)[m]
    limit = group_max + ((total_max - bound) / _GROUP_WEIGHT if may_rise else 0)
    pieces = places.piece[here]
    length_P, content_P = content.length_P[pieces], content.content_P[pieces]
    others_D, group_others_D = total_D - alone_D, group_D - alone_D
    problem = _step_problem(length_P, content_P, shape, others_D, group_others_D, limit)
    budget.spend(1)
    state = State(problem, places.rank[here] * shape.rows + places.row[here])
    improve(state, bound * (1 + ROUNDING), budget, np.random.default_rng(seed))
    after_RD = problem.loads(state.bins)[:, :: shape.rows]
    after = after_RD[0].max() + _GROUP_WEIGHT * after_RD[2].max()
    if after < total_max + _GROUP_WEIGHT * group_max:
        rank, row = places.rank.copy(), places.row.copy()
        rank[here], row[here] = np.divmod(state.bins, shape.rows)
        content.groups[g] = places.moved(rank, row)
        content_GD[g] = after_RD[2]
