"""Sub-microbatches: a microbatch goes through some modules in several groups of one small shape.

Samples are packed as if it went through them in one group, whose shape has the rows of all parts
(`widened`); then every such group is cut into its parts (`parts_of`). What holds of packing, covers
and bounds so holds here too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from dflop_jax.records import Bucket, Layout, Plan, Price, Prices, Shape
from dflop_jax.schedule.placing import Placed


def times(shape: Shape, parts: int) -> Shape:
    """The shape of so many parts together."""
    return replace(shape, rows=shape.rows * parts)


def part_shape(layout: Layout, module: str) -> Shape:
    """The one shape of a divided module's parts.

    Raises:
      ValueError: the plan has several.
    """
    shapes = layout.shapes(module)
    if len(shapes) != 1:
        names = ", ".join(s.name for s in shapes)
        raise ValueError(
            f"up to {layout.fan_in} groups of {module!r} feed one, in shapes {names}; give "
            "the module one shape, or set the plan's fan_in to 1"
        )
    return shapes[0]


def widened(plan: Plan, prices: Prices) -> tuple[Plan, Prices]:
    """The plan in which one group takes the place of several: its buckets with 1 to `fan_in` parts
    of every divided module, most parts first, and their prices; the same where none is divided."""
    modules = _divided(plan.layout)
    if not modules:
        return plan, prices
    counts = range(plan.layout.fan_in, 0, -1)
    part = {m: part_shape(plan.layout, m) for m in modules}
    programs = dict(prices.programs)
    for program, price in prices.programs.items():
        module = plan.layout.segment(program.segment).module
        if part.get(module) == program.shape:
            for n in counts:
                wide = replace(program, shape=times(program.shape, n))
                programs[wide] = Price(n * price.static_s, price.pair_s)
    undivided = plan.with_layout(buckets=wide_buckets(plan.layout), fan_in=1)
    return undivided, replace(prices, programs=programs)


def wide_buckets(layout: Layout) -> tuple[Bucket, ...]:
    """What one microbatch may take: the plan's buckets with 1 to `fan_in` parts of every divided
    module, most parts first."""
    modules, counts = _divided(layout), range(layout.fan_in, 0, -1)
    if not modules:
        return layout.buckets
    return tuple(dict.fromkeys(_with_parts(b, modules, n) for n in counts for b in layout.buckets))


def _divided(layout: Layout) -> list[str]:
    return [m for m in layout.divided if layout.shapes(m)]


def _with_parts(bucket: Bucket, modules: Collection[str], n: int) -> Bucket:
    return Bucket(tuple((m, times(s, n) if m in modules else s) for m, s in bucket.shapes))


def parts_of(
    placed: Sequence[Placed], wide: Shape, part: Shape, ranks: int
) -> list[tuple[Placed, ...]]:
    """The parts of a group that holds some piece, by microbatch; every part takes its share of each
    rank's rows.

    Args:
      placed: pieces of every microbatch, in rows of the shape `wide`.
    """
    cut: list[list[Placed]] = [[] for _ in range(wide.rows // part.rows)]
    for one in placed:
        rank_P, row_P = np.divmod(one.rows_P, wide.rows)
        part_P, row_P = np.divmod(row_P, part.rows)
        assert not len(rank_P) or rank_P.max() < ranks
        for k, pieces in enumerate(cut):
            here = part_P == k
            pieces.append(Placed(one.pieces[here], (rank_P * part.rows + row_P)[here]))
    return [tuple(pieces) for pieces in cut if any(len(p.pieces) for p in pieces)]
