"""DIP's partitioner (arXiv 2504.14145): every rank holds chunks of every module.

A rank is a block of devices. A module is split into chunks of consecutive layers, assigned to the
ranks round-robin; a module whose microbatch takes longer gets more rounds of smaller chunks.
Modules that only feed others run in sub-microbatches of the smallest size that devices run
efficiently; several sub-microbatches feed one group.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from dflop_jax.plan.bounds import Space, make_module_options, segment_graph
from dflop_jax.plan.memory import block_minimum
from dflop_jax.plan.module_tables import HEADROOM, SearchContext, module_table
from dflop_jax.plan.placement import SpaceLimits, divisors, split_layers
from dflop_jax.plan.space import explain_no_placement
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
from dflop_jax.schedule.balance_problem import ROUNDING
from dflop_jax.simulate.task_graph import in_flight_limit

POLICY = "dip"
MIN_EFFICIENCY = 0.95  # minimum rate of a sub-microbatch, relative to the best rate
MAX_ROUNDS = 3  # of a module's chunks over the ranks; every chunk has its own programs
# Maximum per microbatch. With 12 (and 6 rounds) no set-up of the DIP paper was faster, and two
# were 3% and 5% slower.
MAX_SUB_MICROBATCHES = 4
# With more groups per rank, the pipeline's fill and drain are already short; more are tried only if
# fewer, larger groups do not fit into memory.
_MAX_GROUPS_PER_RANK = 8
_ROW_COUNTS = tuple(sorted({k * 2**i for i in range(11) for k in (2, 3)} | {1}))


def module_seconds(
    context: SearchContext, module: str, model: int, rows: Array, tokens: Array
) -> Array:
    """Return the forward and backward seconds of one microbatch in all layers of a module."""
    costs, n = context.costs, context.n_layers[module]
    segment = SegmentPlan(module, module, 0, n, module, True, True)
    predictions = costs.predict(module, model, rows, tokens)
    segment_costs = costs.segment(segment, MeshShape(model=model))
    directions = (FORWARD, BACKWARD) if costs.has_forward(segment) else (BACKWARD,)
    return sum(segment_costs.task_s(1, predictions, d) for d in directions)


def efficient_rows(context: SearchContext, module: str, model: int, tokens: int) -> int:
    """Return the smallest trusted number of rows that reaches `MIN_EFFICIENCY`."""
    max_rows = max(1.0, context.max_trusted_tokens(module) / tokens)
    rows = np.array([n for n in _ROW_COUNTS if n <= max_rows])
    rate = rows / module_seconds(context, module, model, rows, np.full(rows.shape, tokens))
    return int(rows[(rate >= MIN_EFFICIENCY * rate.max()).argmax()])


def choose_rounds(
    context: SearchContext, n_ranks: int, model: int, max_rounds: int
) -> dict[str, int]:
    """Return each module's rounds: its efficient microbatch's time over the shortest such time."""
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
    """Return the submeshes of each division of the devices into ranks; ValueError: none."""
    n_layers, config, choices = limits.n_layers, limits.config, []
    if config.submeshes == "separate" or config.loop == "require":
        if config.policy == POLICY:
            raise ValueError(explain_no_placement(limits))
        return []
    degrees = set.intersection(*(set(limits.degrees[m]) for m in n_layers))
    shallow = min(n_layers, key=n_layers.__getitem__)
    for n in divisors(limits.n_devices, min(config.max_stage, n_layers[shallow]))[1:]:
        size = limits.n_devices // n
        for model in divisors(size, limits.max_model):
            if model in degrees and limits.node % model == 0:
                mesh = MeshShape(data=size // model, model=model)
                choices.append(tuple(mesh.block(f"rank{r}", r * size) for r in range(n)))
    if not choices and config.policy == POLICY:
        raise ValueError(
            f"policy dip has no placement on {limits.n_devices} devices: it needs 2 to "
            f"plan.max_stage={config.max_stage} equal ranks with a layer of every module each, and "
            f"{shallow!r} has {n_layers[shallow]}; change plan.devices or plan.max_stage, or use "
            "plan.policy auto"
        )
    return choices


def dip_layouts(context: SearchContext) -> Iterator[Layout]:
    """Yield layouts without buckets for all ranks and rounds; raises as `rank_submeshes` does."""
    for ranks in rank_submeshes(context.space_limits):
        n, model = len(ranks), ranks[0].model
        each = (choose_rounds(context, n, model, limit + 1) for limit in range(MAX_ROUNDS))
        for rounds in dict.fromkeys(tuple(r.items()) for r in each):
            yield chunked_layout(context, ranks, dict(rounds))


def chunked_layout(
    context: SearchContext, ranks: Sequence[SubmeshPlan], rounds: Mapping[str, int]
) -> Layout:
    """Return the layout with chunk i of each module on rank i modulo the number of ranks."""
    segments = []
    for m, n_rounds in rounds.items():
        n, costs = n_rounds * len(ranks), context.layer_costs[m, ranks[0].model]
        for i, (a, b) in enumerate(split_layers(context.n_layers[m], n, costs)):
            rank = ranks[i % len(ranks)].name
            segments.append(SegmentPlan(f"{m}{i}", m, a, b, rank, i == 0, i == n - 1))
    return context.with_edges(Layout(tuple(ranks), tuple(segments)))


def with_sub_microbatches(
    layout: Layout, context: SearchContext, readers: Collection[str] = ()
) -> Layout:
    """Return the layout with sub-microbatches. Modules that only feed others run in groups of one
    efficient shape, at most `MAX_SUB_MICROBATCHES` per group of the other modules; `readers` are
    divided instead of the modules that feed them. Unchanged if one per group is enough."""
    divided = replace(layout, fan_in=MAX_SUB_MICROBATCHES, divided_readers=tuple(readers))
    subs = {m: _sub_microbatch(divided, m, context) for m in divided.divided if divided.shapes(m)}
    fan_in = max((n for _, n in subs.values()), default=1)
    if fan_in == 1:
        return layout
    shapes = {m: shape for m, (shape, _) in subs.items()}
    buckets = (Bucket(tuple((m, shapes.get(m, s)) for m, s in b.shapes)) for b in layout.buckets)
    return replace(divided, buckets=tuple(dict.fromkeys(buckets)), fan_in=fan_in)


def _sub_microbatch(layout: Layout, module: str, context: SearchContext) -> tuple[Shape, int]:
    """Return (shape of a module's sub-microbatches, their number in its largest group)."""
    shapes = layout.shapes(module)
    model = layout.submesh(layout.segments_of(module)[0].submesh).model
    tokens = max(s.tokens for s in shapes)
    needed_rows = max(-(-s.rows // (tokens // s.tokens)) for s in shapes)  # rows of `tokens`
    rows = min(needed_rows, efficient_rows(context, module, model, tokens))
    rows = max(rows, -(-needed_rows // MAX_SUB_MICROBATCHES))
    return Shape(rows, tokens), -(-needed_rows // rows)


def dip_spaces(context: SearchContext) -> Iterator[Space]:
    """Yield the space of each layout at all granularities; raises as `rank_submeshes` does."""
    return (_bound_layout(context, layout) for layout in dip_layouts(context))


def _bound_layout(context: SearchContext, layout: Layout) -> Space:
    granularities, rank = context.granularities(1), layout.submeshes[0]
    n_groups, limit = granularities[0], context.spec.memory_bytes
    whole_shapes = {}
    for m in layout.modules:
        sizes = context.row_shapes(m, n_groups, rank.data, rank.model)
        pairs = zip(*(size.tolist() for size in sizes))
        whole_shapes[m] = [Shape(r, t) if r else None for r, t in pairs]
    whole_buckets = [
        Bucket.from_shapes({m: of_module[c] for m, of_module in whole_shapes.items()})
        for c in range(len(n_groups))
    ]
    divided = [with_sub_microbatches(replace(layout, buckets=(b,)), context) for b in whole_buckets]
    fan_in = [one.fan_in for one in divided]
    limits = {n: in_flight_limit(Plan(POLICY, replace(layout, fan_in=n))) for n in set(fan_in)}
    graph = segment_graph(layout, context)
    data: Array = np.array([[rank.data]])
    mesh = replace(rank.shape, data=data)
    tables, options, sub_microbatches = {}, {}, {}
    for m in layout.modules:
        directions, resources, _ = graph.module_key(m)
        segments = layout.segments_of(m)
        shapes = [one.buckets[0].shape(m) for one in divided]
        rows, tokens = np.array([(s.rows, s.tokens) if s else (0, 0) for s in shapes]).T[:, None]
        counts = [_sub_microbatch_counts(context, m, n, x) for n, x in zip(n_groups, divided)]
        mean_subs, max_subs = np.array(counts).T
        sub_microbatches[m] = mean_subs[None]
        tables[m] = module_table(
            context,
            segments,
            directions,
            mesh,
            granularities,
            (rows, tokens),
            (mean_subs[None], max_subs),
        )
        in_flight = [np.array([[limits[n][s.name] for n in fan_in]]) for s in segments]
        options[m] = make_module_options(tables[m], resources, in_flight)
    (block,) = graph.blocks
    table_rows = dict.fromkeys(block, np.zeros(1, int))
    minima = {block: block_minimum([options[m] for m in block], limit)}
    space = Space(
        POLICY,
        lambda _: layout,
        graph,
        context,
        *granularities,
        tables,
        table_rows,
        options,
        minima,
        True,
        sub_microbatches,
        fan_in,
        whole_buckets,
    )
    # At least one group per rank, and not many if few fit into memory without saving options.
    fits_unsaved = block_minimum([options[m].with_option(0) for m in block], limit).fits
    n_ranks = len(layout.submeshes)
    fills_ranks = n_groups >= min(n_ranks, n_groups[-1])
    fits = fills_ranks & fits_unsaved & space.is_trusted
    first = np.argmax(fits) if fits.any() else fits.size
    is_coarse = (n_groups <= _MAX_GROUPS_PER_RANK * n_ranks) | (np.arange(fits.size) <= first)
    return replace(space, is_allowed=fills_ranks & is_coarse)


def _sub_microbatch_counts(
    context: SearchContext, module: str, n_groups: int, layout: Layout
) -> tuple[int, int]:
    """Return the (mean, maximum) number of sub-microbatches per group."""
    shape = layout.buckets[0].shape(module)
    if module not in layout.divided:
        return 1, 1
    if shape is None:
        return 1, layout.fan_in
    capacity = context.group_capacity(module, shape.rows, shape.tokens) * layout.data_ranks(module)
    mean = context.volumes[module].mean_per_batch * HEADROOM / (n_groups * capacity)
    return min(max(1, math.ceil(mean - ROUNDING)), layout.fan_in), layout.fan_in
