"""Pieces dealt to ranks, beside the rule as a plain loop."""

import numpy as np
import pytest

from dflop_jax.records import Shape
from dflop_jax.schedule.dispatch.ranks import deal


@pytest.mark.parametrize("seed", range(10))
def test_dealt_pieces_keep_to_their_rows(seed):
    """Each to the rank of fewest pairs that has room, by a plain loop."""
    rng = np.random.default_rng(seed)
    n_ranks, shape = int(rng.integers(1, 5)), Shape(int(rng.integers(1, 4)), 64)
    lengths = rng.integers(1, 65, int(rng.integers(1, 12)))
    rows = deal(lengths, lengths**2, n_ranks, shape)
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
