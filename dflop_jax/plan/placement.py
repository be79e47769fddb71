"""Where a plan's modules lie: the form of each in brief, and the submeshes and segments of all."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dflop_jax.records import Edge, Layout, MeshShape, ModelProfile, SegmentPlan, SubmeshPlan

# By (module, tensor-parallel degree), what a module's entry and exit cost, in layers.
Ends = Mapping[tuple[str, int], tuple[float, float]]


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
class ModelFacts:
    """What the placements of a model depend on.

    n_layers: of every module, in topological order. degrees: of tensor parallelism, by module.
    unstaged: modules with an edge between their layers, which lie in segments, not in stages.
    """

    n_layers: Mapping[str, int]
    degrees: Mapping[str, Collection[int]]
    unstaged: frozenset[str]

    @classmethod
    def of(
        cls,
        n_layers: Mapping[str, int],
        degrees: Mapping[str, Collection[int]],
        edges: Sequence[Edge],
    ) -> ModelFacts:
        taps = {e.source for e in edges if e.leaves >= 0}
        return cls(n_layers, degrees, frozenset(taps | {e.target for e in edges if e.enters >= 0}))


def lay_out(
    forms: Sequence[Form],
    firsts: Sequence[int],
    n_layers: Mapping[str, int],
    ends: Ends | None = None,
) -> Layout:
    """The layout, without shapes and edges, of modules in these forms.

    Args:
      firsts: the first device of each module. Modules that begin on the same device share all of
        their devices.
      n_layers: of every module, in topological order.
      ends: which segments are balanced by; None: nothing.
    """
    meshes: tuple[SubmeshPlan, ...] = ()
    segments: tuple[SegmentPlan, ...] = ()
    for (module, n), first, form in zip(n_layers.items(), firsts, forms, strict=True):
        module_ends = (ends or {}).get((module, form.mesh.model), (0.0, 0.0))
        more_meshes, more_segments = module_segments(module, n, first, form, module_ends)
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
    ends: tuple[float, float] = (0.0, 0.0),
) -> tuple[tuple[SubmeshPlan, ...], tuple[SegmentPlan, ...]]:
    """A module in a form, from device `first` on."""
    n = form.n_segments
    size = form.n_devices // n
    names = [module if n == 1 else f"{module}{i}" for i in range(n)]
    runs = split_layers(n_layers, n, ends)
    return (
        tuple(form.mesh.block(name, first + i * size) for i, name in enumerate(names)),
        tuple(
            SegmentPlan(name, module, a, b, name, i == 0, i == n - 1, rounds=form.rounds)
            for i, (name, (a, b)) in enumerate(zip(names, runs, strict=True))
        ),
    )


def split_layers(
    n_layers: int, parts: int, ends: tuple[float, float] = (0.0, 0.0)
) -> list[tuple[int, int]]:
    """[start, stop) of `parts` runs of at least a layer whose dearest is as cheap as whole layers
    allow; `ends` are the costs of entry and exit in layers, in the first and the last run."""
    assert 1 <= parts <= n_layers, (parts, n_layers)
    counts = [1] * parts
    extra = [0.0] * parts
    extra[0] += ends[0]
    extra[-1] += ends[1]
    for _ in range(n_layers - parts):  # each layer goes to the cheapest run, the first of several
        cheapest = min(range(parts), key=lambda i: (counts[i] + extra[i], i))
        counts[cheapest] += 1
    cuts = [0]
    for n in counts:
        cuts.append(cuts[-1] + n)
    return list(pairwise(cuts))


def factors(n: int, limit: int) -> list[int]:
    """Divisors of n up to `limit`."""
    return [d for d in range(1, min(n, limit) + 1) if n % d == 0]


def ends_in_layers(profile: ModelProfile) -> Ends:
    """What entries and exits cost at the largest shape timed."""
    by_degree = {}
    for t in sorted(profile.timings, key=lambda t: t.shape.size):
        layer_s = t.layer_forward_s + t.layer_backward_s
        both = (t.ends_forward_s + t.ends_backward_s) / layer_s if layer_s else 0.0
        share = profile.entry_share[t.module]
        # Bits of a timing must not move a layer from one segment to another.
        by_degree[t.module, t.model] = (round(both * share, 6), round(both * (1 - share), 6))
    return by_degree
