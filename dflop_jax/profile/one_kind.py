"""A module as if all of its layers were of one kind: what a layer of that kind costs is asked of it
as of any module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflop_jax.contract import (
    ADAPTER,
    LAYERS,
    Module,
    adapter_of,
    layer_kinds_of,
    layer_of,
    on_chip,
    stacked_parts,
)


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
