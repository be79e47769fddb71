"""Content of ranks, evened out as far as that saves anything, and bounds of steps."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dflop_jax.records import Bucket, Load, PackedPieces, Shape
from dflop_jax.schedule.balance_problem import Budget
from dflop_jax.schedule.batch import Batch, Capacity
from dflop_jax.schedule.bounds import fill_and_drain_s
from dflop_jax.schedule.content_balance import (
    GroupContents,
    assign_pieces,
    assign_rows,
    balance_content,
)
from dflop_jax.schedule.count_vectors import list_covers, volume_conditions

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
    """Content of the busiest rank of the step, and of the groups', above an even split."""
    of_D, of_groups, even = np.zeros(RANKS), 0.0, 0.0
    for places in content.groups:
        here_D = np.zeros(RANKS)
        for piece, _, rank, _ in places.columns.T.tolist():
            here_D[rank] += content.content_P[piece]
        of_D += here_D
        of_groups += here_D.max()
        even += math.ceil(here_D.sum() / RANKS)
    return of_D.max() - math.ceil(of_D.sum() / RANKS), of_groups - even


@pytest.mark.parametrize("near", [0.0, 400.0, math.inf])
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


def test_a_piece_that_nearly_fills_a_row_counts_as_the_row():
    """Beside a piece of 15 there is no room for one of 6 in a row of 16 or 20: eight of the first
    and four of the second take ten rows of 16, which volumes alone do not tell."""
    batch = Batch([Load({"m": (n,)}) for n in [15] * 8 + [6] * 4], Capacity({"m": 1}))
    buckets = [Bucket.from_shapes({"m": Shape(1, tokens)}) for tokens in (16, 20)]

    def least_rows(**options):
        wanted = volume_conditions(batch, buckets, **options)
        counts_XC, _ = list_covers(wanted, np.array([16.0, 20.0]), 200.0)
        return min(counts_XC @ [16, 20])

    assert least_rows(is_bound=True) == 10 * 16 > least_rows()


@pytest.mark.parametrize("seed", range(10))
def test_fill_and_drain_are_the_longest_paths(seed):
    """Against all paths through graphs of up to five segments."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 6))
    sources = [[u for u in range(i) if rng.random() < 0.6] for i in range(n)]
    forward_s, back_s, reduce_s = rng.integers(1, 9, (3, n)).tolist()
    send_s = {(u, i): rng.integers(0, 3, 2).tolist() for i in range(n) for u in sources[i]}

    def paths(i):
        """Every way from a segment to some before it, without itself."""
        return [[]] + [[u, *path] for u in sources[i] for path in paths(u)]

    def sends(i, way, kind):
        """The sends between a segment and the last of a way before it, there (0) or back (1)."""
        return sum(send_s[u, reader][kind] for u, reader in zip(way, [i, *way]))

    before_s, after_s = fill_and_drain_s(sources, forward_s, back_s, reduce_s, send_s)
    for i in range(n):
        ways = paths(i)
        assert before_s[i] == max(sum(forward_s[u] for u in w) + sends(i, w, 0) for w in ways)
        assert after_s[i] == max(
            sum(back_s[u] for u in w) + sends(i, w, 1) + (reduce_s[w[-1]] if w else 0) for w in ways
        )


@pytest.mark.parametrize("lengths", [(9, 3), (9, 9), (9,)])
def test_a_piece_longer_than_a_row_fits_no_row(lengths):
    batch = Batch([Load({"vision": lengths, "llm": (4,)})], Capacity({"vision": 1, "llm": 1}))
    for tokens, fits in ((8, False), (9, True)):
        bucket = Bucket((("vision", Shape(4, tokens)), ("llm", Shape(1, 4))))
        placement = assign_pieces(batch, bucket, [[[0]]], "vision", Budget(0))
        assert (placement is not None) == fits
