"""What moves between the data ranks of two modules, of which one reads the other's features.

Shape suffixes: P pieces of the source, Q of the target, V data ranks of the source, D of the
target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflop_jax.records.plan import Plan, home_rank

Ints = NDArray[np.int64]


def traffic(
    sample_P: Ints, rank_P: Ints, amount_P: Ints, sample_Q: Ints, rank_Q: Ints, n: tuple[int, int]
) -> Ints:
    """[V, D]: the amount that each of the `n` = (V, D) ranks of a source has for each of a target's
    ranks, where all pieces of a sample in the target read all of its pieces in the source; a piece
    counts once for a rank that reads it."""
    low, high = n
    readers = np.sort(sample_Q * high + rank_Q)
    readers = readers[np.append(True, readers[1:] != readers[:-1])[: len(readers)]]
    reader, at_rank = np.divmod(readers, high)
    first = np.searchsorted(reader, sample_P)
    count = np.searchsorted(reader, sample_P, side="right") - first
    source = np.repeat(np.arange(len(sample_P)), count)
    within = np.arange(len(source)) - np.repeat(np.cumsum(count) - count, count)
    target = at_rank[np.repeat(first, count) + within]
    pairs = rank_P[source] * high + target
    return np.bincount(pairs, amount_P[source], low * high).astype(np.int64).reshape(low, high)


@dataclass(frozen=True, eq=False)
class Crossing:
    """What ranks of a target read from ranks of a source other than their home, [V, D], and whether
    the two are in different nodes."""

    amount: np.ndarray
    far: np.ndarray

    def of(self, ranks: Sequence[int]) -> Crossing:
        """What some of the target's ranks read."""
        return Crossing(self.amount[:, ranks], self.far[:, ranks])

    @property
    def most(self) -> float:
        """The most that one rank reads from one other."""
        return float(self.amount.max(initial=0))

    @property
    def in_node(self) -> float:
        return float(self.amount[~self.far].sum())

    @property
    def across_nodes(self) -> float:
        return float(self.amount[self.far].sum())


def crossing(read_VD: np.ndarray, node_V: Ints) -> Crossing:
    """What of all that is read leaves the rank that has it; `node_V` is that rank's node."""
    home_D = homes(*read_VD.shape)
    amount = read_VD.copy()
    amount[home_D, np.arange(len(home_D))] = 0
    return Crossing(amount, node_V[:, None] != node_V[home_D])


def homes(low: int, high: int) -> Ints:
    """[D]: the `home_rank` of each of `high` ranks among `low`."""
    return np.array([home_rank(rank, low, high) for rank in range(high)])


def rank_nodes(plan: Plan, module: str) -> Ints:
    """[V]: the node of the first device of each of a module's data ranks."""
    devices = np.array(plan.layout.devices(module))
    return devices // (plan.scheduling.node or plan.layout.n_devices)
