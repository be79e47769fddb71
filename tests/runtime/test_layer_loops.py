"""Loops over layers of several kinds, against the sequence itself and all ways to cut it; and what
a stage of a loop works on at a tick, against stages that pass microbatches on."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflop_jax.runtime.module_parts import split_into_loops
from dflop_jax.runtime.spmd_loop import slot_at


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
    loops = split_into_loops(kinds)
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


def run_by_hand(microbatches, stages, rounds):
    """By tick and stage: (microbatch, round) or None. The first stage takes what the last one made
    if it has a round to go, else a new microbatch."""
    waiting, at, ticks = list(range(microbatches)), [None] * stages, []
    while True:
        came = at[-1]
        first = None
        if came and came[1] + 1 < rounds:
            first = came[0], came[1] + 1
        elif waiting:
            first = waiting.pop(0), 0
        at = [first, *at[:-1]]
        if not any(at):
            return ticks
        ticks.append(at)


@pytest.mark.parametrize(
    "microbatches, stages, rounds", [(1, 1, 1), (4, 2, 1), (2, 2, 2), (8, 2, 2), (6, 3, 4)]
)
def test_stages_take_turns_as_microbatches_come(microbatches, stages, rounds):
    ticks = run_by_hand(microbatches, stages, rounds)
    assert len(ticks) == rounds * microbatches + stages - 1
    t, s = jnp.arange(len(ticks))[:, None], jnp.arange(stages)[None]
    turns = jax.jit(slot_at, static_argnames=("microbatches", "stages", "rounds"))(
        t, s, microbatches=microbatches, stages=stages, rounds=rounds
    )
    number, of_round, microbatch = (np.broadcast_to(a, (len(ticks), stages)) for a in turns)
    taken = [set() for _ in range(stages)]
    for i, at in enumerate(ticks):
        for stage, now in enumerate(at):
            if now:
                assert (microbatch[i, stage], of_round[i, stage]) == now
                taken[stage].add(number[i, stage])
            else:  # not yet, or not any more
                last = rounds * microbatches - 1
                assert number[i, stage] == (0 if i < stage else last)
    assert taken == [set(range(rounds * microbatches))] * stages
