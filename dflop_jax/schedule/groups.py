"""Assign samples to groups, greedily or in arrival order (the baseline), and make the groups of a
schedule from an assignment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise

import numpy as np
from numpy.typing import NDArray

from dflop_jax.records import Bucket, Group, Layout, PackedPieces, Shape
from dflop_jax.schedule.balance_problem import Budget
from dflop_jax.schedule.batch import Batch, check_fits, first_fit_decreasing, sub_microbatch_shape
from dflop_jax.schedule.content_balance import (
    GroupContents,
    assign_pieces,
    balance_content,
    rank_content,
)
from dflop_jax.schedule.costs import Ticks, running_order
from dflop_jax.schedule.count_vectors import Conditions, volume_conditions
from dflop_jax.schedule.packing import Microbatch, Packing, first_fit


@dataclass
class BucketRun:
    """One group of each module of a bucket, for the same samples. `bucket` is an index into the
    buckets of the space; `placements` has every module that has pieces."""

    bucket: int
    microbatches: Packing
    placements: dict[str, PackedPieces] = field(default_factory=dict)


Assignment = Sequence[BucketRun]  # runs that together hold all samples of a batch


@dataclass(frozen=True)
class PackingSpace:
    """The buckets that a batch is packed into, and their costs."""

    batch: Batch
    buckets: tuple[Bucket, ...]
    ticks: Ticks
    # Modules whose content has a price -> seconds per unit of the cheapest feature.
    priced: Mapping[str, float] = field(default_factory=dict)

    def cost(self, assignment: Assignment) -> int:
        """Return the cost of an assignment in ticks: the sum over runs of the cost on their busiest
        resource, plus the time to fill the pipeline with the fastest run."""
        chosen = [t.bucket for t in assignment]
        fill = self.ticks.rest_C[chosen].min() if chosen else 0
        return int(self.ticks.dearest_C[chosen].sum() + fill)

    def sort_runs(self, assignment: Assignment) -> list[BucketRun]:
        """Return the runs in running order."""
        return [assignment[i] for i in running_order([t.bucket for t in assignment], self.ticks)]

    def build_run(self, bucket: int, microbatches: Packing, budget: Budget) -> BucketRun | None:
        """Return the groups of these microbatches, padded with empty microbatches; None if some
        pieces fit no row."""
        width = self.batch.anchor_rows(self.buckets[bucket])
        missing = self.batch.capacity.group_size - len(microbatches)
        empty: Packing = [[[] for _ in range(width)] for _ in range(missing)]
        padded = [*microbatches, *empty]
        placements: dict[str, PackedPieces] = {}
        for module in self.batch.modules:
            placement = assign_pieces(self.batch, self.buckets[bucket], padded, module, budget)
            if placement is None:
                return None
            if len(placement):
                placements[module] = placement
        return BucketRun(bucket, padded, placements)

    def shrink(self, run: BucketRun, budget: Budget) -> BucketRun:
        """Move the microbatches of a run to the cheapest bucket that holds them."""
        batch, width = self.batch, len(run.microbatches[0])
        rows = [row for microbatch in run.microbatches for row in microbatch]
        row_N = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        sample_N = np.fromiter(chain.from_iterable(rows), np.int64, len(row_N))
        needs = {}  # maximum tokens of a row and of a microbatch
        for m in batch.modules:
            tokens_N = batch.tokens[m][sample_N]
            is_anchor = m == batch.anchor
            row_tokens = np.bincount(row_N, tokens_N) if is_anchor else batch.longest[m][sample_N]
            microbatch_tokens = np.bincount(row_N // width, tokens_N)
            needs[m] = row_tokens.max(initial=0), microbatch_tokens.max(initial=0)
        for b in self.buckets_by_cost:
            if b == run.bucket:
                break
            bucket = self.buckets[b]
            may_hold = batch.anchor_rows(bucket) == width and all(
                batch.row_tokens(bucket, m) >= row_tokens
                and batch.microbatch_tokens(bucket, m) >= microbatch_tokens
                for m, (row_tokens, microbatch_tokens) in needs.items()
            )
            if may_hold and (cheaper := self.build_run(b, run.microbatches, budget)):
                return cheaper
        return run

    @cached_property
    def can_hold_CN(self) -> NDArray[np.bool_]:
        """Whether each bucket can hold each sample, [C, N]."""
        return np.array([self.batch.can_hold(b) for b in self.buckets])

    @cached_property
    def demand(self) -> Conditions:
        """Volume conditions on the groups that hold the batch."""
        return volume_conditions(self.batch, self.buckets)

    @cached_property
    def buckets_by_cost(self) -> list[int]:
        """Indices of the buckets, cheapest first."""
        return np.lexsort((self.ticks.sum_C, self.ticks.dearest_C)).tolist()


def greedy_assignment(space: PackingSpace, n_main_buckets: int) -> list[BucketRun]:
    """Assign samples by first fit, fullest first, into one of the first `n_main_buckets` buckets;
    samples that it cannot hold go to the cheapest bucket that can. Each run then moves to its
    cheapest bucket. Return the cheapest result over the main buckets."""
    budget = Budget(0)
    able_CN = space.can_hold_CN
    cheapest_N = np.array(space.buckets_by_cost)[able_CN[space.buckets_by_cost].argmax(axis=0)]
    cheapest: list[BucketRun] | None = None
    by_main = (np.where(able_CN[main], main, cheapest_N) for main in range(n_main_buckets))
    for bucket_N in {bucket_N.tobytes(): bucket_N for bucket_N in by_main}.values():  # unique
        assignment: list[BucketRun] = []
        for b in np.unique(bucket_N).tolist():
            assignment += _first_fit_runs(space, b, np.flatnonzero(bucket_N == b), budget)
        if cheapest is None or space.cost(assignment) < space.cost(cheapest):
            cheapest = assignment
    return space.sort_runs(cheapest or [])


def _first_fit_runs(
    space: PackingSpace, b: int, members: NDArray[np.int64], budget: Budget
) -> list[BucketRun]:
    """Return runs of a bucket that hold the samples, by first fit, fullest first."""
    batch, bucket = space.batch, space.buckets[b]
    fill_N = np.zeros(batch.n_samples)
    for m in batch.modules:
        tokens_of = batch.row_tokens if m == batch.anchor else batch.microbatch_tokens
        np.maximum(fill_N, batch.tokens[m] / max(tokens_of(bucket, m), 1), out=fill_N)
    waiting = members[np.argsort(-fill_N[members], kind="stable")].tolist()
    microbatches: Packing = []
    while waiting:
        packed = first_fit(batch, waiting, bucket)
        waiting = []
        for microbatch in packed:
            waiting += _remove_overflow(space, b, microbatch, budget)
        microbatches += packed
    assignment, size = [], batch.capacity.group_size
    for lo in range(0, len(microbatches), size):
        run = space.build_run(b, microbatches[lo : lo + size], budget)
        assert run is not None, "a bucket holds what was packed into it"
        assignment.append(space.shrink(run, budget))
    return assignment


def _remove_overflow(
    space: PackingSpace, b: int, microbatch: Microbatch, budget: Budget
) -> list[int]:
    """Remove samples from the microbatch until the pieces of all others fit rows, and return
    them."""
    removed: list[int] = []

    def fits(module: str) -> bool:
        pieces = assign_pieces(space.batch, space.buckets[b], [microbatch], module, budget)
        return pieces is not None

    while not all(map(fits, space.batch.modules)):
        removed.append(max(microbatch, key=len).pop())
    return sorted(removed)


def arrival_assignment(space: PackingSpace) -> list[BucketRun]:
    """Assign samples in order, one per row, rank after rank. Each run uses the cheapest bucket in
    which every rank holds the pieces of its own samples.

    Raises:
      ValueError: modules differ in data ranks, or a sample fits no bucket on one rank.
    """
    batch, capacity = space.batch, space.batch.capacity
    if len(set(capacity.ranks.values())) > 1:
        raise ValueError(
            f"arrival grouping needs equal data ranks, got {dict(capacity.ranks)}; give all "
            "modules the same dp or use balanced grouping"
        )
    own_rank = replace(capacity, ranks=dict.fromkeys(capacity.ranks, 1))
    check_fits(batch.with_capacity(own_rank), space.buckets)
    shape = space.buckets[0].shape(batch.modules[-1])
    per_rank = shape.rows if shape else 1
    max_samples = per_rank * capacity.ranks[batch.modules[-1]] * capacity.group_size
    assignment: list[BucketRun] = []
    start = 0
    while start < batch.n_samples:
        for stop in range(min(start + max_samples, batch.n_samples), start, -1):
            run = _arrival_run(space, range(start, stop), per_rank)
            if run is not None:
                break
        assert run is not None, "one sample fits (checked)"
        assignment.append(run)
        start = stop
    return assignment


def _arrival_run(space: PackingSpace, samples: range, per_rank: int) -> BucketRun | None:
    """Return the cheapest run of consecutive samples on their own ranks; None if none fits."""
    batch, n_ranks = space.batch, next(iter(space.batch.capacity.ranks.values()))
    n_rows = per_rank * n_ranks * batch.capacity.group_size
    rows = [[i] for i in samples] + [[] for _ in range(n_rows - len(samples))]
    width = per_rank * n_ranks
    for b in space.buckets_by_cost:
        placements = {
            m: _place_on_own_ranks(batch, samples, m, space.buckets[b].shape(m), n_ranks, per_rank)
            for m in batch.modules
        }
        if None not in placements.values():
            microbatches = [rows[k : k + width] for k in range(0, n_rows, width)]
            return BucketRun(b, microbatches, {m: p for m, p in placements.items() if p})
    return None


def _place_on_own_ranks(
    batch: Batch, samples: range, module: str, shape: Shape | None, n_ranks: int, per_rank: int
) -> PackedPieces | None:
    """Place pieces on the ranks of their samples: in the last module in the sample's row, else by
    first fit decreasing; None if they do not fit."""
    pieces = batch.piece_indices(module, samples)
    length_P = batch.lengths[module][pieces]
    if shape is None or length_P.max(initial=0) > shape.tokens:
        return None if len(pieces) else PackedPieces(np.zeros((4, 0), np.int64))
    rank_P, row_P = np.divmod(batch.sample[module][pieces] - samples.start, per_rank)
    if module == batch.modules[-1]:
        used = np.bincount(batch.sample[module][pieces], length_P)
    else:
        for is_on_rank in (rank_P == rank for rank in np.unique(rank_P)):
            row_P[is_on_rank] = first_fit_decreasing(length_P[is_on_rank], shape.tokens)
        used = length_P
    if used.max(initial=0) > shape.tokens or row_P.max(initial=-1) >= shape.rows:
        return None
    return PackedPieces(np.stack((pieces, *np.divmod(rank_P, n_ranks), row_P)))


def schedule_groups(
    space: PackingSpace, assignment: Assignment, layout: Layout
) -> tuple[Group, ...]:
    """Return the schedule's groups in running order. A run of a bucket becomes one group per
    module, producers first, which feeds the run's groups of the modules that read it. A divided
    module becomes several groups, each with a share of every rank's rows and the same feeds."""
    groups: list[Group] = []
    size, ranks = space.batch.capacity.group_size, space.batch.capacity.ranks
    for run in assignment:
        parts_of: dict[str, tuple[Shape, list[PackedPieces]]] = {}  # shape, groups
        for m, placement in run.placements.items():
            if m in layout.divided:
                shape = sub_microbatch_shape(layout, m)
                part_P, row_P = np.divmod(placement.row, shape.rows)
                inside = placement.reassigned(placement.rank, row_P)
                parts_of[m] = shape, [inside.select(part_P == k) for k in np.unique(part_P)]
            else:
                parts_of[m] = dict(space.buckets[run.bucket].shapes)[m], [placement]
        stops = accumulate((len(parts) for _, parts in parts_of.values()), initial=len(groups))
        groups_of = {m: range(*ends) for m, ends in zip(parts_of, pairwise(stops))}
        for m, (shape, placements) in parts_of.items():
            feeds = tuple(f for t in layout.targets(m) for f in groups_of.get(t, ()))
            for placement in placements:
                content = [
                    int(rank_content(placement, feature_P, size, ranks[m]).sum(axis=0).max())
                    for feature_P in space.batch.features[m]
                ]
                groups.append(
                    Group(m, shape, feeds, tuple(content), placement.sorted_by_row(), size)
                )
    return tuple(groups)


def balance_contents(
    space: PackingSpace,
    assignment: Assignment,
    budget: Budget,
    seed: int,
    tolerance: Mapping[str, float],
) -> None:
    """Balance the content of the priced modules, in place, to within `tolerance`."""
    batch = space.batch
    priced = [m for m in batch.modules if m in space.priced]
    for n_left, m in zip(range(len(priced), 0, -1), priced):
        runs = [t for t in assignment if m in t.placements]
        content = GroupContents(
            batch.lengths[m],
            batch.content[m],
            batch.capacity.ranks[m],
            batch.capacity.group_size,
            [dict(space.buckets[t.bucket].shapes)[m] for t in runs],
            [t.placements[m] for t in runs],
        )
        share = budget.sub_budget(budget.remaining / n_left)
        balance_content(content, share, seed, tolerance.get(m, 0.0))
        for t, placement in zip(runs, content.groups, strict=True):
            t.placements[m] = placement
