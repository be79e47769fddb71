"""Bounds of what groups hold, against all ways to make groups of a few pieces."""

import functools
import itertools

import numpy as np
import pytest

from dflop_jax.records import Bucket, Load, Shape
from dflop_jax.schedule.batch import Batch, Capacity
from dflop_jax.schedule.bounds import content_bound, fill_and_drain_s
from dflop_jax.schedule.count_vectors import list_covers, volume_conditions


def least_by_hand(lengths, content, shapes, ranks, microbatches):
    """The least sum of the groups' busiest ranks, over all partitions of the pieces."""
    pieces = range(len(lengths))

    @functools.cache
    def of_group(held):
        best = np.inf
        for shape in shapes:
            rows = ranks * microbatches * shape.rows
            for places in itertools.product(range(rows), repeat=len(held)):
                filled, on_rank = [0] * rows, [0] * ranks
                for i, row in zip(held, places, strict=True):
                    filled[row] += lengths[i]
                    on_rank[row % ranks] += content[i]
                if max(filled) <= shape.tokens:
                    best = min(best, max(on_rank))
        return best

    @functools.cache
    def of(left):
        if not left:
            return 0
        first, others = left[0], left[1:]
        company = (c for n in range(len(left)) for c in itertools.combinations(others, n))
        return min(
            of_group((first, *c)) + of(tuple(i for i in others if i not in c)) for c in company
        )

    return of(tuple(pieces))


@pytest.mark.parametrize("seed", range(12))
def test_content_bound_is_below_every_grouping(seed):
    rng = np.random.default_rng(seed)
    shapes = [Shape(1, 12), Shape(int(rng.integers(1, 3)), int(rng.integers(3, 9)))]
    ranks, microbatches = ((1, 1), (2, 1), (1, 2))[seed % 3]
    lengths = rng.integers(1, 13, 5)
    content = lengths**2 if seed % 2 else rng.integers(1, 100, 5)
    bound = content_bound(lengths, content, shapes, ranks, microbatches)
    least = least_by_hand(lengths.tolist(), content.tolist(), shapes, ranks, microbatches)
    assert content.sum() / ranks <= bound * (1 + 1e-9)
    assert content.max() <= bound * (1 + 1e-9)
    assert bound <= least * (1 + 1e-9)


@pytest.mark.parametrize(
    "lengths, ranks, least",
    [
        ([8, 8], 2, 64),  # one group: as much as its longest
        ([8, 8, 1, 1], 2, 64 + 1),  # for which there is no room beside them
        ([8, 8, 8, 7, 7, 7], 2, 64 + 64 + 49),  # a row each: the groups' longest, sorted
        ([8, 4, 4, 4, 4, 4, 4], 2, 64 + 32),  # beside the longest two others at most
        ([2, 2, 2, 2], 2, 8),  # the mean
    ],
)
def test_content_bound_of_known_cases(lengths, ranks, least):
    lengths = np.array(lengths)
    assert content_bound(lengths, lengths**2, [Shape(1, 8), Shape(1, 4)], ranks) == least


def test_a_piece_that_nearly_fills_a_row_counts_as_the_row():
    """Beside a piece of 15 there is no room for one of 6 in a row of 16 or 20: eight of the first
    and four of the second take ten rows of 16, which volumes alone do not tell."""
    batch = Batch([Load({"m": (n,)}) for n in [15] * 8 + [6] * 4], ["m"])
    buckets = [Bucket.from_shapes({"m": Shape(1, tokens)}) for tokens in (16, 20)]

    def least_rows(**options):
        wanted = volume_conditions(batch, buckets, Capacity({"m": 1}), **options)
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

    def paths(i):
        """Every way from a segment to some before it, without itself."""
        return [[]] + [[u, *path] for u in sources[i] for path in paths(u)]

    before_s, after_s = fill_and_drain_s(sources, forward_s, back_s, reduce_s)
    for i in range(n):
        ways = paths(i)
        assert before_s[i] == max(sum(forward_s[u] for u in way) for way in ways)
        assert after_s[i] == max(
            sum(back_s[u] for u in way) + (reduce_s[way[-1]] if way else 0) for way in ways
        )
