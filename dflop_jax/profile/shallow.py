"""A module as if all of its layers were of one kind, and a few of them as a segment: what is timed,
or compiled, to know what a layer costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from dflop_jax.contract import (
    ADAPTER,
    LAYERS,
    Module,
    MultimodalModel,
    adapter_of,
    chip_of,
    edges_of,
    layer_kinds_of,
    layer_of,
    on_chip,
    stacked_parts,
    taps_of,
)
from dflop_jax.records import MeshShape, Remat, SegmentPlan
from dflop_jax.runtime.layout import device_mesh
from dflop_jax.runtime.module_parts import parts_of
from dflop_jax.runtime.segment import Segment


def kinds_apart(module: Module) -> dict[str, Module]:
    """By kind, in the order in which they come first, the module with layers of that kind alone;
    itself where there is one kind that has no name."""
    kinds = dict.fromkeys(layer_kinds_of(module))
    return {kind: of_kind(module, kind) for kind in kinds}


def of_kind(module: Module, kind: str) -> Module:
    """The module with layers of one kind alone, which are its part "layers"."""
    return _OneKind(module, kind) if hasattr(module, "layer_kinds") else module


@dataclass(frozen=True)
class _OneKind:
    module: Module
    kind: str

    def __getattr__(self, name: str) -> Any:
        if name == "layer_kinds":
            raise AttributeError(name)
        value = getattr(self.module, name)
        by_kind = name == "attention_flops" or (name == "skips" and isinstance(value, Mapping))
        return value.get(self.kind) if by_kind else value

    def _by_part(self, of_module: Mapping[str, Any]) -> dict[str, Any]:
        """What a mapping by part says of this kind's parts, and of those that are not stacked."""
        stacked = stacked_parts(self.module)
        own = {self.kind: LAYERS, adapter_of(self.kind): ADAPTER}
        return {own.get(p, p): v for p, v in of_module.items() if p in own or p not in stacked}

    @property
    def inputs(self) -> Mapping[str, tuple[str, ...]]:
        return self._by_part(self.module.inputs)

    @property
    def freeze_groups(self) -> Mapping[str, str]:
        return self._by_part(self.module.freeze_groups)

    def _part(self, part: str) -> str:
        return {LAYERS: self.kind, ADAPTER: adapter_of(self.kind)}.get(part, part)

    def init(self, part: str, key: Any) -> Any:
        return self.module.init(self._part(part), key)

    def logical_axes(self, part: str) -> Any:
        return self.module.logical_axes(self._part(part))

    def layer(self, params: Any, x: Any, batch: Any) -> Any:
        return layer_of(self.module, self.kind)(params, x, batch)

    def on_chip(self, chip: str) -> _OneKind:
        return _OneKind(on_chip(self.module, chip), self.kind)


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
