"""Volume, time and bytes of modules, as arrays over data degrees, granularities and options.

All groups of a granularity have one shape and equal content, so their task times are exact before
scheduling; the number of groups per batch is a lower bound from the batch's volume. Arrays are
[n_rows, n_granularities], or with a leading axis of options, [n_options, n_rows, n_granularities].
A row is a data-parallel degree and what its ranks exchange with those of the module's readers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import get_args

import numpy as np

from dflop_jax.plan.memory import MemoryOption, with_options
from dflop_jax.plan.placement import (
    LayerCostsByDegree,
    Parallelism,
    SpaceLimits,
    module_segments,
    relative_layer_costs,
)
from dflop_jax.plan.search_spec import GROUPS_PER_BATCH, SearchSpec
from dflop_jax.plan.space import BASELINES
from dflop_jax.plan.unrolling import choose_unrolled
from dflop_jax.profile.cost_model import CostModel, SegmentCosts, layout_prices
from dflop_jax.profile.fit import Predictions
from dflop_jax.profile.state import Array, SegmentBytes
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    Bucket,
    Direction,
    Grouping,
    Layout,
    Load,
    MeshShape,
    ModelProfile,
    Plan,
    Prices,
    Remat,
    Scheduling,
    SegmentPlan,
    Shape,
    Zero,
    content_seconds,
    piece_content,
)
from dflop_jax.schedule.balance_problem import ROUNDING
from dflop_jax.schedule.buckets.sizes import ROW_COUNTS

# Prices from timings are trusted up to this multiple of the tokens of a module's largest timed
# shape. Twice the ratio admits groups whose prices are extrapolated far.
_MAX_EXTRAPOLATION = 2.0
# Microbatches per group and stage (k) of a looped pipeline. With S stages, a group takes
# 1 + (S - 1) / (k S) times its work: with k = 8 at most 1/8 more, with 16 at most 1/16.
_MICROBATCHES_PER_STAGE = (1, 2, 4, 8)
# Sizes of a plan's buckets relative to the largest, by the time they save. In 6 set-ups of
# benchmarks/auto_choice.py (21 placements) multiples of 1/4 took 0.7% longer than all four, of
# 1/3 2%.
_BUCKET_SHARES = (1.0, 0.6, 0.3, 0.8)

# Ratio of the groups' capacity to a mean batch's volume: batches differ, and packing leaves gaps.
# A larger ratio makes groups slower, but fewer batches need one more group than estimated.
HEADROOM = 1.05


@dataclass(frozen=True)
class ModuleVolume:
    """Amount of a module's data: pieces if each row holds one piece, else tokens."""

    mean_per_batch: float
    content: tuple[float, ...]  # mean per global batch, by cost feature
    max_per_sample: int
    has_many_pieces: bool  # whether some sample has more than one
    max_piece_tokens: int
    by_batch: np.ndarray  # amount in each sampled batch, [n_batches]


def module_volume(
    module: str,
    loads: Sequence[Load],
    batches: Sequence[Sequence[Load]],
    global_batch: int,
    *,
    counts_pieces: bool,
) -> ModuleVolume:
    """Return a module's volume; `counts_pieces`: each of its rows holds one piece."""

    def amount(load: Load) -> int:
        return len(load.lengths(module)) if counts_pieces else load.tokens(module)

    amounts, samples_per_load = [amount(load) for load in loads], global_batch / len(loads)
    content = piece_content(loads, module).sum(axis=1) * samples_per_load
    return ModuleVolume(
        mean_per_batch=sum(amounts) * samples_per_load,
        content=tuple(content.tolist()),
        max_per_sample=max(amounts),
        has_many_pieces=any(len(load.lengths(module)) > 1 for load in loads),
        max_piece_tokens=max((n for load in loads for n in load.lengths(module)), default=0),
        by_batch=np.array([float(sum(map(amount, batch))) for batch in batches]),
    )


