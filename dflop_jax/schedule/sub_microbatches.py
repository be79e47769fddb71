"""Sub-microbatches: a microbatch goes through some modules in several groups of one small shape.

Samples are packed as if it went through them in one group, whose shape has the rows of all parts
(`widened`); then every such group is cut into its parts (`parts_of`). What holds of packing, covers
and bounds so holds here too.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np

from dflop_jax.records import Bucket, Layout, PiecePlaces, Plan, Prices, Shape

_WITH_VARIANTS = 10  # a plan's buckets and what is left of them without some modules


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
                programs[wide] = replace(price, static_s=n * price.static_s)
    undivided = plan.with_layout(buckets=wide_buckets(plan.layout), fan_in=1)
    return undivided, replace(prices, programs=programs)


def wide_buckets(layout: Layout) -> tuple[Bucket, ...]:
    """What one microbatch may take: the plan's buckets with 1 to `fan_in` parts of every divided
    module, most parts first."""
    modules, counts = _divided(layout), range(layout.fan_in, 0, -1)
    if not modules:
        return layout.buckets
    wide = {
        Bucket(tuple((m, times(s, n) if m in modules else s) for m, s in b.shapes)): None
        for n, b in product(counts, layout.buckets)
    }
    return tuple(wide)


def most_buckets(layout: Layout) -> int:
    """How many buckets a batch may choose from: those of `wide_buckets`, and of the plan's some
    without modules that samples lack."""
    n_wide, n_own = len(wide_buckets(layout)), len(layout.buckets)
    return n_wide + max(0, _WITH_VARIANTS - n_own)


def _divided(layout: Layout) -> list[str]:
    return [m for m in layout.divided if layout.shapes(m)]


def parts_of(places: PiecePlaces, part: Shape) -> list[PiecePlaces]:
    """The parts of a group that hold some piece; every part takes its share of each rank's rows."""
    part_P, row_P = np.divmod(places.row, part.rows)
    inside = places.moved(places.rank, row_P)
    return [inside.chosen(part_P == k) for k in range(part_P.max(initial=-1) + 1) if k in part_P]
