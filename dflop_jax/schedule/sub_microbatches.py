"""Sub-microbatches: a microbatch passes some modules in several groups of one small shape.

Samples are packed as if these groups were one group whose shape has the rows of all parts
(`merge_sub_microbatches`). Each such group is then split into its parts (`split_group`). Packing,
count vectors and bounds therefore need no special case.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np

from dflop_jax.records import Bucket, Layout, PackedPieces, Plan, Prices, Shape

_MAX_VARIANTS = 10  # a plan's buckets and what is left of them without some modules


def scale_rows(shape: Shape, n_parts: int) -> Shape:
    """A shape with the rows of `n_parts` parts."""
    return replace(shape, rows=shape.rows * n_parts)


def sub_microbatch_shape(layout: Layout, module: str) -> Shape:
    """The shape of a divided module's groups.

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


def merge_sub_microbatches(plan: Plan, prices: Prices) -> tuple[Plan, Prices]:
    """The plan in which one group stands for 1 to `fan_in` sub-microbatches of every divided
    module, most parts first, and its prices. Unchanged if no module is divided."""
    modules = _divided(plan.layout)
    if not modules:
        return plan, prices
    counts = range(plan.layout.fan_in, 0, -1)
    sub_shape = {m: sub_microbatch_shape(plan.layout, m) for m in modules}
    programs = dict(prices.programs)
    for program, price in prices.programs.items():
        module = plan.layout.segment(program.segment).module
        if sub_shape.get(module) == program.shape:
            for n in counts:
                merged = replace(program, shape=scale_rows(program.shape, n))
                programs[merged] = replace(price, static_s=n * price.static_s)
    undivided = plan.with_layout(buckets=merged_buckets(plan.layout), fan_in=1)
    return undivided, replace(prices, programs=programs)


def merged_buckets(layout: Layout) -> tuple[Bucket, ...]:
    """The buckets of one microbatch: the plan's buckets with 1 to `fan_in` parts of every divided
    module, most parts first."""
    modules, counts = _divided(layout), range(layout.fan_in, 0, -1)
    if not modules:
        return layout.buckets
    merged = {
        Bucket(tuple((m, scale_rows(s, n) if m in modules else s) for m, s in b.shapes)): None
        for n, b in product(counts, layout.buckets)
    }
    return tuple(merged)


def max_buckets(layout: Layout) -> int:
    """The number of buckets that a batch may use: those of `merged_buckets`, and variants of the
    plan's buckets without modules that samples lack."""
    n_wide, n_own = len(merged_buckets(layout)), len(layout.buckets)
    return n_wide + max(0, _MAX_VARIANTS - n_own)


def _divided(layout: Layout) -> list[str]:
    return [m for m in layout.divided if layout.shapes(m)]


def split_group(placement: PackedPieces, sub_shape: Shape) -> list[PackedPieces]:
    """The parts of a merged group that hold pieces; every part has its share of each rank's
    rows."""
    part_P, row_P = np.divmod(placement.row, sub_shape.rows)
    inside = placement.reassigned(placement.rank, row_P)
    return [inside.select(part_P == k) for k in range(part_P.max(initial=-1) + 1) if k in part_P]
