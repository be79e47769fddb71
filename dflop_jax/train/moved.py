"""What a batch moves between data ranks: features that a rank of one module reads from another rank
of the module that feeds it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from dflop_jax.contract import MultimodalModel
from dflop_jax.data.features import features_struct
from dflop_jax.data.packing import PackedGroup
from dflop_jax.records import Layout, Plan, Schedule, Shape, crossing, rank_nodes


@dataclass(frozen=True)
class BatchTraffic:
    """What is moved forward in one batch; gradients take the same way back.

    most: by "group/feeding group", the features that any rank of the group reads from one rank but
      its home: what `Routes.route` asks for. in_node, across_nodes: bytes by "source > target".
    """

    most: dict[str, int] = field(default_factory=dict)
    in_node: dict[str, float] = field(default_factory=dict)
    across_nodes: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def total(parts: Sequence[BatchTraffic]) -> BatchTraffic:
        """What processes that each count their own ranks move together."""
        result = BatchTraffic()
        for part in parts:
            for key, n in part.most.items():
                result.most[key] = max(result.most.get(key, 0), n)
            for counted, into in (
                (part.in_node, result.in_node),
                (part.across_nodes, result.across_nodes),
            ):
                for name, size in counted.items():
                    into[name] = into.get(name, 0.0) + size
        return result

    def of_group(self, group: int, feeders: Collection[int]) -> dict[int, int]:
        """`most` of one group, by feeding group."""
        return {f: self.most[_key(group, f)] for f in feeders}


def moved(
    plan: Plan,
    model: MultimodalModel,
    schedule: Schedule,
    packed: Sequence[PackedGroup],
    counts: Mapping[str, Collection[int]],
) -> BatchTraffic:
    """Count what the ranks of this process read; `counts` has those by module that it counts."""
    result = BatchTraffic()
    for g, arrays in enumerate(packed):
        target = schedule.groups[g].module
        counted = sorted(counts[target])
        for feeder, reads in arrays.reads.items():
            source = schedule.groups[feeder].module
            crossed = crossing(reads, rank_nodes(plan, source))
            result.most[_key(g, feeder)] = int(crossed.most)
            size = _feature_bytes(plan.layout, model, source, target, schedule.groups[feeder].shape)
            name = f"{source} > {target}"
            for n_features, into in (
                (crossed.of(counted).in_node, result.in_node),
                (crossed.of(counted).across_nodes, result.across_nodes),
            ):
                into[name] = into.get(name, 0.0) + size * n_features
    return result


def _feature_bytes(
    layout: Layout, model: MultimodalModel, source: str, target: str, shape: Shape
) -> float:
    """Bytes that all edges between two modules have of one feature."""
    total = 0.0
    for edge in layout.edges:
        if (edge.source, edge.target) == (source, target):
            struct = features_struct(model.modules[source], edge, shape)
            total += struct.shape[-1] * struct.dtype.itemsize
    return total


def _key(group: int, feeder: int) -> str:
    return f"{group}/{feeder}"
