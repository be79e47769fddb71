"""Seconds and bytes of any plan's segments, from a profile.

Shapes are `rows` rows of `tokens`, arrays or numbers; so are data-parallel degrees and the number
of microbatches in a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, reduce

import numpy as np

from dflop_jax.profile.collectives import send_s
from dflop_jax.profile.fit import Fits
from dflop_jax.profile.state import Array, SegmentBytes, SegmentState, ShardSeconds, StateBytes
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    LAYERS,
    MeshShape,
    ModelProfile,
    Remat,
    SegmentPlan,
    Shape,
    layer_key,
    rank_share,
    shape_features,
    with_host_work,
)

_AT_HAND = ShardSeconds()


class Figures:
    """Quantities of a module at shapes, each predicted once: see `Fits.predict`. Those of a layer
    are asked of one `kind`; what is of the whole module was seen beside layers of each kind, and is
    that beside the first."""

    def __init__(self, fits: Fits, module: str, model: int, rows: Array, tokens: Array):
        self.is_there = np.asarray(rows) > 0
        self.rank_share = rank_share(rows, tokens, model)  # of hidden states, on a tensor rank
        features = shape_features(rows, tokens)
        self._first = fits.profile.kinds.get(module, (LAYERS,))[0]
        self._predict = cache(
            lambda kind, name: fits.predict(layer_key(module, kind), model, features, name)
        )

    def __getitem__(self, name: str) -> Array:
        return self.of(self._first, name)

    def of(self, kind: str, name: str) -> Array:
        return self._predict(kind, name)

    def most(self, kinds: Iterable[str], name: str) -> Array:
        """The largest of some kinds."""
        return reduce(np.maximum, (self.of(kind, name) for kind in kinds))


class CostModel:
    """Prices segments by a ModelProfile. Methods are pure; some answers are cached."""

    def __init__(self, profile: ModelProfile):
        self.profile, self.fits = profile, Fits(profile)
        self._largest: dict[tuple[object, ...], SegmentBytes] = {}

    def kind(self, segment: SegmentPlan) -> tuple[object, ...]:
        """Equal for segments of equal prices and bytes, as most of those inside a module are."""
        return (
            segment.module, tuple(self.profile.kinds_in(segment).items()), segment.first,
            segment.last, segment.remat, segment.zero, segment.shard_devices, segment.rounds,
            self.hands_over(segment), self.inputs_kept(segment),
        )  # fmt: skip

    def slowdown(self, mesh: MeshShape) -> Array:
        """How much longer a submesh's devices take together than a rank took when it was timed,
        because they share cores (`ModelProfile.concurrency`)."""
        # One rank was timed with its `model` devices computing together already.
        timed = max(1.0, mesh.model / self.profile.concurrency)
        return np.maximum(1.0, mesh.n_devices / self.profile.concurrency) / timed

    def at(self, module: str, model: int, rows: Array, tokens: Array) -> Figures:
        """The quantities of a module at shapes."""
        return Figures(self.fits, module, model, rows, tokens)

    def task_s(
        self,
        segment: SegmentPlan,
        mesh: MeshShape,
        group_size: Array,
        figures: Figures,
        direction: str,
        moved: ShardSeconds = _AT_HAND,
    ) -> Array:
        """Seconds of a segment's task on a group of microbatches of these per-rank shapes, run
        alone and without content (see `group_content_s`), with what is moved between data ranks
        meanwhile and what the host does for a task; 0 without rows.

        A segment of S stages takes R x M + S - 1 ticks for M microbatches in R rounds. Every stage
        runs the entry in every tick, while the exit's microbatches are shared by the stages. A
        backward task that has no forward task before it, or repeats it, runs the layers twice in
        all.
        """
        stages, slow = mesh.stage, self.slowdown(mesh)
        ticks = segment.ticks(mesh.stage, group_size)
        share = self.profile.entry_share[segment.module]
        share = share * segment.first * ticks + (1.0 - share) * segment.last * group_size / stages
        loops, again = self.loops(segment, direction), _again(segment)
        seconds = self.profile.task_overhead_s + moved.ends_gather_s
        passed_s = self._passed_s(mesh, figures) if stages > 1 else 0.0
        for loop in loops:
            ends_s, moved_s = figures[f"ends_{loop}"], moved.layer_gather_s
            if loop == BACKWARD:
                ends_s = ends_s + figures[f"{again}.ends_s"]
                moved_s = moved_s + moved.layer_scatter_s
                seconds = seconds + ticks * moved.ends_scatter_s
            layers_s: Array = 0.0
            for kind, n in self.profile.kinds_in(segment).items():
                layer_s = figures.of(kind, f"layer_{loop}")
                if loop == BACKWARD:
                    layer_s = layer_s + figures.of(kind, f"{again}.layer_s")
                # A layer's parameters come while the one before is computed.
                at_once = np.maximum(layer_s * slow, moved_s)
                layers_s = layers_s + n / _visits(segment, mesh) * at_once
            layers_s = layers_s + moved_s  # the first layer waits
            seconds = seconds + ticks * (layers_s + passed_s) + share * ends_s * slow
        host_s, shares_cores = self.profile.host_s, self.profile.shares_cores
        seconds = with_host_work(seconds, host_s, shares_cores=shares_cores)
        return np.where(figures.is_there, seconds, 0.0)

    def _passed_s(self, mesh: MeshShape, figures: Figures) -> Array:
        """Seconds until every stage of a loop has a microbatch's hidden states of the one before
        it, which nothing of the tick waits beside."""
        hardware = self.profile.hardware
        if hardware is None:
            return 0.0
        n_bytes = figures["hidden"] * figures.rank_share
        inside, across = (
            send_s(n_bytes, hardware, across=far, collective="ppermute") for far in (False, True)
        )
        return np.where(np.asarray(mesh.n_devices) > hardware.devices_per_node, across, inside)

    def group_content_s(
        self, segment: SegmentPlan, mesh: MeshShape, group_size: Array, direction: str
    ) -> Array:
        """Seconds that a group's task takes more for a unit of each feature of the group's content,
        [features, *data degrees], these with the group sizes where there are several.

        A stage sees every microbatch in every round, and in S - 1 more ticks one of mean content:
        what it computes while the pipeline inside the segment fills and drains.
        """
        loops = [*self.loops(segment, direction), *[_again(segment)] * (direction == BACKWARD)]
        ticks = segment.ticks(mesh.stage, group_size)
        alone_s: Array = 0.0
        for kind, n in self.profile.kinds_in(segment).items():
            layers = layer_key(segment.module, kind)
            layer_s = sum(self.fits.content_s(layers, mesh.model, loop) for loop in loops)
            alone_s = alone_s + layer_s * (n / _visits(segment, mesh))
        return np.multiply.outer(alone_s, self.slowdown(mesh) * (ticks / group_size))

    def hands_over(self, segment: SegmentPlan) -> bool:
        """Whether a segment has a forward task, whose results its backward task begins with: not
        one that nobody reads (see `tasks`)."""
        return not segment.last or any(segment.sends(e) for e in self.profile.edges)

    def loops(self, segment: SegmentPlan, direction: str) -> tuple[str, ...]:
        """How a task goes through the segment's layers."""
        if direction != BACKWARD:
            return (FORWARD,)
        if segment.remat == "segment" or not self.hands_over(segment):
            return (FORWARD, BACKWARD)
        return (BACKWARD,)

    def inputs_kept(self, segment: SegmentPlan) -> tuple[int, int]:
        """Arrays of the hidden states' size that a segment keeps from forward to backward: (those
        that every tensor rank has whole, those that are split over tensor ranks). The former are
        what every edge brings, and of a first segment that no edge enters its fields, the latter
        the hidden states of the segment before it."""
        entering = sum(segment.reads(e) for e in self.profile.edges)
        return (max(1, entering), 0) if segment.first else (entering, 1)

    def segment_bytes(
        self,
        segment: SegmentPlan,
        mesh: MeshShape,
        group_size: int,
        rows: Array,
        tokens: Array,
        *,
        trained: bool = True,
        backward: bool = True,
    ) -> SegmentBytes:
        """Bytes per device of a segment, by shape.

        Args:
          trained: whether it has trainable parameters.
          backward: whether it has backward tasks.
        """
        figures = self.at(segment.module, mesh.model, rows, tokens)
        state = self.state_of(segment, mesh, trained=trained)
        return self.bytes_of(segment, mesh, group_size, figures, state, backward=backward)

    def largest_bytes(
        self,
        segment: SegmentPlan,
        mesh: MeshShape,
        group_size: int,
        shapes: Sequence[Shape],
        *,
        trained: bool,
        backward: bool,
    ) -> SegmentBytes:
        """The most that a segment needs at any of its groups' shapes. Without one it is still
        reduced and updated."""
        key = self.kind(segment), mesh, group_size, tuple(shapes), trained, backward
        if key not in self._largest:
            rows, tokens = np.array([(s.rows, s.tokens) for s in shapes] or [(0, 0)]).T
            each = self.segment_bytes(
                segment, mesh, group_size, rows, tokens, trained=trained, backward=backward
            )
            kept_bytes, temporaries = (
                float(v.max(initial=0.0)) for v in (each.kept, each.temporaries)
            )
            self._largest[key] = SegmentBytes(float(each.state), kept_bytes, temporaries)
        return self._largest[key]

    def state_of(self, segment: SegmentPlan, mesh: MeshShape, *, trained: bool) -> StateBytes:
        """What a segment holds by its data ranks' shares, the same under every recompute policy."""
        state, alone = SegmentState(segment, mesh, self.profile), not self.hands_over(segment)
        return StateBytes(
            held=state.held_bytes(trained=trained),
            at_end=state.end_bytes() if trained else 0.0,
            whole=state.whole_bytes(trained=trained, ends_in_loss=alone),
        )

    def bytes_of(
        self,
        segment: SegmentPlan,
        mesh: MeshShape,
        group_size: Array,
        figures: Figures,
        state: StateBytes,
        *,
        backward: bool,
    ) -> SegmentBytes:
        """`segment_bytes` from figures at hand."""
        handed, temporaries = self.task_bytes(
            segment, mesh, group_size, figures, state, backward=backward
        )
        whole, split = self.inputs_kept(segment)
        return SegmentBytes(
            state=state.held,
            kept=figures["hidden"] * group_size * (whole + split * figures.rank_share) + handed,
            temporaries=np.maximum(temporaries, state.at_end),
        )

    def task_bytes(
        self,
        segment: SegmentPlan,
        mesh: MeshShape,
        group_size: Array,
        figures: Figures,
        state: StateBytes,
        *,
        backward: bool = True,
    ) -> tuple[Array, Array]:
        """(bytes that a group's forward hands to its backward, bytes that the larger of these tasks
        takes beside its arguments and what it hands over).

        What forward hands over is there for every microbatch, of all of a stage's layers; backward
        copies that of the tick that it is at, where there are several. A task that runs forward and
        backward holds all of it among its temporaries, with the hidden states after the last layer
        and their gradients; when its loss is computed, backward has not begun.
        """
        again, alone = _again(segment), not self.hands_over(segment)
        ticks, kinds = segment.ticks(mesh.stage, group_size), self.profile.kinds_in(segment)

        def every_layer(name: str) -> Array:
            visits = _visits(segment, mesh)
            return sum(n / visits * figures.of(k, f"{again}.{name}") for k, n in kinds.items())

        of_layers = every_layer("layer_bytes")
        share = self.profile.entry_share[segment.module]
        share = share * segment.first + (1.0 - share) * segment.last
        of_ends = share * figures[f"{again}.ends_bytes"]
        handed = group_size * (segment.rounds * of_layers + of_ends)
        work = figures.most(kinds, f"{again}.temp_bytes") + every_layer("layer_temp_bytes")
        if backward:
            work = work + (of_layers + of_ends) * (ticks > 1)
        if not backward:
            handed = np.zeros_like(handed)
        elif FORWARD in self.loops(segment, BACKWARD):
            if alone:
                work = np.maximum(work, figures.most(kinds, f"{again}.loss_bytes"))
            work = work + handed + 2 * group_size * figures.rank_share * figures["hidden"]
            handed = np.zeros_like(handed)
        return handed, np.where(figures.is_there, work + state.whole, 0.0)


def _visits(segment: SegmentPlan, mesh: MeshShape) -> int:
    """Ticks in which a microbatch goes through all layers of a segment."""
    return mesh.stage * segment.rounds


def _again(segment: SegmentPlan) -> Remat:
    """The policy of a segment's loop over layers in backward; one that is computed again as a whole
    then has everything."""
    return "none" if segment.remat == "segment" else segment.remat
