"""Which features an exchange moves between data ranks, and at which row of which table they stand.

A data rank of the target has a `home` among the source's data ranks, which takes its features in.
Home reads its own features where they are; of every other rank it asks for `capacity` features a
round, each feature once. What exceeds the capacity waits for another round of the same program.

Shape suffixes: S stages and V data ranks of the source, D data ranks of the target, C capacity, M
microbatches, R rows of a target's rank, L tokens of a row, K features that a place is made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

from dflop_jax.records import home_rank

Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Routes:
    """The numbering of rows between the `low` data ranks of a source and the `high` of a target.

    A rank of the source has `per_microbatch` features in each of the `microbatches`, of which each
    of its `stages` holds a part. The table that a home reads from has `blocks * capacity` rows from
    rank 0, as many from rank 1, and so on, then its own features.
    """

    low: int
    high: int
    stages: int
    microbatches: int
    per_microbatch: int
    capacity: int

    @property
    def blocks(self) -> int:
        """Target ranks that share a home."""
        return self.high // gcd(self.low, self.high)

    @property
    def own_features(self) -> int:
        """Features of a source's rank on one stage."""
        return self.microbatches // self.stages * self.per_microbatch

    @property
    def received(self) -> int:
        """Rows of a table that come from other ranks."""
        return self.low * self.blocks * self.capacity if self.low > 1 else 0

    @property
    def table_rows(self) -> int:
        return self.received + self.own_features

    def route(self, places: Sequence[np.ndarray], max_asked: int | None = None) -> list[Arrays]:
        """What each round asks for and where it stands: (requests, slots) or, with weights,
        (requests, slots, weights); without requests where the source has one rank.

        Args:
          places: index int32 [M, D*R, L, K] into the features of a microbatch, counted over all
            ranks, -1 where nothing is read; and weights of the same shape if K > 1.
          max_asked: features that any rank of the target reads from one rank that is not its home,
            on all processes; None: the index has all ranks, so it says.

        Returns:
          requests: int32 [S, D, V*C], what each rank of the target asks of each of the source, as
            a place among its features on that stage; -1: nothing. slots: int32 [M, D*R, L, K],
            rows of the home's table, -1 where this round brings nothing.
        """
        index, *weight = places
        if not self.received:
            return [(self._own(index), *weight)]
        ranks = (r for r in range(self.high) if (_part(index, r, self) >= 0).any())
        asked = [_Asked.of(self, index, rank) for rank in ranks]
        if max_asked is None:
            max_asked = max((a.n_asked for a in asked), default=0)
        rounds: list[Arrays] = []
        for number in range(max(1, -(-max_asked // self.capacity))):
            slots = np.full(index.shape, -1, np.int32)
            requests = np.full((self.stages, self.high, self.low, self.capacity), -1, np.int32)
            for a in asked:
                a.write(self, number, slots, requests)
            rounds.append((requests.reshape(self.stages, self.high, -1), slots, *weight))
        return rounds

    def _own(self, index: np.ndarray) -> np.ndarray:
        """The slots where the source has one rank, whose tables hold its own features only."""
        turn = np.arange(self.microbatches) % (self.microbatches // self.stages)
        first = (turn * self.per_microbatch).reshape(-1, *[1] * (index.ndim - 1))
        return np.where(index >= 0, index + first, -1).astype(np.int32)

    def stand_in(self, shape: tuple[int, ...]) -> np.ndarray:
        """An index in which every place reads: other ranks' features as far as one round brings
        them, and those of the home, one after the other."""
        _, rows, length, sources = shape
        per_rank = rows // self.high
        some = min(self.capacity // self.microbatches, self.per_microbatch)
        index = np.empty(shape, np.int32)
        for rank in range(self.high):
            home = home_rank(rank, self.low, self.high)
            counts = [self.per_microbatch if v == home else some for v in range(self.low)]
            read = [v * self.per_microbatch + np.arange(n) for v, n in enumerate(counts)]
            every = np.resize(np.concatenate(read), (per_rank, length, sources))
            index[:, rank * per_rank : (rank + 1) * per_rank] = every
        return index


@dataclass(frozen=True, eq=False)
class _Asked:
    """What one rank of the target reads: at the n places that read (`reads`, a mask of its part of
    the index), the round and the slot of each; and by feature that is asked of another rank its
    stage, rank, place there and position in that rank's list, each [features]."""

    rank: int
    reads: np.ndarray
    round_n: np.ndarray
    slot_n: np.ndarray
    features: Arrays

    @classmethod
    def of(cls, routes: Routes, index: np.ndarray, rank: int) -> _Asked:
        wanted = _part(index, rank, routes)
        reads = wanted >= 0
        microbatch, *_ = np.nonzero(reads)
        stage, turn = np.divmod(microbatch, routes.microbatches // routes.stages)
        source, inside = np.divmod(wanted[reads].astype(np.int64), routes.per_microbatch)
        place = turn * routes.per_microbatch + inside
        away = source != home_rank(rank, routes.low, routes.high)
        lists = stage * routes.low + source  # of features asked of a rank on a stage
        asked, which = np.unique(
            lists[away] * routes.own_features + place[away], return_inverse=True
        )
        of_list, place_there = np.divmod(asked, routes.own_features)
        position = np.arange(len(asked)) - np.searchsorted(of_list, of_list)
        round_n, slot_n = np.zeros_like(place), routes.received + place
        round_n[away], rest = np.divmod(position[which], routes.capacity)
        block = rank % routes.blocks
        slot_n[away] = (source[away] * routes.blocks + block) * routes.capacity + rest
        stage_there, source_there = np.divmod(of_list, routes.low)
        features = stage_there, source_there, place_there, position
        return cls(rank, reads, round_n, slot_n, features)

    @property
    def n_asked(self) -> int:
        """Features asked of one rank, on the stage where they are most."""
        return int(self.features[-1].max(initial=-1)) + 1

    def write(self, routes: Routes, number: int, slots: np.ndarray, requests: np.ndarray) -> None:
        """Add what round `number` brings to its arrays."""
        _part(slots, self.rank, routes)[self.reads] = np.where(
            self.round_n == number, self.slot_n, -1
        )
        stage, source, place, position = self.features
        round_n, rest = np.divmod(position, routes.capacity)
        now = round_n == number
        requests[stage[now], self.rank, source[now], rest[now]] = place[now]


def _part(array: np.ndarray, rank: int, routes: Routes) -> np.ndarray:
    """View of a target rank's rows."""
    rows = array.shape[1] // routes.high
    return array[:, rank * rows : (rank + 1) * rows]
