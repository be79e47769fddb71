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


class RunCosts(NamedTuple):
    """What runs of a module's layers cost, in mean layers: its entry, its exit, and each layer; ()
    if all layers cost the same."""

    entry: float = 0.0
    exit: float = 0.0
    layers: tuple[float, ...] = ()


BY_NUMBER = RunCosts()  # runs cost what they have layers
# By (module, tensor-parallel degree).
CutCosts = Mapping[tuple[str, int], RunCosts]


@dataclass(frozen=True, order=True)
class Form:
    """A module on `n_segments` submeshes side by side, or in stages that microbatches go through in
    so many `rounds`."""

    mesh: MeshShape
    n_segments: int = 1
    rounds: int = 1

    @property
    def n_devices(self) -> int:
        return self.n_segments * self.mesh.n_devices


@dataclass(frozen=True)
class Extent:
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
    def of(
        cls,
        kinds: Mapping[str, Sequence[str]],
        degrees: Mapping[str, Collection[int]],
        edges: Sequence[Edge],
        *devices: Any,
    ) -> Extent:
        """`kinds` are those of every module's layers; `devices` are the last three fields."""
        unstaged = {e.source for e in edges if e.leaves >= 0}
        unstaged |= {e.target for e in edges if e.enters >= 0}
        n_layers = {m: len(k) for m, k in kinds.items()}
        return cls(n_layers, degrees, unstaged, {m: pattern(k) for m, k in kinds.items()}, *devices)

    @property
    def max_model(self) -> int:
        """The largest tensor-parallel degree, which stays inside a node."""
        return min(self.config.max_model, self.node)


def pattern(kinds: Sequence[str]) -> int:
    """Layers of the shortest pattern whose repeats are a sequence of kinds."""
    n, every = len(kinds), tuple(kinds)
    return next(p for p in range(1, n + 1) if n % p == 0 and every[:p] * (n // p) == every)


def lay_out(
    forms: Sequence[Form],
    firsts: Sequence[int],
    n_layers: Mapping[str, int],
    costs: CutCosts | None = None,
) -> Layout:
    """The layout, without shapes and edges, of modules in these forms.

    Args:
      firsts: the first device of each module. Modules that begin on the same device share all of
        their devices.
      n_layers: of every module, in topological order.
      costs: which segments are balanced by; None: the number of layers.
    """
    meshes: tuple[SubmeshPlan, ...] = ()
    segments: tuple[SegmentPlan, ...] = ()
    for (module, n), first, form in zip(n_layers.items(), firsts, forms, strict=True):
        of_module = (costs or {}).get((module, form.mesh.model), BY_NUMBER)
        more_meshes, more_segments = module_segments(module, n, first, form, of_module)
        meshes, segments = meshes + more_meshes, segments + more_segments
    return Layout(meshes, segments, group_size=max(f.mesh.stage for f in forms))


def name_of(layout: Layout) -> str:
    """Short, and unique among layouts of a space: module=stage x data x model on how many
    segments, and rounds through the stages."""
    parts = []
    for module in layout.modules:
        segments = layout.segments_of(module)
        m = layout.submesh(segments[0].submesh)
        many = f"{len(segments)}*" if len(segments) > 1 else ""
        rounds = f"({segments[0].rounds} rounds)" if segments[0].rounds > 1 else ""
        parts.append(f"{module}={many}{m.text}@{m.first}{rounds}")
    return " ".join(parts)


def module_segments(
    module: str,
    n_layers: int,
    first: int,
    form: Form,
    costs: RunCosts = BY_NUMBER,
) -> tuple[tuple[SubmeshPlan, ...], tuple[SegmentPlan, ...]]:
    """A module in a form, from device `first` on."""
    n = form.n_segments
    size = form.n_devices // n
    names = [module if n == 1 else f"{module}{i}" for i in range(n)]
    runs = split_layers(n_layers, n, costs)
    return (
        tuple(form.mesh.block(name, first + i * size) for i, name in enumerate(names)),
        tuple(
            SegmentPlan(name, module, a, b, name, i == 0, i == n - 1, rounds=form.rounds)
            for i, (name, (a, b)) in enumerate(zip(names, runs, strict=True))
        ),
    )


def split_layers(n_layers: int, parts: int, costs: RunCosts = BY_NUMBER) -> list[tuple[int, int]]:
    """[start, stop) of `parts` runs of at least a layer whose dearest is as cheap as whole layers
    allow, with the entry in the first and the exit in the last run."""
    assert 1 <= parts <= n_layers, (parts, n_layers)
    if costs.layers:
        return list(_cheapest_runs(costs, parts))
    counts = [1] * parts
    extra = [0.0] * parts
    extra[0] += costs.entry
    extra[-1] += costs.exit
    for _ in range(n_layers - parts):  # each layer goes to the cheapest run, the first of several
        cheapest = min(range(parts), key=lambda i: (counts[i] + extra[i], i))
        counts[cheapest] += 1
    cuts = [0]
    for n in counts:
        cuts.append(cuts[-1] + n)
    return list(pairwise(cuts))


@lru_cache(maxsize=4096)
def _cheapest_runs(costs: RunCosts, parts: int) -> tuple[tuple[int, int], ...]:
    """`split_layers` of layers that differ: by the best way to cut the first layers into fewer
    runs, of which those that waste least (the sum of squares is least) are preferred."""
    # Whole numbers, so that no choice hangs on the order of a sum.
    each = [round(COST_UNITS * c) for c in costs.layers]
    each[0] += round(COST_UNITS * costs.entry)
    each[-1] += round(COST_UNITS * costs.exit)
    total = [0, *accumulate(each)]
    n = len(each)
    # By number of layers: (dearest run, sum of squares, where each run begins).
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for run in range(1, parts + 1):
        ways: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for stop in range(run, n - (parts - run) + 1):
            options = []
            for start, (dearest, squares, starts) in best.items():
                if start < stop:
                    cost = total[stop] - total[start]
                    options.append((max(dearest, cost), squares + cost * cost, (*starts, start)))
            ways[stop] = min(options)
        best = ways
    starts = best[n][2]
    return tuple(pairwise((*starts, n)))


def factors(n: int, limit: int) -> list[int]:
    """Divisors of n up to `limit`."""
    return [d for d in range(1, min(n, limit) + 1) if n % d == 0]


def cut_costs(profile: ModelProfile) -> CutCosts:
    """What entries, exits and layers cost at the largest shape timed."""
    largest: dict[tuple[str, int, str], LayerTiming] = {}
    for t in sorted(profile.timings, key=lambda t: t.shape.size):
        largest[t.module, t.model, t.kind] = t
    by_degree = {}
    for module, model in dict.fromkeys((m, d) for m, d, _ in largest):
        kinds = profile.layer_kinds(module)
        of_kind = {kind: largest[module, model, kind] for kind in kinds}
        seconds = {k: t.layer_forward_s + t.layer_backward_s for k, t in of_kind.items()}
        mean_s = sum(seconds[k] for k in kinds) / len(kinds)
        ends_s = of_kind[kinds[0]].ends_forward_s + of_kind[kinds[0]].ends_backward_s
        share = profile.entry_share[module]

        # Bits of a timing must not move a layer from one segment to another.
        def in_layers(s: float, mean_s: float = mean_s) -> float:
            return round(s / mean_s, 6) if mean_s else 0.0

        each = tuple(in_layers(seconds[k]) for k in kinds) if len(seconds) > 1 else ()
        by_degree[module, model] = RunCosts(
            in_layers(ends_s * share), in_layers(ends_s * (1 - share)), each
        )
    return by_degree
