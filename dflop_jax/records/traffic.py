"""Amounts that the data ranks of a target module read from the data ranks of a source module.

Shape suffixes: P pieces of the source, Q pieces of the target, V data ranks of the source, D data
ranks of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflop_jax.records.plan import Plan

Ints = NDArray[np.int64]
Array = Any  # a number or an array


def rank_traffic(
    sample_P: Ints,
    rank_P: Ints,
    amount_P: Ints,
    sample_Q: Ints,
    rank_Q: Ints,
    n_ranks: tuple[int, int],
) -> Ints:
    """Return [V, D]: the amount that each target rank reads from each source rank. `n_ranks` is
    (V, D). All of a sample's pieces in the target read all of its pieces in the source. A piece
    counts once per target rank that reads it."""
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
    amounts = np.bincount(pairs, amount_P[source], n_source_ranks * n_target_ranks)
    return amounts.astype(np.int64).reshape(n_ranks)


@dataclass(frozen=True, eq=False)
class CrossingTraffic:
    """Amounts that target ranks read from source ranks other than their home rank."""

    amount: np.ndarray  # [V, D]
    is_across_nodes: np.ndarray  # whether the two ranks are on different nodes, [V, D]

    def for_target_ranks(self, ranks: Sequence[int]) -> CrossingTraffic:
        """Return the amounts that a subset of target ranks reads."""
        return CrossingTraffic(self.amount[:, ranks], self.is_across_nodes[:, ranks])

    @property
    def max_amount(self) -> float:
        """Maximum amount that a target rank reads from one source rank."""
        return float(self.amount.max(initial=0))

    @property
    def intra_node_amount(self) -> float:
        return float(self.amount[~self.is_across_nodes].sum())

    @property
    def inter_node_amount(self) -> float:
        return float(self.amount[self.is_across_nodes].sum())


def crossing_traffic(read_VD: np.ndarray, node_V: Ints) -> CrossingTraffic:
    """Return the amounts read from other ranks than home ranks; `node_V`: nodes of the ranks."""
    home_D = home_ranks(*read_VD.shape)
    amount = read_VD.copy()
    amount[home_D, np.arange(len(home_D))] = 0
    return CrossingTraffic(amount, node_V[:, None] != node_V[home_D])


def home_ranks(n_source_ranks: int, n_target_ranks: int) -> Ints:
    """Return [D]: the source rank that collects each target rank's input, if possible locally."""
    common = gcd(n_source_ranks, n_target_ranks)
    return np.arange(n_target_ranks) // (n_target_ranks // common) * (n_source_ranks // common)


def exchanged_features(n_source_ranks: Array, n_target_ranks: Array) -> Array:
    """Return the features that the busiest home rank exchanges, relative to those that a source
    rank holds, if target ranks read equal shares from all source ranks: the home ranks collect the
    features of all source ranks."""
    return n_source_ranks // np.gcd(n_source_ranks, n_target_ranks)


def rank_nodes(plan: Plan, module: str) -> Ints:
    """Return [V]: the node of the first device of each of a module's data ranks."""
    devices = np.array(plan.layout.devices(module))
    return devices // (plan.scheduling.node or plan.layout.n_devices)
