"""Seconds and bytes of modules, as arrays over data degrees, granularities and options.

All groups of a granularity have one shape and equal content, so the seconds of their tasks are
exact before anything is scheduled. The number of groups of a batch is a lower bound, by its volume.

Arrays are [n_rows, n_granularities]; the rows of a table differ in their data degree only. Those
that depend on the option have it first, [n_options, n_rows, n_granularities].
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

import numpy as np

from dflop_jax.plan.options import MemoryOption
from dflop_jax.plan.placement import (
    EQUAL_LAYERS,
    LayerCosts,
    LayerCostsByDegree,
    Parallelism,
    SpaceLimits,
    module_segments,
    relative_layer_costs,
)
from dflop_jax.plan.search_spec import SearchSpec
from dflop_jax.plan.volume import (
    GROUPS_PER_BATCH,
    ModuleVolume,
    group_content,
    min_groups,
    packed_rows,
    piece_rows,
)
from dflop_jax.profile.cost_model import CostModel, Predictions
from dflop_jax.profile.state import Array, SegmentBytes
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    Layout,
    MeshShape,
    ModelProfile,
    SegmentPlan,
    Shape,
    Zero,
    content_seconds,
)

# Tokens over those of a module's largest timed shape up to which prices by timings are trusted.
# Twice as much admits groups whose prices are extrapolated far.
_MAX_EXTRAPOLATION = 2.0
# Microbatches of a group for each stage of a loop. A loop of S stages takes 1 + (S - 1) / (k S)
# times its work: with k = 8 at most an eighth more, which 16 would halve.
_MICROBATCHES_PER_STAGE = (1, 2, 4, 8)
# Sizes of a plan's buckets relative to the largest, those first that save most. In 6 set-ups of
# benchmarks/auto_choice.py (21 placements) quarters took 0.7% longer than all four, thirds 2%.
_BUCKET_SHARES = (1.0, 0.6, 0.3, 0.8)


@dataclass(frozen=True)
class SearchContext:
    """What all candidates of a search share: costs, volumes of the sampled batches by module, and
    the spec, with all limits above 0."""

    costs: CostModel
    volumes: Mapping[str, ModuleVolume]
    spec: SearchSpec

    @property
    def profile(self) -> ModelProfile:
        return self.costs.profile

    @property
    def n_layers(self) -> dict[str, int]:
        """Layers of every module, in topological order."""
        return self.profile.n_layers

    def options(self, module: str) -> tuple[MemoryOption, ...]:
        """The options of a module, simplest first; of equal ones the search takes the first."""
        remat, zero = self.spec.remat, self.spec.zero
        policies = (remat,) if remat != "auto" else self.costs.priced_policies(module)
        degrees: tuple[Zero, ...] = (zero,) if zero != "auto" else get_args(Zero)
        blocks = self._shard_devices
        return tuple(
            MemoryOption(r, z, d)
            for z in degrees
            for d in (blocks if z > 1 else blocks[:1])
            for r in policies
        )

    @cached_property
    def space_limits(self) -> SpaceLimits:
        """Limits of the placements, with the tensor-parallel degrees that the profile timed."""
        degrees: dict[str, set[int]] = {m: set() for m in self.n_layers}
        for t in self.profile.timings:
            degrees[t.module].add(t.model)
        kinds = {m: self.profile.layer_kinds(m) for m in self.n_layers}
        n, config = self.spec.n_devices, self.spec.config
        edges = self.profile.edges
        return SpaceLimits.from_model(kinds, degrees, edges, n, config.node or n, config)

    @property
    def _shard_devices(self) -> tuple[int, ...]:
        """Sizes of blocks of devices that share state (0: all devices): the configured one, else
        all and, where links have prices and there are several nodes, a node."""
        if requested := self.spec.config.shard_devices:
            return (requested,)
        node = self.spec.config.node if self.profile.hardware else 0
        return (0, node) if 0 < node < self.spec.n_devices else (0,)

    def max_trusted_tokens(self, module: str) -> float:
        """Tokens of a microbatch on a rank up to which prices are trusted: a fit of timings is
        wrong far beyond the largest timed shape, computed prices hold at any size."""
        if self.profile.computed:
            return np.inf
        timed = (t.shape.size for t in self.profile.timings if t.module == module)
        return _MAX_EXTRAPOLATION * max(timed)

    def granularities(self, stages: int) -> tuple[np.ndarray, np.ndarray]:
        """(groups of a mean batch, microbatches of a group): groups have as many microbatches as
        the deepest loop has stages, and multiples of these where there is a loop."""
        max_count, fixed = (
            self.spec.config.max_microbatches,
            self.spec.config.microbatches_per_stage,
        )
        sizes = [1]
        if stages > 1:
            per_stage = (fixed,) if fixed else _MICROBATCHES_PER_STAGE
            sizes = [k * stages for k in per_stage if fixed or k * stages <= max_count] or [stages]
        max_groups = [max(1, max_count // size) for size in sizes]
        groups = [[*(c for c in GROUPS_PER_BATCH if c < n), n] for n in max_groups]
        return np.concatenate(groups), np.repeat(sizes, [len(n) for n in groups])

    @property
    def bucket_shares(self) -> tuple[float, ...]:
        """Sizes of the buckets of a plan relative to the largest, rising; the last is 1."""
        return tuple(sorted(_BUCKET_SHARES[: self.spec.config.buckets]))

    def row_tokens(self, module: str) -> int:
        """Tokens of a packed row that holds the longest piece."""
        longest = max(1, self.volumes[module].max_piece_tokens)
        multiple = self.spec.token_multiple
        return -(-longest // multiple) * multiple

    def row_shapes(
        self, module: str, microbatches: Array, data: Array, model: int
    ) -> tuple[Array, Array]:
        """(rows, tokens of a row) of a rank where a mean batch has so many microbatches."""
        volume, multiple = self.volumes[module], self.spec.token_multiple
        if module in self.profile.piece_tokens:
            rows = piece_rows(volume, microbatches, data)
            return rows, np.full(rows.shape, self.profile.piece_tokens[module])
        return packed_rows(volume, microbatches, data, self.costs, module, model, multiple)

    def group_capacity(self, module: str, rows: Array, tokens: Array) -> Array:
        """What such rows hold, in the units of `ModuleVolume`."""
        return rows if module in self.profile.piece_tokens else rows * tokens

    @cached_property
    def layer_costs_by_degree(self) -> LayerCostsByDegree:
        return relative_layer_costs(self.profile)

    def layer_costs(self, module: str, model: int) -> LayerCosts:
        """Costs of a module's ends and layers at a tensor-parallel degree."""
        return self.layer_costs_by_degree.get((module, model), EQUAL_LAYERS)

    def with_edges(self, layout: Layout) -> Layout:
        """A layout of submeshes and segments, with the model's edges."""
        return replace(layout, edges=self.profile.edges, tied=self.profile.tied)

    def trainable(self, layout: Layout) -> list[str]:
        """Names of the segments with trainable parameters."""
        return [s.name for s in layout.segments if self.spec.trains(s)]

    def segments(self, module: str, parallelism: Parallelism) -> tuple[SegmentPlan, ...]:
        """A module's segments under a parallelism."""
        costs = self.layer_costs(module, parallelism.mesh.model)
        return module_segments(module, self.n_layers[module], 0, parallelism, costs)[1]


