"""Placements: every module's parallelism, and the submeshes and segments derived from it."""

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

# Decimal digits of a layer's relative cost; rounding keeps timing noise from moving a layer.
_COST_DIGITS = 6


class LayerCosts(NamedTuple):
    """Costs of a module's entry, exit and layers, relative to its mean layer."""

    entry: float = 0.0
    exit: float = 0.0
    layers: tuple[float, ...] = ()  # (): equal costs


EQUAL_LAYERS = LayerCosts()
# By (module, tensor-parallel degree).
LayerCostsByDegree = Mapping[tuple[str, int], LayerCosts]


@dataclass(frozen=True, order=True)
class Parallelism:
    """A module as segments with one submesh each, or as a looped pipeline with `rounds`."""

    mesh: MeshShape
    n_segments: int = 1
    rounds: int = 1

    @property
    def n_devices(self) -> int:
        return self.n_segments * self.mesh.n_devices


@dataclass(frozen=True)
class SpaceLimits:
    """Limits of the space of placements."""

    n_layers: Mapping[str, int]  # by module, in topological order
    degrees: Mapping[str, Collection[int]]  # tensor-parallel degrees, by module
    unstaged: Collection[str]  # modules with an edge at an inner layer, which need segments
    # Layers in the shortest repeated pattern of layer kinds, by module; stages hold whole patterns.
    patterns: Mapping[str, int]
    n_devices: int
    node: int  # devices per node
    config: PlanConfig  # with all limits resolved (above 0)

    @classmethod
    def from_model(
        cls,
        kinds: Mapping[str, Sequence[str]],
        degrees: Mapping[str, Collection[int]],
        edges: Sequence[Edge],
        *devices: Any,
    ) -> SpaceLimits:
        """Build limits from each module's layer `kinds`; `devices` are the last three fields."""
        unstaged = {e.source for e in edges if e.leaves >= 0}
        unstaged |= {e.target for e in edges if e.enters >= 0}
        patterns = {m: shortest_pattern(k) for m, k in kinds.items()}
        return cls({m: len(k) for m, k in kinds.items()}, degrees, unstaged, patterns, *devices)

    @property
    def max_model(self) -> int:
        """Maximum tensor-parallel degree, limited to a node's devices."""
        return min(self.config.max_model, self.node)


