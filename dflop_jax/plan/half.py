"""A small bucket beside a plan's only one, for what does not fit: a second group of the same size
would double the step."""

from __future__ import annotations

from dataclasses import replace

from dflop_jax.plan.estimate import Rules
from dflop_jax.records import Bucket, Layout, Shape


def with_half(layout: Layout, rules: Rules) -> Layout:
    """A layout of one bucket with a bucket of half its rows beside it, or of half its tokens where
    there is one packed row, rounded down; as it is where nothing can be halved or plans have one
    bucket only."""
    (bucket,) = layout.buckets
    shapes: dict[str, Shape | None] = {}
    for m, shape in bucket.shapes:
        rows, tokens = max(1, shape.rows // 2), shape.tokens
        multiple = rules.spec.token_multiple
        if shape.rows == 1 and m not in rules.profile.piece_tokens and tokens >= 2 * multiple:
            tokens = tokens // 2 // multiple * multiple
        shapes[m] = shape if m in layout.divided else Shape(rows, tokens)
    half = Bucket.of(shapes)
    if half == bucket or rules.least_group == 1.0:
        return layout
    return replace(layout, buckets=(bucket, half))
