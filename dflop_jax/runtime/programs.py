"""The programs of a layout and the segments that they run on; `compiling` compiles them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from dflop_jax.contract import MultimodalModel
from dflop_jax.records import BACKWARD, FORWARD, REDUCE, UPDATE, Layout, Shape
from dflop_jax.runtime.communicator import is_local, remote_array
from dflop_jax.runtime.exchange import Exchange
from dflop_jax.runtime.layout import make_segments
from dflop_jax.runtime.lowering import Lowering
from dflop_jax.runtime.segment import (
    EVALUATE,
    ProgramKind,
    Segment,
    field_structs,
    output_struct,
    x_structs,
    y_structs,
)
from dflop_jax.runtime.update import Optimizer, SegmentUpdate
from dflop_jax.simulate.task_graph import (
    SegmentLink,
    segment_links,
    segments_with_backward,
    submesh_resources,
    tied_segments,
)

Tree = Any
T = TypeVar("T")
Program = Callable[..., Any]
# Key of a program: a segment's name, then (shape, kind), (shape, LESS_REMAT, kind), (REDUCE,),
# (UPDATE,), (link, low shape, high shape, whether backward) or ("sum", struct).
Key = tuple[Any, ...]
LESS_REMAT = "keeping more"  # key entry of programs under the second recompute policy


@dataclass(frozen=True)
class GroupArrays:
    """Host arrays of one group: `fields[name]` [M, ranks * rows, ...]. For each group that feeds
    it, `source_indices[number of that group]` has the outputs that each token reads, as an index,
    or an index and weights, [M, ranks * rows, tokens, sources]. `max_requested[group]` is the
    argument of `ExchangeIndex.rounds` if this process does not have all ranks' indices."""

    fields: Mapping[str, np.ndarray]
    source_indices: Mapping[int, tuple[np.ndarray, ...]]
    max_requested: Mapping[int, int] = field(default_factory=dict)


class Signature(NamedTuple):
    """Inputs, fields and outputs of a segment at one shape, as sharded structs."""

    x: dict[str, Any]
    fields: dict[str, jax.ShapeDtypeStruct]
    y: dict[str, Tree]


def _cached_method(method: Callable[..., T]) -> Callable[..., T]:
    """Cache a method's results per object: tracing shapes takes milliseconds."""
    cached: Any = cached_property(lambda self: cache(partial(method, self)))
    return cached


@dataclass(frozen=True, eq=False)
class Programs:
    """Segments, updates and links of a layout on its devices, with the programs compiled so far.

    A segment has programs for every shape of its module, an edge for every pair of shapes that the
    layout's buckets join. A program on other processes' devices does not run on this process: its
    outputs are arrays without local shards.

    Attributes:
      evaluates: whether there are programs that return losses without gradients.
      lowerings: of all segments, in topological order.
      less_remat: of the segments that have a second recompute policy, under that policy.
      updates: of the segments that train.
      owner_of: segment that reads a tied entry -> segment that owns the entry.
    """

    model: MultimodalModel
    layout: Layout
    evaluates: bool
    lowerings: Mapping[str, Lowering]
    less_remat: Mapping[str, Lowering]
    updates: Mapping[str, SegmentUpdate]
    backward: tuple[str, ...]
    owner_of: Mapping[str, str]
    compiled: dict[Key, jax.stages.Compiled] = field(default_factory=dict)

    # ---- facts ----

    @cached_property
    def segments(self) -> dict[str, Segment]:
        return {n: lowering.segment for n, lowering in self.lowerings.items()}

    @cached_property
    def local_segments(self) -> frozenset[str]:
        """Segments with devices of this process."""
        return frozenset(n for n, s in self.segments.items() if is_local(s.mesh))

    @cached_property
    def serial_segments(self) -> frozenset[str]:
        """Segments of several CPU devices. Their collectives block threads of a pool with one
        thread per device, so two programs in flight on the same devices could deadlock."""
        return frozenset(n for n, s in self.segments.items() if s.mesh.size > 1 and s.is_on_cpu)

    @cached_property
    def incoming_links(self) -> dict[str, tuple[SegmentLink, ...]]:
        links = segment_links(self.layout)
        return {n: tuple(k for k in links if k.target == n) for n in self.segments}

    @cached_property
    def outgoing_links(self) -> dict[str, tuple[SegmentLink, ...]]:
        links = segment_links(self.layout)
        return {n: tuple(k for k in links if k.source == n) for n in self.segments}

    @cached_property
    def submesh_of(self) -> dict[str, str]:
        return {s.name: s.submesh for s in self.layout.segments}

    @cached_property
    def resource_of(self) -> dict[str, int]:
        """The resource that each segment's tasks occupy."""
        resource_by_submesh = submesh_resources(self.layout)
        return {s.name: resource_by_submesh[s.submesh] for s in self.layout.segments}

    @_cached_method
    def signature(self, name: str, shape: Shape) -> Signature:
        s = self.segments[name]
        return Signature(x_structs(s, shape), field_structs(s, shape), y_structs(s, shape))

    @_cached_method
    def exchange(self, link: SegmentLink, low: Shape, high: Shape) -> Exchange:
        """Return the exchange of a link's edge between groups of two shapes."""
        assert link.edge is not None
        return Exchange(
            output_struct(self.segments[link.source], link.edge, low),
            self.signature(link.target, high).x[link.edge.name],
            link.edge.sources,
            self.layout.exchange_capacity(link.edge, low, high),
        )

    @_cached_method
    def _remote_program(self, key: Key) -> Program:
        """Return a stand-in for a program of other processes; its outputs have no local shards."""
        outputs = jax.tree.map(remote_array, output_structs(self, key))
        return lambda *_: outputs

    def program(self, key: Key) -> Program:
        """Return the program of a key; exchanges of `serial_segments` wait for their outputs."""
        if key[0] not in self.local_segments:
            return self._remote_program(key)
        program = self.compiled[key]
        if isinstance(key[1], SegmentLink) and key[0] in self.serial_segments:
            return lambda *args: jax.block_until_ready(program(*args))
        return program


