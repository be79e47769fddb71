"""Names the parts of a module, and the structs of their inputs and outputs on one data rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
UNIFORM_MODULE_PARTS = ("entry", LAYERS, "exit")  # of a module whose layers are of one kind
KEY_IMPL = "rbg"  # PRNG of fresh parameters; it compiles several times faster than threefry


def segment_parts(s: SegmentPlan, module: Module) -> tuple[str, ...]:
    """Return the parts of its module that a segment owns."""
    kinds = segment_layer_kinds(s, module)
    stacked = [part for part, kind in stacked_parts(module).items() if kind in kinds]
    ends = ["entry"] if s.first else []
    exits = ["exit"] if s.last else []
    for name, layers in taps_of(module).items():
        exits += [name] if name in module.inputs and s.runs_through(layers) else []
    adapters = [a for a in map(adapter_of, ends + exits) if a in module.freeze_groups]
    layers_first = [part for part in stacked if part in kinds]
    return tuple(dict.fromkeys([*ends, *layers_first, *exits, *stacked, *adapters]))


def segment_layer_kinds(s: SegmentPlan, module: Module) -> tuple[str, ...]:
    """Return the kinds of a segment's layers."""
    return layer_kinds_until(s, module)[s.start :]


def layer_kinds_until(s: SegmentPlan, module: Module) -> tuple[str, ...]:
    """Return the kinds of a module's layers up to the segment's last one."""
    kinds: tuple[str, ...] = getattr(module, "layer_kinds", (LAYERS,) * s.stop)
    return kinds[: s.stop]


@partial(jax.jit, static_argnums=(0, 1))
def init_part(module: Module, part: str, key: Array) -> Params:
    """Return fresh parameters of a part; of one layer if the part is stacked."""
    return module.init(part, key)


# The functions below are called for every segment, shape and program, so their results are cached.


@lru_cache(maxsize=256)
def part_struct(module: Module, part: str) -> Params:
    """Return structs of a part, or of one of its layers, in the module's working dtypes."""
    float32 = float32_names_of(module)

    def working(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        stays = last_key(path) in float32 or not jnp.issubdtype(leaf.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype if stays else working_dtype_of(module))

    # Uses the jitted `init_part`, whose trace is then cached for the actual draw.
    drawn = init_part.eval_shape(module, part, jax.random.key(0, impl=KEY_IMPL))
    return jax.tree.map_with_path(working, drawn)


def module_structs(module: Module, sharding: jax.sharding.Sharding | None = None) -> Params:
    """Return `part_struct` of all parts of a module, with layers stacked."""

    def stack(part: str, a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        lead = (n_stacked_layers(module, part),) if part in stacked_parts(module) else ()
        return jax.ShapeDtypeStruct((*lead, *a.shape), a.dtype, sharding=sharding)

    return {p: jax.tree.map(partial(stack, p), part_struct(module, p)) for p in module.inputs}


@lru_cache(maxsize=256)
def logical_axes(module: Module, part: str) -> Params:
    return module.logical_axes(part)


@lru_cache(maxsize=1024)
def hidden_struct(module: Module, shape: Shape) -> Tree:
    """Return structs of the hidden states between layers: one array or a tree of arrays."""
    fields = _field_structs(module, "entry", shape)
    return jax.eval_shape(module.entry, part_struct(module, "entry"), fields)


@lru_cache(maxsize=1024)
def tap_struct(module: Module, name: str, shape: Shape) -> jax.ShapeDtypeStruct:
    fields = {
        k: struct
        for part in ("entry", *dict.fromkeys(layer_kinds_of(module)), name)
        for k, struct in _field_structs(module, part, shape).items()
    }
    params = part_struct(module, name) if name in module.inputs else None
    tap: Any = module.tap  # type: ignore[attr-defined]
    return jax.eval_shape(partial(tap, name), params, hidden_struct(module, shape), fields)


@lru_cache(maxsize=1024)
def exit_struct(module: Module, shape: Shape) -> Tree:
    """Return structs of the exit's output: features, or a loss's sums by name."""
    fields, hidden = _field_structs(module, "exit", shape), hidden_struct(module, shape)
    entry = part_struct(module, "entry") if module.tied else None
    return jax.eval_shape(module.exit, part_struct(module, "exit"), hidden, fields, entry)


def _field_structs(module: Module, part: str, shape: Shape) -> dict[str, jax.ShapeDtypeStruct]:
    names = module.inputs.get(part, ())
    return {n: module.field_spec(n, shape.rows, shape.tokens) for n in names}


# ---- loops over repeated periods of layer kinds, which compile less code ----


@dataclass(frozen=True)
class LayerLoop:
    """A loop that runs the layers of `period` `repeats` times, from layer number `start` on."""

    start: int
    period: tuple[Any, ...]
    repeats: int

    @property
    def stop(self) -> int:
        return self.start + len(self.period) * self.repeats

    def rows(self, kinds: Sequence[Any]) -> tuple[range, ...]:
        """Return the rows of each period layer's repeats in the stack of its kind."""
        rows = []
        for j, kind in enumerate(self.period):
            step, first = self.period.count(kind), kinds[: self.start + j].count(kind)
            rows.append(range(first, first + step * self.repeats, step))
        return tuple(rows)


@lru_cache(maxsize=1024)
def split_into_loops(kinds: Sequence[Any]) -> tuple[LayerLoop, ...]:
    """Return loops that run layers of these kinds in order. The sum of their periods is minimal;
    among equal sums, the number of loops is minimal.

    Solved as a shortest path between layer numbers, with O(n^2 log n) comparisons of periods.
    """
    kinds, n = tuple(kinds), len(kinds)
    # Up to each layer: (compiled layers, loops) of the shortest path, and its last loop.
    shortest: list[tuple[int, int, LayerLoop | None]] = [(0, 0, None)]
    shortest += [(n + 1, n + 1, None)] * n
    for i in range(n):
        layers, loops, _ = shortest[i]
        for size in range(1, n - i + 1):
            period = kinds[i : i + size]
            stop = i + size
            while kinds[stop - size : stop] == period:
                cost = layers + size, loops + 1
                if cost < shortest[stop][:2]:
                    shortest[stop] = (*cost, LayerLoop(i, period, (stop - i) // size))
                stop += size
                if stop > n:
                    break
    path: list[LayerLoop] = []
    while n:
        last = shortest[n][2]
        assert last is not None
        path.append(last)
        n = last.start
    return tuple(reversed(path))
