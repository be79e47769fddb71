"""Place the pieces of a microbatch in the rows of every module, and balance their content.

In the simulator, a program call takes as long as its busiest rank (`Group.content`). On devices, a
rank may run ahead until the next exchange, so the busiest rank of the whole step also counts. Two
quantities are minimised: first the content of the busiest rank of each group, then of the step. An
exchange that lowers the step's maximum may raise a group's by a few times that amount.

Shape suffixes: P pieces, D data ranks, K microbatches or groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dflop_jax.records import Bucket, PackedPieces, Shape
from dflop_jax.schedule.balance_problem import ITEMS_PER_WORK, ROUNDING, Budget, Ints, Problem
from dflop_jax.schedule.batch import Batch, first_fit_decreasing
from dflop_jax.schedule.bounds import busiest_rank_bound
from dflop_jax.schedule.local_search import State, improve
from dflop_jax.schedule.packing import Microbatch, Packing

# Weight of the groups' busiest ranks relative to the step's. With 0.5, steps in which every group
# waits for its busiest rank were 0.03% shorter, others equal.
_GROUP_WEIGHT = 0.25


def assign_pieces(
    batch: Batch, bucket: Bucket, microbatches: Packing, module: str, budget: Budget
) -> PackedPieces | None:
    """Place a module's pieces of these microbatches in rows; None if no placement is found."""
    shape, columns = bucket.shape(module), []
    for m, microbatch in enumerate(microbatches):
        pieces = batch.piece_indices(module, [i for row in microbatch for i in row])
        slots = _assign_slots(batch, shape, microbatch, pieces, module, budget)
        if slots is None:
            return None
        rank, row = np.divmod(slots, shape.rows if shape else 1)
        columns.append(np.stack((pieces, np.full(len(pieces), m), rank, row)))
    return PackedPieces(np.concatenate(columns, axis=1))


def _assign_slots(
    batch: Batch,
    shape: Shape | None,
    microbatch: Microbatch,
    pieces: Ints,
    module: str,
    budget: Budget,
) -> Ints | None:
    """Return the rows of a microbatch's pieces, [P], rows of rank 0 first; None if there is no
    room. Pieces of equal length go to the ranks in turn; others use `assign_rows` or, if that
    fails, first fit decreasing."""
    if module == batch.anchor:
        count_N = batch.n_pieces[module]
        return np.array([r for r, row in enumerate(microbatch) for i in row if count_N[i]], int)
    n, ranks = len(pieces), batch.capacity.ranks[module]
    if shape is None or n == 0:
        return None if n else pieces
    length_P, rows = batch.lengths[module][pieces], ranks * shape.rows
    if length_P.max() > shape.tokens:
        return None
    if length_P.min() == length_P.max():
        pieces_per_row = shape.tokens // int(length_P[0])
        slot, rank = np.divmod(np.arange(n), ranks)
        return rank * shape.rows + slot // pieces_per_row if n <= rows * pieces_per_row else None
    budget.spend(n / ITEMS_PER_WORK)
    row_P = assign_rows(length_P, batch.content[module][pieces], ranks, shape)
    if (row_P < 0).any():
        row_P = first_fit_decreasing(length_P, shape.tokens)
    return row_P if row_P.max() < rows else None


def assign_rows(length_P: Ints, content_P: Ints, n_ranks: int, shape: Shape) -> Ints:
    """Return the rows of pieces, rows of rank 0 first; -1 for a piece without room. Pieces go
    longest first into the emptiest row of the rank with least content, as in OrchMLLM's
    post-balancing dispatcher (arXiv 2503.23830)."""
    free_DR = np.full((n_ranks, shape.rows), shape.tokens)
    rows, max_free_D, content_D = np.full(len(length_P), -1), free_DR.max(axis=1), np.zeros(n_ranks)
    for i in np.argsort(-length_P, kind="stable").tolist():
        fits_D = max_free_D >= length_P[i]
        if fits_D.any():
            rank = int(np.where(fits_D, content_D, np.inf).argmin())
            row = int(free_DR[rank].argmax())
            rows[i] = rank * shape.rows + row
            free_DR[rank, row] -= length_P[i]
            max_free_D[rank] = free_DR[rank].max()
            content_D[rank] += content_P[i]
    return rows


def rank_content(placement: PackedPieces, content_P: Ints, microbatches: int, ranks: int) -> Ints:
    """Return the content of each rank in each microbatch of a group, [K, D]."""
    content_KD = np.zeros((microbatches, ranks), np.int64)
    np.add.at(content_KD, (placement.microbatch, placement.rank), content_P[placement.piece_id])
    return content_KD


def match_ranks(content_KD: Ints) -> Ints:
    """Return permutations of the ranks of K lists, [K, D], that make the largest sum over lists
    small: item [k, d] is the rank of list k that moves to rank d. The heaviest ranks of one list
    are matched with the lightest sums of the others."""
    ranks_KD = np.tile(np.arange(content_KD.shape[1]), (len(content_KD), 1))
    if len(content_KD) < 2:
        return ranks_KD
    order = np.argsort(-(content_KD.max(axis=1) - content_KD.min(axis=1)), kind="stable")
    permuted_KD = np.zeros_like(content_KD)
    best_max, best_KD = np.inf, ranks_KD
    while True:
        for k in order:
            others_D = permuted_KD.sum(axis=0) - permuted_KD[k]
            lightest_D = np.argsort(others_D, kind="stable")
            ranks_KD[k, lightest_D] = np.argsort(-content_KD[k], kind="stable")
            permuted_KD[k] = content_KD[k, ranks_KD[k]]
        busiest = int(permuted_KD.sum(axis=0).max())
        if busiest >= best_max:
            return best_KD
        best_max, best_KD = busiest, ranks_KD.copy()


