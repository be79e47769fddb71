"""Tasks and bytes of modules in all their forms at all cuts and with all options, as arrays.

Every group of a cut has one shape and one content, so its tasks' seconds are exact before anything
is scheduled; only how many groups a batch takes is not, and at least as many as its volume needs.

Arrays are [n_forms, n_cuts]; the forms of a table differ in their data degree only. Those that
depend on the option have it first, [n_options, n_forms, n_cuts].
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

# Times the largest timed shape of a module up to which prices by timings are believed; twice as
# much admits fewer and larger groups, priced by a fit that nothing near them was timed for.
_MAX_EXTRAPOLATION = 2.0
# Microbatches of a group for each stage of a loop. A loop of S stages takes 1 + (S - 1) / (k S)
# times what it needs: with 8, at most an eighth more, which 16 would halve.
_MICROBATCHES_PER_STAGE = (1, 2, 4, 8)
# Of a bucket, what it and the smaller ones beside it have, those first that save most. In 6 set-ups
# of benchmarks/auto_choice.py (21 placements) quarters took 0.7% longer than all four, thirds 2%.
_BUCKET_SHARES = (1.0, 0.6, 0.3, 0.8)


@dataclass(frozen=True)
class SearchContext:
    """What every placement is priced with.

    volumes: of the sampled batches, by module. spec: what is searched for, all limits above 0.
    """

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
        """What is tried for a module, the simplest first: of equals the first is taken."""
        remat, zero = self.spec.remat, self.spec.zero
        policies = (remat,) if remat != "auto" else self.costs.fits.priced_policies(module)
        zero_degrees: tuple[Zero, ...] = (zero,) if zero != "auto" else get_args(Zero)
        return tuple(
            MemoryOption(r, z, d)
            for z in zero_degrees
            for d in (self.shard_devices if z > 1 else self.shard_devices[:1])
            for r in policies
        )

    @cached_property
    def space_limits(self) -> SpaceLimits:
        """How far the space of placements reaches, with the tensor-parallel degrees of which the
        profile has timings."""
        timed_degrees: dict[str, set[int]] = {m: set() for m in self.n_layers}
        for t in self.profile.timings:
            timed_degrees[t.module].add(t.model)
        kinds = {m: self.profile.layer_kinds(m) for m in self.n_layers}
        n_devices, node = self.spec.n_devices, self.spec.config.node
        return SpaceLimits.from_model(
            kinds, timed_degrees, self.profile.edges, n_devices, node or n_devices, self.spec.config
        )

    @property
    def shard_devices(self) -> tuple[int, ...]:
        """Sizes of blocks of devices that may share state: as asked for, else all or, where links
        have prices and there are several nodes, those of a node."""
        if requested := self.spec.config.shard_devices:
            return (requested,)
        node = self.spec.config.node if self.profile.hardware else 0
        return (0, node) if 0 < node < self.spec.n_devices else (0,)

    def max_trusted_tokens(self, module: str) -> float:
        """Tokens of a microbatch on a rank up to which prices are believed: a fit of timings goes
        astray far beyond the largest shape that was timed, computed ones hold at any size."""
        if self.profile.computed:
            return np.inf
        timed_tokens = (t.shape.size for t in self.profile.timings if t.module == module)
        return _MAX_EXTRAPOLATION * max(timed_tokens)

    def granularities(self, stages: int) -> tuple[np.ndarray, np.ndarray]:
        """(groups that a mean batch may be cut into, microbatches of a group): groups of as many
        microbatches as the deepest loop has stages, and, where there is a loop, of more."""
        config = self.spec.config
        requested, max_microbatches = config.microbatches_per_stage, config.max_microbatches
        per_stage = (
            [requested]
            if requested
            else [k for k in _MICROBATCHES_PER_STAGE if k * stages <= max_microbatches]
        )
        group_sizes = [k * stages for k in per_stage or [1]] if stages > 1 else [1]
        max_groups = [max(1, max_microbatches // size) for size in group_sizes]
        groups_per_batch = [[*(c for c in GROUPS_PER_BATCH if c < n), n] for n in max_groups]
        return np.concatenate(groups_per_batch), np.repeat(
            group_sizes, [len(n) for n in groups_per_batch]
        )

    def layer_costs(self, module: str, model: int) -> LayerCosts:
        """What a module's ends and layers cost at a tensor-parallel degree."""
        return self.layer_costs_by_degree.get((module, model), EQUAL_LAYERS)

    @property
    def bucket_shares(self) -> tuple[float, ...]:
        """What of a bucket the smaller ones have that plans may have beside it, and 1; rising."""
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
        volume = self.volumes[module]
        if module in self.profile.piece_tokens:
            rows = piece_rows(volume, microbatches, data)
            return rows, np.full(rows.shape, self.profile.piece_tokens[module])
        return packed_rows(
            volume, microbatches, data, self.costs, module, model, self.spec.token_multiple
        )

    def group_capacity(self, module: str, rows: Array, tokens: Array) -> Array:
        """What such rows hold, in the units of `Volume`."""
        return rows if module in self.profile.piece_tokens else rows * tokens

    @cached_property
    def layer_costs_by_degree(self) -> LayerCostsByDegree:
        return relative_layer_costs(self.profile)

    def with_edges(self, layout: Layout) -> Layout:
        """A layout of submeshes and segments, with the model's edges."""
        return replace(layout, edges=self.profile.edges, tied=self.profile.tied)

    def trainable(self, layout: Layout) -> list[str]:
        """Names of the plan's segments that train."""
        return [s.name for s in layout.segments if self.spec.trains(s)]

    def segments(self, module: str, parallelism: Parallelism) -> tuple[SegmentPlan, ...]:
        """A module's segments in a form."""
        costs = self.layer_costs(module, parallelism.mesh.model)
        return module_segments(module, self.n_layers[module], 0, parallelism, costs)[1]


