"""Dispatching to ranks against brute force and the algorithms of the paper."""

from functools import cache
from itertools import product

import numpy as np
import pytest

from dflop_jax.records import Shape
from dflop_jax.schedule.dispatch.cost import PhaseCost
from dflop_jax.schedule.dispatch.ranks import deal, dispatch
from tests.benchmarks.scripts import module

paper = module("dispatch")
COSTS = list(paper.COSTS.values())


@cache
def every_way(n, n_ranks):
    """All ways to put n pieces on ranks that are alike, int64 [ways, n]."""
    ways = [()]
    for _ in range(n):
        ways = [(*w, r) for w in ways for r in range(min(max(w, default=-1) + 2, n_ranks))]
    return np.array(ways, np.int64).reshape(len(ways), n)


def least(lengths, n_ranks, cost):
    """The least makespan of all ways, by the cost's definition."""
    ways, busiest = every_way(len(lengths), n_ranks), 0.0
    for rank in range(n_ranks):
        here = ways == rank
        longest = (here * lengths).max(axis=1, initial=0)
        by_length = (here * lengths).sum(axis=1), (here * lengths**2).sum(axis=1)
        if cost.padded:
            by_length = here.sum(axis=1) * longest, here.sum(axis=1) * longest**2
        load = cost.linear * by_length[0] + cost.square * by_length[1]
        busiest = np.maximum(busiest, load)
    return float(np.min(busiest))


def makespan(lengths, bins, n_ranks, cost):
    """Of a rank's pieces as the cost's docstring defines it, rank by rank."""
    loads = [0.0]
    for rank in range(n_ranks):
        own = [float(x) for x, r in zip(lengths, bins, strict=True) if r == rank]
        n, longest = (len(own), max(own, default=0.0)) if cost.padded else (1, None)
        terms = (longest, longest**2) if cost.padded else (sum(own), sum(x * x for x in own))
        loads.append(n * (cost.linear * terms[0] + cost.square * terms[1]))
    return max(loads)


@pytest.mark.parametrize("cost", COSTS, ids=list(paper.COSTS))
def test_few_pieces_are_dispatched_as_well_as_possible(cost):
    """500 instances of up to 9 pieces, under all costs: brute force, and the paper's algorithm."""
    rng = np.random.default_rng(0)
    for _ in range(500):
        n, n_ranks = int(rng.integers(0, 10)), int(rng.integers(1, 5))
        lengths = rng.integers(0, 40, n) ** 2
        answer = dispatch(lengths, n_ranks, cost, work=1000)
        assert answer.status == "optimal"
        found = makespan(lengths, answer.bins, n_ranks, cost)
        assert found == pytest.approx(answer.makespan)
        assert found == pytest.approx(least(lengths, n_ranks, cost))
        theirs = paper.paper_ranks(lengths.tolist(), n_ranks, cost)
        assert found <= makespan(lengths, theirs, n_ranks, cost) * (1 + 1e-9)


@pytest.mark.parametrize("cost", COSTS, ids=list(paper.COSTS))
@pytest.mark.parametrize("n_ranks, n", [(8, 100), (16, 40), (5, 3)])
def test_many_pieces_never_cost_more_than_the_papers_algorithm(cost, n_ranks, n):
    for seed, work in product(range(3), (0, 200)):
        lengths = paper.lengths_of(n, seed)
        answer = dispatch(lengths, n_ranks, cost, work=work)
        assert answer.makespan >= answer.lower_bound * (1 - 1e-9)
        theirs = np.array(paper.paper_ranks(lengths.tolist(), n_ranks, cost))
        most = cost.of_ranks(lengths, theirs, n_ranks).max()
        assert answer.makespan <= most * (1 + 1e-9)


def test_a_padded_phase_keeps_like_lengths_together():
    cost = PhaseCost(padded=True)
    answer = dispatch([10, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], 2, cost)
    assert answer.makespan == 10
    assert answer.bins.tolist().count(answer.bins[0]) == 1


@pytest.mark.parametrize("cost", COSTS, ids=list(paper.COSTS))
def test_ranks_without_pieces_and_pieces_beyond_a_share(cost):
    assert dispatch([], 3, cost).makespan == 0
    assert dispatch([0, 0], 3, cost).makespan == 0
    one = dispatch([7], 3, cost)
    assert one.makespan == pytest.approx(cost.each(np.array([7]))[0])
    large = dispatch([1000, 1, 1, 1], 2, cost)  # its rank takes nothing else
    assert large.bins.tolist().count(large.bins[0]) == 1
    assert large.makespan == pytest.approx(cost.each(np.array([1000]))[0])


@pytest.mark.parametrize("cost", COSTS, ids=list(paper.COSTS))
def test_wrong_arguments_are_named(cost):
    with pytest.raises(ValueError, match=r"rank|n_bins"):
        dispatch([1], 0, cost)
    with pytest.raises(ValueError, match=r"-1|>= 0"):
        dispatch([-1], 2, cost)
    with pytest.raises(ValueError, match="not negative"):
        PhaseCost(linear=-1.0)


@pytest.mark.parametrize("seed", range(10))
def test_dealt_pieces_keep_to_their_rows(seed):
    """Each to the rank of fewest pairs that has room, by a plain loop."""
    rng = np.random.default_rng(seed)
    n_ranks, shape = int(rng.integers(1, 5)), Shape(int(rng.integers(1, 4)), 64)
    lengths = rng.integers(1, 65, int(rng.integers(1, 12)))
    rows = deal(lengths, n_ranks, shape)
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
