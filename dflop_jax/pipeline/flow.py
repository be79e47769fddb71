"""What a segment takes and gives at a per-rank shape, as sharded structs."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from dflop_jax.pipeline.parts import exit_struct, hidden_struct, tap_struct
from dflop_jax.pipeline.segment import Segment
from dflop_jax.pipeline.token_split import rows_and_tokens, token_spec
from dflop_jax.records import Edge, Shape

Tree = Any


def device_bytes(structs: Tree) -> float:
    """Bytes that arrays of these structs take on one device."""
    total = 0.0
    for s in jax.tree.leaves(structs):
        total += s.dtype.itemsize * prod(s.sharding.shard_shape(s.shape))
    return total


def field_names(s: Segment) -> tuple[str, ...]:
    """Fields that come from the packer; what edges bring is not among them."""
    edges = {e.name for e in s.edges if e.target == s.plan.module}
    names = [n for part in s.own_parts for n in s.module.inputs[part]]
    return tuple(dict.fromkeys(n for n in names if n not in edges))


def field_structs(s: Segment, shape: Shape) -> dict[str, jax.ShapeDtypeStruct]:
    """Fields of a group."""
    return {
        n: _global(s, s.module.field_spec(n, shape.rows, shape.tokens), None, "data")
        for n in field_names(s)
    }


def x_structs(s: Segment, shape: Shape) -> dict[str, Tree]:
    """What the segment receives: "hidden" from the one before it, and what edges bring."""
    placed = {
        name: _global(s, s.module.field_spec(name, shape.rows, shape.tokens), None, "data")
        for name in (*s.entry_inputs, *(name for name, _ in s.inlets))
    }
    return placed if s.plan.first else {"hidden": _hidden(s, shape), **placed}


def y_structs(s: Segment, shape: Shape, *, sums: bool = False) -> dict[str, Tree]:
    """What the segment gives: "next", "exit", "taps", and its loss's "sums" if wanted."""
    y: dict[str, Tree] = {}
    if s.taps:
        y["taps"] = {
            name: _global(s, tap_struct(s.module, name, shape), "stage", "data")
            for name, _ in s.taps
        }
    if not s.plan.last:
        # As the next segment takes it, so that the transfer is a copy of equal pieces.
        return {**y, "next": _hidden(s, shape)}
    if not s.has_loss:
        return {**y, "exit": _global(s, exit_struct(s.module, shape), "stage", "data")}
    if not sums:
        return y
    each = jax.ShapeDtypeStruct(
        (s.microbatches, s.data_ranks), jnp.float32, sharding=s.sharding("stage", "data")
    )
    return {**y, "sums": dict.fromkeys(s.loss_sums, each)}


def output_struct(s: Segment, edge: Edge, shape: Shape) -> jax.ShapeDtypeStruct:
    """What an edge takes from the segment: features of its exit, or of a tap."""
    y = y_structs(s, shape)
    return y["taps"][edge.tap] if edge.tap else y["exit"]


def _hidden(s: Segment, shape: Shape) -> Tree:
    """Hidden states between segments."""
    structs = hidden_struct(s.module, shape)
    ways = s.tensor_ranks if s.passes_split else 1
    by_rows, by_tokens = token_spec(*rows_and_tokens(structs), ways)
    spec = None, ("data", by_rows) if by_rows else "data", by_tokens
    return jax.tree.map(lambda a: _global(s, a, *spec), structs)


def _global(s: Segment, struct: jax.ShapeDtypeStruct, *spec: Any) -> jax.ShapeDtypeStruct:
    """Of one data rank's microbatch, that of all ranks and microbatches."""
    rows, *rest = struct.shape
    shape = (s.microbatches, s.data_ranks * rows, *rest)
    return jax.ShapeDtypeStruct(shape, struct.dtype, sharding=s.sharding(*spec))
