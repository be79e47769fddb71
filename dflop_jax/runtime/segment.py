"""A segment on its submesh: its static properties, its inputs and its outputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dflop_jax.contract import Module, chip_of, stacked_parts
from dflop_jax.records import Direction, Edge, SegmentPlan, Shape
from dflop_jax.runtime.module_parts import (
    exit_struct,
    hidden_struct,
    layer_kinds_until,
    segment_layer_kinds,
    segment_parts,
    tap_struct,
)
from dflop_jax.runtime.token_split import rows_and_tokens, token_spec

Tree = Any
# "evaluate" is a forward program that also returns the loss's sums.
ProgramKind = Direction | Literal["evaluate"]
EVALUATE: Literal["evaluate"] = "evaluate"


def max_unrolled_layers(chip: str) -> int:
    """Return how many layers to unroll: GPUs compile 8 in a minute, CPUs copy cheaply in loops."""
    return 8 if chip.startswith("sm_") else 0


@dataclass(frozen=True)
class Segment:
    """Static properties; `parameter_layout` has the parameters and `lowering` the programs."""

    plan: SegmentPlan
    module: Module
    mesh: Mesh
    microbatches: int  # of a group
    trainable: frozenset[str]  # own parts, and the shared entry, that get gradients
    wants_gradient: frozenset[str] = frozenset()  # names of inputs whose source needs a gradient
    edges: tuple[Edge, ...] = ()  # the model's edges that leave or enter this segment
    # Whether it reads its module's entry parameters, which another segment owns (tied head).
    shares_entry: bool = False
    # Whether hidden states between it and its module's other segments are split over tensor ranks;
    # all these segments then have the same degree.
    passes_sharded: bool = True

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def owned_parts(self) -> tuple[str, ...]:
        """Parts that the segment updates and saves."""
        return segment_parts(self.plan, self.module)

    @property
    def read_parts(self) -> tuple[str, ...]:
        """Parts that its programs read: owned parts, and the entry if it is shared."""
        return (*self.owned_parts, *(("entry",) if self.shares_entry else ()))

    @property
    def stages(self) -> int:
        return self.mesh.shape["stage"]

    @property
    def data_ranks(self) -> int:
        return self.mesh.shape["data"]

    @property
    def tp(self) -> int:
        return self.mesh.shape["model"]

    @property
    def is_on_cpu(self) -> bool:
        return self.mesh.devices.flat[0].platform == "cpu"

    @property
    def chip(self) -> str:
        return chip_of(self.mesh.devices.flat[0])

    def sharding(self, *spec: Any) -> NamedSharding:
        return NamedSharding(self.mesh, P(*spec))

    @cached_property
    def outgoing(self) -> tuple[Edge, ...]:
        return tuple(e for e in self.edges if self.plan.sends(e))

    @cached_property
    def entry_inputs(self) -> tuple[str, ...]:
        """Names of the edges that the entry reads."""
        names = (e.name for e in self.edges if e.enters < 0 and self.plan.reads(e))
        return tuple(dict.fromkeys(names))

    @cached_property
    def inlets(self) -> tuple[tuple[str, int], ...]:
        """(name, layers of the segment that run before) of the edges that enter between layers."""
        edges = (e for e in self.edges if e.enters >= 0 and self.plan.reads(e))
        return tuple(dict.fromkeys((e.name, e.enters - self.plan.start) for e in edges))

    @cached_property
    def taps(self) -> tuple[tuple[str, int], ...]:
        """(name, layers of the segment that run before) of the taps that edges leave from."""
        edges = (e for e in self.outgoing if e.tap)
        return tuple(dict.fromkeys((e.tap, e.leaves - self.plan.start) for e in edges))

    @property
    def chunk_layers(self) -> int:
        """See `SegmentPlan.chunk_layers`."""
        return self.plan.chunk_layers(self.stages)

    @cached_property
    def layer_order(self) -> tuple[int, ...]:
        """Layer numbers of the module in stored order: by stage, then by round. With one round, the
        stages hold consecutive layers."""
        n, stages, rounds = self.chunk_layers, range(self.stages), range(self.plan.rounds)
        firsts = (self.plan.start + (r * self.stages + s) * n for s in stages for r in rounds)
        return tuple(first + i for first in firsts for i in range(n))

    @cached_property
    def chunk_kinds(self) -> tuple[str, ...]:
        """Kinds of a stage's layers in one round, equal for all stages."""
        return segment_layer_kinds(self.plan, self.module)[: self.chunk_layers]

    @cached_property
    def stacked(self) -> dict[str, str]:
        """The stacked parts that its programs read, each with the kind of its layers."""
        of_module = stacked_parts(self.module)
        return {part: of_module[part] for part in self.owned_parts if part in of_module}

    @cached_property
    def layer_rows(self) -> dict[str, tuple[int, ...]]:
        """Rows of each stacked part in stored order, numbered among the layers of its kind."""
        kinds = layer_kinds_until(self.plan, self.module)
        number = {i: kinds[:i].count(kinds[i]) for i in self.layer_order}
        return {
            part: tuple(number[i] for i in self.layer_order if kinds[i] == kind)
            for part, kind in self.stacked.items()
        }

    @property
    def unrolls_layers(self) -> bool:
        """See `SegmentPlan.unrolls_layers`."""
        return self.plan.unrolls_layers(self.stages, max_unrolled_layers(self.chip))

    @property
    def sums_by_layer(self) -> bool:
        """Whether large gradients of stacked parts are summed in an array for each layer, to which
        GPUs add while they multiply. To rows of a stack they do so in loops only."""
        return self.unrolls_layers and self.stages == self.plan.rounds == self.plan.zero == 1

    @property
    def compiles_forward_first(self) -> bool:
        """Whether backward is lowered after forward is compiled, to know residuals' shardings."""
        return self.saves_residuals and self.tp > 1

    @cached_property
    def loss_sums(self) -> tuple[str, ...]:
        """Names of its loss's sums; () without a loss."""
        exit_out = exit_struct(self.module, Shape(1, 128)) if self.plan.last else None
        return tuple(exit_out) if isinstance(exit_out, dict) else ()

    @property
    def has_loss(self) -> bool:
        return bool(self.loss_sums)

    @property
    def saves_residuals(self) -> bool:
        """Whether it has a forward and a backward task, and does not recompute everything."""
        is_read = not self.plan.last or bool(self.outgoing)
        runs_back = bool(self.trainable or self.wants_gradient)
        return is_read and runs_back and self.plan.remat != "segment"


