"""Which devices and parallelism a plan may give to encoder and LLM: the search space, as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from dflop_jax.records import SegmentPlan, SubmeshPlan


@dataclass(frozen=True)
class Placement:
    """Submeshes and segments without buckets; `group_size` fits the stages inside segments."""

    submeshes: tuple[SubmeshPlan, ...]
    segments: tuple[SegmentPlan, ...]
    group_size: int

    def mesh_of(self, segment: SegmentPlan) -> SubmeshPlan:
        return next(m for m in self.submeshes if m.name == segment.submesh)

    @property
    def name(self) -> str:
        """Short and unique: module=stage x data x model on how many segments."""
        seen: dict[str, list[SegmentPlan]] = {}
        for s in self.segments:
            seen.setdefault(s.module, []).append(s)
        parts = []
        for module, segs in seen.items():
            m = self.mesh_of(segs[0])
            many = f"{len(segs)}*" if len(segs) > 1 else ""
            parts.append(f"{module}={many}{m.stage}x{m.data}x{m.model}@{m.first}")
        return " ".join(parts)


def factors(n: int, most: int) -> list[int]:
    """Divisors of n up to `most`."""
    return [d for d in range(1, min(n, most) + 1) if n % d == 0]


def split_layers(n_layers: int, parts: int) -> list[tuple[int, int]]:
    """[start, stop) of `parts` runs as even as whole layers allow, longer ones first."""
    cuts = [0]
    for i in range(parts):
        cuts.append(cuts[-1] + n_layers // parts + (i < n_layers % parts))
    return list(pairwise(cuts))


def _module_segments(
    module: str, n_layers: int, first: int, mesh: tuple[int, int, int], n_segments: int
) -> tuple[tuple[SubmeshPlan, ...], tuple[SegmentPlan, ...]]:
    """A module over `n_segments` equal submeshes side by side."""
    size = mesh[0] * mesh[1] * mesh[2]
    names = [module if n_segments == 1 else f"{module}{i}" for i in range(n_segments)]
    runs = split_layers(n_layers, n_segments)
    return (
        tuple(SubmeshPlan(n, first + i * size, *mesh) for i, n in enumerate(names)),
        tuple(
            SegmentPlan(n, module, a, b, n, i == 0, i == n_segments - 1)
            for i, (n, (a, b)) in enumerate(zip(names, runs, strict=True))
        ),
    )


def _encoder_segments(
    n_layers: Mapping[str, int], n_devices: int, degrees: Sequence[int]
) -> tuple[tuple[SubmeshPlan, ...], tuple[SegmentPlan, ...]]:
    """The encoders on the first devices, which they share, each with a tensor-parallel degree of
    its own; nothing for a model without."""
    meshes: tuple[SubmeshPlan, ...] = ()
    segments: tuple[SegmentPlan, ...] = ()
    for module, tp in zip(_encoders(n_layers), degrees, strict=True):
        mesh = (1, n_devices // tp, tp)
        more = _module_segments(module, n_layers[module], 0, mesh, 1)
        meshes, segments = meshes + more[0], segments + more[1]
    return meshes, segments


def _encoders(n_layers: Mapping[str, int]) -> list[str]:
    return [m for m in n_layers if m != "llm"]


def separate(
    n_devices: int,
    n_layers: Mapping[str, int],
    *,
    max_model: int,
    max_stage: int,
    tied: bool,
) -> Iterator[Placement]:
    """DFLOP: encoders and LLM on disjoint devices, each with its own (stage, data, model).

    An LLM pipeline of depth s comes as one segment with stage=s and, unless head and embedding are
    tied, as s segments. A model without encoder gets all devices for the LLM.
    """
    encoders = _encoders(n_layers)
    for below in range(1, n_devices) if encoders else (0,):
        for_llm = n_devices - below
        for degrees in product(factors(below, max_model), repeat=len(encoders)):
            low = _encoder_segments(n_layers, below, degrees)
            for stages in factors(for_llm, max_stage):
                for tp in factors(for_llm // stages, max_model):
                    data = for_llm // stages // tp
                    forms = []
                    if n_layers["llm"] % stages == 0:
                        forms.append((1, (stages, data, tp)))
                    if 1 < stages <= n_layers["llm"] and not tied:
                        forms.append((stages, (1, data, tp)))
                    for n_segments, mesh in forms:
                        high = _module_segments("llm", n_layers["llm"], below, mesh, n_segments)
                        yield Placement(low[0] + high[0], low[1] + high[1], mesh[0])


def shared(
    n_devices: int,
    n_layers: Mapping[str, int],
    *,
    max_model: int,
    max_stage: int,
    tied: bool,
) -> Iterator[Placement]:
    """OrchMLLM: every module on all devices, each with its own parallelism, one after the other.

    The encoders' items and the LLM's rows are balanced over the ranks separately.
    """
    encoders = _encoders(n_layers)
    for degrees in product(factors(n_devices, max_model), repeat=len(encoders)):
        low = _encoder_segments(n_layers, n_devices, degrees)
        for stages in factors(n_devices, max_stage):
            if n_layers["llm"] % stages:
                continue
            for tp in factors(n_devices // stages, max_model):
                mesh = (stages, n_devices // stages // tp, tp)
                high = _module_segments("llm", n_layers["llm"], 0, mesh, 1)
                yield Placement(low[0] + high[0], low[1] + high[1], stages)


def uniform(
    n_devices: int,
    n_layers: Mapping[str, int],
    *,
    max_model: int,
    max_stage: int,
    tied: bool,
) -> Iterator[Placement]:
    """Blind baseline: one (stage, data, model) for the whole model.

    The encoders are the first pipeline stage and the LLM's layers fill the others evenly; with one
    stage everything shares all devices.
    """
    encoders = _encoders(n_layers)
    for stages in factors(n_devices, max_stage):
        llm_stages = stages - bool(encoders) if stages > 1 else 1
        if llm_stages < 1 or llm_stages > n_layers["llm"] or (tied and llm_stages > 1):
            continue
        for tp in factors(n_devices // stages, max_model):
            mesh = (1, n_devices // stages // tp, tp)
            low = _encoder_segments(n_layers, n_devices // stages, [tp] * len(encoders))
            first = n_devices // stages if encoders and stages > 1 else 0
            high = _module_segments("llm", n_layers["llm"], first, mesh, llm_stages)
            yield Placement(low[0] + high[0], low[1] + high[1], 1)
