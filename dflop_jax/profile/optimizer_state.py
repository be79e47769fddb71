"""What an optimizer keeps of every parameter, as a profile has it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from dflop_jax.contract import Module, MultimodalModel, n_rows, stacked_parts
from dflop_jax.pipeline.parts import part_struct
from dflop_jax.pipeline.update import Optimizer, map_state
from dflop_jax.profile.parts import param_dims
from dflop_jax.records import ModelProfile, ParamDims, layer_key

Tree = Any
FLOAT32_BYTES = 4  # of an element


def with_optimizer(
    profile: ModelProfile, model: MultimodalModel, tx: Optimizer, frozen: Collection[str] = ()
) -> ModelProfile:
    """A model's profile that says which parameters train, being in no `frozen` group, and what `tx`
    keeps of them."""
    layer_dims, ends_dims = dict(profile.layer_dims), dict(profile.ends_dims)
    for name, module in model.modules.items():
        stacked = stacked_parts(module)
        for kind in dict.fromkeys(stacked.values()):
            parts = [p for p, k in stacked.items() if k == kind]
            layer_dims[layer_key(name, kind)] = _dims(module, parts, tx, frozen)
        ends = [p for p in module.freeze_groups if p not in stacked]
        ends_dims[name] = _dims(module, ends, tx, frozen)
    return replace(profile, layer_dims=layer_dims, ends_dims=ends_dims)


def part_state_bytes(module: Module, part: str, tx: Optimizer) -> float:
    """Bytes of all that `tx` keeps of a part, of all layers if it is stacked."""
    n = n_rows(module, part) if part in stacked_parts(module) else 1
    dims = _dims(module, (part,), tx, ())
    return n * sum(prod(d.sizes) * d.element_state_bytes for d in dims)


def _dims(
    module: Module, parts: Sequence[str], tx: Optimizer, frozen: Collection[str]
) -> tuple[ParamDims, ...]:
    known = []
    for part in parts:
        dims = param_dims(module, (part,))
        trains = module.freeze_groups[part] not in frozen
        kept_bytes = _kept_bytes(tx, module, part) if trains else [0.0] * len(dims)
        known += [
            replace(d, element_state_bytes=element, trains=trains)
            for d, element in zip(dims, kept_bytes, strict=True)
        ]
    return tuple(known)


def _kept_bytes(tx: Optimizer, module: Module, part: str) -> list[float]:
    """Bytes of each element's state of each parameter of a part; what belongs to none, such as a
    count, is left out."""
    structs = part_struct(module, part)
    params = {part: jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), structs)}
    total = [0.0] * len(jax.tree.leaves(params))

    def add(moments: Tree) -> Tree:
        for i, leaf in enumerate(jax.tree.leaves(moments)):
            total[i] += leaf.dtype.itemsize
        return moments

    map_state(add, lambda leaf: leaf, jax.eval_shape(tx.init, params), params)
    return total
