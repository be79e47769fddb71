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
from dflop_jax.plan.estimate import Rules, module_table
from dflop_jax.plan.placement import Extent, factors, split_layers
from dflop_jax.plan.structure import Member, least, structure_of
from dflop_jax.plan.volume import ROOM
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
EFFICIENT = 0.95  # of the best rate, which a sub-microbatch reaches at least
MOST_ROUNDS = 3  # of a module's chunks round the ranks; every chunk has programs of its own
# Sub-microbatches of a microbatch. With 12 steps of VLM-S were 10% shorter, on 8 ranks in place of
# 2, and planning took nine times as long, since every step that is tried has more tasks.
MOST_PARTS = 4
# Groups for each rank, beyond which filling and draining the pipeline hardly costs: more are tried
# only where memory does not hold fewer.
_ENOUGH = 8
_ROWS = tuple(sorted({k * 2**i for i in range(11) for k in (2, 3)} | {1}))


def module_s(rules: Rules, module: str, model: int, rows: Array, tokens: Array) -> Array:
    """Seconds of a group of one microbatch in all of a module's layers, forward and backward."""
    costs, n = rules.costs, rules.n_layers[module]
    whole = SegmentPlan(module, module, 0, n, module, True, True)
    figures = costs.at(module, model, rows, tokens)
    directions = (FORWARD, BACKWARD) if costs.hands_over(whole) else (BACKWARD,)
    return sum(costs.task_s(whole, MeshShape(model=model), 1, figures, d) for d in directions)


def efficient_rows(rules: Rules, module: str, model: int, tokens: int) -> int:
    """Least rows of so many tokens at which a module reaches `EFFICIENT` of its best rate, among
    sizes whose prices are believed."""
    believed_rows = max(1.0, rules.trusted_tokens(module) / tokens)
    rows = np.array([n for n in _ROWS if n <= believed_rows])
    rate = rows / module_s(rules, module, model, rows, np.full(rows.shape, tokens))
    return int(rows[(rate >= EFFICIENT * rate.max()).argmax()])


