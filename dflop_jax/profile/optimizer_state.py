"""Parameters of a model with the bytes of their optimizer state, as a profile has them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from dflop_jax.contract import Module, MultimodalModel, stacked_parts
from dflop_jax.profile.traced_parts import param_dims
from dflop_jax.records import ParamDims, layer_key
from dflop_jax.runtime.module_parts import part_struct
from dflop_jax.runtime.update import Optimizer, map_optimizer_state

Tree = Any
FLOAT32_BYTES = 4  # of an element


def parameter_dims(
    model: MultimodalModel, tx: Optimizer | None = None, frozen: Collection[str] = ()
) -> dict[str, Any]:
    """`layer_dims` and `ends_dims` of a model's profile: every parameter, whether it trains (it is
    in no `frozen` group), and the bytes of its state under `tx`; None: under AdamW."""
    layer_dims, ends_dims = {}, {}
    for name, module in model.modules.items():
        stacked = stacked_parts(module)
        for kind in dict.fromkeys(stacked.values()):
            parts = [p for p, k in stacked.items() if k == kind]
            layer_dims[layer_key(name, kind)] = _param_dims(module, parts, tx, frozen)
        ends = [p for p in module.freeze_groups if p not in stacked]
        ends_dims[name] = _param_dims(module, ends, tx, frozen)
    return {"layer_dims": layer_dims, "ends_dims": ends_dims}


def _param_dims(
    module: Module, parts: Sequence[str], tx: Optimizer | None, frozen: Collection[str]
) -> tuple[ParamDims, ...]:
    all_dims: list[ParamDims] = []
    for part in parts:
        dims = param_dims(module, part)
        if tx:
            trains = module.freeze_groups[part] not in frozen
            element_bytes = _state_element_bytes(tx, module, part) if trains else [0.0] * len(dims)
            dims = [
                replace(d, element_state_bytes=element, trains=trains)
                for d, element in zip(dims, element_bytes, strict=True)
            ]
        all_dims += dims
    return tuple(all_dims)


def _state_element_bytes(tx: Optimizer, module: Module, part: str) -> list[float]:
    """Bytes of state for an element of each parameter of a part; state of no parameter, such as a
    count, is left out."""
    structs = part_struct(module, part)
    params = {part: jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), structs)}
    element_bytes = [0.0] * len(jax.tree.leaves(params))

    def add(moments: Tree) -> Tree:
        for i, leaf in enumerate(jax.tree.leaves(moments)):
            element_bytes[i] += leaf.dtype.itemsize
        return moments

    map_optimizer_state(add, lambda leaf: leaf, jax.eval_shape(tx.init, params), params)
    return element_bytes
