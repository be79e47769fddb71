"""Cost model: time and memory of segments, and the prices of a layout, from a profile.

Programs are priced by the profile's fits; transfers (activations between segments, gradients and
parameters between data ranks) by its hardware. Devices are numbered node by node; the model axis of
a submesh is the innermost. `rows`, `tokens` (per row), data-parallel degrees and the number of
microbatches in a group may be numbers or arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import get_args

import numpy as np

from dflop_jax import records
from dflop_jax.profile.collectives import all_to_all_s, overlapped_s, send_s
from dflop_jax.profile.fit import LayerFits, Predictions
from dflop_jax.profile.loops import copies_residuals, loop_copies_s
from dflop_jax.profile.state import Array, SegmentBytes, ShardedState
from dflop_jax.records import BACKWARD, FORWARD, Layout, MeshShape, Price, SegmentPlan, Shape, Task
from dflop_jax.simulate.task_graph import segment_links, tied_segments


class CostModel:
    """Cost model of a ModelProfile. Methods are pure; some results are cached."""

    def __init__(self, profile: records.ModelProfile):
        self.profile, self.fits = profile, cache(partial(LayerFits, profile))
        self._max_bytes: dict[tuple[object, ...], SegmentBytes] = {}

    def price_key(self, segment: SegmentPlan) -> tuple[object, ...]:
        """Return a key that is equal for segments of a layout with equal prices and bytes on one
        mesh."""
        return (
            segment.module,
            tuple(self.profile.kinds_in(segment).items()),
            segment.first,
            segment.last,
            segment.remat,
            segment.zero,
            segment.shard_devices,
            segment.rounds,
            segment.unrolled,
            self.has_forward(segment),
            self.saved_inputs(segment),
            tuple(map(segment.sends, self.profile.edges)),
        )

    def predict(self, module: str, tp: int, rows: Array, tokens: Array) -> Predictions:
        return Predictions(self.profile, self.fits, module, tp, rows, tokens)

    def segment(
        self, segment: SegmentPlan, mesh: MeshShape, exchanged: Array | None = None
    ) -> SegmentCosts:
        """Return a segment's costs; `exchanged`: see `SegmentCosts`; None: the least that any
        readers exchange."""
        if exchanged is None:
            exchanged = float(self.n_edges_sent(segment))
        state = ShardedState(segment, mesh, self.profile)
        return SegmentCosts(self, segment, mesh, state, exchanged)

    def slowdown(self, mesh: MeshShape) -> Array:
        """Return the slowdown of a submesh whose devices share cores (`ModelProfile.concurrency`),
        relative to the timing of one rank of `model` devices."""
        timed = max(1.0, mesh.model / self.profile.concurrency)
        return np.maximum(1.0, mesh.n_devices / self.profile.concurrency) / timed

    def priced_policies(self, module: str) -> tuple[records.Remat, ...]:
        """Return the recompute policies that the profile has prices for, in order of `REMAT`."""
        policies = [t.recompute for t in self.profile.timings if t.module == module]
        return tuple(
            r for r in get_args(records.Remat) if r == "segment" or all(r in k for k in policies)
        )

    def has_forward(self, segment: SegmentPlan) -> bool:
        """Return whether a segment has a forward task, which saves residuals for its backward task.
        A last segment without reading edges has none: its backward task also runs forward."""
        return not segment.last or self.n_edges_sent(segment) > 0

    def n_edges_sent(self, segment: SegmentPlan) -> int:
        return sum(segment.sends(e) for e in self.profile.edges)

    def saved_inputs(self, segment: SegmentPlan) -> tuple[int, int]:
        """Return the number of inputs of hidden-state size that a segment saves for backward:
        (replicated over tensor ranks: inputs from edges, or a first segment's fields; split over
        tensor ranks: hidden states of the previous segment)."""
        entering = sum(segment.reads(e) for e in self.profile.edges)
        return (max(1, entering), 0) if segment.first else (entering, 1)

    def max_segment_bytes(
        self, s: SegmentPlan, layout: Layout, *, trained: bool, backward: bool
    ) -> SegmentBytes:
        """Return a segment's maximum bytes over the layout's shapes, or without any shape."""
        mesh, group_size = layout.submesh(s.submesh).shape, layout.group_size
        shapes = tuple(layout.shapes(s.module))
        key = self.price_key(s), mesh, group_size, shapes, trained, backward
        if key not in self._max_bytes:
            rows, tokens = np.array([(x.rows, x.tokens) for x in shapes] or [(0, 0)]).T
            predictions = self.predict(s.module, mesh.model, rows, tokens)
            n_bytes = self.segment(s, mesh).n_bytes(
                group_size, predictions, trained=trained, backward=backward
            )
            by_shape = n_bytes.state, n_bytes.residuals, n_bytes.temporaries
            self._max_bytes[key] = SegmentBytes(*(float(np.max(b)) for b in by_shape))
        return self._max_bytes[key]


@dataclass(frozen=True)
class SegmentCosts:
    """Time and memory of a segment on a mesh, whose data-parallel degree may be an array. Methods
    take `group_size` (microbatches per group) and `predictions` at the per-rank shapes."""

    costs: CostModel
    segment: SegmentPlan
    mesh: MeshShape
    state: ShardedState  # parameters, gradients and optimizer state on one device
    # Features that the busiest data rank exchanges for each task, relative to its own features, by
    # data-parallel degree if the mesh has an array of them; see `exchanged_features`.
    exchanged: Array

    def task_s(self, group_size: Array, predictions: Predictions, direction: str) -> Array:
        """Return the seconds of a group's task that runs alone, with its collectives and exchanges
        over data ranks and its host work, without content (see `content_s`); 0 without rows.

        A segment of S stages takes R x M + S - 1 ticks for M microbatches in R rounds. Every stage
        runs the entry in every tick; the exit's microbatches are divided among the stages.
        """
        segment, profile = self.segment, self.costs.profile
        stages, slowdown = self.mesh.stage, self.costs.slowdown(self.mesh)
        layer_gather_s, ends_gather_s = self.state.gather_s
        layer_scatter_s, ends_scatter_s = self.state.scatter_s
        ticks = segment.ticks(stages, group_size)
        entry_share = profile.entry_share[segment.module]
        n_ends = entry_share * segment.first * ticks
        n_ends = n_ends + (1.0 - entry_share) * segment.last * group_size / stages
        seconds = profile.task_overhead_s + ends_gather_s
        seconds = seconds + self._exchange_s(group_size, predictions)
        stage_send_s = self._stage_send_s(predictions) if stages > 1 else 0.0
        for layer_pass in self._passes(direction):
            ends_s, transfer_s = predictions[f"ends_{layer_pass}"], layer_gather_s
            if layer_pass == BACKWARD:
                ends_s = ends_s + predictions[f"{self._policy}.ends_s"]
                transfer_s = transfer_s + layer_scatter_s
                seconds = seconds + ticks * ends_scatter_s
            layers_s: Array = 0.0
            for kind, n in profile.kinds_in(segment).items():
                layer_s = predictions.layer(kind, f"layer_{layer_pass}")
                if layer_pass == BACKWARD:
                    layer_s = layer_s + predictions.layer(kind, f"{self._policy}.layer_s")
                if layer_pass == direction:
                    layer_s = layer_s + self._stack_s(predictions, kind, direction)
                # Gathering a layer's parameters overlaps with the previous layer.
                both_s = overlapped_s(layer_s * slowdown, transfer_s, self.state.overlap)
                layers_s = layers_s + n / self._ticks * both_s
            layers_s = layers_s + transfer_s  # nothing runs beside the first layer's gather
            seconds = seconds + ticks * (layers_s + stage_send_s) + n_ends * ends_s * slowdown
        seconds = records.add_host_work(seconds, profile.host_s, shares_cores=profile.shares_cores)
        return np.where(predictions.has_rows, seconds, 0.0)

    def content_s(self, group_size: Array, direction: str) -> Array:
        """Return the additional seconds of a group's task per unit of each content feature,
        [features, *data degrees]. A stage processes every microbatch in every round, and in the
        S - 1 ticks of fill and drain a microbatch of mean content."""
        segment, tp = self.segment, self.mesh.model
        quantities = [*self._passes(direction), *[self._policy] * (direction == BACKWARD)]
        ticks = segment.ticks(self.mesh.stage, group_size)
        unit_s: Array = 0.0
        for kind, n in self.costs.profile.kinds_in(segment).items():
            fits = self.costs.fits(records.layer_key(segment.module, kind), tp)
            layer_s = sum(fits.content_s(name) for name in quantities)
            unit_s = unit_s + layer_s * (n / self._ticks)
        return np.multiply.outer(unit_s, self.costs.slowdown(self.mesh) * (ticks / group_size))

    def n_bytes(
        self, group_size: Array, predictions: Predictions, *, trained: bool, backward: bool
    ) -> SegmentBytes:
        """Return bytes per device, by shape; `trained`: the segment has trainable parameters."""
        residuals, temporaries = self.task_bytes(
            group_size, predictions, trained=trained, backward=backward
        )
        whole, split = self.costs.saved_inputs(self.segment)
        inputs = predictions["hidden"] * group_size * (whole + split * predictions.rank_share)
        return SegmentBytes(
            state=self.state.state_bytes(trained=trained),
            residuals=inputs + residuals,
            temporaries=np.maximum(temporaries, self.state.step_end_bytes if trained else 0.0),
        )

    def task_bytes(
        self, group_size: Array, predictions: Predictions, *, trained: bool, backward: bool
    ) -> tuple[Array, Array]:
        """Return (residual bytes from a group's forward task to its backward task, over all
        microbatches and a stage's layers; temporary bytes of the larger task).

        With several ticks, backward copies the residuals of the current tick. In a task that runs
        forward and backward, temporaries include all residuals, the last hidden states and their
        gradients; the loss is computed before backward starts.
        """
        segment, policy = self.segment, self._policy
        kinds = self.costs.profile.kinds_in(segment)
        has_forward = self.costs.has_forward(segment)

        def over_layers(name: str) -> Array:
            per_layer = (predictions.layer(k, f"{policy}.{name}") for k in kinds)
            return sum(n / self._ticks * a for n, a in zip(kinds.values(), per_layer, strict=True))

        layer_bytes = over_layers("layer_bytes")
        share = self.costs.profile.entry_share[segment.module]
        share = share * segment.first + (1.0 - share) * segment.last
        ends_bytes = share * predictions[f"{policy}.ends_bytes"]
        residuals = group_size * (segment.rounds * layer_bytes + ends_bytes)
        temporaries = predictions.max_layer(kinds, f"{policy}.temp_bytes")
        temporaries = temporaries + over_layers("layer_temp_bytes")
        if backward:
            ticks = segment.ticks(self.mesh.stage, group_size)
            temporaries = temporaries + (layer_bytes + ends_bytes) * (ticks > 1)
        if not backward:
            residuals = np.zeros_like(residuals)
        elif FORWARD in self._passes(BACKWARD):
            if not has_forward:
                loss_bytes = predictions.max_layer(kinds, f"{policy}.loss_bytes")
                temporaries = np.maximum(temporaries, loss_bytes)
            hidden_bytes = 2 * group_size * predictions.rank_share * predictions["hidden"]
            temporaries = temporaries + residuals + hidden_bytes
            residuals = np.zeros_like(residuals)
        gathered = self.state.gathered_bytes(trained=trained, ends_in_loss=not has_forward)
        return residuals, np.where(predictions.has_rows, temporaries + gathered, 0.0)

    @property
    def copies_residuals(self) -> bool:
        return copies_residuals(self.costs.profile.hardware, self.segment, self.mesh.stage)

    def _stack_s(self, predictions: Predictions, kind: str, direction: str) -> Array:
        """Return the seconds in which a task's loop copies a layer's residuals into stacks: none if
        layers are unrolled, or another task saves the residuals."""
        saving = BACKWARD if FORWARD in self._passes(BACKWARD) else FORWARD
        if direction != saving or not self.copies_residuals:
            return 0.0
        residual_bytes = predictions.layer(kind, f"{self._policy}.layer_bytes")
        return loop_copies_s(self.costs.profile.hardware, residual_bytes)

    @property
    def _ticks(self) -> int:
        """Ticks that a microbatch takes through all layers."""
        return self.mesh.stage * self.segment.rounds

    @property
    def _policy(self) -> records.Remat:
        """Recompute policy of backward's loop over layers."""
        return "none" if self.segment.remat == "segment" else self.segment.remat

    def _passes(self, direction: str) -> tuple[str, ...]:
        """Return the directions in which a task runs the segment's layers, in order."""
        if direction != BACKWARD:
            return (FORWARD,)
        if self.segment.remat == "segment" or not self.costs.has_forward(self.segment):
            return (FORWARD, BACKWARD)
        return (BACKWARD,)

    def _exchange_s(self, group_size: Array, predictions: Predictions) -> Array:
        """Return the seconds of the all-to-alls that bring a group's features to the data ranks
        that read them, or their gradients back. Assignments of two modules are independent, so a
        rank reads equal shares from all ranks."""
        hardware, mesh = self.costs.profile.hardware, self.mesh
        if hardware is None or not np.any(self.exchanged):
            return 0.0
        n_bytes = predictions["output"] * group_size / mesh.stage
        each_s = all_to_all_s(n_bytes, mesh.data, hardware, stride=mesh.stride("data"))
        return self.exchanged * each_s

    def _stage_send_s(self, predictions: Predictions) -> Array:
        """Return seconds to send a microbatch to the next stage; they do not overlap."""
        hardware = self.costs.profile.hardware
        if hardware is None:
            return 0.0
        n_bytes = predictions["hidden"] * predictions.rank_share
        send = partial(send_s, n_bytes, hardware, collective="ppermute")
        inside, across = send(across=False), send(across=True)
        is_across = np.asarray(self.mesh.n_devices) > hardware.devices_per_node
        return np.where(is_across, across, inside)


def layout_prices(
    layout: Layout, costs: CostModel, grouping: records.Grouping = "balanced"
) -> records.Prices:
    """Return the prices of a layout; ValueError if the profile lacks a degree of the layout. With
    `grouping` "arrival", all pieces of a sample stay on one data rank, so nothing is exchanged."""
    return records.Prices(
        programs=_program_prices(layout, costs, grouping),
        step_end=_step_end_seconds(layout, costs),
        sends=_send_seconds(layout, costs),
        concurrency=costs.profile.concurrency,
        host_s=costs.profile.host_s,
        shares_cores=costs.profile.shares_cores,
    )


def _program_prices(
    layout: Layout, costs: CostModel, grouping: records.Grouping
) -> dict[records.ProgramId, Price]:
    """Return the price of every segment at every shape, under each of its policies."""
    programs: dict[records.ProgramId, Price] = {}
    priced: dict[object, dict[tuple[Shape, records.Direction], Price]] = {}
    for s in layout.segments:
        mesh = layout.submesh(s.submesh).shape
        sent = [e for e in layout.edges if s.sends(e) and grouping != "arrival"]
        readers = (layout.data_ranks(e.target) for e in sent)
        exchanged = sum(records.exchanged_features(mesh.data, n) for n in readers)
        for segment in [s, s.with_less_remat] if s.remat_less is not None else [s]:
            key = costs.price_key(segment), mesh
            if key not in priced:
                priced[key] = _segment_prices(layout, costs.segment(segment, mesh, exchanged))
            programs |= {
                records.ProgramId(s.name, shape, direction, segment is not s): price
                for (shape, direction), price in priced[key].items()
            }
    return programs


def _segment_prices(
    layout: Layout, segment: SegmentCosts
) -> dict[tuple[Shape, records.Direction], Price]:
    module, group_size = segment.segment.module, layout.group_size
    shapes = layout.shapes(module)
    rows, tokens = (np.array([getattr(s, dim) for s in shapes]) for dim in ("rows", "tokens"))
    predictions = segment.costs.predict(module, segment.mesh.model, rows, tokens)
    prices: dict[tuple[Shape, records.Direction], Price] = {}
    for direction in (FORWARD, BACKWARD):
        static_s = segment.task_s(group_size, predictions, direction).tolist()
        content_s = tuple(segment.content_s(group_size, direction).tolist())
        for shape, seconds in zip(shapes, static_s, strict=True):
            prices[shape, direction] = Price(seconds, content_s)
    return prices


def _step_end_seconds(layout: Layout, costs: CostModel) -> dict[Task, float]:
    """Return the seconds of every segment's gradient reduction and update. A segment that reads a
    tied entry's parameters sends their gradient to the owner and receives new parameters."""
    seconds, profile = dict[Task, float](), costs.profile
    for s in layout.segments:
        state = costs.segment(s, layout.submesh(s.submesh).shape).state
        seconds[Task(s.name, records.NO_GROUP, records.REDUCE)] = float(state.reduce_s)
        seconds[Task(s.name, records.NO_GROUP, records.UPDATE)] = float(state.update_s)
    for reader, owner in tied_segments(layout).items() if profile.hardware else ():
        target, source = (layout.submesh(layout.segment(n).submesh) for n in (reader, owner))
        ends_bytes = 4.0 * profile.ends_elements(layout.segment(reader).module) / target.model
        for direction in (records.REDUCE, records.UPDATE):
            seconds[Task(reader, records.NO_GROUP, direction)] += _transfer_s(
                source, target, ends_bytes, profile.hardware
            )
    return seconds


def _send_seconds(layout: Layout, costs: CostModel) -> dict[records.SendId, float]:
    """Return the seconds of sends of activations to other submeshes, for every shape of the reader,
    and of their gradients, which have equal size.

    Each device of the reader receives its data rank's activations over its own link: its share of
    hidden states, or the whole output for each edge between two modules. If several groups feed one
    group, each is priced as if it filled the whole group.
    """
    seconds, hardware = dict[records.SendId, float](), costs.profile.hardware
    for link in segment_links(layout) if hardware else ():
        reader = layout.segment(link.target)
        target, source = (
            layout.submesh(layout.segment(n).submesh) for n in (link.target, link.source)
        )
        for shape in layout.shapes(reader.module):
            predictions = costs.predict(reader.module, target.model, shape.rows, shape.tokens)
            n_bytes = predictions["hidden"] * (1.0 if link.edge else predictions.rank_share)
            transfer_s = _transfer_s(source, target, float(n_bytes) * layout.group_size, hardware)
            for direction in (FORWARD, BACKWARD) if transfer_s else ():
                key = records.SendId(link.source, link.target, shape, direction)
                seconds[key] = seconds.get(key, 0.0) + transfer_s
    return seconds


def _transfer_s(
    source: records.SubmeshPlan,
    target: records.SubmeshPlan,
    n_bytes: float,
    hardware: records.Hardware | None,
) -> float:
    """Return seconds to send `n_bytes` to each device of another submesh; 0 if it is the same."""
    if hardware is None or (source.first, source.shape) == (target.first, target.shape):
        return 0.0
    nodes = {d // hardware.devices_per_node for d in (*source.devices, *target.devices)}
    return float(send_s(n_bytes, hardware, across=len(nodes) > 1))