# ---- sharded structs of a segment's inputs and outputs at a per-rank shape ----


def device_bytes(structs: Tree) -> float:
    """Return the bytes of arrays of these structs on one device."""
    leaves = jax.tree.leaves(structs)
    return float(sum(s.dtype.itemsize * prod(s.sharding.shard_shape(s.shape)) for s in leaves))


def field_names(s: Segment) -> tuple[str, ...]:
    """Return the names of the fields that the packer provides, without inputs from edges."""
    edges = {e.name for e in s.edges if e.target == s.plan.module}
    names = [n for part in s.owned_parts for n in s.module.inputs[part]]
    return tuple(dict.fromkeys(n for n in names if n not in edges))


def field_structs(
    s: Segment, shape: Shape, names: Iterable[str] | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return structs of a group's fields; by default of all `field_names`."""
    return {
        n: _group_struct(s, s.module.field_spec(n, shape.rows, shape.tokens), None, "data")
        for n in (field_names(s) if names is None else names)
    }


def x_structs(s: Segment, shape: Shape) -> dict[str, Tree]:
    """Return structs of the inputs: "hidden" from the previous segment, and one per edge."""
    edge_inputs = field_structs(s, shape, (*s.entry_inputs, *(name for name, _ in s.inlets)))
    return edge_inputs if s.plan.first else {"hidden": _hidden_structs(s, shape), **edge_inputs}


def y_structs(s: Segment, shape: Shape, *, sums: bool = False) -> dict[str, Tree]:
    """Return structs of the outputs: "next", "exit", "taps", and, if `sums`, the loss's "sums"."""
    y: dict[str, Tree] = {}
    if s.taps:
        y["taps"] = {
            name: _group_struct(s, tap_struct(s.module, name, shape), "stage", "data")
            for name, _ in s.taps
        }
    if not s.plan.last:
        # Sharded as the next segment reads it, so that the transfer copies equal shards.
        return {**y, "next": _hidden_structs(s, shape)}
    if not s.has_loss:
        return {**y, "exit": _group_struct(s, exit_struct(s.module, shape), "stage", "data")}
    if not sums:
        return y
    ranks = s.microbatches, s.data_ranks
    each = jax.ShapeDtypeStruct(ranks, jnp.float32, sharding=s.sharding("stage", "data"))
    return {**y, "sums": dict.fromkeys(s.loss_sums, each)}


def output_struct(s: Segment, edge: Edge, shape: Shape) -> jax.ShapeDtypeStruct:
    """Return the struct of the features that an edge takes from the segment's exit or tap."""
    y = y_structs(s, shape)
    return y["taps"][edge.tap] if edge.tap else y["exit"]


def _hidden_structs(s: Segment, shape: Shape) -> Tree:
    structs = hidden_struct(s.module, shape)
    tp = s.tp if s.passes_sharded else 1
    by_rows, by_tokens = token_spec(*rows_and_tokens(structs), tp) or (None, None)
    spec = None, ("data", by_rows) if by_rows else "data", by_tokens
    return jax.tree.map(lambda a: _group_struct(s, a, *spec), structs)


def _group_struct(s: Segment, struct: jax.ShapeDtypeStruct, *spec: Any) -> jax.ShapeDtypeStruct:
    """Return the struct of a whole group from that of one rank's microbatch."""
    rows, *rest = struct.shape
    shape = (s.microbatches, s.data_ranks * rows, *rest)
    return jax.ShapeDtypeStruct(shape, struct.dtype, sharding=s.sharding(*spec))
