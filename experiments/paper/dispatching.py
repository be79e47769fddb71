"""Features on their way from encoder ranks to LLM ranks, with and without node-wise names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from dflop_jax.data.content import features_struct
from dflop_jax.records import Hardware, Load, Plan, crossing_traffic, home_ranks
from dflop_jax.records.traffic import CrossingTraffic
from dflop_jax.schedule.batch import Batch, capacity_of
from dflop_jax.schedule.rank_permutation import tokens_read
from experiments.paper.cases import Case, Step
from experiments.paper.costs import profile_of

Array = np.ndarray


@dataclass(frozen=True)
class ExchangeTraffic:
    """Bytes of features that a step moves forward inside and across nodes, and seconds of it both
    ways where every device sends and receives over its own links."""

    inside: float
    across: float
    seconds: float


def exchange(
    case: Case, plan: Plan, step: Step, loads: Sequence[Load], named: bool
) -> ExchangeTraffic:
    """What a step moves, with the ranks that the scheduler named or (not `named`) with names drawn
    at random, as a balance that knows no nodes leaves them."""
    rng = np.random.default_rng(0)
    inside = across = seconds = 0.0
    for source, matrix in _read(plan, step, loads):
        size_VD = matrix * _token_bytes(case, source)
        if not named:
            size_VD = size_VD[rng.permutation(len(size_VD))]
        node_V = np.array(plan.layout.devices(source)) // case.hardware.devices_per_node
        moved = crossing_traffic(size_VD, node_V)
        inside += moved.in_node
        across += moved.across_nodes
        seconds += 2 * _slowest_s(moved, case.hardware)
    return ExchangeTraffic(inside, across, seconds)


def features(case: Case, plan: Plan, step: Step, loads: Sequence[Load]) -> float:
    """Bytes of features that the groups of a step read."""
    read = _read(plan, step, loads)
    return sum(float(matrix.sum()) * _token_bytes(case, source) for source, matrix in read)


def home_nodes(case: Case, plan: Plan) -> tuple[int, int]:
    """Nodes at which ranks of the last module get their features from the first, and all nodes on
    which that first module works."""
    first, last = plan.layout.modules[0], plan.layout.modules[-1]
    node_V = np.array(plan.layout.devices(first)) // case.hardware.devices_per_node
    home_D = home_ranks(len(node_V), plan.layout.data_ranks(last))
    return len(set(node_V[home_D].tolist())), len(set(node_V.tolist()))


def _slowest_s(moved: CrossingTraffic, hardware: Hardware) -> float:
    """Seconds of the rank that sends or receives longest."""
    s_VD = moved.amount / np.where(
        moved.is_across_nodes, hardware.network_bandwidth, hardware.link_bandwidth
    )
    received_s = np.bincount(home_ranks(*s_VD.shape), s_VD.sum(axis=0))
    return float(max(received_s.max(), s_VD.sum(axis=1).max()))


def _read(plan: Plan, step: Step, loads: Sequence[Load]) -> Iterator[tuple[str, Array]]:
    """Of groups that feed one another: the source, and its tokens that each of its ranks has for
    the target's."""
    groups, batch = step.schedule.groups, Batch(loads, capacity_of(plan.layout))
    for group in groups:
        for target in (groups[f] for f in group.feeds):
            modules = group.module, target.module
            yield group.module, tokens_read(modules, group.pieces, target.pieces, batch)


def _token_bytes(case: Case, source: str) -> float:
    """Bytes of features for each of a source's tokens."""
    model, profile = case.model(), profile_of(case)
    shape = next(t.shape for t in profile.timings if t.module == source)
    edges = [e for e in profile.edges if e.source == source]
    structs = [features_struct(model.modules[source], e, shape) for e in edges]
    return sum(prod(s.shape) * s.dtype.itemsize for s in structs) / shape.size
