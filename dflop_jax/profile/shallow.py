"""A few layers of a module as a segment: what is timed, or compiled, to know what a layer costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from dflop_jax.contract import (
    Module,
    MultimodalModel,
    chip_of,
    edges_of,
    layer_kinds_of,
    on_chip,
    taps_of,
)
from dflop_jax.pipeline.layout import device_mesh
from dflop_jax.pipeline.parts import parts_of
from dflop_jax.pipeline.segment import Segment
from dflop_jax.profile.one_kind import of_kind
from dflop_jax.records import MeshShape, Remat, SegmentPlan


@dataclass(frozen=True)
class _Shallow:
    """A module whose taps all leave after the first layer at the latest."""

    module: Module

    @property
    def taps(self) -> dict[str, int]:
        return {name: min(leaves, 1) for name, leaves in taps_of(self.module).items()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def shallow_segment(
    model: MultimodalModel,
    module: str,
    depth: int,
    devices: Sequence[jax.Device],
    mesh_shape: MeshShape,
    remat: Remat = "none",
    *,
    ends: bool = True,
    kind: str = "",
) -> Segment:
    """`depth` layers of a module, all of one kind (""; of its first layer's): the first, with all
    that leaves and enters it, or, without `ends`, layers between others.

    What leaves or enters deeper is moved to the first layer, so that every depth runs it once.
    """
    edges = tuple(
        replace(e, leaves=min(e.leaves, 1), enters=min(e.enters, 1)) for e in edges_of(model)
    )
    first = 0 if ends else 2  # behind what enters after the first layer
    plan = SegmentPlan(module, module, first, first + depth, module, ends, ends, remat)
    own = on_chip(model.modules[module], chip_of(devices[0]))
    spec: Any = of_kind(own, kind or layer_kinds_of(own)[0])
    spec = _Shallow(spec) if taps_of(spec) else spec
    received = {e.name for e in edges if plan.reads(e)} if ends else {"hidden"}
    return Segment(
        plan=plan,
        module=spec,
        mesh=device_mesh(mesh_shape, devices),
        microbatches=1,
        trainable=frozenset(parts_of(plan, spec)),
        wants_gradient=frozenset(received),
        edges=tuple(e for e in edges if plan.reads(e) or plan.sends(e)),
    )