def apply_permutation(placement: PackedPieces, ranks_KD: Ints) -> PackedPieces:
    """Move the pieces of rank `ranks_KD[k, d]` in microbatch k to rank d."""
    new_rank_KD = np.argsort(ranks_KD, axis=1)  # of permutations: their inverse
    return placement.reassigned(new_rank_KD[placement.microbatch, placement.rank], placement.row)


@dataclass
class GroupContents:
    """The groups of one module in a step: their shapes and placements. `length_P` and `content_P`
    cover all pieces of the batch."""

    length_P: Ints
    content_P: Ints
    ranks: int
    microbatches: int
    shapes: list[Shape]
    groups: list[PackedPieces]

    def content_KD(self, group: int) -> Ints:
        """Return the content of each rank in each microbatch of a group."""
        return rank_content(self.groups[group], self.content_P, self.microbatches, self.ranks)

    def content_GD(self) -> Ints:
        """Return the content of each rank in each group, over all microbatches."""
        sums = [self.content_KD(g).sum(axis=0) for g in range(len(self.groups))]
        return np.array(sums, np.int64).reshape(-1, self.ranks)


def balance_content(
    content: GroupContents, budget: Budget, seed: int, tolerance: float = 0.0
) -> None:
    """Balance the content of a module's groups, in place. First, ranks are matched within groups
    and over the step. Then pieces of one microbatch after another move to lower the content of the
    step's busiest rank; in a second sweep, a group's busiest rank may rise. The search stops when
    the step's maximum and the sum of the groups' maxima are within `tolerance` of their bounds."""
    microbatches = [(g, m) for g in range(len(content.groups)) for m in range(content.microbatches)]
    if not microbatches:
        return
    for g, placement in enumerate(content.groups):
        content.groups[g] = apply_permutation(placement, match_ranks(content.content_KD(g)))
    for g, ranks_D in enumerate(match_ranks(content.content_GD())):
        ranks_KD = np.broadcast_to(ranks_D, (content.microbatches, content.ranks))
        content.groups[g] = apply_permutation(content.groups[g], ranks_KD)
    content_GD = content.content_GD()
    bound = busiest_rank_bound(content.content_P, content.ranks)
    of_groups = [content.content_P[places.piece_id] for places in content.groups]
    bound_G = sum(busiest_rank_bound(content_P, content.ranks) for content_P in of_groups)
    for n_sweeps, may_rise in ((2, False), (1, True)):
        for n_left, (g, m) in zip(range(len(microbatches), 0, -1), microbatches):
            step_over = content_GD.sum(axis=0).max() - bound
            if max(step_over, content_GD.max(axis=1).sum() - bound_G) <= tolerance:
                return
            step_budget = budget.sub_budget(budget.remaining / n_left / n_sweeps)
            _balance_microbatch(content, content_GD, g, m, bound, step_budget, seed, may_rise)


def _balance_microbatch(
    content: GroupContents,
    content_GD: Ints,
    g: int,
    m: int,
    bound: int,
    budget: Budget,
    seed: int,
    may_rise: bool,
) -> None:
    """Lower the content of the step's busiest rank, at best to `bound`, by moving pieces of one
    microbatch, in place; update `content_GD`. If `may_rise`, the content of the group's busiest
    rank may rise by less than the decrease of the step's divided by `_GROUP_WEIGHT`."""
    placement, shape = content.groups[g], content.shapes[g]
    group_D, total_D = content_GD[g], content_GD.sum(axis=0)
    group_max, total_max = int(group_D.max()), int(total_D.max())
    members = np.flatnonzero(placement.microbatch == m)
    if budget.is_spent or len(members) == 0 or total_max <= bound:
        return
    alone_D = content.content_KD(g)[m]
    limit = group_max + ((total_max - bound) / _GROUP_WEIGHT if may_rise else 0)
    pieces = placement.piece_id[members]
    length_P, content_P = content.length_P[pieces], content.content_P[pieces]
    # Content of the other microbatches on each rank, in the step (the cost) and in the group.
    base_RD = np.stack((total_D - alone_D, np.zeros_like(total_D), group_D - alone_D))
    problem = Problem(
        sizes_RN=np.stack((content_P, length_P, content_P)).astype(float),
        n_costs=1,
        limits_R=np.array([np.inf, shape.tokens, limit]),
        n_bins=content.ranks * shape.rows,
        group=shape.rows,
        grouped_R=(True, False, True),
        base_RB=np.repeat(base_RD, shape.rows, axis=1).astype(float),
    )
    budget.spend(1)
    state = State(problem, placement.rank[members] * shape.rows + placement.row[members])
    improve(state, bound * (1 + ROUNDING), budget, np.random.default_rng(seed))
    after_RD = problem.loads(state.bins)[:, :: shape.rows]
    content_after = after_RD[0].max() + _GROUP_WEIGHT * after_RD[2].max()
    if content_after < total_max + _GROUP_WEIGHT * group_max:
        rank, row = placement.rank.copy(), placement.row.copy()
        rank[members], row[members] = np.divmod(state.bins, shape.rows)
        content.groups[g] = placement.reassigned(rank, row)
        content_GD[g] = after_RD[2]
