"""Smaller buckets beside a plan's only one, for what does not fit: a second group of the same size
would double the step."""

from __future__ import annotations

import math
from dataclasses import replace

from dflop_jax.plan.estimate import Rules
from dflop_jax.records import Bucket, Layout, Shape
from dflop_jax.schedule.solver.problem import ROUNDING


def with_ladder(layout: Layout, rules: Rules) -> Layout:
    """A layout of one bucket with as many smaller ones beside it as plans may have."""
    return replace(layout, buckets=tuple(ladder_of(layout, rules)))


def ladder_of(layout: Layout, rules: Rules) -> dict[Bucket, float]:
    """Shares that the buckets of `with_ladder` have of the only one, the largest first: of its rows
    each, rounded up, or of its tokens where there is one packed row, which stays long enough for
    the longest piece. The share is the largest of the modules of which something is cut."""
    (whole,) = layout.buckets
    ladder = {whole: 1.0}
    for share in reversed(rules.shares[:-1]):
        part = _part(whole, share, layout, rules)
        cut = [part.tokens(m) / s.size for m, s in whole.shapes if part.shape(m) != s]
        ladder.setdefault(part, max(cut, default=1.0))
    return ladder


def _part(whole: Bucket, share: float, layout: Layout, rules: Rules) -> Bucket:
    def cut(size: int, unit: int = 1) -> int:
        return math.ceil(size * share / unit - ROUNDING) * unit

    shapes: dict[str, Shape | None] = {}
    for m, shape in whole.shapes:
        rows, tokens = cut(shape.rows), shape.tokens
        if shape.rows == 1 and m not in rules.profile.piece_tokens:
            least = max(cut(tokens, rules.spec.token_multiple), rules.row_tokens(m))
            tokens = min(tokens, least)
        shapes[m] = shape if m in layout.divided else Shape(rows, tokens)
    return Bucket.of(shapes)
