"""Where a plan's modules lie: the form of each in brief, and the submeshes and segments of all."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from dflop_jax.config import PlanConfig
from dflop_jax.records import (
    Edge,
    LayerTiming,
    Layout,
    MeshShape,
    ModelProfile,
    SegmentPlan,
    SubmeshPlan,
)

COST_UNITS = 10**6  # of a layer's cost, in which costs of runs are compared


class LayerCosts(NamedTuple):
    """What runs of a module's layers cost, in mean layers: its entry, its exit, and each layer; ()
    if all layers cost the same."""

    entry: float = 0.0
    exit: float = 0.0
    layers: tuple[float, ...] = ()


EQUAL_LAYERS = LayerCosts()  # runs cost what they have layers
# By (module, tensor-parallel degree).
LayerCostsByDegree = Mapping[tuple[str, int], LayerCosts]


@dataclass(frozen=True, order=True)
class Parallelism:
    """A module on `n_segments` submeshes side by side, or in stages that microbatches go through in
    so many `rounds`."""

    mesh: MeshShape
    n_segments: int = 1
    rounds: int = 1

    @property
    def n_devices(self) -> int:
        return self.n_segments * self.mesh.n_devices


@dataclass(frozen=True)
class SpaceLimits:
    """How far a space of placements reaches.

    n_layers: of every module, in topological order. degrees: of tensor parallelism, by module.
    unstaged: modules with an edge between their layers, which lie in segments, not in stages.
    patterns: layers of the shortest pattern of kinds that a module repeats from end to end, 1 where
    all are alike; stages of a loop hold whole patterns. node: devices of a node. config: settings,
    whose limits are above 0.
    """

    n_layers: Mapping[str, int]
    degrees: Mapping[str, Collection[int]]
    unstaged: Collection[str]
    patterns: Mapping[str, int]
    n_devices: int
    node: int
    config: PlanConfig

    @classmethod
    def from_model(
        cls,
        kinds: Mapping[str, Sequence[str]],
        degrees: Mapping[str, Collection[int]],
        edges: Sequence[Edge],
        *devices: Any,
    ) -> SpaceLimits:
        """`kinds` are those of every module's layers; `devices` are the last three fields."""
        unstaged = {e.source for e in edges if e.leaves >= 0}
        unstaged |= {e.target for e in edges if e.enters >= 0}
        n_layers = {m: len(k) for m, k in kinds.items()}
        return cls(
            n_layers,
            degrees,
            unstaged,
            {m: shortest_pattern(k) for m, k in kinds.items()},
            *devices,
        )

    @property
    def max_model(self) -> int:
        """The largest tensor-parallel degree, which stays inside a node."""
        return min(self.config.max_model, self.node)


