"""What a stage of a loop works on at a tick, against stages that pass microbatches on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflop_jax.pipeline.spmd_loop import turn_at


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
    turns = jax.jit(turn_at, static_argnames=("microbatches", "stages", "rounds"))(
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
