"""What moves between the data ranks of two modules, from loads alone.

All pieces of a sample in the target read all of its pieces in the source; amounts are tokens of the
source, to which its features are proportional.

Shape suffixes: P pieces of the source, Q of the target, V data ranks of the source, D of the
target.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflop_jax.records import (
    ExchangeRoom,
    Group,
    Layout,
    Load,
    Schedule,
    Shape,
    first_pieces,
    home_rank,
    piece_tokens,
)
from dflop_jax.schedule.solver.problem import Ints

_LEAST = 1 / 32  # of a rank's features: room of a round, whatever the batches that were seen move
_ROUND = 0.3  # of a rank's features: what a round costs beside its room


def traffic(
    sample_P: Ints, rank_P: Ints, amount_P: Ints, sample_Q: Ints, rank_Q: Ints, n: tuple[int, int]
) -> Ints:
    """[V, D]: the amount that each of the `n` = (V, D) ranks of a source has for each of a target's
    ranks; a piece counts once for a rank that reads it."""
    low, high = n
    readers = np.unique(sample_Q * high + rank_Q)
    reader, at_rank = np.divmod(readers, high)
    first = np.searchsorted(reader, sample_P)
    count = np.searchsorted(reader, sample_P, side="right") - first
    source = np.repeat(np.arange(len(sample_P)), count)
    within = np.arange(len(source)) - np.repeat(np.cumsum(count) - count, count)
    target = at_rank[np.repeat(first, count) + within]
    pairs = rank_P[source] * high + target
    return np.bincount(pairs, amount_P[source], low * high).astype(np.int64).reshape(low, high)


def exchange_rooms(
    layout: Layout, schedules: Sequence[Schedule], batches: Sequence[Sequence[Load]]
) -> tuple[ExchangeRoom, ...]:
    """Rooms with which the exchanges of these schedules send least: one round takes what most
    groups move, and a few need another."""
    shares: dict[tuple[str, str, Shape, Shape], list[float]] = {}
    for schedule, loads in zip(schedules, batches, strict=True):
        for target in schedule.groups:
            for source in (g for g in schedule.groups if _feeds(g, target, schedule)):
                low, high = (
                    layout.data_ranks(source.module),
                    layout.data_ranks(target.module),
                )
                if low > 1:
                    key = source.module, target.module, source.shape, target.shape
                    moved = moved_between(source, target, loads, (low, high))
                    own = len(source.rows) * source.shape.size
                    shares.setdefault(key, []).append(float(moved.max(initial=0)) / own)
    return tuple(ExchangeRoom(*key, _best_share(np.array(needs))) for key, needs in shares.items())


def _feeds(source: Group, target: Group, schedule: Schedule) -> bool:
    return any(schedule.groups[f] is target for f in source.feeds)


def read_between(source: Group, target: Group, loads: Sequence[Load], n: tuple[int, int]) -> Ints:
    """[V, D]: what ranks of one group have for each rank of another."""
    sample_P, rank_P, piece_P = _placed(source, loads)
    sample_Q, rank_Q, _ = _placed(target, loads)
    amount_P = np.array(piece_tokens(loads, source.module), np.int64)[piece_P]
    return traffic(sample_P, rank_P, amount_P, sample_Q, rank_Q, n)


def moved_between(source: Group, target: Group, loads: Sequence[Load], n: tuple[int, int]) -> Ints:
    """[V, D]: `read_between` without what stays at home."""
    moved = read_between(source, target, loads, n)
    homes = [home_rank(rank, *n) for rank in range(n[1])]
    moved[homes, np.arange(n[1])] = 0
    return moved


def _placed(group: Group, loads: Sequence[Load]) -> tuple[Ints, Ints, Ints]:
    """Sample, rank and number of every piece of a group."""
    pairs = [
        (piece, rank)
        for microbatch in group.rows
        for rank, rows in enumerate(microbatch)
        for row in rows
        for piece in row
    ]
    piece, rank = np.array(pairs, np.int64).reshape(-1, 2).T
    sample = np.searchsorted(first_pieces(loads, group.module), piece, side="right") - 1
    return sample.astype(np.int64), rank, piece


def _best_share(needs: np.ndarray) -> float:
    """Of the shares that groups need, the one under which all their rounds together take least."""
    rooms = np.unique(np.clip(needs, _LEAST, 1.0))
    rounds = np.maximum(1, np.ceil(needs[:, None] / rooms - 1e-9))
    return float(rooms[np.argmin((rounds * (rooms + _ROUND)).sum(axis=0))])
