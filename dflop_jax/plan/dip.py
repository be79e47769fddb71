"""DIP's partitioner (arXiv 2504.14145): every rank holds chunks of every module.

A rank is a block of devices. A module is split into chunks of consecutive layers, which go round
the ranks once or several times: a module whose microbatch takes longer has more and smaller chunks.
Modules that only feed others run in sub-microbatches, as small as the devices run them efficiently,
of which several feed one group.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from dflop_jax.plan.bounds import Space, segment_graph
from dflop_jax.plan.module_tables import SearchContext, module_table
from dflop_jax.plan.option_combinations import ModuleOptions, block_minimum
from dflop_jax.plan.placement import SpaceLimits, divisors, split_layers
from dflop_jax.plan.volume import HEADROOM
from dflop_jax.profile.state import Array
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    Bucket,
    Layout,
    MeshShape,
    Plan,
    SegmentPlan,
    Shape,
    SubmeshPlan,
)
from dflop_jax.simulate.task_graph import in_flight_limit

POLICY = "dip"
MIN_EFFICIENCY = 0.95  # of the best rate, for a sub-microbatch
MAX_ROUNDS = 3  # of a module's chunks over the ranks; every chunk has programs of its own
# Sub-microbatches of a microbatch. With 12, steps of VLM-S were 10% shorter, on 8 ranks in place of
# 2, and planning took nine times as long, since every simulated step has more tasks.
MAX_SUB_MICROBATCHES = 4
# Groups for each rank, beyond which fill and drain of the pipeline take little time; more are tried
# only where memory does not hold fewer.
_MAX_GROUPS_PER_RANK = 8
_ROW_COUNTS = tuple(sorted({k * 2**i for i in range(11) for k in (2, 3)} | {1}))


def module_seconds(
    context: SearchContext, module: str, model: int, rows: Array, tokens: Array
) -> Array:
    """Seconds of a group of one microbatch in all of a module's layers, forward and backward."""
    costs, n = context.costs, context.n_layers[module]
    segment = SegmentPlan(module, module, 0, n, module, True, True)
    predictions = costs.predict(module, model, rows, tokens)
    segment_costs = costs.segment(segment, MeshShape(model=model))
    directions = (FORWARD, BACKWARD) if costs.has_forward(segment) else (BACKWARD,)
    return sum(segment_costs.task_s(1, predictions, d) for d in directions)


def efficient_rows(context: SearchContext, module: str, model: int, tokens: int) -> int:
    """Smallest number of rows of so many tokens at which a module reaches `MIN_EFFICIENCY` of its
    best rate, among sizes whose prices are trusted."""
    max_rows = max(1.0, context.max_trusted_tokens(module) / tokens)
    rows = np.array([n for n in _ROW_COUNTS if n <= max_rows])
    rate = rows / module_seconds(context, module, model, rows, np.full(rows.shape, tokens))
    return int(rows[(rate >= MIN_EFFICIENCY * rate.max()).argmax()])