def shortest_pattern(kinds: Sequence[str]) -> int:
    """Layers of the shortest pattern whose repeats are a sequence of kinds."""
    n, all_kinds = len(kinds), tuple(kinds)
    return next(
        length
        for length in range(1, n + 1)
        if n % length == 0 and all_kinds[:length] * (n // length) == all_kinds
    )


def build_layout(
    parallelisms: Sequence[Parallelism],
    first_devices: Sequence[int],
    n_layers: Mapping[str, int],
    costs: LayerCostsByDegree | None = None,
) -> Layout:
    """The layout, without shapes and edges, of modules in these forms.

    Args:
      firsts: the first device of each module. Modules that begin on the same device share all of
        their devices.
      n_layers: of every module, in topological order.
      costs: which segments are balanced by; None: the number of layers.
    """
    submeshes: tuple[SubmeshPlan, ...] = ()
    segments: tuple[SegmentPlan, ...] = ()
    for (module, n), first_device, parallelism in zip(
        n_layers.items(), first_devices, parallelisms, strict=True
    ):
        module_costs = (costs or {}).get((module, parallelism.mesh.model), EQUAL_LAYERS)
        more_submeshes, more_segments = module_segments(
            module, n, first_device, parallelism, module_costs
        )
        submeshes, segments = submeshes + more_submeshes, segments + more_segments
    return Layout(submeshes, segments, group_size=max(f.mesh.stage for f in parallelisms))


def layout_name(layout: Layout) -> str:
    """Short, and unique among layouts of a space: module=stage x data x model on how many
    segments, and rounds through the stages."""
    names = []
    for module in layout.modules:
        segments = layout.segments_of(module)
        m = layout.submesh(segments[0].submesh)
        n_submeshes = f"{len(segments)}*" if len(segments) > 1 else ""
        rounds = f"({segments[0].rounds} rounds)" if segments[0].rounds > 1 else ""
        names.append(f"{module}={n_submeshes}{m.text}@{m.first}{rounds}")
    return " ".join(names)


def module_segments(
    module: str,
    n_layers: int,
    first_device: int,
    parallelism: Parallelism,
    costs: LayerCosts = EQUAL_LAYERS,
) -> tuple[tuple[SubmeshPlan, ...], tuple[SegmentPlan, ...]]:
    """A module in a form, from device `first` on."""
    n = parallelism.n_segments
    size = parallelism.n_devices // n
    names = [module if n == 1 else f"{module}{i}" for i in range(n)]
    runs = split_layers(n_layers, n, costs)
    return (
        tuple(
            parallelism.mesh.block(name, first_device + i * size) for i, name in enumerate(names)
        ),
        tuple(
            SegmentPlan(name, module, a, b, name, i == 0, i == n - 1, rounds=parallelism.rounds)
            for i, (name, (a, b)) in enumerate(zip(names, runs, strict=True))
        ),
    )


def split_layers(
    n_layers: int, n_runs: int, costs: LayerCosts = EQUAL_LAYERS
) -> list[tuple[int, int]]:
    """[start, stop) of `parts` runs of at least a layer whose dearest is as cheap as whole layers
    allow, with the entry in the first and the exit in the last run."""
    assert 1 <= n_runs <= n_layers, (n_runs, n_layers)
    if costs.layers:
        return list(_balanced_runs(costs, n_runs))
    n_layers_of_run = [1] * n_runs
    end_costs = [0.0] * n_runs
    end_costs[0] += costs.entry
    end_costs[-1] += costs.exit
    for _ in range(n_layers - n_runs):  # each layer goes to the cheapest run, the first of several
        cheapest = min(range(n_runs), key=lambda i: (n_layers_of_run[i] + end_costs[i], i))
        n_layers_of_run[cheapest] += 1
    stops = [0]
    for n in n_layers_of_run:
        stops.append(stops[-1] + n)
    return list(pairwise(stops))


@lru_cache(maxsize=4096)
def _balanced_runs(costs: LayerCosts, n_runs: int) -> tuple[tuple[int, int], ...]:
    """`split_layers` of layers that differ: by the best way to cut the first layers into fewer
    runs, of which those that waste least (the sum of squares is least) are preferred."""
    # Whole numbers, so that no choice hangs on the order of a sum.
    layer_costs = [round(COST_UNITS * c) for c in costs.layers]
    layer_costs[0] += round(COST_UNITS * costs.entry)
    layer_costs[-1] += round(COST_UNITS * costs.exit)
    cumulative = [0, *accumulate(layer_costs)]
    n = len(layer_costs)
    # By number of layers: (dearest run, sum of squares, where each run begins).
    best_by_stop: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for run in range(1, n_runs + 1):
        next_by_stop: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for stop in range(run, n - (n_runs - run) + 1):
            options = []
            for start, (max_cost, squares, starts) in best_by_stop.items():
                if start < stop:
                    cost = cumulative[stop] - cumulative[start]
                    options.append((max(max_cost, cost), squares + cost * cost, (*starts, start)))
            next_by_stop[stop] = min(options)
        best_by_stop = next_by_stop
    starts = best_by_stop[n][2]
    return tuple(pairwise((*starts, n)))


def divisors(n: int, limit: int) -> list[int]:
    """Divisors of n up to `limit`."""
    return [d for d in range(1, min(n, limit) + 1) if n % d == 0]


def relative_layer_costs(profile: ModelProfile) -> LayerCostsByDegree:
    """What entries, exits and layers cost at the largest shape timed."""
    largest_timings: dict[tuple[str, int, str], LayerTiming] = {}
    for t in sorted(profile.timings, key=lambda t: t.shape.size):
        largest_timings[t.module, t.model, t.kind] = t
    costs_by_degree = {}
    for module, model in dict.fromkeys((m, d) for m, d, _ in largest_timings):
        kinds = profile.layer_kinds(module)
        timing_by_kind = {kind: largest_timings[module, model, kind] for kind in kinds}
        layer_seconds = {
            k: t.layer_forward_s + t.layer_backward_s for k, t in timing_by_kind.items()
        }
        mean_s = sum(layer_seconds[k] for k in kinds) / len(kinds)
        ends_s = timing_by_kind[kinds[0]].ends_forward_s + timing_by_kind[kinds[0]].ends_backward_s
        entry_share = profile.entry_share[module]

        # Bits of a timing must not move a layer from one segment to another.
        def in_layers(s: float, mean_s: float = mean_s) -> float:
            return round(s / mean_s, 6) if mean_s else 0.0

        layer_costs = (
            tuple(in_layers(layer_seconds[k]) for k in kinds) if len(layer_seconds) > 1 else ()
        )
        costs_by_degree[module, model] = LayerCosts(
            in_layers(ends_s * entry_share), in_layers(ends_s * (1 - entry_share)), layer_costs
        )
    return costs_by_degree
