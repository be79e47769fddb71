"""`benchmarks/peer_rules.py` against cases done by hand and the rules said again with lists."""

import numpy as np
import pytest

from .scripts import module

rules = module("peer_rules")


def loads(bins, load_N, n_bins):
    return [sum(l for l, b in zip(load_N, bins, strict=True) if b == k) for k in range(n_bins)]


@pytest.mark.parametrize("n_bins", [1, 3])
def test_no_sample_and_one(n_bins):
    none, one = np.zeros(0), np.array([5.0])
    for given in (none, one):
        for bins in (
            rules.lpt(given, n_bins),
            rules.bridge(given, n_bins),
            rules.loongforge(given, given, n_bins),
            *rules.entrain(given, given, n_bins, 2),
        ):
            assert bins.tolist() == [0] * len(given)
    assert rules.over_mean(np.zeros(n_bins)) == 1
    assert rules.over_mean(np.array([3.0, 1.0, 2.0])) == 1.5


def lpt_in_words(load_N, n_bins, room, size_N, held_B):
    """The rule said with lists: an oracle that shares no line."""
    bins, load, size = {}, list(held_B), [0.0] * n_bins
    for i in sorted(range(len(load_N)), key=lambda i: (-load_N[i], i)):
        able = [b for b in range(n_bins) if size[b] + size_N[i] <= room] or range(n_bins)
        bins[i] = min(able, key=lambda b: (load[b], b))
        load[bins[i]] += load_N[i]
        size[bins[i]] += size_N[i]
    return [bins[i] for i in range(len(load_N))]


@pytest.mark.parametrize("seed", range(5))
def test_longest_first(seed):
    rng = np.random.default_rng(seed)
    load_N, size_N, held_B = rng.integers(1, 9, 30), rng.integers(1, 5, 30), rng.integers(0, 9, 4)
    room = size_N.sum() / 4
    bins = rules.lpt(load_N, 4, held_B, size_N, room)
    assert bins.tolist() == lpt_in_words(load_N, 4, room, size_N, held_B)
    equal = rules.bridge(load_N[:28], 4)
    assert np.bincount(equal, minlength=4).tolist() == [7] * 4
    assert equal.tolist() == lpt_in_words(load_N[:28], 4, 7, np.ones(28), [0] * 4)
    assert np.bincount(rules.bridge(load_N, 4), minlength=4).max() == 8  # 30 over 4


def test_bridge_keeps_counts_equal_where_loads_would_not():
    """9 alone would even out three of 3; equal counts give it a companion."""
    load_N = [9, 3, 3, 3]
    assert loads(rules.lpt(load_N, 2), load_N, 2) == [9, 9]
    assert loads(rules.bridge(load_N, 2), load_N, 2) == [12, 6]


def test_loongforge_leaves_what_is_even_enough_or_hopeless():
    tokens = np.ones(4)
    even = np.array([6.0, 5.0, 5.0, 5.0])  # 11 and 10: 5% above the mean
    assert rules.loongforge(even, tokens, 2).tolist() == [0, 0, 1, 1]
    alone = np.array([9.0, 1.0, 1.0, 1.0])  # the mean is 6
    assert rules.loongforge(alone, tokens, 2).tolist() == [0, 0, 1, 1]
    uneven = np.array([5.0, 4.0, 2.0, 1.0])  # 9 and 3
    bins = rules.loongforge(uneven, tokens, 2)
    assert loads(bins, uneven, 2) == [6, 6]


def test_loongforge_counts_what_was_held_and_limits_tokens():
    load_N, held_B = np.array([3.0, 3.0, 2.0, 2.0]), np.array([6.0, 0.0])
    bins = rules.loongforge(load_N, np.ones(4), 2, held_B)  # 6 + 6 and 0 + 4 as read; mean 8
    # 1.2 times the mean of 2 tokens: two samples a rank, the lighter ones where 6 is held.
    assert bins.tolist() == [1, 1, 0, 0]
    free = rules.loongforge(load_N, np.array([1.0, 1.0, 1.0, 9.0]), 2, held_B)
    assert loads(free, load_N, 2) == [2, 8]  # 7.2 tokens: the last alone fits nowhere


