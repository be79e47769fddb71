"""Places the pieces of a microbatch in the rows of every module, and balances their content.

The time of a program call depends on its shape and, on each rank, on the content of that rank. The
simulator ends a call with the busiest rank (`Group.content`). On devices a rank may run ahead until
the next exchange, and the busiest rank of the whole step counts. So two sums are lowered: first the
busiest ranks of the groups, then the busiest rank of the step. Moving rows of a microbatch to other
ranks is free; an exchange may raise the busiest rank of a group by a few times the amount by which
it lowers the step's.

Shape suffixes: P pieces, D data ranks, K microbatches or groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace

import numpy as np

from dflop_jax.records import Bucket, PackedPieces, Shape
from dflop_jax.schedule.balance_problem import ROUNDING, Budget, Ints, Problem
from dflop_jax.schedule.batch import Batch, Capacity, first_fit_decreasing
from dflop_jax.schedule.bounds import busiest_rank_bound
from dflop_jax.schedule.local_search import State, improve
from dflop_jax.schedule.packing import Microbatch, Packing

# Weight of the groups' busiest ranks relative to the step's: a group's may gain four units of
# content for each that the step's loses. With twice the weight, steps in which every group waits
# for its busiest rank were 0.03% shorter, others equal.
_GROUP_WEIGHT = 0.25
# Times that every list of ranks is matched to the others, at most. On random lists, 2 leave 0.07%
# of the largest sum, 4 leave 0.001%.
_MAX_MATCHINGS = 4
# Sweeps over all microbatches, which share the work. With 2 or 8, step times differ by 0.02%.
_EVENING_TURNS = 4


def assign_pieces(
    batch: Batch,
    bucket: Bucket,
    microbatches: Packing,
    module: str,
    capacity: Capacity,
    budget: Budget,
) -> PackedPieces | None:
    """The rows of a module's pieces of these microbatches; None if no placement was found."""
    shape, columns = bucket.shape(module), []
    for m, microbatch in enumerate(microbatches):
        pieces = batch.piece_indices(module, [i for row in microbatch for i in row])
        slots = _assign_slots(batch, bucket, microbatch, pieces, module, capacity, budget)
        if slots is None:
            return None
        rank, row = np.divmod(slots, shape.rows if shape else 1)
        columns.append(np.stack((pieces, np.full(len(pieces), m), rank, row)))
    return PackedPieces(np.concatenate(columns, axis=1))


def _assign_slots(
    batch: Batch,
    bucket: Bucket,
    microbatch: Microbatch,
    pieces: Ints,
    module: str,
    capacity: Capacity,
    budget: Budget,
) -> Ints | None:
    """[P]: the rows of a module's pieces of a microbatch, rows of rank 0 first; None if no
    placement was found. Pieces of equal length go to the ranks in turn; others use `assign_rows`
    or, if that fails, first fit decreasing."""
    if module == batch.anchor:
        count_N = batch.n_pieces[module]
        return np.array([r for r, row in enumerate(microbatch) for i in row if count_N[i]], int)
    shape, n, ranks = bucket.shape(module), len(pieces), capacity.ranks[module]
    if shape is None or n == 0:
        return None if n else pieces
    length_P, rows = batch.lengths[module][pieces], ranks * shape.rows
    if length_P.min() == length_P.max():
        pieces_per_row = shape.tokens // int(length_P[0])
        slot, rank = np.divmod(np.arange(n), ranks)
        return rank * shape.rows + slot // pieces_per_row if n <= rows * pieces_per_row else None
    budget.spend(n / 20)
    row_P = assign_rows(length_P, batch.content[module][pieces], ranks, shape)
    if (row_P < 0).any():
        row_P = first_fit_decreasing(length_P, shape.tokens)
    return row_P if row_P.max() < rows else None


def assign_rows(length_P: Ints, content_P: Ints, n_ranks: int, shape: Shape) -> Ints:
    """Rows of pieces, rows of rank 0 first, such that the busiest rank has little content; -1 for a
    piece that no rank has room for. Pieces go longest first to the lightest rank with room, there
    into the emptiest row.

    This is OrchMLLM's post-balancing dispatcher (arXiv 2503.23830): every phase is balanced on its
    own after the batch is drawn.
    """
    free = [[shape.tokens] * shape.rows for _ in range(n_ranks)]
    lightest = [(0.0, rank) for rank in range(n_ranks)]  # a heap of (content, rank)
    rows = np.full(len(length_P), -1)
    contents = content_P.tolist()
    for i in np.argsort(-length_P, kind="stable").tolist():
        length, full_ranks = int(length_P[i]), []
        while lightest:
            content, rank = lightest[0]
            max_free = max(free[rank])
            if max_free >= length:
                row = free[rank].index(max_free)
                free[rank][row] -= length
                rows[i] = rank * shape.rows + row
                heapreplace(lightest, (content + contents[i], rank))
                break
            full_ranks.append(heappop(lightest))
        for entry in full_ranks:
            heappush(lightest, entry)
    return rows