@dataclass(frozen=True)
class ModuleTable:
    """A module in forms of one kind, with every option, at the cuts of `Rules.cuts`.

    data: degree of each form, [n_forms]. rows, tokens: the shape of each form and cut, 0 rows where
    the data has no piece. trusted: whether its prices are believed, or no cut is finer. groups:
    that each sampled batch takes at least, [n_batches, n_forms, n_cuts]. seconds: of each segment's
    group forward and backward, 0 where it does not run them, and of the step's end: reduction and
    update. n_bytes: of each segment's devices.
    """

    options: tuple[MemoryOption, ...]
    data: Array
    rows: Array
    tokens: Array
    is_trusted: Array
    min_groups: Array
    seconds: tuple[tuple[Array, ...], ...]
    n_bytes: tuple[SegmentBytes, ...]

    def shape(self, form: int, cut: int) -> Shape | None:
        rows, tokens = int(self.rows[form, cut]), int(self.tokens[form, cut])
        return Shape(rows, tokens) if rows else None


def module_table(
    context: SearchContext,
    segments: Sequence[SegmentPlan],
    directions: Sequence[Collection[str]],
    mesh: MeshShape,
    granularities: tuple[Array, Array],
    row_shapes: tuple[Array, Array],
    groups_together: Array = 1,
    max_groups_together: Array = 1,
) -> ModuleTable:
    """A module's table.

    Args:
      segments: of the module, most of which are alike; `tasks` are each one's.
      mesh: has rising data degrees, [n_forms, 1].
      cuts: groups of a mean batch at each cut, and microbatches of a group.
      sizes: rows of a rank at each cut, and tokens of a row.
      parts, max_parts: groups of the module that go together, on average and at most.
    """
    module, (n_groups, group_size), (rows, tokens) = segments[0].module, granularities, row_shapes
    volume, n_tokens = context.volumes[module], rows * tokens
    data: Array = mesh.data
    min_tokens = n_tokens[:, [int((n_groups * group_size).argmax())]]
    capacity = (
        context.group_capacity(module, rows, tokens) * max_groups_together * data * group_size
    )
    predictions = context.costs.predict(module, mesh.model, rows, tokens)
    content = group_content(volume, n_groups * groups_together, data)
    costs_by_kind: dict[tuple[object, ...], list[Array]] = {}
    costs = []
    for s, segment_directions in zip(segments, directions, strict=True):
        key = context.costs.price_key(s), tuple(segment_directions), context.spec.trains(s)
        if key not in costs_by_kind:
            costs_by_kind[key] = _segment_costs(
                context, s, mesh, group_size, predictions, content, segment_directions
            )
        costs.append(costs_by_kind[key])
    *seconds, state, kept, temporaries = zip(*costs, strict=True)
    return ModuleTable(
        context.options(module),
        data[:, 0],
        rows,
        tokens,
        n_tokens <= np.maximum(context.max_trusted_tokens(module), min_tokens),
        min_groups(volume, capacity, context.bucket_shares[0]),
        tuple(seconds),
        tuple(map(SegmentBytes, state, kept, temporaries)),
    )


def _segment_costs(
    context: SearchContext,
    s: SegmentPlan,
    mesh: MeshShape,
    group_size: Array,
    predictions: Predictions,
    content: Sequence[Array],
    directions: Collection[str],
) -> list[Array]:
    """What a segment takes with every option of its module: seconds forward, backward, of reduction
    and of update, and the fields of its `SegmentBytes`."""
    trains, shape = context.spec.trains(s), predictions.has_rows.shape
    by_option = []
    for option in context.options(s.module):
        costs = context.costs.segment(option.apply(s), mesh)
        quantities: list[Array] = []
        for d in (FORWARD, BACKWARD):
            seconds: Array = 0.0
            if d in directions:
                seconds = costs.task_s(group_size, predictions, d)
                seconds = seconds + content_seconds(costs.content_s(group_size, d), content)
            quantities.append(seconds)
        state = costs.state
        quantities += [state.reduce_s(), state.update_s()] if trains else [0.0, 0.0]
        n_bytes = costs.n_bytes(
            group_size, predictions, trained=trains, backward=BACKWARD in directions
        )
        quantities += [n_bytes.state, n_bytes.residuals, n_bytes.temporaries]
        by_option.append([np.broadcast_to(a, shape) for a in quantities])
    return [np.stack(each) for each in zip(*by_option, strict=True)]
