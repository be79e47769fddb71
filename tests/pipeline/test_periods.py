"""Loops over layers of several kinds, against the sequence itself and all ways to cut it."""

import itertools

import numpy as np
import pytest

from dflop_jax.pipeline.pieces import loops_over


def least(kinds):
    """(layers compiled, loops) of the best way, by trying every one."""
    if not kinds:
        return 0, 0
    ways = []
    for stop, size in itertools.product(range(1, len(kinds) + 1), repeat=2):
        if size <= stop and kinds[:size] * (stop // size) == kinds[:stop]:
            layers, loops = least(kinds[stop:])
            ways.append((layers + size, loops + 1))
    return min(ways)


def check(kinds):
    loops = loops_over(kinds)
    assert sum((loop.period * loop.repeats for loop in loops), ()) == kinds
    assert [loop.start for loop in loops[1:]] == [loop.stop for loop in loops[:-1]]
    seen = {kind: [] for kind in kinds}
    for loop in loops:
        for repeat in zip(*loop.rows(kinds), strict=True):
            for kind, row in zip(loop.period, repeat, strict=True):
                seen[kind].append(row)
    assert all(rows == list(range(kinds.count(kind))) for kind, rows in seen.items())
    return sum(len(loop.period) for loop in loops), len(loops)


def test_no_sequence_is_cut_better():
    for n in range(8):
        for kinds in itertools.product("ab", repeat=n):
            assert check(kinds) == least(kinds), kinds


@pytest.mark.parametrize("pattern, compiled", [
    ("", 0), ("a", 1), ("a" * 80, 1), ("aaab" * 8, 4), ("aaaaab" * 10, 6), ("ab" * 20 + "b", 3),
    ("b" + "aaab" * 7 + "aa", 6),
])  # fmt: skip
def test_what_is_compiled_grows_with_the_pattern_alone(pattern, compiled):
    assert check(tuple(pattern))[0] <= compiled


def test_long_sequences_without_a_pattern_are_gone_through():
    rng = np.random.default_rng(0)
    check(tuple(rng.choice(["a", "b", "c"], 120).tolist()))