def rank_content(placement: PackedPieces, content_P: Ints, microbatches: int, ranks: int) -> Ints:
    """[K, D]: content of each rank in the microbatches of a group. `content_P` covers all pieces of
    the batch."""
    content_KD = np.zeros((microbatches, ranks), np.int64)
    np.add.at(content_KD, (placement.microbatch, placement.rank), content_P[placement.piece_id])
    return content_KD


def match_ranks(content_KD: Ints) -> Ints:
    """[K, D]: for each of K lists, which of its ranks goes to rank d, such that the largest sum
    over the lists is small. Repeatedly matches the heaviest ranks of one list with the lightest
    sums of the others."""
    ranks_KD = np.tile(np.arange(content_KD.shape[1]), (len(content_KD), 1))
    if len(content_KD) < 2:
        return ranks_KD
    order = np.argsort(-(content_KD.max(axis=1) - content_KD.min(axis=1)), kind="stable")
    permuted_KD = np.zeros_like(content_KD)
    best_max, best_KD = None, ranks_KD
    for _ in range(_MAX_MATCHINGS):
        for k in order:
            others_D = permuted_KD.sum(axis=0) - permuted_KD[k]
            lightest_D = np.argsort(others_D, kind="stable")
            ranks_KD[k, lightest_D] = np.argsort(-content_KD[k], kind="stable")
            permuted_KD[k] = content_KD[k, ranks_KD[k]]
        busiest = int(permuted_KD.sum(axis=0).max())
        if best_max is not None and busiest >= best_max:
            break
        best_max, best_KD = busiest, ranks_KD.copy()
    return best_KD


def apply_permutation(placement: PackedPieces, ranks_KD: Ints) -> PackedPieces:
    """The placement with the pieces of rank `ranks_KD[k, d]` of microbatch k moved to rank d."""
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
        """Content of each rank in each microbatch of a group."""
        return rank_content(self.groups[group], self.content_P, self.microbatches, self.ranks)

    def content_GD(self) -> Ints:
        """Content of each rank in all microbatches of each group."""
        sums = [self.content_KD(g).sum(axis=0) for g in range(len(self.groups))]
        return np.array(sums, np.int64).reshape(-1, self.ranks)


def balance_content(
    content: GroupContents, budget: Budget, seed: int, tolerance: float = 0.0
) -> None:
    """Balance the content of a module's groups, in place. First ranks are matched within groups and
    over the step. Then the busiest rank of the step is lowered, one microbatch after another; the
    first sweep never raises the busiest rank of a group. The search stops when the busiest rank of
    the step, and those of the groups together, are within `tolerance` of their bounds."""
    microbatches = [(g, m) for g in range(len(content.groups)) for m in range(content.microbatches)]
    _permute_ranks(content)
    content_GD = content.content_GD()
    bound = busiest_rank_bound(content.content_P, content.ranks)
    of_groups = [content.content_P[places.piece_id] for places in content.groups]
    bound_G = sum(busiest_rank_bound(content_P, content.ranks) for content_P in of_groups)
    for sweep in range(_EVENING_TURNS):
        for n_left, (g, m) in zip(range(len(microbatches), 0, -1), microbatches):
            step_over = content_GD.sum(axis=0).max() - bound
            if max(step_over, content_GD.max(axis=1).sum() - bound_G) <= tolerance:
                return
            step_budget = budget.sub_budget(budget.remaining / n_left / (_EVENING_TURNS - sweep))
            _even_step(content, content_GD, g, m, bound, step_budget, seed, may_rise=sweep > 0)


def imbalance(content: GroupContents) -> float:
    """The objective of `balance_content`: the content of the step's busiest rank, plus a share of
    that of every group."""
    if not content.groups:
        return 0.0
    content_GD = content.content_GD()
    return float(content_GD.sum(axis=0).max() + _GROUP_WEIGHT * content_GD.max(axis=1).sum())


def _permute_ranks(content: GroupContents) -> None:
    """Move the pieces of microbatches to other ranks, in place, so that heavy ranks meet light
    ones."""
    if not content.groups:
        return
    for g, placement in enumerate(content.groups):
        content.groups[g] = apply_permutation(placement, match_ranks(content.content_KD(g)))
    for g, ranks_D in enumerate(match_ranks(content.content_GD())):
        alike_KD = np.broadcast_to(ranks_D, (content.microbatches, content.ranks))
        content.groups[g] = apply_permutation(content.groups[g], alike_KD)


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
    """Lower the busiest rank of the step, at best to `bound`, by moving pieces of one microbatch,
    in place; `content_GD` is updated, too. If `may_rise`, the busiest rank of the group may rise by
    less than the step's falls, over `_GROUP_WEIGHT`."""
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
    # Content of the other microbatches on each rank: in the step, which counts, and in the group.
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
