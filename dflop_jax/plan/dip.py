"""DIP's partitioner (arXiv 2504.14145): every rank holds chunks of every module.

A rank is a block of devices. A module is cut into chunks of consecutive layers, which go round the
ranks once or several times: a module that takes longer for its microbatch has more and smaller
chunks. What other modules only feed from is cut into sub-microbatches, as small as the devices run
them efficiently, of which several feed one group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from dflop_jax.plan.estimate import Rules
from dflop_jax.plan.placement import Extent, factors, split_layers
from dflop_jax.profile.state import Array
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    Bucket,
    Layout,
    MeshShape,
    SegmentPlan,
    Shape,
    SubmeshPlan,
)

POLICY = "dip"
EFFICIENT = 0.95  # of the best rate, which a sub-microbatch reaches at least
MOST_ROUNDS = 3  # of a module's chunks round the ranks; every chunk has programs of its own
# Sub-microbatches of a microbatch. With 12 steps of VLM-S were 10% shorter, on 8 ranks in place of
# 2, and planning took nine times as long, since every step that is tried has more tasks.
MOST_PARTS = 4
_ROWS = tuple(sorted({k * 2**i for i in range(11) for k in (2, 3)} | {1}))


def module_s(rules: Rules, module: str, model: int, rows: Array, tokens: Array) -> Array:
    """Seconds of a group of one microbatch in all of a module's layers, forward and backward."""
    costs, n = rules.costs, rules.n_layers[module]
    whole = SegmentPlan(module, module, 0, n, module, True, True)
    figures = costs.at(module, model, rows, tokens)
    back_s = costs.task_s(whole, MeshShape(model=model), 1, figures, BACKWARD)
    if not costs.hands_over(whole):
        return back_s
    return back_s + costs.task_s(whole, MeshShape(model=model), 1, figures, FORWARD)


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


def rank_sizes(extent: Extent) -> list[tuple[int, int, int]]:
    """(count, data, model) of ranks that the devices may form.

    Raises:
      ValueError: there are none, and the policy is this one.
    """
    facts, config = extent.facts, extent.config
    common = set.intersection(*(set(facts.degrees[m]) for m in facts.n_layers))
    sizes = []
    for count in factors(extent.n_devices, min(config.max_stage, *facts.n_layers.values())):
        size = extent.n_devices // count
        for model in factors(size, extent.max_model):
            if count >= 2 and model in common and extent.node % model == 0:
                sizes.append((count, size // model, model))
    if not sizes and config.policy == POLICY:
        raise ValueError(_none(extent))
    return sizes


def rank_submeshes(count: int, data: int, model: int) -> tuple[SubmeshPlan, ...]:
    """The devices of every rank."""
    size = data * model
    return tuple(SubmeshPlan(f"rank{r}", r * size, data=data, model=model) for r in range(count))


def _none(extent: Extent) -> str:
    """Why there is no placement, and what would give one."""
    n_layers = extent.facts.n_layers
    shallow = min(n_layers, key=n_layers.__getitem__)
    return (
        f"policy dip has no placement on {extent.n_devices} devices: 2 to plan.max_stage="
        f"{extent.config.max_stage} ranks of equal size each hold a layer of every module, and "
        f"{shallow!r} has {n_layers[shallow]}; change plan.devices or plan.max_stage, or use "
        "plan.policy auto"
    )


def layouts(rules: Rules) -> Iterator[Layout]:
    """Layouts, without shapes, of ranks that the devices may form; errors as of `rank_sizes`."""
    for count, data, model in rank_sizes(rules.extent):
        seen: list[dict[str, int]] = []
        for most_rounds in range(1, MOST_ROUNDS + 1):
            rounds = rounds_of(rules, count, model, most_rounds)
            if rounds not in seen:
                seen.append(rounds)
                yield chunked(rules, rank_submeshes(count, data, model), rounds)


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


def readers_of(layout: Layout) -> tuple[str, ...]:
    """Modules that only read others."""
    return tuple(m for m in layout.modules if layout.sources(m) and not layout.targets(m))


def _part(layout: Layout, module: str, rules: Rules) -> tuple[Shape, int]:
    """The efficient shape of a module's parts, and how many of them its largest group takes."""
    shapes = layout.shapes(module)
    model = layout.submesh(layout.segments_of(module)[0].submesh).model
    tokens = max(s.tokens for s in shapes)
    needed = max(-(-s.rows // (tokens // s.tokens)) for s in shapes)  # rows of `tokens`
    rows = min(needed, efficient_rows(rules, module, model, tokens))
    rows = max(rows, -(-needed // MOST_PARTS))
    return Shape(rows, tokens), -(-needed // rows)
