"""What moves between the data ranks of two modules, of which one reads the other's features.

Shape suffixes: P pieces of the source, Q of the target, V data ranks of the source, D of the
target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from dflop_jax.records.plan import Plan

Ints = NDArray[np.int64]


def rank_traffic(
    sample_P: Ints,
    rank_P: Ints,
    amount_P: Ints,
    sample_Q: Ints,
    rank_Q: Ints,
    n_ranks: tuple[int, int],
) -> Ints:
    """[V, D]: the amount that each of the `n` = (V, D) ranks of a source has for each of a target's
    ranks, where all pieces of a sample in the target read all of its pieces in the source; a piece
    counts once for a rank that reads it."""
    n_source_ranks, n_target_ranks = n_ranks
    readers = np.sort(sample_Q * n_target_ranks + rank_Q)
    readers = readers[np.append(True, readers[1:] != readers[:-1])[: len(readers)]]
    reader_sample, reader_rank = np.divmod(readers, n_target_ranks)
    first = np.searchsorted(reader_sample, sample_P)
    count = np.searchsorted(reader_sample, sample_P, side="right") - first
    source = np.repeat(np.arange(len(sample_P)), count)
    offset = np.arange(len(source)) - np.repeat(np.cumsum(count) - count, count)
    target = reader_rank[np.repeat(first, count) + offset]
    pairs = rank_P[source] * n_target_ranks + target
    return (
        np.bincount(pairs, amount_P[source], n_source_ranks * n_target_ranks)
        .astype(np.int64)
        .reshape(n_source_ranks, n_target_ranks)
    )


@dataclass(frozen=True, eq=False)
class CrossingTraffic:
    """What ranks of a target read from ranks of a source other than their home, [V, D], and whether
    the two are in different nodes."""

    amount: np.ndarray
    is_across_nodes: np.ndarray

    def for_target_ranks(self, ranks: Sequence[int]) -> CrossingTraffic:
        """What some of the target's ranks read."""
        return CrossingTraffic(self.amount[:, ranks], self.is_across_nodes[:, ranks])

    @property
    def max_amount(self) -> float:
        """The most that one rank reads from one other."""
        return float(self.amount.max(initial=0))

    @property
    def in_node(self) -> float:
        return float(self.amount[~self.is_across_nodes].sum())

    @property
    def across_nodes(self) -> float:
        return float(self.amount[self.is_across_nodes].sum())


def crossing_traffic(read_VD: np.ndarray, node_V: Ints) -> CrossingTraffic:
    """What of all that is read leaves the rank that has it; `node_V` is that rank's node."""
    home_D = home_ranks(*read_VD.shape)
    amount = read_VD.copy()
    amount[home_D, np.arange(len(home_D))] = 0
    return CrossingTraffic(amount, node_V[:, None] != node_V[home_D])


def home_rank(rank: int, n_source_ranks: int, n_target_ranks: int) -> int:
    """The data rank of a source of `low` ranks that takes in what rank `rank` of `high` ranks of a
    target reads: one that shares a device with it where both lie on the same devices, as far as
    these can."""
    common = gcd(n_source_ranks, n_target_ranks)
    return rank // (n_target_ranks // common) * (n_source_ranks // common)


def home_ranks(n_source_ranks: int, n_target_ranks: int) -> Ints:
    """[D]: the `home_rank` of each of `high` ranks among `low`."""
    return np.array(
        [home_rank(rank, n_source_ranks, n_target_ranks) for rank in range(n_target_ranks)]
    )


def rank_nodes(plan: Plan, module: str) -> Ints:
    """[V]: the node of the first device of each of a module's data ranks."""
    devices = np.array(plan.layout.devices(module))
    return devices // (plan.scheduling.node or plan.layout.n_devices)
