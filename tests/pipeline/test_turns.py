"""What a stage of a loop works on at a tick, against stages that pass microbatches on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflop_jax.pipeline.layout import device_mesh
from dflop_jax.pipeline.segment import Segment
from dflop_jax.pipeline.turns import turn_at
from dflop_jax.records import MeshShape, SegmentPlan
from tests.small import Small


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


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_rounds_go_through_the_layers_in_order(rounds):
    """A stage goes through its stack chunk by chunk, so a microbatch meets every layer in turn."""
    module = Small(n_layers=15).modules["llm"]
    plan = SegmentPlan("llm", "llm", 3, 15, "all", False, True, rounds=rounds)
    mesh = device_mesh(MeshShape(stage=2), jax.devices())
    s = Segment(plan, module, mesh, 2, frozenset())
    stages = np.array(s.held_layers).reshape(2, -1)
    n = s.chunk_layers
    met = [stage[r * n : (r + 1) * n] for r in range(rounds) for stage in stages]
    assert np.concatenate(met).tolist() == list(range(3, 15))
