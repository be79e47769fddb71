"""Modules with one kind of layers, and segments of a few layers, whose programs are timed or
compiled to price a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from dflop_jax import contract
from dflop_jax.records import MeshShape, Remat, SegmentPlan
from dflop_jax.runtime.layout import device_mesh
from dflop_jax.runtime.module_parts import segment_parts
from dflop_jax.runtime.segment import Segment


def single_kind_modules(module: contract.Module) -> dict[str, contract.Module]:
    """Return the module restricted to each kind of layers, by kind in order of first use."""
    kinds = dict.fromkeys(contract.layer_kinds_of(module))
    return {kind: restrict_to_layer_kind(module, kind) for kind in kinds}


def restrict_to_layer_kind(module: contract.Module, kind: str) -> contract.Module:
    """Return the module restricted to one kind of layers, under the name "layers"."""
    return _SingleKindModule(module, kind) if hasattr(module, "layer_kinds") else module


@dataclass(frozen=True)
class _SingleKindModule:
    module: contract.Module
    kind: str

    def __getattr__(self, name: str) -> Any:
        if name == "layer_kinds":
            raise AttributeError(name)
        value = getattr(self.module, name)
        if name in ("inputs", "freeze_groups"):  # keep this kind and parts that are not stacked
            stacked = contract.stacked_parts(self.module)
            renamed = {self._stacked_part(p): p for p in (contract.LAYERS, contract.ADAPTER)}
            return {
                renamed.get(p, p): v for p, v in value.items() if p in renamed or p not in stacked
            }
        by_kind = name == "attention_flops" or (name == "skips" and isinstance(value, Mapping))
        return value.get(self.kind) if by_kind else value

    def _stacked_part(self, part: str) -> str:
        stacked = {contract.LAYERS: self.kind, contract.ADAPTER: contract.adapter_of(self.kind)}
        return stacked.get(part, part)

    def init(self, part: str, key: Any) -> Any:
        return self.module.init(self._stacked_part(part), key)

    def logical_axes(self, part: str) -> Any:
        return self.module.logical_axes(self._stacked_part(part))

    def layer(self, params: Any, x: Any, batch: Any) -> Any:
        return contract.layer_of(self.module, self.kind)(params, x, batch)

    def on_chip(self, chip: str) -> _SingleKindModule:
        return _SingleKindModule(contract.on_chip(self.module, chip), self.kind)


@dataclass(frozen=True)
class _ShallowModule:
    """A module with all taps moved to the first layer or before."""

    module: contract.Module

    @property
    def taps(self) -> dict[str, int]:
        return {name: min(leaves, 1) for name, leaves in contract.taps_of(self.module).items()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def shallow_segment(
    model: contract.MultimodalModel,
    module: str,
    depth: int,
    devices: Sequence[jax.Device],
    mesh_shape: MeshShape,
    remat: Remat = "none",
    *,
    ends: bool = True,
    kind: str = "",
) -> Segment:
    """Return a segment of `depth` layers of a module, all of one kind ("": the first layer's kind).
    With `ends`, all edges and taps are at the first layer, so that every depth runs them once;
    without, the segment has only inner layers."""
    edges = [
        replace(e, leaves=min(e.leaves, 1), enters=min(e.enters, 1))
        for e in contract.edges_of(model)
    ]
    first = 0 if ends else 2  # after the edges that enter after the first layer
    plan = SegmentPlan(module, module, first, first + depth, module, ends, ends, remat)
    on_chip: Any = contract.on_chip(model.modules[module], contract.chip_of(devices[0]))
    single_kind: Any = restrict_to_layer_kind(on_chip, kind or contract.layer_kinds_of(on_chip)[0])
    single_kind = _ShallowModule(single_kind) if contract.taps_of(single_kind) else single_kind
    received = {e.name for e in edges if plan.reads(e)} if ends else {"hidden"}
    return Segment(
        plan=plan,
        module=single_kind,
        mesh=device_mesh(mesh_shape, devices),
        microbatches=1,
        trainable=frozenset(segment_parts(plan, single_kind)),
        wants_gradient=frozenset(received),
        edges=tuple(e for e in edges if plan.reads(e) or plan.sends(e)),
    )
