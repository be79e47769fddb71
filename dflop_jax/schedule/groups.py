"""Groups of microbatches: the greedy answer, the arrival-order baseline, and their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dflop_jax.records import ITEMS, Bucket, SampleShape
from dflop_jax.schedule.costs import BucketCosts
from dflop_jax.schedule.cover import Capacity
from dflop_jax.schedule.packing import Packed, first_fit, rows_per_microbatch

# A schedule in the making: (bucket, rows of each of the group's microbatches).
Groups = list[tuple[int, Packed]]


def oversize(
    shapes: Sequence[SampleShape], buckets: Sequence[Bucket], capacity: Capacity
) -> list[int]:
    """Indices of the samples that no bucket can hold; what to do with them is the caller's."""
    return [i for i, s in enumerate(shapes) if not any(capacity.holds(b, s) for b in buckets)]


def check_fits(
    shapes: Sequence[SampleShape], buckets: Sequence[Bucket], capacity: Capacity
) -> None:
    bad = oversize(shapes, buckets, capacity)
    if bad:
        shape = shapes[bad[0]]
        largest = max(buckets, key=lambda b: (b.tokens, b.tiles, b.windows))
        has = "".join(f", {shape.load(m)} {ITEMS[m]}" for m in capacity.encoders)
        room = "".join(f", {capacity.items(largest, m)} {ITEMS[m]}" for m in capacity.encoders)
        raise ValueError(
            f"sample {bad[0]} of the batch has {shape.llm_tokens} LLM tokens{has}; the largest "
            f"bucket {largest.name} holds {largest.tokens} tokens a row{room}: drop or truncate "
            "it (data.oversize) or plan with a bigger bucket"
        )


def predict_s(groups: Groups, costs: BucketCosts) -> float:
    return costs.predict_s([b for b, held in groups for _ in held])


def running_order(buckets: Sequence[int], costs: BucketCosts) -> list[int]:
    """Buckets of the groups in running order: the one that fills the pipeline fastest first, then
    the heavier before the lighter (a short last one drains fastest)."""

    def fill_s(b: int) -> float:
        return sum(costs.seconds[b]) - max(costs.seconds[b])

    ranked = sorted(buckets, key=lambda b: (-sum(costs.seconds[b]), b))
    if len(ranked) > 1:
        first = min(ranked, key=lambda b: (fill_s(b), b))
        ranked.remove(first)
        ranked.insert(0, first)
    return ranked


def in_order(groups: Groups, costs: BucketCosts) -> Groups:
    waiting: dict[int, list[Packed]] = {}
    for b, held in groups:
        waiting.setdefault(b, []).append(held)
    return [(b, waiting[b].pop(0)) for b in running_order([b for b, _ in groups], costs)]


def as_group(
    microbatches: Packed,
    shapes: Sequence[SampleShape],
    buckets: Sequence[Bucket],
    capacity: Capacity,
    costs: BucketCosts,
    own_rank: bool = False,
) -> tuple[int, Packed] | None:
    """A group of these microbatches, padded with empty ones to the group size, and its cheapest
    bucket of as many rows; None if no bucket holds them. With `own_rank` the encoder items of an
    LLM rank's samples must fit the encoder's rank of the same index."""
    width = len(microbatches[0])
    per = width // capacity.llm_ranks if own_rank else width
    tokens = max(sum(shapes[i].llm_tokens for i in row) for rows in microbatches for row in rows)
    items = {
        m: max(
            sum(shapes[i].load(m) for row in rows[lo : lo + per] for i in row)
            for rows in microbatches
            for lo in range(0, width, per)
        )
        for m in capacity.encoders
    }
    able = [
        b
        for b, bucket in enumerate(buckets)
        if rows_per_microbatch(bucket, capacity) == width
        and tokens <= bucket.tokens
        and all(
            n <= (bucket.items(m) if own_rank else capacity.items(bucket, m))
            for m, n in items.items()
        )
    ]
    if not able:
        return None
    missing = capacity.group_size - len(microbatches)
    empty: Packed = [[[] for _ in range(width)] for _ in range(missing)]
    best = min(able, key=lambda b: (max(costs.seconds[b]), sum(costs.seconds[b]), b))
    return best, microbatches + empty


def greedy_groups(
    shapes: Sequence[SampleShape],
    buckets: Sequence[Bucket],
    capacity: Capacity,
    costs: BucketCosts,
) -> Groups:
    """First fit, fullest first, into one main bucket (what it cannot hold into the cheapest other
    one), each group then shrunk to its cheapest bucket; the best choice of main bucket."""

    def fill(i: int, bucket: Bucket) -> float:
        rooms = {m: capacity.items(bucket, m) for m in capacity.encoders}
        items = (shapes[i].load(m) / room for m, room in rooms.items() if room)
        return max(shapes[i].llm_tokens / bucket.tokens, *items, 0.0)

    able_N = [
        [b for b in range(len(buckets)) if capacity.holds(buckets[b], shape)] for shape in shapes
    ]
    best: Groups = []
    for main in range(len(buckets)):
        homes: dict[int, list[int]] = {}
        for i, able in enumerate(able_N):
            home = main if main in able else min(able, key=lambda b: (max(costs.seconds[b]), b))
            homes.setdefault(home, []).append(i)
        groups: Groups = []
        for b, members in sorted(homes.items()):
            order = sorted(members, key=lambda i: (-fill(i, buckets[b]), i))
            packed = first_fit(shapes, order, buckets[b], capacity)
            for lo in range(0, len(packed), capacity.group_size):
                part = packed[lo : lo + capacity.group_size]
                group = as_group(part, shapes, buckets, capacity, costs)
                assert group is not None, "a bucket holds what was packed into it"
                groups.append(group)
        groups = in_order(groups, costs)
        if not best or predict_s(groups, costs) < predict_s(best, costs):
            best = groups
    return best


def arrival_groups(
    shapes: Sequence[SampleShape],
    buckets: Sequence[Bucket],
    capacity: Capacity,
    costs: BucketCosts,
) -> Groups:
    """Samples in order, one a row, rank after rank, each group in the cheapest bucket that holds
    its longest sample and, on each rank, the encoder items of that rank's own samples."""
    for module, ranks in capacity.encoders.items():
        if ranks != capacity.llm_ranks:
            raise ValueError(
                f"arrival grouping needs equal data ranks, got {module} {ranks} and llm "
                f"{capacity.llm_ranks}; plan all modules alike or use balanced grouping"
            )
    own = replace(
        capacity,
        vision_ranks=min(capacity.vision_ranks, 1),
        audio_ranks=min(capacity.audio_ranks, 1),
    )
    check_fits(shapes, buckets, own)
    width = rows_per_microbatch(buckets[0], capacity)
    groups: Groups = []
    start = 0
    while start < len(shapes):
        for count in range(min(width * capacity.group_size, len(shapes) - start), 0, -1):
            rows = [[start + k] if k < count else [] for k in range(-(-count // width) * width)]
            part = [rows[i : i + width] for i in range(0, len(rows), width)]
            group = as_group(part, shapes, buckets, capacity, costs, own_rank=True)
            if group is not None:
                break
        assert group is not None, "one sample fits (checked)"
        groups.append(group)
        start += count
    return groups
