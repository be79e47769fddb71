"""Features on their way from encoder ranks to LLM ranks, with and without node-wise names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from dflop_jax.data.features import features_struct
from dflop_jax.hardware import Hardware
from dflop_jax.records import Load, Plan, home_rank
from dflop_jax.schedule.dispatch.traffic import read_between
from experiments.paper.cases import Case, Step
from experiments.paper.costs import profile_of

Array = np.ndarray


@dataclass(frozen=True)
class Exchange:
    """Bytes of features that a step moves forward inside and across nodes, and seconds of it both
    ways where every device sends and receives over its own links."""

    inside: float
    across: float
    seconds: float


def exchange(case: Case, plan: Plan, step: Step, loads: Sequence[Load], named: bool) -> Exchange:
    """What a step moves, with the ranks that the scheduler named or (not `named`) with names drawn
    at random, as a balance that knows no nodes leaves them."""
    rng = np.random.default_rng(0)
    inside = across = seconds = 0.0
    for source, matrix in _read(plan, step, loads):
        low, high = matrix.shape
        size_VD = matrix * _token_bytes(case, source)
        if not named:
            size_VD = size_VD[rng.permutation(low)]
        device_V = np.array(plan.layout.devices(source))
        home_D = np.array([home_rank(rank, low, high) for rank in range(high)])
        size_VV = np.zeros((low, low))
        np.add.at(size_VV.T, home_D, size_VD.T)
        np.fill_diagonal(size_VV, 0.0)
        node_V = device_V // case.hardware.devices_per_node
        far_VV = node_V[:, None] != node_V
        inside += float(size_VV[~far_VV].sum())
        across += float(size_VV[far_VV].sum())
        seconds += 2 * _slowest_s(size_VV, far_VV, case.hardware)
    return Exchange(inside, across, seconds)


def _slowest_s(size_VV: Array, far_VV: Array, hardware: Hardware) -> float:
    """Seconds of the rank that sends or receives longest."""
    s_VV = size_VV / np.where(far_VV, hardware.network_bandwidth, hardware.link_bandwidth)
    return float(max(s_VV.sum(axis=0).max(), s_VV.sum(axis=1).max()))


def _read(plan: Plan, step: Step, loads: Sequence[Load]) -> Iterator[tuple[str, Array]]:
    """Of groups that feed one another: the source, and its tokens that each of its ranks has for
    the target's."""
    groups = step.schedule.groups
    for group in groups:
        for target in (groups[f] for f in group.feeds):
            ranks = plan.layout.data_ranks(group.module), plan.layout.data_ranks(target.module)
            yield group.module, read_between(group, target, loads, ranks)


def _token_bytes(case: Case, source: str) -> float:
    """Bytes of features for each of a source's tokens."""
    model, profile = case.model(), profile_of(case)
    shape = next(t.shape for t in profile.timings if t.module == source)
    edges = [e for e in profile.edges if e.source == source]
    structs = [features_struct(model.modules[source], e, shape) for e in edges]
    return sum(prod(s.shape) * s.dtype.itemsize for s in structs) / shape.size