def shortest_pattern(kinds: Sequence[str]) -> int:
    """Return the length of the shortest pattern that, repeated, gives the sequence of kinds."""
    n, names = len(kinds), tuple(kinds)
    return next(k for k in range(1, n + 1) if n % k == 0 and names[:k] * (n // k) == names)


def build_layout(
    parallelisms: Sequence[Parallelism],
    first_devices: Sequence[int],
    n_layers: Mapping[str, int],
    costs: LayerCostsByDegree | None = None,
) -> Layout:
    """Return the layout, without buckets and edges, of modules in topological order with these
    parallelisms and first devices; modules with the same first device share all devices. Segments
    are balanced by `costs`, else by their number of layers."""
    submeshes: tuple[SubmeshPlan, ...] = ()
    segments: tuple[SegmentPlan, ...] = ()
    modules = zip(n_layers.items(), first_devices, parallelisms, strict=True)
    for (module, n), first, parallelism in modules:
        of_module = (costs or {}).get((module, parallelism.mesh.model), EQUAL_LAYERS)
        new_meshes, new_segments = module_segments(module, n, first, parallelism, of_module)
        submeshes, segments = submeshes + new_meshes, segments + new_segments
    return Layout(submeshes, segments, group_size=max(x.mesh.stage for x in parallelisms))


def has_loop(layout: Layout) -> bool:
    """Return whether a segment is divided into stages, which a `shard_map` loop runs."""
    return any(m.stage > 1 for m in layout.submeshes)


def fits_structure(layout: Layout, config: PlanConfig) -> bool:
    """Return whether a layout is as `plan.submeshes` and `plan.loop` require."""
    devices: dict[str, set[int]] = {m: set() for m in layout.modules}
    for s in layout.segments:
        devices[s.module].update(layout.submesh(s.submesh).devices)
    *others, last = devices.values()
    if config.submeshes == "separate" and not (others and last.isdisjoint(set().union(*others))):
        return False
    if config.submeshes == "shared" and any(of_module != last for of_module in others):
        return False
    return config.loop == "any" or has_loop(layout) == (config.loop == "require")


def layout_name(layout: Layout) -> str:
    """Return a unique short name: each module's segments, mesh, first device and rounds."""
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
    """Return a module's submeshes and segments, starting at device `first_device`."""
    n, mesh, rounds = parallelism.n_segments, parallelism.mesh, parallelism.rounds
    size = parallelism.n_devices // n
    submeshes, segments = [], []
    for i, (a, b) in enumerate(split_layers(n_layers, n, costs)):
        name = module if n == 1 else f"{module}{i}"
        submeshes.append(mesh.block(name, first_device + i * size))
        ends = i == 0, i == n - 1
        segments.append(SegmentPlan(name, module, a, b, name, *ends, rounds=rounds))
    return tuple(submeshes), tuple(segments)


def split_layers(
    n_layers: int, n_runs: int, costs: LayerCosts = EQUAL_LAYERS
) -> list[tuple[int, int]]:
    """Return [start, stop) of nonempty runs of layers with the lowest possible maximum cost."""
    assert 1 <= n_runs <= n_layers, (n_runs, n_layers)
    if costs.layers:
        return list(_split_unequal(costs, n_runs))
    counts, ends = [1] * n_runs, [0.0] * n_runs
    ends[0] += costs.entry
    ends[-1] += costs.exit
    for _ in range(n_layers - n_runs):  # add each layer to the cheapest run
        cheapest = min(range(n_runs), key=lambda i: (counts[i] + ends[i], i))
        counts[cheapest] += 1
    return list(pairwise(accumulate(counts, initial=0)))


@lru_cache(maxsize=4096)
def _split_unequal(costs: LayerCosts, n_runs: int) -> tuple[tuple[int, int], ...]:
    """Split layers with different costs by dynamic programming over the first layers; ties are
    broken by the lowest sum of squares."""
    # Integers, so that results do not depend on the order of sums.
    entry, leave, *each = (round(10**_COST_DIGITS * c) for c in (*costs[:2], *costs.layers))
    each[0] += entry
    each[-1] += leave
    total, n = [0, *accumulate(each)], len(each)
    # By number of layers split: (maximum cost of a run, sum of squares, first layer of each run).
    best_split: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for run in range(1, n_runs + 1):
        longer: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for stop in range(run, n - (n_runs - run) + 1):
            options = []
            for start, (highest, squares, starts) in best_split.items():
                if start < stop:
                    cost = total[stop] - total[start]
                    options.append((max(highest, cost), squares + cost * cost, (*starts, start)))
            longer[stop] = min(options)
        best_split = longer
    return tuple(pairwise((*best_split[n][2], n)))


def divisors(n: int, limit: int) -> list[int]:
    """Return the divisors of n up to `limit`."""
    return [d for d in range(1, min(n, limit) + 1) if n % d == 0]


def relative_layer_costs(profile: ModelProfile) -> LayerCostsByDegree:
    """Return relative costs of entries, exits and layers at the largest timed shape."""
    largest: dict[tuple[str, int, str], LayerTiming] = {}
    for t in sorted(profile.timings, key=lambda t: t.shape.size):
        largest[t.module, t.model, t.kind] = t
    by_degree = {}
    for module, model in dict.fromkeys((m, d) for m, d, _ in largest):
        kinds = profile.layer_kinds(module)
        timings = {kind: largest[module, model, kind] for kind in kinds}
        seconds = {k: t.layer_forward_s + t.layer_backward_s for k, t in timings.items()}
        mean_s = sum(seconds[k] for k in kinds) / len(kinds)
        ends_s = timings[kinds[0]].ends_forward_s + timings[kinds[0]].ends_backward_s
        share, of_layers = profile.entry_share[module], kinds if len(seconds) > 1 else ()
        all_s = ends_s * share, ends_s * (1 - share), *(seconds[k] for k in of_layers)
        entry, leave, *layers = (round(s / mean_s, _COST_DIGITS) if mean_s else 0.0 for s in all_s)
        by_degree[module, model] = LayerCosts(entry, leave, tuple(layers))
    return by_degree
