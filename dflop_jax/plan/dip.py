"""DIP's partitioner (arXiv 2504.14145): every rank holds chunks of every module.

A rank is a block of devices. A module is cut into chunks of consecutive layers, which go round the
ranks once or several times: a module that takes longer for its microbatch has more and smaller
chunks. What other modules only feed from is cut into sub-microbatches, as small as the devices run
them efficiently, of which several feed one group.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from dflop_jax.plan.bounds import Space
from dflop_jax.plan.module_tables import SearchContext, module_table
from dflop_jax.plan.option_combinations import ModuleOptions, block_minimum, segment_graph
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
MIN_EFFICIENCY = 0.95  # of the best rate, which a sub-microbatch reaches at least
MAX_ROUNDS = 3  # of a module's chunks round the ranks; every chunk has programs of its own
# Sub-microbatches of a microbatch. With 12 steps of VLM-S were 10% shorter, on 8 ranks in place of
# 2, and planning took nine times as long, since every step that is tried has more tasks.
MAX_SUB_MICROBATCHES = 4
# Groups for each rank, beyond which filling and draining the pipeline hardly costs: more are tried
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
    """Least rows of so many tokens at which a module reaches `EFFICIENT` of its best rate, among
    sizes whose prices are believed."""
    max_rows = max(1.0, context.max_trusted_tokens(module) / tokens)
    rows = np.array([n for n in _ROW_COUNTS if n <= max_rows])
    rate = rows / module_seconds(context, module, model, rows, np.full(rows.shape, tokens))
    return int(rows[(rate >= MIN_EFFICIENCY * rate.max()).argmax()])


def choose_rounds(
    context: SearchContext, n_ranks: int, model: int, max_rounds: int
) -> dict[str, int]:
    """How often each module's chunks go round `count` ranks of this tensor-parallel degree,
    `most_rounds` times at most: as many times as it takes longer than the fastest for a microbatch
    that it runs efficiently, rounded down."""
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
    """Ways to divide the devices into ranks: the submeshes of each.

    Raises:
      ValueError: there are none, and the policy is this one.
    """
    config = limits.config
    common_degrees = set.intersection(*(set(limits.degrees[m]) for m in limits.n_layers))
    rank_choices = []
    for n_ranks in divisors(limits.n_devices, min(config.max_stage, *limits.n_layers.values())):
        size = limits.n_devices // n_ranks
        for model in divisors(size, limits.max_model):
            if n_ranks >= 2 and model in common_degrees and limits.node % model == 0:
                meshes = (
                    SubmeshPlan(f"rank{r}", r * size, data=size // model, model=model)
                    for r in range(n_ranks)
                )
                rank_choices.append(tuple(meshes))
    if not rank_choices and config.policy == POLICY:
        raise ValueError(_no_placement(limits))
    return rank_choices


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
    """Layouts, without shapes, of ranks that the devices may form; errors as of `ranks_of`."""
    for ranks in rank_submeshes(context.space_limits):
        n_ranks, model = len(ranks), ranks[0].model
        rounds_by_limit = (
            choose_rounds(context, n_ranks, model, max_rounds + 1)
            for max_rounds in range(MAX_ROUNDS)
        )
        for rounds in dict.fromkeys(tuple(r.items()) for r in rounds_by_limit):
            yield chunked_layout(context, ranks, dict(rounds))


def chunked_layout(
    context: SearchContext, ranks: Sequence[SubmeshPlan], rounds: Mapping[str, int]
) -> Layout:
    """Chunk number i of each module on rank i modulo the number of ranks, round and round."""
    segments = []
    for m, n_rounds in rounds.items():
        n_chunks = n_rounds * len(ranks)
        costs = context.layer_costs(m, ranks[0].model)
        for i, (a, b) in enumerate(split_layers(context.n_layers[m], n_chunks, costs)):
            rank = ranks[i % len(ranks)].name
            segments.append(SegmentPlan(f"{m}{i}", m, a, b, rank, i == 0, i == n_chunks - 1))
    return context.with_edges(Layout(tuple(ranks), tuple(segments)))


def with_sub_microbatches(
    layout: Layout, context: SearchContext, readers: Collection[str] = ()
) -> Layout:
    """The layout with modules in groups of one efficient shape, at most `MOST_PARTS` of them for
    every group that its buckets have: those that only feed others, and these `readers` and not what
    feeds them; as it is where one is enough."""
    divided = replace(layout, fan_in=MAX_SUB_MICROBATCHES, divided_readers=tuple(readers))
    shape_and_count = {
        m: _sub_microbatch(divided, m, context) for m in divided.divided if divided.shapes(m)
    }
    fan_in = max((n for _, n in shape_and_count.values()), default=1)
    if fan_in == 1:
        return layout
    buckets = dict.fromkeys(
        Bucket(
            tuple((m, shape_and_count[m][0] if m in shape_and_count else s) for m, s in b.shapes)
        )
        for b in layout.buckets
    )
    return replace(divided, buckets=tuple(buckets), fan_in=fan_in)


def _sub_microbatch(layout: Layout, module: str, context: SearchContext) -> tuple[Shape, int]:
    """The efficient shape of a module's parts, and how many of them its largest group takes."""
    shapes = layout.shapes(module)
    model = layout.submesh(layout.segments_of(module)[0].submesh).model
    tokens = max(s.tokens for s in shapes)
    needed_rows = max(-(-s.rows // (tokens // s.tokens)) for s in shapes)  # rows of `tokens`
    rows = min(needed_rows, efficient_rows(context, module, model, tokens))
    rows = max(rows, -(-needed_rows // MAX_SUB_MICROBATCHES))
    return Shape(rows, tokens), -(-needed_rows // rows)


def dip_spaces(context: SearchContext) -> Iterator[Space]:
    """Each layout at all cuts of a mean batch into groups; errors as of `layouts`."""
    return (_bounded_space(context, layout) for layout in dip_layouts(context))


def _bounded_space(context: SearchContext, layout: Layout) -> Space:
    (groups_per_batch, group_sizes), rank = context.granularities(1), layout.submeshes[0]
    row_shapes = {
        m: context.row_shapes(m, groups_per_batch, rank.data, rank.model) for m in context.volumes
    }
    whole_buckets = [
        Bucket.from_shapes(
            {m: Shape(int(n[c]), int(t[c])) if n[c] else None for m, (n, t) in row_shapes.items()}
        )
        for c in range(len(groups_per_batch))
    ]
    divided_layouts = [
        with_sub_microbatches(replace(layout, buckets=(b,)), context) for b in whole_buckets
    ]
    fan_in = [one.fan_in for one in divided_layouts]
    limits = {n: in_flight_limit(Plan(POLICY, replace(layout, fan_in=n))) for n in set(fan_in)}
    graph = segment_graph(layout, context)
    (block,) = graph.blocks
    data: Array = np.array([[rank.data]])
    mesh = replace(rank.shape, data=data)
    tables, module_options, groups_together = {}, {}, {}
    for m in block:
        directions, resources, _ = graph.module_key(m)
        segments = layout.segments_of(m)
        shapes = [one.buckets[0].shape(m) for one in divided_layouts]
        rows = np.array([[s.rows if s else 0 for s in shapes]])
        tokens = np.array([[s.tokens if s else 0 for s in shapes]])
        groups_together[m] = np.array(
            [
                [
                    _mean_groups_together(context, m, n, divided_layout)
                    for n, divided_layout in zip(groups_per_batch.tolist(), divided_layouts)
                ]
            ]
        )
        max_groups_together = np.array(
            [one.fan_in if m in one.divided else 1 for one in divided_layouts]
        )
        tables[m] = module_table(
            context,
            segments,
            directions,
            mesh,
            (groups_per_batch, group_sizes),
            (rows, tokens),
            groups_together[m],
            max_groups_together,
        )
        in_flight = [np.array([[limits[n][s.name] for n in fan_in]]) for s in segments]
        module_options[m] = ModuleOptions.from_table(tables[m], resources, in_flight)
    block_options = [module_options[m] for m in block]
    space = Space(
        POLICY,
        lambda _: layout,
        graph,
        context,
        groups_per_batch,
        group_sizes,
        tables,
        table_rows=dict.fromkeys(block, np.zeros(1, int)),
        module_options=module_options,
        devices=dict.fromkeys(block, np.array([[rank.n_devices]])),
        block_minima={block: block_minimum(block_options, context.spec.memory_bytes)},
        groups_together=groups_together,
        fan_in=fan_in,
        whole_buckets=whole_buckets,
    )
    fits_unsaved = block_minimum(
        [m.with_option(0) for m in block_options], context.spec.memory_bytes
    ).fits
    return replace(
        space,
        is_tried=_is_tried(
            groups_per_batch, len(layout.submeshes), space.is_trusted & fits_unsaved
        ),
    )


def _mean_groups_together(
    context: SearchContext, module: str, groups_per_batch: int, layout: Layout
) -> int:
    """Groups of a module that go together in a mean batch of so many."""
    shape = layout.buckets[0].shape(module)
    if shape is None or module not in layout.divided:
        return 1
    capacity = context.group_capacity(module, shape.rows, shape.tokens) * layout.data_ranks(module)
    needed_groups = (
        context.volumes[module].mean_per_batch * HEADROOM / (groups_per_batch * capacity)
    )
    return min(max(1, math.ceil(needed_groups - 1e-9)), layout.fan_in)


def _is_tried(groups_per_batch: np.ndarray, n_ranks: int, fits: Array) -> Array:
    """Whether a cut is tried, [1, n_cuts]: not into fewer groups than ranks, which would wait for
    each other, and not further than enough where memory holds a coarser one that saves nothing."""
    fills_ranks = groups_per_batch >= min(n_ranks, groups_per_batch[-1])
    is_cheapest = fills_ranks & fits
    first = np.argmax(is_cheapest) if is_cheapest.any() else is_cheapest.size
    return fills_ranks & (
        (groups_per_batch <= _MAX_GROUPS_PER_RANK * n_ranks)
        | (np.arange(is_cheapest.size) <= first)
    )
