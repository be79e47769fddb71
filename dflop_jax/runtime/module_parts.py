"""Parts of a module: their names, and structs of their inputs and outputs on one data rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from dflop_jax.contract import (
    LAYERS,
    Array,
    Module,
    Params,
    adapter_of,
    float32_names_of,
    last_key,
    layer_kinds_of,
    n_stacked_layers,
    stacked_parts,
    taps_of,
    working_dtype_of,
)
from dflop_jax.records import SegmentPlan, Shape

Tree = Any
UNIFORM_MODULE_PARTS = ("entry", LAYERS, "exit")  # of every module whose layers are of one kind
KEY_IMPL = "rbg"  # of the keys of fresh parameters: compiles several times faster than threefry


def segment_parts(s: SegmentPlan, module: Module) -> tuple[str, ...]:
    """The parts of its module that a segment owns."""
    kinds = segment_layer_kinds(s, module)
    stacked = {part: kind in kinds for part, kind in stacked_parts(module).items()}
    layer_parts = {part: is_read for part, is_read in stacked.items() if part in kinds}
    read_by_segment = {"entry": s.first, **layer_parts, "exit": s.last}
    for name, layers in taps_of(module).items():
        read_by_segment[name] = name in module.inputs and s.runs_through(layers)
    adapters = {
        adapter_of(part): is_read for part, is_read in read_by_segment.items() if part not in kinds
    }
    adapters = {part: is_read for part, is_read in adapters.items() if part in module.freeze_groups}
    return tuple(
        part for part, is_read in {**read_by_segment, **stacked, **adapters}.items() if is_read
    )


def segment_layer_kinds(s: SegmentPlan, module: Module) -> tuple[str, ...]:
    """The kinds of a segment's layers."""
    return layer_kinds_until(s, module)[s.start :]


def layer_kinds_until(s: SegmentPlan, module: Module) -> tuple[str, ...]:
    """The kinds of a module's layers up to the last one of a segment."""
    kinds: tuple[str, ...] = getattr(module, "layer_kinds", (LAYERS,) * s.stop)
    return kinds[: s.stop]


@partial(jax.jit, static_argnums=(0, 1))
def init_part(module: Module, part: str, key: Array) -> Params:
    """Fresh parameters of a part of a module; of one layer for a stacked part."""
    return module.init(part, key)


# The functions below are called for every segment, shape and program, so their results are cached.


@lru_cache(maxsize=256)
def part_struct(module: Module, part: str) -> Params:
    """Structs of a part, or of one layer of it, in the dtypes that the module's functions get."""

    float32 = float32_names_of(module)

    def working(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        stays = last_key(path) in float32 or not jnp.issubdtype(leaf.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype if stays else working_dtype_of(module))

    # By `init_part`, which then is not traced again where it runs.
    drawn = init_part.eval_shape(module, part, jax.random.key(0, impl=KEY_IMPL))
    return jax.tree.map_with_path(working, drawn)


def module_structs(
    module: Module,
    struct_of: Callable[[Module, str], Params] = part_struct,
    sharding: jax.sharding.Sharding | None = None,
) -> Params:
    """All parts of a module, layers stacked, with the shapes and dtypes that `struct_of` gives."""

    def structs(part: str) -> Params:
        lead = (n_stacked_layers(module, part),) if part in stacked_parts(module) else ()
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((*lead, *a.shape), a.dtype, sharding=sharding),
            struct_of(module, part),
        )

    return {part: structs(part) for part in module.inputs}


@lru_cache(maxsize=256)
def logical_axes(module: Module, part: str) -> Params:
    return module.logical_axes(part)


@lru_cache(maxsize=1024)
def hidden_struct(module: Module, shape: Shape) -> Tree:
    """Hidden states between layers: an array, or a tree of them."""
    fields = _field_structs(module, "entry", shape)
    return jax.eval_shape(module.entry, part_struct(module, "entry"), fields)


@lru_cache(maxsize=1024)
def tap_struct(module: Module, name: str, shape: Shape) -> jax.ShapeDtypeStruct:
    """The struct of a tap's output."""
    fields = {k: struct for part in ("entry", *dict.fromkeys(layer_kinds_of(module)), name)
              for k, struct in _field_structs(module, part, shape).items()}  # fmt: skip
    params = part_struct(module, name) if name in module.inputs else None
    tap: Any = module.tap  # type: ignore[attr-defined]
    return jax.eval_shape(partial(tap, name), params, hidden_struct(module, shape), fields)


@lru_cache(maxsize=1024)
def exit_struct(module: Module, shape: Shape) -> Tree:
    """Structs of the exit's output: features, or a loss's sums by name."""
    fields, hidden = _field_structs(module, "exit", shape), hidden_struct(module, shape)
    entry = part_struct(module, "entry") if module.tied else None
    return jax.eval_shape(module.exit, part_struct(module, "exit"), hidden, fields, entry)


def _field_structs(module: Module, part: str, shape: Shape) -> dict[str, jax.ShapeDtypeStruct]:
    names = module.inputs.get(part, ())
    return {n: module.field_spec(n, shape.rows, shape.tokens) for n in names}
