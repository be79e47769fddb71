"""Traffic of features from encoder to LLM ranks, with and without the rank permutation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from dflop_jax.data.content import features_struct
from dflop_jax.records import Hardware, Plan, crossing_traffic, home_ranks
from dflop_jax.records.traffic import CrossingTraffic
from dflop_jax.schedule.batch import Batch, capacity_of
from dflop_jax.schedule.rank_permutation import tokens_read
from experiments.paper.cases import Case, Step
from experiments.paper.costs import get_profile

Array = np.ndarray


@dataclass(frozen=True)
class ExchangeTraffic:
    """Bytes of features that the forward of a step moves, and seconds of forward and backward when
    every device sends and receives over its own links."""

    in_node_bytes: float
    across_node_bytes: float
    seconds: float


def measure_exchange(case: Case, step: Step, is_permuted: bool) -> ExchangeTraffic:
    """Compute a step's traffic with the scheduler's rank permutation or, if not `is_permuted`, with
    a random one, as a balancer without node information gives."""
    rng = np.random.default_rng(0)
    in_node = across_nodes = seconds = 0.0
    for source, matrix in _tokens_by_edge(step):
        size_VD = matrix * _bytes_per_token(case, source)
        if not is_permuted:
            size_VD = size_VD[rng.permutation(len(size_VD))]
        node_V = np.array(step.plan.layout.devices(source)) // case.hardware.devices_per_node
        traffic = crossing_traffic(size_VD, node_V)
        in_node += traffic.intra_node_amount
        across_nodes += traffic.inter_node_amount
        seconds += 2 * _slowest_rank_s(traffic, case.hardware)
    return ExchangeTraffic(in_node, across_nodes, seconds)


def count_feature_bytes(case: Case, step: Step) -> float:
    """Return the bytes of features that the groups of a step read."""
    edge_tokens = _tokens_by_edge(step)
    return sum(
        float(matrix.sum()) * _bytes_per_token(case, source) for source, matrix in edge_tokens
    )


def count_home_nodes(case: Case, plan: Plan) -> tuple[int, int]:
    """Return the number of nodes through which ranks of the last module read features of the
    first, and the number of nodes of the first module."""
    first, last = plan.layout.modules[0], plan.layout.modules[-1]
    node_V = np.array(plan.layout.devices(first)) // case.hardware.devices_per_node
    home_D = home_ranks(len(node_V), plan.layout.data_ranks(last))
    return len(set(node_V[home_D].tolist())), len(set(node_V.tolist()))


def _slowest_rank_s(traffic: CrossingTraffic, hardware: Hardware) -> float:
    """Return the seconds of the rank that sends or receives longest."""
    s_VD = traffic.amount / np.where(
        traffic.is_across_nodes, hardware.network_bandwidth, hardware.link_bandwidth
    )
    received_s = np.bincount(home_ranks(*s_VD.shape), s_VD.sum(axis=0))
    return float(max(received_s.max(), s_VD.sum(axis=1).max()))


def _tokens_by_edge(step: Step) -> Iterator[tuple[str, Array]]:
    """Yield each edge's source module and the tokens from its ranks to the target's ranks."""
    groups, batch = step.schedule.groups, Batch(step.loads, capacity_of(step.plan.layout))
    for group in groups:
        for target in (groups[f] for f in group.feeds):
            modules = group.module, target.module
            yield group.module, tokens_read(modules, group.pieces, target.pieces, batch)


def _bytes_per_token(case: Case, source: str) -> float:
    """Return the bytes of features per token of a source module."""
    model, profile = case.model(), get_profile(case)
    shape = next(t.shape for t in profile.timings if t.module == source)
    edges = [e for e in profile.edges if e.source == source]
    structs = [features_struct(model.modules[source], e, shape) for e in edges]
    return sum(prod(s.shape) * s.dtype.itemsize for s in structs) / shape.size
