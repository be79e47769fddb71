"""Volume, seconds and bytes of modules, as arrays over data degrees, granularities and options.

All groups of a granularity have one shape and equal content, so the seconds of their tasks are
exact before anything is scheduled; the number of groups of a batch is a lower bound, by its volume.
Arrays are [n_rows, n_granularities], where rows differ in their data degree only, or with the
option first, [n_options, n_rows, n_granularities].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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
from dflop_jax.profile.cost_model import CostModel, layout_prices
from dflop_jax.profile.state import Array, SegmentBytes
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    Bucket,
    Layout,
    Load,
    MeshShape,
    ModelProfile,
    Plan,
    Prices,
    Scheduling,
    SegmentPlan,
    Shape,
    Zero,
    content_seconds,
    piece_content,
)
from dflop_jax.schedule.balance_problem import ROUNDING
from dflop_jax.schedule.buckets.sizes import ROW_COUNTS

# Tokens over those of a module's largest timed shape up to which prices by timings are trusted.
# Twice as much admits groups whose prices are extrapolated far.
_MAX_EXTRAPOLATION = 2.0
# Microbatches of a group for each stage of a loop. A loop of S stages takes 1 + (S - 1) / (k S)
# times its work: with k = 8 at most an eighth more, which 16 would halve.
_MICROBATCHES_PER_STAGE = (1, 2, 4, 8)
# Sizes of a plan's buckets relative to the largest, those first that save most. In 6 set-ups of
# benchmarks/auto_choice.py (21 placements) quarters took 0.7% longer than all four, thirds 2%.
_BUCKET_SHARES = (1.0, 0.6, 0.3, 0.8)

# Capacity of the groups over a mean batch's volume: batches differ, and samples do not pack without
# gaps. Twice the 5% makes groups slower, and fewer batches need one more than estimated.
HEADROOM = 1.05


@dataclass(frozen=True)
class ModuleVolume:
    """Volume of a module: pieces where a row takes one piece, else tokens."""

    mean_per_batch: float
    content: tuple[float, ...]  # of a global batch, by feature
    max_per_sample: int
    has_many_pieces: bool  # whether some sample has more than one
    max_piece_tokens: int
    by_batch: np.ndarray  # of each sampled batch, [n_batches]


def module_volume(
    module: str,
    loads: Sequence[Load],
    batches: Sequence[Sequence[Load]],
    global_batch: int,
    *,
    counts_pieces: bool,
) -> ModuleVolume:
    """The volume of a module; `counts_pieces` where each of its rows takes one piece."""

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
    """What all candidates of a search share; the spec has all limits above 0."""

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
        spec, node = self.spec, self.spec.config.node if self.profile.hardware else 0
        remats = self.costs.priced_policies(module) if spec.remat == "auto" else (spec.remat,)
        degrees: tuple[Zero, ...] = get_args(Zero) if spec.zero == "auto" else (spec.zero,)
        # Devices that share state (0: all), where links have prices a node, too.
        blocks = (0, node) if 0 < node < spec.n_devices else (0,)
        if spec.config.shard_devices:
            blocks = (spec.config.shard_devices,)
        return tuple(
            MemoryOption(r, z, d)
            for z in degrees
            for d in (blocks if z > 1 else blocks[:1])
            for r in remats
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

    def max_trusted_tokens(self, module: str) -> float:
        """Tokens up to which prices are trusted: fits are wrong far beyond what was timed."""
        if self.profile.computed:
            return np.inf
        timed = (t.shape.size for t in self.profile.timings if t.module == module)
        return _MAX_EXTRAPOLATION * max(timed)

    def granularities(self, stages: int) -> tuple[np.ndarray, np.ndarray]:
        """(groups of a mean batch, microbatches of a group: multiples of a loop's stages)."""
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
        """Sizes of the buckets of a plan relative to the largest, rising; the last is 1."""
        return tuple(sorted(_BUCKET_SHARES[: self.spec.config.buckets]))

    def row_tokens(self, module: str) -> int:
        """Tokens of a packed row that holds the longest piece."""
        return int(self._round_up(max(1, self.volumes[module].max_piece_tokens)))

    def row_shapes(
        self, module: str, microbatches: Array, data: Array, model: int
    ) -> tuple[Array, Array]:
        """(rows, tokens of a row) of a rank where a mean batch has so many microbatches. Of packed
        rows the number is that which is cheapest per token; each has room for the longest piece,
        all of them for the largest sample. 0 rows where no sample has a piece."""
        volume = self.volumes[module]
        rank_volume: Array = volume.mean_per_batch * HEADROOM / (microbatches * data)  # of a rank
        if module in self.profile.piece_tokens:
            n_rows = np.maximum(_ceil(rank_volume), _ceil(volume.max_per_sample / data)).astype(int)
            return n_rows, np.full(n_rows.shape, self.profile.piece_tokens[module])
        best_rows: Array = np.zeros(np.shape(rank_volume), int)
        best_tokens: Array = best_rows
        best_s: Array = np.inf  # per token
        kinds = Counter(self.profile.layer_kinds(module)).items()
        for rows in ROW_COUNTS if volume.max_per_sample else ():
            # First fit cannot fail where each row has room for an even share of the largest sample
            # and one piece more.
            min_tokens, largest = volume.max_piece_tokens + 0.0 * data, volume.max_per_sample
            if volume.has_many_pieces:
                min_tokens = np.minimum(largest, largest / (rows * data) + min_tokens)
            shortest = self._round_up(min_tokens)
            tokens = np.maximum(self._round_up(rank_volume / rows), shortest).astype(int)
            predictions = self.costs.predict(module, model, rows, tokens)
            layers_s = sum(n * predictions.layer(kind, "layer_backward") for kind, n in kinds)
            token_s = layers_s / (rows * tokens)
            # More rows than the volume fills would only pad.
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
        """What such rows hold, in the units of `ModuleVolume`."""
        return rows if module in self.profile.piece_tokens else rows * tokens

    @cached_property
    def layer_costs(self) -> LayerCostsByDegree:
        return relative_layer_costs(self.profile)

    def with_edges(self, layout: Layout) -> Layout:
        """A layout of submeshes and segments, with the model's edges."""
        return replace(layout, edges=self.profile.edges, tied=self.profile.tied)

    def price_layout(self, layout: Layout) -> Prices:
        return layout_prices(layout, self.costs)

    def trainable(self, layout: Layout) -> list[str]:
        """Names of the segments with trainable parameters."""
        return [s.name for s in layout.segments if self.spec.trains(s)]

    def segments(self, module: str, parallelism: Parallelism) -> tuple[SegmentPlan, ...]:
        """A module's segments under a parallelism."""
        costs = self.layer_costs[module, parallelism.mesh.model]
        return module_segments(module, self.n_layers[module], 0, parallelism, costs)[1]

    def build_plan(
        self,
        layout: Layout,
        policy: str,
        buckets: Sequence[Bucket],
        options: Mapping[str, MemoryOption] | None = None,
    ) -> Plan:
        """The plan of a layout of submeshes and segments; `options` None: the simplest."""
        options = options or {m: self.options(m)[0] for m in self.n_layers}
        scheduling = Scheduling(
            "arrival" if policy in BASELINES else "balanced", node=self.spec.config.node
        )
        layout = replace(self.with_edges(layout), buckets=tuple(buckets))
        return with_options(Plan(policy, layout, scheduling), options)


@dataclass(frozen=True)
class ModuleTable:
    """A module with degrees of data parallelism by row, every option, and all granularities."""

    options: tuple[MemoryOption, ...]
    data: Array  # data degree, [n_rows]
    n_devices: Array  # of a segment, [n_rows, 1]
    rows: Array  # of the shape; 0 where the data has no piece
    tokens: Array
    is_trusted: Array  # whether prices of the shape are, or no granularity has a smaller one
    min_groups: Array  # minimum of each sampled batch, [n_batches, n_rows, n_granularities]
    # Of each segment, [4, n_options, ...]: a group forward and backward, 0 where it does not run
    # them, reduction and update at the step's end.
    seconds: tuple[Array, ...]
    n_bytes: tuple[SegmentBytes, ...]  # of each segment's devices, [n_options, ...]

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
    by_kind: dict[tuple[object, ...], Array] = {}

    def quantities(s: SegmentPlan, tasks: Collection[str]) -> Array:
        """[7, n_options, ...]: seconds as in `ModuleTable`, and bytes of a segment."""
        trains, by_option = context.spec.trains(s), []
        for option in context.options(module):
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
        min_groups(volume, capacity * max_sub_microbatches, context.bucket_shares[0]),
        tuple(a[:4] for a in each),
        tuple(SegmentBytes(*a[4:]) for a in each),
    )


def group_content(volume: ModuleVolume, groups_per_batch: Array, data: Array) -> tuple[Array, ...]:
    """Content, by feature, of a rank's share of one group, where a mean batch takes so many."""
    return tuple(_ceil(amount * HEADROOM / (groups_per_batch * data)) for amount in volume.content)


def min_groups(volume: ModuleVolume, capacity: Array, min_share: float) -> Array:
    """Minimum number of groups of such a capacity of each sampled batch, [n_batches, ...]; the last
    one may have this share of the others (1: all have the largest bucket)."""
    batch_amounts = volume.by_batch.reshape(-1, *(1 for _ in np.shape(capacity)))
    needed = batch_amounts / np.maximum(capacity, 1)
    return np.maximum(min_share, needed if min_share < 1 else _ceil(needed))


def _ceil(x: Array) -> Array:
    return np.ceil(x - ROUNDING)
