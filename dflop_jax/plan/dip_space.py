"""The candidates of the policy `dip`: ranks, and into how many groups a mean batch is cut."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from dflop_jax.plan.bounds import Bounds, Divided, Space
from dflop_jax.plan.choices import Member, least
from dflop_jax.plan.dip import POLICY, layouts, with_sub_microbatches
from dflop_jax.plan.estimate import Rules, Segments, module_table
from dflop_jax.plan.structure import Structure, structure_of
from dflop_jax.plan.volume import ROOM
from dflop_jax.profile.state import Array
from dflop_jax.records import Bucket, Layout, Plan, Shape, SubmeshPlan
from dflop_jax.tasks.graph import in_flight_limit

# Groups for each rank, beyond which filling and draining the pipeline hardly costs: more are tried
# only where memory does not hold fewer.
_ENOUGH = 8


def dip_bounds(rules: Rules) -> Iterator[Bounds]:
    """Bounds of each layout at all cuts; errors as of `dip.layouts`."""
    return (_bounds(rules, layout) for layout in layouts(rules))


def _bounds(rules: Rules, layout: Layout) -> Bounds:
    (cuts, group_sizes), n_ranks = rules.cuts(1), len(layout.submeshes)
    whole = _buckets(rules, layout.submeshes[0], cuts)
    at_cut = [with_sub_microbatches(replace(layout, buckets=(b,)), rules) for b in whole]
    fan_in = tuple(one.fan_in for one in at_cut)
    parts = tuple(_parts(rules, n, one) for n, one in zip(cuts.tolist(), at_cut, strict=True))
    structure = structure_of(layout, rules)
    (block,) = structure.blocks
    tables = {m: _table(rules, m, structure, at_cut, parts) for m in block}
    limits = {n: in_flight_limit(Plan(POLICY, replace(layout, fan_in=n))) for n in set(fan_in)}
    members = {}
    for m, table in tables.items():
        names = [s.name for s in layout.segments_of(m)]
        in_flight = [np.array([[limits[n][name] for n in fan_in]]) for name in names]
        members[m] = Member.of(table, structure.facts(m)[1], in_flight)
    together = [members[m] for m in block]
    unsaved = least([m.only(0) for m in together], rules.spec.memory_bytes).fits
    space = Space(
        lambda _: layout,
        structure,
        rules,
        cuts,
        group_sizes,
        tables,
        forms=dict.fromkeys(tables, np.zeros(1, int)),
        members=members,
        devices=dict.fromkeys(tables, np.array([[layout.submeshes[0].n_devices]])),
        divided=Divided(parts, fan_in, whole),
    )
    leasts = {block: least(together, rules.spec.memory_bytes)}
    return Bounds.of(space, leasts, _tried(cuts, n_ranks, tables, unsaved))


def _buckets(rules: Rules, rank: SubmeshPlan, cuts: np.ndarray) -> tuple[Bucket, ...]:
    """Of every cut the shapes that cut a mean batch into so many groups of every module."""
    shapes: dict[str, list[Shape | None]] = {}
    for m in rules.volumes:
        rows, tokens = rules.row_sizes(m, cuts, rank.data, rank.model)
        each = zip(rows.tolist(), tokens.tolist(), strict=True)
        shapes[m] = [Shape(n, length) if n else None for n, length in each]
    return tuple(Bucket.of({m: s[i] for m, s in shapes.items()}) for i in range(len(cuts)))


def _parts(rules: Rules, cut: int, layout: Layout) -> dict[str, int]:
    """Groups of each module that go together in a mean batch of so many."""
    parts = dict.fromkeys(rules.n_layers, 1)
    for m in layout.divided:
        if shape := layout.buckets[0].shape(m):
            room = rules.room(m, shape.rows, shape.tokens) * layout.data_ranks(m)
            share = rules.volumes[m].mean * ROOM / (cut * room)
            parts[m] = min(max(1, math.ceil(share - 1e-9)), layout.fan_in)
    return parts


def _table(
    rules: Rules,
    module: str,
    structure: Structure,
    at_cut: Sequence[Layout],
    parts: Sequence[Mapping[str, int]],
) -> Segments:
    """A module at every cut, [1, n_cuts]; `at_cut` is the layout that runs there."""
    segments, tasks = at_cut[0].segments_of(module), structure.facts(module)[0]
    mesh = at_cut[0].submesh(segments[0].submesh).shape
    data: Array = np.array([[mesh.data]])
    shapes = [one.buckets[0].shape(module) for one in at_cut]
    rows = np.array([[s.rows if s else 0 for s in shapes]])
    tokens = np.array([[s.tokens if s else 0 for s in shapes]])
    return module_table(
        rules,
        segments,
        tasks,
        replace(mesh, data=data),
        rules.cuts(1),
        (rows, tokens),
        parts=np.array([[n[module] for n in parts]]),
        max_parts=np.array([one.fan_in if module in one.divided else 1 for one in at_cut]),
    )


def _tried(cuts: np.ndarray, n_ranks: int, tables: Mapping[str, Segments], fits: Array) -> Array:
    """Whether a cut is tried, [1, n_cuts]: not into fewer groups than ranks, which would wait for
    each other, and not further than enough where memory holds a coarser one that saves nothing."""
    piped = cuts >= min(n_ranks, cuts[-1])
    held = piped & fits & np.logical_and.reduce([t.trusted for t in tables.values()])
    first = np.argmax(held) if held.any() else held.size
    return piped & ((cuts <= _ENOUGH * n_ranks) | (np.arange(held.size) <= first))
