"""Which microbatch a stage of a loop works on at a tick, and in which round.

With one round a stage's turn number t - s, at tick t of stage s, is that microbatch. With R rounds
S microbatches go round the ring of S stages R times, then the next S do: turns are numbered in this
order, R x M of them for M microbatches. So what the last stage makes in a round is what the first
one reads in its next tick.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from dflop_jax.contract import Array


class Turn(NamedTuple):
    """A microbatch in a round. The round is a plain 0 where it is the only one, so that nothing is
    computed from it."""

    number: Array
    round: int | Array
    microbatch: Array


def turn_at(tick: Array, stage: Array, *, microbatches: int, stages: int, rounds: int) -> Turn:
    """The turn of a stage at a tick; its first or its last one where it has none."""
    number = jnp.clip(tick - stage, 0, rounds * microbatches - 1)
    if rounds == 1:
        return Turn(number, 0, number)
    block, place = jnp.divmod(number, rounds * stages)
    return Turn(number, place // stages, block * stages + place % stages)