def rounds_of(rules: Rules, count: int, model: int, most_rounds: int) -> dict[str, int]:
    """How often each module's chunks go round `count` ranks of this tensor-parallel degree,
    `most_rounds` times at most: as many times as it takes longer than the fastest for a microbatch
    that it runs efficiently, rounded down."""
    took_s: dict[str, float] = {}
    for m, volume in rules.volumes.items():
        if volume.largest:
            tokens = rules.profile.piece_tokens.get(m) or rules.row_tokens(m)
            rows = efficient_rows(rules, m, model, tokens)
            took_s[m] = float(module_s(rules, m, model, rows, tokens))
    least_s = min(took_s.values())
    return {
        m: max(1, min(int(took_s.get(m, 0.0) / least_s + 1e-6), most_rounds, n // count))
        for m, n in rules.n_layers.items()
    }


def ranks_of(extent: Extent) -> list[tuple[SubmeshPlan, ...]]:
    """Ways to divide the devices into ranks: the submeshes of each.

    Raises:
      ValueError: there are none, and the policy is this one.
    """
    config = extent.config
    common = set.intersection(*(set(extent.degrees[m]) for m in extent.n_layers))
    ways = []
    for count in factors(extent.n_devices, min(config.max_stage, *extent.n_layers.values())):
        size = extent.n_devices // count
        for model in factors(size, extent.max_model):
            if count >= 2 and model in common and extent.node % model == 0:
                meshes = (
                    SubmeshPlan(f"rank{r}", r * size, data=size // model, model=model)
                    for r in range(count)
                )
                ways.append(tuple(meshes))
    if not ways and config.policy == POLICY:
        raise ValueError(_none(extent))
    return ways


def _none(extent: Extent) -> str:
    """Why there is no placement, and what would give one."""
    n_layers = extent.n_layers
    shallow = min(n_layers, key=n_layers.__getitem__)
    return (
        f"policy dip has no placement on {extent.n_devices} devices: 2 to plan.max_stage="
        f"{extent.config.max_stage} ranks of equal size each hold a layer of every module, and "
        f"{shallow!r} has {n_layers[shallow]}; change plan.devices or plan.max_stage, or use "
        "plan.policy auto"
    )


def layouts(rules: Rules) -> Iterator[Layout]:
    """Layouts, without shapes, of ranks that the devices may form; errors as of `ranks_of`."""
    for ranks in ranks_of(rules.extent):
        n, model = len(ranks), ranks[0].model
        each = (rounds_of(rules, n, model, most + 1) for most in range(MOST_ROUNDS))
        for rounds in dict.fromkeys(tuple(r.items()) for r in each):
            yield chunked(rules, ranks, dict(rounds))


def chunked(rules: Rules, ranks: Sequence[SubmeshPlan], rounds: Mapping[str, int]) -> Layout:
    """Chunk number i of each module on rank i modulo the number of ranks, round and round."""
    segments = []
    for m, times in rounds.items():
        n = times * len(ranks)
        costs = rules.run_costs(m, ranks[0].model)
        for i, (a, b) in enumerate(split_layers(rules.n_layers[m], n, costs)):
            rank = ranks[i % len(ranks)].name
            segments.append(SegmentPlan(f"{m}{i}", m, a, b, rank, i == 0, i == n - 1))
    return rules.joined(Layout(tuple(ranks), tuple(segments)))


def with_sub_microbatches(layout: Layout, rules: Rules, readers: Collection[str] = ()) -> Layout:
    """The layout with modules in groups of one efficient shape, at most `MOST_PARTS` of them for
    every group that its buckets have: those that only feed others, and these `readers` and not what
    feeds them; as it is where one is enough."""
    divided = replace(layout, fan_in=MOST_PARTS, divided_readers=tuple(readers))
    parts = {m: _part(divided, m, rules) for m in divided.divided if divided.shapes(m)}
    fan_in = max((n for _, n in parts.values()), default=1)
    if fan_in == 1:
        return layout
    buckets = dict.fromkeys(
        Bucket(tuple((m, parts[m][0] if m in parts else s) for m, s in b.shapes))
        for b in layout.buckets
    )
    return replace(divided, buckets=tuple(buckets), fan_in=fan_in)


def _part(layout: Layout, module: str, rules: Rules) -> tuple[Shape, int]:
    """The efficient shape of a module's parts, and how many of them its largest group takes."""
    shapes = layout.shapes(module)
    model = layout.submesh(layout.segments_of(module)[0].submesh).model
    tokens = max(s.tokens for s in shapes)
    needed = max(-(-s.rows // (tokens // s.tokens)) for s in shapes)  # rows of `tokens`
    rows = min(needed, efficient_rows(rules, module, model, tokens))
    rows = max(rows, -(-needed // MOST_PARTS))
    return Shape(rows, tokens), -(-needed // rows)


def dip_spaces(rules: Rules) -> Iterator[Space]:
    """Each layout at all cuts of a mean batch into groups; errors as of `layouts`."""
    return (_space(rules, layout) for layout in layouts(rules))


def _space(rules: Rules, layout: Layout) -> Space:
    (cuts, group_sizes), rank = rules.cuts(1), layout.submeshes[0]
    sizes = {m: rules.row_sizes(m, cuts, rank.data, rank.model) for m in rules.volumes}
    whole = [
        Bucket.of({m: Shape(int(n[c]), int(t[c])) if n[c] else None for m, (n, t) in sizes.items()})
        for c in range(len(cuts))
    ]
    at_cut = [with_sub_microbatches(replace(layout, buckets=(b,)), rules) for b in whole]
    fan_in = [one.fan_in for one in at_cut]
    limits = {n: in_flight_limit(Plan(POLICY, replace(layout, fan_in=n))) for n in set(fan_in)}
    structure = structure_of(layout, rules)
    (block,) = structure.blocks
    data: Array = np.array([[rank.data]])
    mesh = replace(rank.shape, data=data)
    tables, members, parts = {}, {}, {}
    for m in block:
        tasks, resource, _ = structure.facts(m)
        segments = layout.segments_of(m)
        shapes = [one.buckets[0].shape(m) for one in at_cut]
        rows = np.array([[s.rows if s else 0 for s in shapes]])
        tokens = np.array([[s.tokens if s else 0 for s in shapes]])
        parts[m] = np.array([[_parts(rules, m, n, at) for n, at in zip(cuts.tolist(), at_cut)]])
        most = np.array([one.fan_in if m in one.divided else 1 for one in at_cut])
        tables[m] = module_table(
            rules, segments, tasks, mesh, (cuts, group_sizes), (rows, tokens), parts[m], most
        )
        in_flight = [np.array([[limits[n][s.name] for n in fan_in]]) for s in segments]
        members[m] = Member.of(tables[m], resource, in_flight)
    together = [members[m] for m in block]
    space = Space(
        POLICY,
        lambda _: layout,
        structure,
        rules,
        cuts,
        group_sizes,
        tables,
        forms=dict.fromkeys(block, np.zeros(1, int)),
        members=members,
        devices=dict.fromkeys(block, np.array([[rank.n_devices]])),
        leasts={block: least(together, rules.spec.memory_bytes)},
        parts=parts,
        fan_in=fan_in,
        whole=whole,
    )
    unsaved = least([m.only(0) for m in together], rules.spec.memory_bytes).fits
    return replace(space, tried=_tried(cuts, len(layout.submeshes), space.trusted & unsaved))


def _parts(rules: Rules, module: str, cut: int, layout: Layout) -> int:
    """Groups of a module that go together in a mean batch of so many."""
    shape = layout.buckets[0].shape(module)
    if shape is None or module not in layout.divided:
        return 1
    room = rules.room(module, shape.rows, shape.tokens) * layout.data_ranks(module)
    share = rules.volumes[module].mean * ROOM / (cut * room)
    return min(max(1, math.ceil(share - 1e-9)), layout.fan_in)


def _tried(cuts: np.ndarray, n_ranks: int, fits: Array) -> Array:
    """Whether a cut is tried, [1, n_cuts]: not into fewer groups than ranks, which would wait for
    each other, and not further than enough where memory holds a coarser one that saves nothing."""
    piped = cuts >= min(n_ranks, cuts[-1])
    held = piped & fits
    first = np.argmax(held) if held.any() else held.size
    return piped & ((cuts <= _ENOUGH * n_ranks) | (np.arange(held.size) <= first))