@dataclass(frozen=True)
class ModuleTable:
    """A module with degrees of data parallelism by row, every option, and all granularities.

    Attributes:
      data, n_devices: data degree, [n_rows], and devices of a segment, [n_rows, 1].
      rows, tokens: of the shape, [n_rows, n_granularities]; 0 rows where the data has no piece.
      is_trusted: whether prices of the shape are trusted, or no granularity has a smaller one.
      min_groups: minimum number of groups of each sampled batch, [n_batches, n_rows, ...].
      seconds: of each segment, [4, n_options, n_rows, n_granularities]: a group forward and
        backward, 0 where it does not run them, reduction and update at the step's end.
      n_bytes: of each segment's devices, [n_options, n_rows, n_granularities].
    """

    options: tuple[MemoryOption, ...]
    data: Array
    n_devices: Array
    rows: Array
    tokens: Array
    is_trusted: Array
    min_groups: Array
    seconds: tuple[Array, ...]
    n_bytes: tuple[SegmentBytes, ...]

    def shape(self, row: int, granularity: int) -> Shape | None:
        rows, tokens = int(self.rows[row, granularity]), int(self.tokens[row, granularity])
        return Shape(rows, tokens) if rows else None


def module_table(
    context: SearchContext,
    segments: Sequence[SegmentPlan],
    directions: Sequence[Collection[str]],
    mesh: MeshShape,
    granularities: tuple[Array, Array],
    row_shapes: tuple[Array, Array],
    sub_microbatches: Array = 1,
    max_sub_microbatches: Array = 1,
) -> ModuleTable:
    """The table of a module.

    Args:
      segments, directions: of the module, and the tasks of each; most segments are alike.
      mesh: with rising data degrees, [n_rows, 1].
      granularities: groups of a mean batch, and microbatches of a group.
      row_shapes: rows of a rank at each granularity, and tokens of a row.
      sub_microbatches, max_sub_microbatches: groups of the module for one of other modules.
    """
    module, (n_groups, group_size), (rows, tokens) = segments[0].module, granularities, row_shapes
    volume, n_tokens = context.volumes[module], rows * tokens
    data: Array = mesh.data
    min_tokens = n_tokens[:, [int((n_groups * group_size).argmax())]]
    capacity = context.group_capacity(module, rows, tokens) * data * group_size
    predictions = context.costs.predict(module, mesh.model, rows, tokens)
    content = group_content(volume, n_groups * sub_microbatches, data)
    by_kind: dict[tuple[object, ...], tuple[Array, SegmentBytes]] = {}
    costs = []
    for s, tasks in zip(segments, directions, strict=True):
        key = context.costs.price_key(s), tuple(tasks), context.spec.trains(s)
        if key not in by_kind:
            by_kind[key] = _segment_costs(context, s, mesh, group_size, predictions, content, tasks)
        costs.append(by_kind[key])
    seconds, n_bytes = zip(*costs, strict=True)
    return ModuleTable(
        context.options(module),
        data[:, 0],
        np.asarray(mesh.n_devices),
        rows,
        tokens,
        n_tokens <= np.maximum(context.max_trusted_tokens(module), min_tokens),
        min_groups(volume, capacity * max_sub_microbatches, context.bucket_shares[0]),
        seconds,
        n_bytes,
    )


