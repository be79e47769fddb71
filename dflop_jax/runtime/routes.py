"""Which features an exchange moves between data ranks, and at which row of which table they stand.

A data rank of the target has a `home` among the source's data ranks, which takes its features in.
Home reads its own features where they are; of every other rank it asks for `capacity` features a
round, each feature once. What exceeds the capacity waits for another round of the same program.

Shape suffixes: S stages and V data ranks of the source, D data ranks of the target, C capacity, M
microbatches, R rows of a target's rank, L tokens of a row, K features that a place is made of. In
`route`, n counts places that read and f features that are asked of another rank.
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
        reads = index >= 0
        microbatch, row, *_ = np.nonzero(reads)
        stage, turn = np.divmod(microbatch, self.microbatches // self.stages)
        source, inside = np.divmod(index[reads].astype(np.int64), self.per_microbatch)
        place = turn * self.per_microbatch + inside  # among a rank's features on that stage
        round_n, slot_n = np.zeros_like(place), self.received + place
        if not self.received:
            return [(_filled(index, reads, slot_n), *weight)]
        rank = row // (index.shape[1] // self.high)
        homes = np.array([home_rank(r, self.low, self.high) for r in range(self.high)])
        away = source != homes[rank]
        # One list for each stage, rank of the target and rank of the source: what the first two
        # ask of the third, each feature once.
        lists = (stage * self.high + rank) * self.low + source
        asked, which = np.unique(lists[away] * self.own_features + place[away], return_inverse=True)
        list_f, place_f = np.divmod(asked, self.own_features)
        position_f = np.arange(len(asked)) - np.searchsorted(list_f, list_f)
        round_f, rest_f = np.divmod(position_f, self.capacity)
        block = source * self.blocks + rank % self.blocks
        round_n[away], slot_n[away] = round_f[which], block[away] * self.capacity + rest_f[which]
        if max_asked is None:
            max_asked = int(position_f.max(initial=-1)) + 1
        rounds: list[Arrays] = []
        for number in range(max(1, -(-max_asked // self.capacity))):
            slots = _filled(index, reads, np.where(round_n == number, slot_n, -1))
            requests = np.full((self.stages * self.high * self.low, self.capacity), -1, np.int32)
            now = round_f == number
            requests[list_f[now], rest_f[now]] = place_f[now]
            rounds.append((requests.reshape(self.stages, self.high, -1), slots, *weight))
        return rounds

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


def _filled(index: np.ndarray, reads: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Slots at the places that read, -1 at all others."""
    filled = np.full(index.shape, -1, np.int32)
    filled[reads] = slots
    return filled
