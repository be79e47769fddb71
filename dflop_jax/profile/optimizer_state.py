"""What an optimizer keeps of every parameter, as a profile has it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import ceil, prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dflop_jax.contract import Module, MultimodalModel, n_rows, stacked_parts
from dflop_jax.pipeline.by_layer import Averaged, LayerOptimizer, Optimizer, kept, published_structs
from dflop_jax.pipeline.elementwise import map_state
from dflop_jax.pipeline.parts import part_struct
from dflop_jax.profile.parts import param_dims
from dflop_jax.records import ModelProfile, ParamDims, layer_key

Tree = Any
AVERAGE_BYTES = FLOAT32_BYTES = 4  # of an element


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
    return n * sum(prod(d.sizes) * d.element_state_bytes + d.whole_state_bytes for d in dims)


def _dims(
    module: Module, parts: Sequence[str], tx: Optimizer, frozen: Collection[str]
) -> tuple[ParamDims, ...]:
    known = []
    for part in parts:
        dims = param_dims(module, (part,))
        trains = module.freeze_groups[part] not in frozen
        kept_bytes = _kept_bytes(tx, module, part) if trains else [(0.0, 0.0)] * len(dims)
        moments = _layer_moments(tx, module, part) if trains else [-1] * len(dims)
        known += [
            replace(
                d, element_state_bytes=element, whole_state_bytes=whole, trains=trains,
                layer_moments=n,
            )
            for d, (element, whole), n in zip(dims, kept_bytes, moments, strict=True)
        ]  # fmt: skip
    return tuple(known)


def _kept_bytes(tx: Optimizer, module: Module, part: str) -> list[tuple[float, float]]:
    """(bytes of each element's state, bytes of a layer's own state) of each parameter of a part."""
    if isinstance(tx, Averaged):
        kept_by_stepping = _kept_bytes(tx.stepping, module, part)
        return [(element + AVERAGE_BYTES, whole) for element, whole in kept_by_stepping]
    structs = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), part_struct(module, part)
    )
    if not isinstance(tx, LayerOptimizer):
        return _of_state(tx, {part: structs})
    takes = tx.takes(module, part)
    rest = jax.tree.map(lambda yes: not yes, takes)
    by_element = iter(_of_state(tx.rest, {part: kept(rest, structs)}))
    whole = iter(_of_state(tx.whole, {part: kept(takes, published_structs(module, part))}))
    return [next(whole if yes else by_element) for yes in jax.tree.leaves(takes)]


def _layer_moments(tx: Optimizer, module: Module, part: str) -> list[int]:
    """`ParamDims.layer_moments` of each parameter of a part."""
    stepping = tx.stepping if isinstance(tx, Averaged) else tx
    of_elements = [element for element, _ in _kept_bytes(stepping, module, part)]
    if not isinstance(stepping, LayerOptimizer):
        return [-1] * len(of_elements)
    taken = jax.tree.leaves(stepping.takes(module, part))
    return [
        ceil(element / FLOAT32_BYTES) if yes else -1
        for yes, element in zip(taken, of_elements, strict=True)
    ]


def _of_state(tx: optax.GradientTransformation, params: Tree) -> list[tuple[float, float]]:
    """`_kept_bytes` of every leaf of `params`; what belongs to none, such as a count, is left
    out."""
    total = [np.zeros(2) for _ in jax.tree.leaves(params)]

    def add(moments: Tree) -> Tree:
        leaves = zip(jax.tree.leaves(moments), jax.tree.leaves(params), strict=True)
        for i, (leaf, param) in enumerate(leaves):
            size = leaf.dtype.itemsize
            alike = leaf.shape == param.shape
            total[i] += (size, 0.0) if alike else (0.0, size * prod(leaf.shape))
        return moments

    map_state(add, lambda leaf: leaf, jax.eval_shape(tx.init, params), params)
    return [(float(element), float(whole)) for element, whole in total]
