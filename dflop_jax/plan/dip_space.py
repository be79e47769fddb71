"""The candidates of the policy `dip`: ranks, and into how many groups a mean batch is cut."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dflop_jax.config import PlanConfig
from dflop_jax.plan.bounds import Bounds, Divided
from dflop_jax.plan.choices import Member, least
from dflop_jax.plan.dip import Ranks, placement, spaces, with_sub_microbatches
from dflop_jax.plan.estimate import Rules, Segments, segment_costs
from dflop_jax.plan.placement import Placement
from dflop_jax.plan.structure import Structure, structure_of
from dflop_jax.plan.volume import ROOM, group_pairs, least_groups, packed_rows, piece_rows
from dflop_jax.profile.state import Array
from dflop_jax.records import Bucket, Layout, Plan, Shape
from dflop_jax.tasks.graph import in_flight_limit

# Groups for each rank, beyond which filling and draining the pipeline hardly costs: more are tried
# only where memory does not hold fewer.
_ENOUGH = 8


def dip_bounds(rules: Rules, n_devices: int, config: PlanConfig) -> list[Bounds]:
    """Bounds of each placement at all cuts; none where there is no placement."""
    return [_bounds(_Cuts.of(rules, r)) for r in spaces(rules, n_devices, config)]


@dataclass(frozen=True)
class _Cuts:
    """A placement at every cut. whole: the bucket of each. plans: with the groups of that bucket
    divided. parts: groups of each module that go together in a mean batch."""

    rules: Rules
    ranks: Ranks
    placement: Placement
    cuts: np.ndarray
    whole: tuple[Bucket, ...]
    plans: tuple[Plan, ...]
    parts: tuple[dict[str, int], ...]

    @staticmethod
    def of(rules: Rules, ranks: Ranks) -> _Cuts:
        placed, cuts = placement(rules, ranks), rules.cuts(1)
        undivided, whole = rules.structure(placed), _buckets(rules, ranks, cuts)
        plans = tuple(
            with_sub_microbatches(undivided.with_layout(buckets=(b,)), rules) for b in whole
        )
        parts = tuple(
            _parts(rules, ranks, n, p.layout) for n, p in zip(cuts.tolist(), plans, strict=True)
        )
        return _Cuts(rules, ranks, placed, cuts, whole, plans, parts)

    @property
    def fan_in(self) -> tuple[int, ...]:
        return tuple(p.layout.fan_in for p in self.plans)


def _buckets(rules: Rules, ranks: Ranks, cuts: np.ndarray) -> tuple[Bucket, ...]:
    """Of every cut the shapes that cut a mean batch into so many groups of every module."""
    shapes: dict[str, list[Shape | None]] = {}
    for m, volume in rules.volumes.items():
        if m in rules.profile.piece_tokens:
            rows = piece_rows(volume, cuts, ranks.data)
            tokens = np.full(rows.shape, rules.profile.piece_tokens[m])
        else:
            rows, tokens = packed_rows(
                volume, cuts, ranks.data, rules.costs, m, ranks.model, rules.token_multiple
            )
        each = zip(rows.tolist(), tokens.tolist(), strict=True)
        shapes[m] = [Shape(n, length) if n else None for n, length in each]
    return tuple(Bucket.of({m: s[i] for m, s in shapes.items()}) for i in range(len(cuts)))


def _parts(rules: Rules, ranks: Ranks, cut: int, layout: Layout) -> dict[str, int]:
    parts = dict.fromkeys(rules.n_layers, 1)
    for m in layout.divided:
        if shape := layout.buckets[0].shape(m):
            room = _room(rules, m, shape) * ranks.data
            share = rules.volumes[m].mean * ROOM / (cut * room)
            parts[m] = min(max(1, math.ceil(share - 1e-9)), layout.fan_in)
    return parts


def _room(rules: Rules, module: str, shape: Shape) -> int:
    """What a group holds on one data rank, in the units of `Volume`."""
    return shape.rows if module in rules.profile.piece_tokens else shape.size


def _bounds(at: _Cuts) -> Bounds:
    rules = at.rules
    structure = structure_of(at.plans[0], rules)
    (block,) = structure.blocks
    tables = {m: _table(at, m, structure) for m in block}
    limits = {n: in_flight_limit(at.plans[0].with_layout(fan_in=n)) for n in set(at.fan_in)}
    members = {}
    for m, table in tables.items():
        names = [s.name for s in at.plans[0].layout.segments_of(m)]
        in_flight = [np.array([[limits[n][name] for n in at.fan_in]]) for name in names]
        members[m] = Member.of(table, structure.facts(m)[1], in_flight)
    together = [members[m] for m in block]
    return Bounds.of(
        lambda _: at.placement,
        structure,
        rules,
        at.cuts,
        tables,
        forms=dict.fromkeys(tables, np.zeros(1, int)),
        members=members,
        leasts={block: least(together, rules.memory_bytes)},
        devices=dict.fromkeys(tables, np.array([[at.ranks.data * at.ranks.model]])),
        tried=_tried(at, tables, least([m.only(0) for m in together], rules.memory_bytes).fits),
        divided=Divided(at.parts, at.fan_in, at.whole),
    )


def _table(at: _Cuts, module: str, structure: Structure) -> Segments:
    """A module at every cut, [1, n_cuts]."""
    rules, ranks, volume = at.rules, at.ranks, at.rules.volumes[module]
    shapes = [p.layout.buckets[0].shape(module) for p in at.plans]
    rows = np.array([[s.rows if s else 0 for s in shapes]])
    tokens = np.array([[s.tokens if s else 0 for s in shapes]])
    most = [p.layout.fan_in if module in p.layout.divided else 1 for p in at.plans]
    rooms = [_room(rules, module, s) if s else 0 for s in shapes]
    parts = np.array([[n[module] for n in at.parts]])
    sizes, pairs = rows * tokens, group_pairs(volume, at.cuts * parts, np.array(ranks.data))
    mesh = (1, np.array([[ranks.data]]), ranks.model)
    figures = rules.costs.at(module, ranks.model, rows, tokens)
    tasks = structure.facts(module)[0]
    segments = at.plans[0].layout.segments_of(module)
    return Segments(
        rules.options(module),
        np.array([ranks.data]),
        rows,
        tokens,
        sizes <= np.maximum(rules.trusted_tokens(module), sizes[:, -1:]),
        pairs,
        least_groups(volume, np.array([rooms]) * most * ranks.data),
        segment_costs(rules, segments, tasks, mesh, 1, figures, pairs),
    )


def _tried(at: _Cuts, tables: dict[str, Segments], fits: Array) -> Array:
    """Whether a cut is tried, [1, n_cuts]: not into fewer groups than ranks, which would wait for
    each other, and not further than enough where memory holds a coarser one that saves nothing."""
    piped = at.cuts >= min(at.ranks.count, at.cuts[-1])
    held = piped & fits & np.logical_and.reduce([t.trusted for t in tables.values()])
    first = np.argmax(held) if held.any() else held.size
    return piped & ((at.cuts <= _ENOUGH * at.ranks.count) | (np.arange(held.size) <= first))