def choose_rounds(
    context: SearchContext, n_ranks: int, model: int, max_rounds: int
) -> dict[str, int]:
    """Rounds of each module's chunks over the ranks, at most `max_rounds`: the seconds of its
    efficient microbatch over those of the fastest module's, rounded down."""
    microbatch_s: dict[str, float] = {}
    for m, volume in context.volumes.items():
        if volume.max_per_sample:
            tokens = context.profile.piece_tokens.get(m) or context.row_tokens(m)
            rows = efficient_rows(context, m, model, tokens)
            microbatch_s[m] = float(module_seconds(context, m, model, rows, tokens))
    min_s = min(microbatch_s.values())
    return {
        m: max(1, min(int(microbatch_s.get(m, 0.0) / min_s + 1e-6), max_rounds, n // n_ranks))
        for m, n in context.n_layers.items()
    }


def rank_submeshes(limits: SpaceLimits) -> list[tuple[SubmeshPlan, ...]]:
    """The submeshes of each division of the devices into ranks.

    Raises:
      ValueError: there is none, and the policy is this one.
    """
    degrees = set.intersection(*(set(limits.degrees[m]) for m in limits.n_layers))
    choices = []
    max_ranks = min(limits.config.max_stage, *limits.n_layers.values())
    for n in divisors(limits.n_devices, max_ranks)[1:]:
        size = limits.n_devices // n
        for model in divisors(size, limits.max_model):
            if model in degrees and limits.node % model == 0:
                mesh = MeshShape(data=size // model, model=model)
                choices.append(tuple(mesh.block(f"rank{r}", r * size) for r in range(n)))
    if not choices and limits.config.policy == POLICY:
        raise ValueError(_no_placement(limits))
    return choices


def _no_placement(limits: SpaceLimits) -> str:
    """Why there is no placement, and what would give one."""
    n_layers = limits.n_layers
    shallow = min(n_layers, key=n_layers.__getitem__)
    return (
        f"policy dip has no placement on {limits.n_devices} devices: 2 to plan.max_stage="
        f"{limits.config.max_stage} ranks of equal size each hold a layer of every module, and "
        f"{shallow!r} has {n_layers[shallow]}; change plan.devices or plan.max_stage, or use "
        "plan.policy auto"
    )


def dip_layouts(context: SearchContext) -> Iterator[Layout]:
    """Layouts, without buckets, of all ranks and rounds; errors as of `rank_submeshes`."""
    for ranks in rank_submeshes(context.space_limits):
        n, model = len(ranks), ranks[0].model
        each = (choose_rounds(context, n, model, limit + 1) for limit in range(MAX_ROUNDS))
        for rounds in dict.fromkeys(tuple(r.items()) for r in each):
            yield chunked_layout(context, ranks, dict(rounds))


def chunked_layout(
    context: SearchContext, ranks: Sequence[SubmeshPlan], rounds: Mapping[str, int]
) -> Layout:
    """The layout with chunk number i of each module on rank i modulo the number of ranks."""
    segments = []
    for m, n_rounds in rounds.items():
        n, costs = n_rounds * len(ranks), context.layer_costs(m, ranks[0].model)
        for i, (a, b) in enumerate(split_layers(context.n_layers[m], n, costs)):
            rank = ranks[i % len(ranks)].name
            segments.append(SegmentPlan(f"{m}{i}", m, a, b, rank, i == 0, i == n - 1))
    return context.with_edges(Layout(tuple(ranks), tuple(segments)))


def with_sub_microbatches(
    layout: Layout, context: SearchContext, readers: Collection[str] = ()
) -> Layout:
    """The layout with sub-microbatches: modules that only feed others, and `readers` instead of
    what feeds them, run in groups of one efficient shape, at most `MAX_SUB_MICROBATCHES` for each
    group of the other modules. The layout itself where one is enough."""
    divided = replace(layout, fan_in=MAX_SUB_MICROBATCHES, divided_readers=tuple(readers))
    subs = {m: _sub_microbatch(divided, m, context) for m in divided.divided if divided.shapes(m)}
    fan_in = max((n for _, n in subs.values()), default=1)
    if fan_in == 1:
        return layout
    shapes = {m: shape for m, (shape, _) in subs.items()}
    buckets = (Bucket(tuple((m, shapes.get(m, s)) for m, s in b.shapes)) for b in layout.buckets)
    return replace(divided, buckets=tuple(dict.fromkeys(buckets)), fan_in=fan_in)


def _sub_microbatch(layout: Layout, module: str, context: SearchContext) -> tuple[Shape, int]:
    """(shape of a module's sub-microbatches, how many of them its largest group takes)."""
    shapes = layout.shapes(module)
    model = layout.submesh(layout.segments_of(module)[0].submesh).model
    tokens = max(s.tokens for s in shapes)
    needed_rows = max(-(-s.rows // (tokens // s.tokens)) for s in shapes)  # rows of `tokens`
    rows = min(needed_rows, efficient_rows(context, module, model, tokens))
    rows = max(rows, -(-needed_rows // MAX_SUB_MICROBATCHES))
    return Shape(rows, tokens), -(-needed_rows // rows)


def dip_spaces(context: SearchContext) -> Iterator[Space]:
    """The space of each layout at all granularities; errors as of `dip_layouts`."""
    return (_bounded_space(context, layout) for layout in dip_layouts(context))


def _bounded_space(context: SearchContext, layout: Layout) -> Space:
    (n_groups, group_sizes), rank = context.granularities(1), layout.submeshes[0]
    row_shapes = {m: context.row_shapes(m, n_groups, rank.data, rank.model) for m in layout.modules}

    def whole_bucket(c: int) -> Bucket:
        sizes = {m: (int(rows[c]), int(tokens[c])) for m, (rows, tokens) in row_shapes.items()}
        return Bucket.from_shapes(
            {m: Shape(*size) if size[0] else None for m, size in sizes.items()}
        )

    whole_buckets = [whole_bucket(c) for c in range(len(n_groups))]
    divided = [with_sub_microbatches(replace(layout, buckets=(b,)), context) for b in whole_buckets]
    fan_in = [one.fan_in for one in divided]
    limits = {n: in_flight_limit(Plan(POLICY, replace(layout, fan_in=n))) for n in set(fan_in)}
    graph = segment_graph(layout, context)
    data: Array = np.array([[rank.data]])
    mesh = replace(rank.shape, data=data)
    tables, module_options, sub_microbatches = {}, {}, {}
    for m in layout.modules:
        directions, resources, _ = graph.module_key(m)
        segments = layout.segments_of(m)
        shapes = [one.buckets[0].shape(m) for one in divided]
        rows, tokens = np.array([(s.rows, s.tokens) if s else (0, 0) for s in shapes]).T[:, None]
        each = zip(n_groups.tolist(), divided, strict=True)
        sub_microbatches[m] = np.array(
            [[_mean_sub_microbatches(context, m, n, one) for n, one in each]]
        )
        max_subs = np.array([one.fan_in if m in one.divided else 1 for one in divided])
        tables[m] = module_table(
            context, segments, directions, mesh, (n_groups, group_sizes), (rows, tokens),
            sub_microbatches[m], max_subs,
        )  # fmt: skip
        in_flight = [np.array([[limits[n][s.name] for n in fan_in]]) for s in segments]
        module_options[m] = ModuleOptions.from_table(tables[m], resources, in_flight)
    (block,), limit = graph.blocks, context.spec.memory_bytes
    options = [module_options[m] for m in block]
    space = Space(
        POLICY,
        lambda _: layout,
        graph,
        context,
        n_groups,
        group_sizes,
        tables,
        table_rows=dict.fromkeys(block, np.zeros(1, int)),
        module_options=module_options,
        block_minima={block: block_minimum(options, limit)},
        sub_microbatches=sub_microbatches,
        fan_in=fan_in,
        whole_buckets=whole_buckets,
    )
    fits_unsaved = block_minimum([m.with_option(0) for m in options], limit).fits
    fits_unsaved = fits_unsaved & space.is_trusted
    return replace(space, is_allowed=_is_allowed(n_groups, len(layout.submeshes), fits_unsaved))


def _mean_sub_microbatches(
    context: SearchContext, module: str, n_groups: int, layout: Layout
) -> int:
    """Sub-microbatches of a module for a group, where a mean batch takes `n_groups` groups."""
    shape = layout.buckets[0].shape(module)
    if shape is None or module not in layout.divided:
        return 1
    capacity = context.group_capacity(module, shape.rows, shape.tokens) * layout.data_ranks(module)
    n_subs = context.volumes[module].mean_per_batch * HEADROOM / (n_groups * capacity)
    return min(max(1, math.ceil(n_subs - 1e-9)), layout.fan_in)


def _is_allowed(n_groups: np.ndarray, n_ranks: int, fits_unsaved: Array) -> Array:
    """Whether the search takes a granularity, [1, n_granularities]: at least a group for each rank,
    and at most `_MAX_GROUPS_PER_RANK` where memory holds a coarser one without saving options."""
    fills_ranks = n_groups >= min(n_ranks, n_groups[-1])
    fits = fills_ranks & fits_unsaved
    first = np.argmax(fits) if fits.any() else fits.size
    is_coarse = (n_groups <= _MAX_GROUPS_PER_RANK * n_ranks) | (np.arange(fits.size) <= first)
    return fills_ranks & is_coarse