@dataclass(frozen=True)
class SearchContext:
    """Costs, data volumes and settings of a search; all limits of the spec are resolved (> 0)."""

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
        """Return a module's options, simplest first; the search prefers earlier ones in ties."""
        spec, node = self.spec, self.spec.config.node if self.profile.hardware else 0
        remats = self.costs.priced_policies(module) if spec.remat == "auto" else (spec.remat,)
        degrees: tuple[Zero, ...] = get_args(Zero) if spec.zero == "auto" else (spec.zero,)
        # Numbers of devices to shard over (0: all); a node is one choice if links are priced.
        blocks = (0, node) if 0 < node < spec.n_devices else (0,)
        if spec.config.shard_devices:
            blocks = (spec.config.shard_devices,)
        return tuple(
            MemoryOption(r, z, d, z < 3 and self.unrolled[module, r])
            for z in degrees
            for d in (blocks if z > 1 else blocks[:1])
            for r in remats
        )

    @cached_property
    def unrolled(self) -> Mapping[tuple[str, Remat], bool]:
        """See `choose_unrolled`, as if every module ran on all devices."""
        mean_tokens = {
            m: self.profile.piece_tokens.get(m, 1) * self.volumes[m].mean_per_batch
            for m in self.n_layers
        }
        tokens = {m: n / self.spec.n_devices for m, n in mean_tokens.items()}
        return choose_unrolled(self.profile, tokens, self.spec.steps, self.spec.config.buckets)

    @cached_property
    def space_limits(self) -> SpaceLimits:
        """Limits of placements, with the tensor-parallel degrees that were profiled."""
        degrees: dict[str, set[int]] = {m: set() for m in self.n_layers}
        for t in self.profile.timings:
            degrees[t.module].add(t.model)
        kinds = {m: self.profile.layer_kinds(m) for m in self.n_layers}
        n, config = self.spec.n_devices, self.spec.config
        edges = self.profile.edges
        return SpaceLimits.from_model(kinds, degrees, edges, n, config.node or n, config)

    def max_trusted_tokens(self, module: str) -> float:
        """Return the maximum tokens with trusted prices: fits are wrong far beyond timed shapes."""
        if self.profile.computed:
            return np.inf
        timed = (t.shape.size for t in self.profile.timings if t.module == module)
        return _MAX_EXTRAPOLATION * max(timed)

    def granularities(self, stages: int) -> tuple[np.ndarray, np.ndarray]:
        """Return arrays (groups per mean batch, microbatches per group), one entry per choice;
        group sizes are multiples of a looped pipeline's stages."""
        config, sizes = self.spec.config, [1]
        max_count, fixed = config.max_microbatches, config.microbatches_per_stage
        if stages > 1:
            per_stage = (fixed,) if fixed else _MICROBATCHES_PER_STAGE
            sizes = [k * stages for k in per_stage if fixed or k * stages <= max_count] or [stages]
        max_groups = [max(1, max_count // size) for size in sizes]
        groups = [[*(c for c in GROUPS_PER_BATCH if c < n), n] for n in max_groups]
        return np.concatenate(groups), np.repeat(sizes, [len(n) for n in groups])

    @property
    def bucket_shares(self) -> tuple[float, ...]:
        """Sizes of a plan's buckets relative to the largest, ascending; the last is 1."""
        return tuple(sorted(_BUCKET_SHARES[: self.spec.config.buckets]))

    def row_tokens(self, module: str) -> int:
        """Return the minimum tokens of a packed row, which holds the longest piece."""
        return int(self._round_up(max(1, self.volumes[module].max_piece_tokens)))

    def row_shapes(
        self, module: str, microbatches: Array, data: Array, model: int
    ) -> tuple[Array, Array]:
        """Return (rows per rank, tokens per row) for a number of microbatches per mean batch. The
        number of packed rows is the cheapest per token; each row fits the longest piece, and the
        rows together fit the largest sample. 0 rows if no sample has a piece."""
        volume = self.volumes[module]
        rank_volume: Array = volume.mean_per_batch * HEADROOM / (microbatches * data)
        if module in self.profile.piece_tokens:
            n_rows = np.maximum(_ceil(rank_volume), _ceil(volume.max_per_sample / data)).astype(int)
            return n_rows, np.full(n_rows.shape, self.profile.piece_tokens[module])
        best_rows: Array = np.zeros(np.shape(rank_volume), int)
        best_tokens: Array = best_rows
        best_s: Array = np.inf  # per token
        kinds = Counter(self.profile.layer_kinds(module)).items()
        for rows in ROW_COUNTS if volume.max_per_sample else ():
            # First fit cannot fail if each row has room for an even share of the largest sample
            # plus one piece.
            min_tokens, largest = volume.max_piece_tokens + 0.0 * data, volume.max_per_sample
            if volume.has_many_pieces:
                min_tokens = np.minimum(largest, largest / (rows * data) + min_tokens)
            shortest = self._round_up(min_tokens)
            tokens = np.maximum(self._round_up(rank_volume / rows), shortest).astype(int)
            predictions = self.costs.predict(module, model, rows, tokens)
            layers_s = sum(n * predictions.layer(kind, "layer_backward") for kind, n in kinds)
            token_s = layers_s / (rows * tokens)
            # Rows that the volume does not fill would only add padding.
            is_filled = (rows == 1) | (rank_volume > (rows - 0.5) * shortest)
            is_cheaper = is_filled & (token_s < best_s * (1 - ROUNDING))
            best_rows = np.where(is_cheaper, rows, best_rows)
            best_tokens = np.where(is_cheaper, tokens, best_tokens)
            best_s = np.where(is_cheaper, token_s, best_s)
        return best_rows, best_tokens

    def _round_up(self, tokens: Array) -> Array:
        multiple = self.spec.token_multiple
        return _ceil(tokens / multiple) * multiple

    def group_capacity(self, module: str, rows: Array, tokens: Array) -> Array:
        """Return the capacity of rows in the units of `ModuleVolume`."""
        return rows if module in self.profile.piece_tokens else rows * tokens

    @cached_property
    def layer_costs(self) -> LayerCostsByDegree:
        return relative_layer_costs(self.profile)

    def with_edges(self, layout: Layout) -> Layout:
        """Return the layout with the model's edges and tied parameters."""
        return replace(layout, edges=self.profile.edges, tied=self.profile.tied)

    def price_layout(self, layout: Layout, policy: str | None = None) -> Prices:
        """Return the layout's prices under a policy's grouping of samples; None: the search's
        policy."""
        return layout_prices(layout, self.costs, _grouping(policy or self.spec.config.policy))

    def trainable(self, layout: Layout) -> list[str]:
        """Return the names of segments with trainable parameters."""
        return [s.name for s in layout.segments if self.spec.trains(s)]

    def segments(self, module: str, parallelism: Parallelism) -> tuple[SegmentPlan, ...]:
        """Return a module's segments under a parallelism."""
        costs = self.layer_costs[module, parallelism.mesh.model]
        return module_segments(module, self.n_layers[module], 0, parallelism, costs)[1]

    def build_plan(
        self,
        layout: Layout,
        policy: str,
        buckets: Sequence[Bucket],
        options: Mapping[str, MemoryOption] | None = None,
    ) -> Plan:
        """Build the plan of a layout with `buckets`; `options` None: the simplest."""
        options = options or {m: self.options(m)[0] for m in self.n_layers}
        scheduling = Scheduling(_grouping(policy), node=self.spec.config.node)
        layout = replace(self.with_edges(layout), buckets=tuple(buckets))
        return with_options(Plan(policy, layout, scheduling), options)


def _grouping(policy: str) -> Grouping:
    return "arrival" if policy in BASELINES else "balanced"


@dataclass(frozen=True)
class ModuleTable:
    """A module's shapes, time and memory by row, option and granularity."""

    options: tuple[MemoryOption, ...]
    data: Array  # data-parallel degree, [n_rows]
    n_devices: Array  # per segment, [n_rows, 1]
    rows: Array  # of the bucket's shape; 0 if the data has no piece
    tokens: Array  # per row of the shape
    is_trusted: Array  # whether the shape's prices are trusted, or no shape is smaller
    min_groups: Array  # minimum per sampled batch, [n_batches, n_rows, n_granularities]
    # By segment, [4, n_options, ...]: forward and backward of a group (0 if not run), gradient
    # reduction and update at the end of the step.
    seconds: tuple[Array, ...]
    n_bytes: tuple[SegmentBytes, ...]  # per device, by segment, [n_options, ...]

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
    sub_microbatches: tuple[Array, Array] = (1, 1),
    exchanged: Mapping[str, Array] | None = None,
) -> ModuleTable:
    """Return the table of a module.

    Args:
      segments, directions: the module's segments and the tasks of each.
      mesh: with data-parallel degrees [n_rows, 1].
      granularities: groups per mean batch, and microbatches per group.
      row_shapes: rows per rank and tokens per row at each granularity.
      sub_microbatches: mean and maximum number of groups per group of other modules.
      exchanged: `SegmentCosts.exchanged` by segment, [n_rows, 1]; None: of readers on equal meshes.
    """
    module, (n_groups, group_size), (rows, tokens) = segments[0].module, granularities, row_shapes
    volume, n_tokens = context.volumes[module], rows * tokens
    data: Array = mesh.data
    min_tokens = n_tokens[:, [int((n_groups * group_size).argmax())]]
    capacity = context.group_capacity(module, rows, tokens) * data * group_size
    predictions = context.costs.predict(module, mesh.model, rows, tokens)
    content = group_content(volume, n_groups * sub_microbatches[0], data)
    task_s = partial(_task_s, group_size, predictions, content)
    by_kind: dict[tuple[object, ...], Array] = {}

    def quantities(s: SegmentPlan, tasks: Collection[str]) -> Array:
        """Return [7, n_options, ...]: a segment's `ModuleTable.seconds` and three byte counts."""
        trains, by_option = context.spec.trains(s), []
        by_sharding: dict[tuple[Zero, int], SegmentCosts] = {}
        forward_s: dict[tuple[object, ...], Array] = {}
        for option in context.options(module):
            sharding = option.zero, option.shard_devices
            if sharding not in by_sharding:
                by_sharding[sharding] = context.costs.segment(
                    option.apply(s), mesh, (exchanged or {}).get(s.name)
                )
            costs = replace(by_sharding[sharding], segment=option.apply(s))
            key = *sharding, costs.copies_residuals and option.remat
            if key not in forward_s:
                forward_s[key] = task_s(costs, FORWARD) if FORWARD in tasks else 0.0
            backward = BACKWARD in tasks
            backward_s = task_s(costs, BACKWARD) if backward else 0.0
            seconds: list[Array] = [forward_s[key], backward_s, 0.0, 0.0]
            if trains:
                seconds[2:] = costs.state.reduce_s, costs.state.update_s
            n_bytes = costs.n_bytes(group_size, predictions, trained=trains, backward=backward)
            values = *seconds, n_bytes.state, n_bytes.residuals, n_bytes.temporaries
            by_option.append([np.broadcast_to(a, n_tokens.shape) for a in values])
        return np.stack(by_option, axis=1)

    each = []
    for s, tasks in zip(segments, directions, strict=True):
        key = context.costs.price_key(s), tuple(tasks), context.spec.trains(s)
        if key not in by_kind:
            by_kind[key] = quantities(s, tasks)
        each.append(by_kind[key])
    return ModuleTable(
        context.options(module),
        data[:, 0],
        np.asarray(mesh.n_devices),
        rows,
        tokens,
        n_tokens <= np.maximum(context.max_trusted_tokens(module), min_tokens),
        min_groups(volume, capacity * sub_microbatches[1], context.bucket_shares[0]),
        tuple(a[:4] for a in each),
        tuple(SegmentBytes(*a[4:]) for a in each),
    )


def _task_s(
    group_size: Array,
    predictions: Predictions,
    content: Sequence[Array],
    costs: SegmentCosts,
    direction: Direction,
) -> Array:
    """Return the seconds of a group's task with this content per rank."""
    static_s = costs.task_s(group_size, predictions, direction)
    return static_s + content_seconds(costs.content_s(group_size, direction), content)


def group_content(volume: ModuleVolume, groups_per_batch: Array, data: Array) -> tuple[Array, ...]:
    """Return a rank's content per group, by cost feature, given the groups per mean batch."""
    return tuple(_ceil(amount * HEADROOM / (groups_per_batch * data)) for amount in volume.content)


def min_groups(volume: ModuleVolume, capacity: Array, min_share: float) -> Array:
    """Return the minimum number of groups of this capacity per sampled batch, [n_batches, ...]; the
    last group may have `min_share` of the capacity (1: all groups are equal)."""
    batch_amounts = volume.by_batch.reshape(-1, *(1 for _ in np.shape(capacity)))
    needed = batch_amounts / np.maximum(capacity, 1)
    return np.maximum(min_share, needed if min_share < 1 else _ceil(needed))


def _ceil(x: Array) -> Array:
    return np.ceil(x - ROUNDING)