def _segment_costs(
    context: SearchContext,
    s: SegmentPlan,
    mesh: MeshShape,
    group_size: Array,
    predictions: Predictions,
    content: Sequence[Array],
    tasks: Collection[str],
) -> tuple[Array, SegmentBytes]:
    """(seconds [4, n_options, ...] as in `ModuleTable`, bytes) of a segment."""
    trains, shape = context.spec.trains(s), predictions.has_rows.shape
    by_option = []
    for option in context.options(s.module):
        costs = context.costs.segment(option.apply(s), mesh)
        seconds: list[Array] = [0.0] * 4
        for i, d in enumerate((FORWARD, BACKWARD)):
            if d in tasks:
                static_s = costs.task_s(group_size, predictions, d)
                seconds[i] = static_s + content_seconds(costs.content_s(group_size, d), content)
        if trains:
            seconds[2:] = costs.state.reduce_s(), costs.state.update_s()
        backward = BACKWARD in tasks
        n_bytes = costs.n_bytes(group_size, predictions, trained=trains, backward=backward)
        quantities = *seconds, n_bytes.state, n_bytes.residuals, n_bytes.temporaries
        by_option.append([np.broadcast_to(a, shape) for a in quantities])
    each: Array = np.stack(by_option, axis=1)
    return each[:4], SegmentBytes(*each[4:])
