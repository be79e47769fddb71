"""What moves between the data ranks of two modules, from loads alone.

Amounts are tokens of the source, to which its features are proportional.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflop_jax.records import (
    ExchangeRoom,
    Layout,
    Load,
    PiecePlaces,
    Schedule,
    Shape,
    crossing,
    traffic,
)
from dflop_jax.schedule.batch import Batch
from dflop_jax.schedule.solver.problem import Ints

# Shares of a rank's features. The least room of a round, whatever the batches that were seen move:
# twice as much sends more padding, and fewer groups of later batches need a second round. And what
# a round costs beside its room: twice as much gives larger rooms and fewer rounds.
_LEAST_ROOM, _ROUND_COST = 1 / 32, 0.3


def read_between(
    modules: tuple[str, str],
    source: PiecePlaces,
    target: PiecePlaces,
    batch: Batch,
    n: tuple[int, int],
) -> Ints:
    """[V, D]: what each of the `n` = (V, D) ranks of two modules has for each that reads it."""
    here, there = (batch.sample[m][p.piece] for m, p in zip(modules, (source, target)))
    amount = batch.lengths[modules[0]][source.piece]
    return traffic(here, source.rank, amount, there, target.rank, n)


def exchange_rooms(
    layout: Layout, schedules: Sequence[Schedule], batches: Sequence[Sequence[Load]]
) -> tuple[ExchangeRoom, ...]:
    """Rooms with which the exchanges of these schedules send least: one round takes what most
    groups move, and a few need another."""
    shares: dict[tuple[str, str, Shape, Shape], list[float]] = {}
    for schedule, loads in zip(schedules, batches, strict=True):
        batch = Batch(loads, layout.modules)
        for place, target in enumerate(schedule.groups):
            for source in (g for g in schedule.groups if place in g.feeds):
                n = layout.data_ranks(source.module), layout.data_ranks(target.module)
                if n[0] > 1:
                    both = source.module, target.module
                    read = read_between(both, source.pieces, target.pieces, batch, n)
                    moved = crossing(read, np.zeros(n[0], np.int64))
                    held_tokens = source.microbatches * source.shape.size
                    key = *both, source.shape, target.shape
                    shares.setdefault(key, []).append(moved.most / held_tokens)
    return tuple(ExchangeRoom(*key, _best_share(np.array(needs))) for key, needs in shares.items())


def _best_share(needs: np.ndarray) -> float:
    """The share, of those that groups need, under which all their rounds together take least."""
    rooms = np.unique(np.clip(needs, _LEAST_ROOM, 1.0))
    rounds = np.maximum(1, np.ceil(needs[:, None] / rooms - 1e-9))
    return float(rooms[np.argmin((rounds * (rooms + _ROUND_COST)).sum(axis=0))])