def test_loongforge_refines_what_longest_first_leaves(monkeypatch):
    """Longest first ends with 5 3 3, 5 3 and 4 4. 11 and 8 differ by more than 5%: to move a 5
    leaves 6 and 13, to exchange it with the 3 of the first of 8 leaves 9 and 10. Then 5 for 4."""
    load_N = np.array([5.0, 5, 3, 3, 3, 4, 4])
    assert loads(rules.lpt(load_N, 3), load_N, 3) == [11, 8, 8]
    assert loads(rules.loongforge(load_N, np.zeros(7), 3), load_N, 3) == [9, 9, 9]
    # 1.2 times the mean of the tokens is two samples: the bin of three may give none back.
    assert loads(rules.loongforge(load_N, np.ones(7), 3), load_N, 3) == [11, 8, 8]
    monkeypatch.setattr(rules, "REFINEMENTS", 1)
    assert loads(rules.loongforge(load_N, np.zeros(7), 3), load_N, 3) == [9, 10, 8]


@pytest.mark.parametrize("seed", range(20))
def test_loongforge_is_as_read_or_no_wider_than_longest_first(seed):
    load_N = np.random.default_rng(seed).pareto(2.5, 40) + 0.1
    read_B = np.array(loads(rules.as_read(40, 4), load_N, 4))
    bins = rules.loongforge(load_N, np.ones(40), 4)
    if read_B.max() < 1.2 * read_B.mean() or load_N.max() > read_B.mean():
        assert bins.tolist() == sorted(bins.tolist())
    else:
        first = lpt_in_words(load_N, 4, 12, np.ones(40), [0] * 4)
        assert np.ptp(loads(bins, load_N, 4)) <= np.ptp(loads(first, load_N, 4))


def test_entrain_evens_the_encoder_and_defers_the_rest():
    """One rank, two microbatches. Encoder 4 and 3 + 1 (three samples); their LLM loads 9, 1, 2, and
    texts of 2 and 2 fill up: 9 | 1 + 2 + 2 + 2 = 7. The mean is 8; no sample of the first fits into
    an excess of 1, so it stays."""
    encoder_N, llm_N = np.array([4.0, 3, 1, 0, 0]), np.array([9.0, 1, 2, 2, 2])
    ranks, microbatches = rules.entrain(encoder_N, llm_N, 1, 2)
    assert ranks.tolist() == [0] * 5
    assert microbatches.tolist() == [0, 1, 1, 1, 1]
    # As before, but what the first microbatch sees is two samples: one of them is deferred.
    encoder_N, llm_N = np.array([2.0, 3, 1]), np.array([5.0, 2, 5])
    assert rules.entrain(encoder_N, llm_N, 1, 2)[1].tolist() == [1, 0, 1]
    encoder_N, llm_N = np.array([3.0, 2, 1]), np.array([6.0, 2, 2])
    assert rules.entrain(encoder_N, llm_N, 1, 2)[1].tolist() == [0, 1, 1]
    encoder_N, llm_N = np.array([2.0, 2, 1, 1]), np.array([6.0, 0, 3, 1])
    assert rules.entrain(encoder_N, llm_N, 1, 2)[1].tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("seed", range(5))
def test_entrain_defers_only_later_and_only_above_the_mean(seed):
    rng = np.random.default_rng(seed)
    encoder_N, llm_N = rng.integers(0, 5, 40).astype(float), rng.integers(1, 9, 40).astype(float)
    ranks, microbatches = rules.entrain(encoder_N, llm_N, 2, 4)
    assert ranks.tolist() == rules.lpt(encoder_N + llm_N, 2).tolist()
    for rank in range(2):
        held = ranks == rank
        load_M = loads(microbatches[held], llm_N[held], 4)
        mean = sum(load_M) / 4
        for m in range(3):  # what is left in excess holds no sample that would fit into it
            excess = load_M[m] - mean
            smallest = min(llm_N[held & (microbatches == m)], default=np.inf)
            assert excess <= 0 or smallest > excess
