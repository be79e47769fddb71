"""A bucket for samples that no other holds, compiled ahead like the rest and rarely run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dflop_jax.records import Bucket, Load, Plan, Shape
from dflop_jax.schedule.batch import Capacity, capacity_of, oversize, rows_needed
from dflop_jax.schedule.sub_microbatches import wide_buckets


def holding_capacity(plan: Plan) -> Capacity:
    """What a bucket of the plan has for one sample: all data ranks, or one where a sample stays on
    the rank that it arrives at."""
    capacity = capacity_of(plan.layout)
    if plan.scheduling.grouping == "balanced":
        return capacity
    return Capacity(dict.fromkeys(capacity.ranks, 1), capacity.group_size)


def beyond(loads: Sequence[Load], plan: Plan) -> list[int]:
    """Indices of the samples that no microbatch of the plan holds."""
    return oversize(loads, wide_buckets(plan.layout), holding_capacity(plan))


def spare_bucket(
    loads: Sequence[Load], capacity: Capacity, piece_tokens: Mapping[str, int], multiple: int
) -> Bucket:
    """The bucket that holds each of these samples alone, in rows of the longest piece.

    Args:
      piece_tokens: modules whose rows take one piece each, and its tokens.
      multiple: tokens of other modules' rows are a multiple of it.
    """
    shapes: dict[str, Shape | None] = {}
    for m, ranks in capacity.ranks.items():
        longest = max((max(load.lengths(m), default=0) for load in loads), default=0)
        row = Shape(1, piece_tokens.get(m) or max(1, -(-longest // multiple)) * multiple)
        rows = max(int(rows_needed(load.lengths(m), row)) for load in loads)
        shapes[m] = Shape(-(-rows // ranks), row.tokens) if longest else None
    return Bucket.of(shapes)
