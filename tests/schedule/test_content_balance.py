"""Content of ranks: pieces are dealt to the lightest, then it is evened out as far as that saves
anything."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dflop_jax.records import PackedPieces, Shape
from dflop_jax.schedule.balance_problem import Budget
from dflop_jax.schedule.content_balance import GroupContents, assign_rows, balance_content

RANKS, MICROBATCHES, SHAPE, GROUPS = 3, 2, Shape(2, 64), 4


def contents() -> GroupContents:
    """Rows of up to four pieces each, of all lengths."""
    rng = np.random.default_rng(0)
    lengths, groups = [], []
    for _ in range(GROUPS):
        rows = []
        for m, d, r in np.ndindex(MICROBATCHES, RANKS, SHAPE.rows):
            for _ in range(rng.integers(1, 5)):
                rows.append((len(lengths), m, d, r))
                lengths.append(int(rng.integers(1, SHAPE.tokens // 4)))
        groups.append(PackedPieces(np.array(rows).T))
    length_P = np.array(lengths)
    shapes = [SHAPE] * GROUPS
    return GroupContents(length_P, length_P**2, RANKS, MICROBATCHES, shapes, groups)


def over(content: GroupContents) -> tuple[float, float]:
    """Content of the busiest rank of the step, and of those of the groups together, above what an
    even split would have."""
    of_D, of_groups, even = np.zeros(RANKS), 0.0, 0.0
    for places in content.groups:
        here_D = np.zeros(RANKS)
        for piece, _, rank, _ in places.columns.T.tolist():
            here_D[rank] += content.content_P[piece]
        of_D += here_D
        of_groups += here_D.max()
        even += math.ceil(here_D.sum() / RANKS)
    return of_D.max() - math.ceil(of_D.sum() / RANKS), of_groups - even


@pytest.mark.parametrize("near", [0.0, 40.0, 400.0, math.inf])
def test_balancing_stops_within_the_tolerance(near):
    content, full, budget = contents(), contents(), Budget(4000)
    balance_content(content, budget, 0, near)
    alone = Budget(4000)
    balance_content(full, alone, 0)
    assert max(over(content)) <= max(near, *over(full))
    assert budget.spent <= alone.spent
    assert (budget.spent == 0) == (near == math.inf)
    for before, after in zip(contents().groups, content.groups, strict=True):
        assert sorted(before.piece_id) == sorted(after.piece_id)
        filled = np.zeros((MICROBATCHES, RANKS, SHAPE.rows))
        for piece, *place in after.columns.T.tolist():
            filled[tuple(place)] += content.length_P[piece]
        assert filled.max() <= SHAPE.tokens


@pytest.mark.parametrize("seed", range(10))
def test_assign_rows_equals_a_plain_loop(seed):
    """Each to the rank of fewest pairs that has room, by a plain loop."""
    rng = np.random.default_rng(seed)
    n_ranks, shape = int(rng.integers(1, 5)), Shape(int(rng.integers(1, 4)), 64)
    lengths = rng.integers(1, 65, int(rng.integers(1, 12)))
    rows = assign_rows(lengths, lengths**2, n_ranks, shape)
    free, pairs = np.full(n_ranks * shape.rows, shape.tokens), np.zeros(n_ranks)
    for i in np.argsort(-lengths, kind="stable"):
        room = free.reshape(n_ranks, -1).max(axis=1)
        able = np.flatnonzero(room >= lengths[i])
        if len(able) == 0:
            assert rows[i] == -1
            continue
        rank, row = divmod(int(rows[i]), shape.rows)
        assert rank in able
        assert pairs[rank] == pairs[able].min()
        assert free[rows[i]] == room[rank]
        pairs[rank] += lengths[i] ** 2
        free[rows[i]] -= lengths[i]
        assert 0 <= row < shape.rows
    assert (free >= 0).all()
