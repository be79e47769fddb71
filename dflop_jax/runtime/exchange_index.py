"""Finds the features that an exchange moves between data ranks, and their rows in each table.

A data rank of the target has a home rank among the source's data ranks (`home_ranks`), which
receives the target rank's features. The home rank reads its own features in place; from every other
rank it requests `capacity` features a round, each feature once. Requests above the capacity are
moved in further rounds of the same program.

Shape suffixes: S stages and V data ranks of the source, D data ranks of the target, C capacity, M
microbatches, R rows of one target rank, L tokens of a row, K features that an input sums. In
`rounds`, n counts positions that read and f features that are requested from another rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd

import numpy as np

from dflop_jax.records import home_ranks

IndexArrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class ExchangeIndex:
    """The numbering of rows between the data ranks of a source and those of a target.

    A source rank has `per_microbatch` features in each of the `microbatches`, and each of its
    `stages` holds a part of these. The table that a home rank reads has `blocks * capacity` rows
    from rank 0, the same number from rank 1 and so on, then the home rank's own features.
    """

    source_ranks: int
    target_ranks: int
    stages: int
    microbatches: int
    per_microbatch: int
    capacity: int

    @property
    def blocks(self) -> int:
        """Target ranks that share a home rank."""
        return self.target_ranks // gcd(self.source_ranks, self.target_ranks)

    @property
    def home_spacing(self) -> int:
        """Source ranks from one home rank to the next."""
        return self.source_ranks // gcd(self.source_ranks, self.target_ranks)

    @cached_property
    def home_ranks(self) -> list[int]:
        """The home rank of each target rank."""
        return home_ranks(self.source_ranks, self.target_ranks).tolist()

    @property
    def own_features(self) -> int:
        """Features of one source rank on one stage."""
        return self.microbatches // self.stages * self.per_microbatch

    @property
    def received_rows(self) -> int:
        """Rows of a table that come from other ranks."""
        return self.source_ranks * self.blocks * self.capacity if self.source_ranks > 1 else 0

    @property
    def table_rows(self) -> int:
        return self.received_rows + self.own_features

    def rounds(
        self, sources: Sequence[np.ndarray], max_requested: int | None = None
    ) -> list[IndexArrays]:
        """Return the arrays of each round: (requests, slots) or, with weights, (requests, slots,
        weights); without requests if the source has one rank.

        Args:
          sources: index int32 [M, D*R, L, K] into the features of a microbatch, counted over all
            ranks, -1 where nothing is read; and weights of the same shape if K > 1.
          max_requested: largest number of features that a target rank reads from a rank other than
            its home, over all processes; None: computed, which needs all ranks' indices.

        Returns:
          requests: int32 [S, D, V*C], the features that each target rank requests from each source
            rank, numbered within that rank and stage; -1: none. slots: int32 [M, D*R, L, K], rows
            of the home rank's table, -1 where this round brings nothing.
        """
        index, *weight = sources
        reads = index >= 0
        microbatch, row, *_ = np.nonzero(reads)
        stage, stage_microbatch = np.divmod(microbatch, self.microbatches // self.stages)
        source, offset = np.divmod(index[reads].astype(np.int64), self.per_microbatch)
        feature = stage_microbatch * self.per_microbatch + offset  # in a rank and stage
        round_n, slot_n = np.zeros_like(feature), self.received_rows + feature
        if not self.received_rows:
            return [(_scatter_slots(index, reads, slot_n), *weight)]
        rank = row // (index.shape[1] // self.target_ranks)
        is_remote = source != np.array(self.home_ranks)[rank]
        # One list for each (stage, target rank, source rank), with each feature once.
        lists = (stage * self.target_ranks + rank) * self.source_ranks + source
        requested, request_of = np.unique(
            (lists * self.own_features + feature)[is_remote], return_inverse=True
        )
        list_f, feature_f = np.divmod(requested, self.own_features)
        position_f = np.arange(len(requested)) - np.searchsorted(list_f, list_f)
        round_f, rest_f = np.divmod(position_f, self.capacity)
        block = source * self.blocks + rank % self.blocks
        round_n[is_remote] = round_f[request_of]
        slot_n[is_remote] = block[is_remote] * self.capacity + rest_f[request_of]
        if max_requested is None:
            max_requested = int(position_f.max(initial=-1)) + 1
        rounds: list[IndexArrays] = []
        n_lists = self.stages * self.target_ranks * self.source_ranks
        for number in range(max(1, -(-max_requested // self.capacity))):
            slots = _scatter_slots(index, reads, np.where(round_n == number, slot_n, -1))
            in_round = round_f == number
            requests = np.full((n_lists, self.capacity), -1, np.int32)
            requests[list_f[in_round], rest_f[in_round]] = feature_f[in_round]
            rounds.append((requests.reshape(self.stages, self.target_ranks, -1), slots, *weight))
        return rounds

    def synthetic_index(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return an index that fills one round and in which every position reads a feature."""
        _, rows, length, sources = shape
        per_rank = rows // self.target_ranks
        remote_features = min(self.capacity // self.microbatches, self.per_microbatch)
        index = np.empty(shape, np.int32)
        for rank, home in enumerate(self.home_ranks):
            counts = [remote_features] * self.source_ranks
            counts[home] = self.per_microbatch
            read = [v * self.per_microbatch + np.arange(n) for v, n in enumerate(counts)]
            rank_index = np.resize(np.concatenate(read), (per_rank, length, sources))
            index[:, rank * per_rank : (rank + 1) * per_rank] = rank_index
        return index


def _scatter_slots(index: np.ndarray, reads: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Return an array with the slots at the positions that read, -1 at all others."""
    filled = np.full(index.shape, -1, np.int32)
    filled[reads] = slots
    return filled