def make_programs(
    model: MultimodalModel,
    layout: Layout,
    devices: list[jax.Device],
    tx: Optimizer,
    *,
    clip_norm: float = 0.0,
    freeze: tuple[str, ...] = (),
    rate_factors: Mapping[str, float] = MappingProxyType({}),
    evaluates: bool = False,
) -> Programs:
    """Return the programs of a layout, none compiled yet.

    Args:
      tx: the elementwise optimizer. Before it, gradients are clipped to `clip_norm` (0: off) by
        their norm over all segments.
      freeze: names of the modules' `freeze_groups`.
      rate_factors: factor of the learning rate of `tx` by freeze group; 1 for other groups.
      evaluates: whether to make programs that return losses without gradients, too.

    Raises:
      ValueError: see `make_segments`.
    """
    segments = make_segments(model, layout, devices, freeze=freeze)
    owner_of = tied_segments(layout)
    trains_shared = {o for r, o in owner_of.items() if "entry" in segments[r].trainable}
    lowerings = {n: Lowering(s) for n, s in segments.items()}
    less_remat = {
        n: Lowering(replace(s, plan=s.plan.with_less_remat))
        for n, s in segments.items()
        if s.plan.remat_less is not None
    }
    updates = {
        n: SegmentUpdate(s, tx, clip_norm, rate_factors, adds_shared=n in trains_shared)
        for n, s in segments.items()
        if s.trainable
    }
    backward = segments_with_backward(layout, updates)
    return Programs(model, layout, evaluates, lowerings, less_remat, updates, backward, owner_of)


def program_kinds(programs: Programs, name: str) -> tuple[ProgramKind, ...]:
    """Return a segment's kinds of programs; without readers, training needs no forward."""
    is_read = bool(programs.outgoing_links[name])
    gives_loss = programs.evaluates and programs.segments[name].has_loss
    forward = (FORWARD,) if is_read else ()
    backward = (BACKWARD,) if name in programs.backward or not is_read else ()
    return (*forward, *backward, *((EVALUATE,) if gives_loss else ()))


def output_structs(programs: Programs, key: Key) -> Tree:
    """Return structs of a program's outputs, without residuals."""
    name, *details, kind = key
    if kind in (REDUCE, UPDATE):
        update = programs.updates[name]
        return update.reduced_structs() if kind == REDUCE else update.updated_structs()
    if isinstance(details[0], SegmentLink):
        exchange = programs.exchange(*details)
        return exchange.gradient_structs if kind else exchange.block_structs
    if kind == BACKWARD:
        return programs.lowerings[name].backward_structs(details[0])
    return y_structs(programs.segments[name], details[0], sums=kind == EVALUATE)


def autotunes(segments: Iterable[Segment]) -> bool:
    """Return whether compilation of these segments' programs times kernels on their devices."""
    return any(not s.is_on_cpu for s in segments)
