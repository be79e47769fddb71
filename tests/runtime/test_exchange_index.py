"""Requests and slots of an exchange, followed by hand from every place to the feature it reads."""

import numpy as np
import pytest

from dflop_jax.records import home_rank
from dflop_jax.runtime.exchange_index import ExchangeIndex


def random_case(seed):
    """(routes, an index of random reads)."""
    rng = np.random.default_rng(seed)
    low, high, stages = (int(n) for n in rng.integers(1, 5, 3))
    microbatches, per_microbatch = stages * int(rng.integers(1, 3)), int(rng.integers(1, 6))
    own = microbatches // stages * per_microbatch
    capacity = int(rng.integers(1, own + 1))
    routes = ExchangeIndex(low, high, stages, microbatches, per_microbatch, capacity)
    shape = (microbatches, high * int(rng.integers(1, 3)), 3, int(rng.integers(1, 3)))
    read = rng.integers(0, low * per_microbatch, shape)
    return routes, np.where(rng.random(shape) < 0.6, read, -1).astype(np.int32)


def followed(r, rounds, index):
    """The index that the rounds stand for; each place is served in one round."""
    got = np.full(index.shape, -1)
    per_rank, per_stage = index.shape[1] // r.target_ranks, r.microbatches // r.stages
    for arrays in rounds:
        for (m, row, token, k), slot in np.ndenumerate(arrays[-1]):
            if slot < 0:
                continue
            rank, home = row // per_rank, home_rank(row // per_rank, r.source_ranks, r.target_ranks)
            source, place = home, slot - r.received_rows
            if place < 0:
                source, rest = divmod(slot, r.blocks * r.capacity)
                block, position = divmod(rest, r.capacity)
                assert block == rank % r.blocks
                assert source != home
                asked = arrays[0].reshape(r.stages, r.target_ranks, r.source_ranks, r.capacity)
                place = asked[m // per_stage, rank, source, position]
            turn, inside = divmod(place, r.per_microbatch)
            assert turn == m % per_stage
            assert got[m, row, token, k] == -1
            got[m, row, token, k] = source * r.per_microbatch + inside
    return got


@pytest.mark.parametrize("seed", range(40))
def test_every_place_gets_the_feature_that_it_reads(seed):
    routes, index = random_case(seed)
    rounds = routes.rounds((index,))
    np.testing.assert_array_equal(followed(routes, rounds, index), index)
    if routes.source_ranks == 1:
        assert [len(arrays) for arrays in rounds] == [1]
        return
    shape = routes.stages, routes.target_ranks, routes.source_ranks, routes.capacity
    asked = np.concatenate([a[0].reshape(shape) for a in rounds], axis=3)
    for wanted in asked.reshape(-1, asked.shape[3]):
        real = wanted[wanted >= 0]
        assert (wanted[: len(real)] == real).all()  # lists begin at their first row
        assert len(set(real)) == len(real)  # and ask for a feature once
    most = int((asked >= 0).sum(axis=3).max())
    assert len(rounds) == max(1, -(-most // routes.capacity))
    more = routes.rounds((index,), most + routes.capacity)  # as another process may need
    assert len(more) == -(-(most + routes.capacity) // routes.capacity)
    np.testing.assert_array_equal(followed(routes, more, index), index)


@pytest.mark.parametrize("seed", range(8))
def test_a_stand_in_is_one_round_in_which_every_place_reads(seed):
    routes, index = random_case(seed)
    stand_in = routes.synthetic_index(index.shape)
    assert stand_in.min() >= 0
    rounds = routes.rounds((stand_in,))
    assert len(rounds) == 1
    np.testing.assert_array_equal(followed(routes, rounds, stand_in), stand_in)


def test_weights_go_with_every_round():
    routes = ExchangeIndex(2, 2, 1, 1, 8, 2)
    index = np.arange(16, dtype=np.int32).reshape(1, 2, 4, 2)[:, ::-1]
    weight = np.ones(index.shape, np.float32)
    rounds = routes.rounds((index, weight))
    assert len(rounds) == 4
    assert all(arrays[2] is weight for arrays in rounds)


HOMES = [(1, 3, [0, 0, 0]), (4, 4, [0, 1, 2, 3]), (4, 2, [0, 2]), (2, 4, [0, 0, 1, 1])]


@pytest.mark.parametrize("low, high, homes", [*HOMES, (6, 4, [0, 0, 3, 3])])
def test_homes_lie_on_the_ranks_devices(low, high, homes):
    assert [home_rank(rank, low, high) for rank in range(high)] == homes
