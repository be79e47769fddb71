"""Groups of samples that run together: the greedy assignment, the arrival-order baseline, and the
groups of a schedule made from an assignment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from dflop_jax.records import Bucket, Group, Layout, PackedPieces, Shape
from dflop_jax.schedule.balance_problem import Budget
from dflop_jax.schedule.batch import Batch, Capacity, check_fits
from dflop_jax.schedule.content_balance import (
    GroupContents,
    assign_pieces,
    balance_content,
    imbalance,
    rank_content,
)
from dflop_jax.schedule.costs import GroupCosts, Ticks, running_order
from dflop_jax.schedule.count_vectors import Conditions, volume_conditions
from dflop_jax.schedule.packing import Microbatch, Packing, first_fit, rows_per_microbatch
from dflop_jax.schedule.sub_microbatches import split_group, sub_microbatch_shape

# Share of a step's seconds below which a further balancing of content is not worth its search.
_TOLERATED_SHARE = 1e-3


@dataclass
class BucketRun:
    """One group of each module of a bucket, for the same samples. `bucket` is an index into the
    buckets of the space; `placements` has every module that has pieces."""

    bucket: int
    microbatches: Packing
    placements: dict[str, PackedPieces] = field(default_factory=dict)


Assignment = Sequence[BucketRun]  # groups that hold a whole batch together


@dataclass(frozen=True)
class PackingSpace:
    """What a batch is packed into: buckets with their costs, times data ranks and group size.
    `priced` are the modules whose content has a price."""

    batch: Batch
    buckets: tuple[Bucket, ...]
    capacity: Capacity
    ticks: Ticks
    priced: frozenset[str] = frozenset()

    def cost(self, assignment: Assignment) -> int:
        """The cost of an assignment, in ticks, which the search minimises: every run keeps its
        dearest resource busy, and the run that fills the pipeline fastest goes first."""
        chosen = [t.bucket for t in assignment]
        if not chosen:
            return 0
        return int(self.ticks.dearest_C[chosen].sum() + self.ticks.rest_C[chosen].min())

    def tokens(self, bucket: Bucket, module: str) -> int:
        """Tokens of one microbatch of a bucket, on all ranks, that pieces can fill."""
        return self.batch.microbatch_tokens(bucket, module, self.capacity)

    def sort_runs(self, assignment: Assignment) -> list[BucketRun]:
        """The runs in running order."""
        return [assignment[i] for i in running_order([t.bucket for t in assignment], self.ticks)]

    def build_run(self, bucket: int, microbatches: Packing, budget: Budget) -> BucketRun | None:
        """The groups of these microbatches, padded with empty ones; None if some pieces fit no
        row."""
        shapes = self.buckets[bucket]
        width = rows_per_microbatch(shapes, self.batch, self.capacity)
        missing = self.capacity.group_size - len(microbatches)
        empty: Packing = [[[] for _ in range(width)] for _ in range(missing)]
        padded = [*microbatches, *empty]
        placements: dict[str, PackedPieces] = {}
        for module in self.batch.modules:
            placement = assign_pieces(self.batch, shapes, padded, module, self.capacity, budget)
            if placement is None:
                return None
            if len(placement):
                placements[module] = placement
        return BucketRun(bucket, padded, placements)

    def shrink(self, run: BucketRun, budget: Budget) -> BucketRun:
        """The same microbatches in the cheapest bucket that holds them."""
        batch, width = self.batch, len(run.microbatches[0])
        rows = [row for microbatch in run.microbatches for row in microbatch]
        row_N = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        sample_N = np.fromiter(chain.from_iterable(rows), np.int64, len(row_N))
        needs = {}  # most tokens of a row and of a microbatch
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
            may_hold = rows_per_microbatch(bucket, batch, self.capacity) == width and all(
                batch.row_tokens(bucket.shape(m), m) >= row_tokens
                and self.tokens(bucket, m) >= microbatch_tokens
                for m, (row_tokens, microbatch_tokens) in needs.items()
            )
            if may_hold and (cheaper := self.build_run(b, run.microbatches, budget)):
                return cheaper
        return run

    @cached_property
    def can_hold_CN(self) -> NDArray[np.bool_]:
        """[buckets, N]: which samples each bucket can hold."""
        return np.array([self.batch.can_hold(b, self.capacity) for b in self.buckets])

    @cached_property
    def demand(self) -> Conditions:
        """Volume conditions on the groups that hold the batch."""
        return volume_conditions(self.batch, self.buckets, self.capacity)

    @cached_property
    def buckets_by_cost(self) -> list[int]:
        """Indices of the buckets, cheapest first."""
        return np.lexsort((self.ticks.sum_C, self.ticks.dearest_C)).tolist()


def greedy_assignment(space: PackingSpace, mains: int) -> list[BucketRun]:
    """First fit, fullest sample first, into one main bucket; samples that it cannot hold go to the
    cheapest bucket that can. Each group then moves to its cheapest bucket. Returns the cheapest
    result over the first `mains` buckets as the main one."""
    budget = Budget(0)
    able_CN = space.can_hold_CN
    cheapest_N = np.array(space.buckets_by_cost)[able_CN[space.buckets_by_cost].argmax(axis=0)]
    cheapest: list[BucketRun] | None = None
    tried_buckets: set[bytes] = set()
    for main in range(mains):
        bucket_N = np.where(able_CN[main], main, cheapest_N)
        if bucket_N.tobytes() in tried_buckets:
            continue
        tried_buckets.add(bucket_N.tobytes())
        assignment: list[BucketRun] = []
        for b in np.unique(bucket_N).tolist():
            assignment += _first_fit_runs(space, b, np.flatnonzero(bucket_N == b), budget)
        if cheapest is None or space.cost(assignment) < space.cost(cheapest):
            cheapest = assignment
    return space.sort_runs(cheapest or [])


def _first_fit_runs(
    space: PackingSpace, b: int, members: NDArray[np.int64], budget: Budget
) -> list[BucketRun]:
    """Groups of a bucket that hold the samples, by first fit, fullest first. Samples whose pieces
    fit no row are packed again."""
    batch, capacity, bucket = space.batch, space.capacity, space.buckets[b]

    fill_N = np.zeros(batch.n_samples)
    for m in batch.modules:
        free_tokens = space.tokens(bucket, m)
        free_tokens = batch.row_tokens(bucket.shape(m), m) if m == batch.anchor else free_tokens
        np.maximum(fill_N, batch.tokens[m] / max(free_tokens, 1), out=fill_N)
    waiting = members[np.argsort(-fill_N[members], kind="stable")].tolist()
    microbatches: Packing = []
    while waiting:
        packed = first_fit(batch, waiting, bucket, capacity)
        waiting = []
        for microbatch in packed:
            waiting += _remove_overflow(space, b, microbatch, budget)
        microbatches += packed
    assignment = []
    for lo in range(0, len(microbatches), capacity.group_size):
        run = space.build_run(b, microbatches[lo : lo + capacity.group_size], budget)
        assert run is not None, "a bucket holds what was packed into it"
        assignment.append(space.shrink(run, budget))
    return assignment


def _remove_overflow(
    space: PackingSpace, b: int, microbatch: Microbatch, budget: Budget
) -> list[int]:
    """Remove samples from the microbatch, in place, until the pieces of all others fit rows;
    returns the removed samples."""
    removed: list[int] = []
    batch, bucket, capacity = space.batch, space.buckets[b], space.capacity

    def fits(module: str) -> bool:
        return assign_pieces(batch, bucket, [microbatch], module, capacity, budget) is not None

    while not all(map(fits, batch.modules)):
        fullest = max(microbatch, key=len)
        removed.append(fullest.pop())
    return sorted(removed)


def arrival_assignment(space: PackingSpace) -> list[BucketRun]:
    """Samples in order, one per row, rank after rank. Each group runs in the cheapest bucket in
    which every rank holds the pieces of its own samples.

    Raises:
      ValueError: modules differ in data ranks, or a sample fits no bucket on one rank.
    """
    batch, ranks = space.batch, space.capacity.ranks
    last = batch.modules[-1]
    if len(set(ranks.values())) > 1:
        raise ValueError(
            f"arrival grouping needs equal data ranks, got {dict(ranks)}; plan all modules alike "
            "or use balanced grouping"
        )
    own_rank = Capacity(dict.fromkeys(ranks, 1))
    check_fits(batch, space.buckets, own_rank)
    shape = space.buckets[0].shape(last)
    per_rank = shape.rows if shape else 1
    width = per_rank * ranks[last]
    assignment: list[BucketRun] = []
    start = 0
    while start < batch.n_samples:
        for count in range(min(width * space.capacity.group_size, batch.n_samples - start), 0, -1):
            run = _arrival_run(space, range(start, start + count), per_rank)
            if run is not None:
                break
        assert run is not None, "one sample fits (checked)"
        assignment.append(run)
        start += count
    return assignment


def _arrival_run(space: PackingSpace, samples: range, per_rank: int) -> BucketRun | None:
    """The cheapest groups for consecutive samples; None if no bucket holds them on their own
    ranks."""
    last, n_ranks = space.batch.modules[-1], next(iter(space.capacity.ranks.values()))
    width, group_size = per_rank * n_ranks, space.capacity.group_size
    ranks_MD = [
        [
            list(samples[(k * n_ranks + d) * per_rank : (k * n_ranks + d + 1) * per_rank])
            for d in range(n_ranks)
        ]
        for k in range(group_size)
    ]
    rows = [[[i] for rank in ranks_D for i in rank] for ranks_D in ranks_MD]
    batch = space.batch
    for b in space.buckets_by_cost:
        placements: dict[str, PackedPieces] = {}
        for m in batch.modules:
            shape = space.buckets[b].shape(m)
            placement = _place_on_own_ranks(batch, ranks_MD, m, shape, m == last)
            if placement is None:
                break
            if len(placement):
                placements[m] = placement
        else:
            padded = [[*r, *([] for _ in range(width - len(r)))] for r in rows]
            return BucketRun(b, padded, placements)
    return None


def _place_on_own_ranks(
    batch: Batch,
    ranks_MD: Sequence[Sequence[Sequence[int]]],
    module: str,
    shape: Shape | None,
    row_each: bool,
) -> PackedPieces | None:
    """Pieces on the ranks of their samples, in the sample's own row (`row_each`) or by first fit;
    None if they do not fit."""
    entries: list[tuple[int, int, int, int]] = []
    for m, ranks_D in enumerate(ranks_MD):
        for d, samples in enumerate(ranks_D):
            free = [shape.tokens] * shape.rows if shape else []
            for slot, i in enumerate(samples):
                for piece_number in batch.piece_indices(module, [i]).tolist():
                    n = int(batch.lengths[module][piece_number])
                    rows = range(slot, min(slot + 1, len(free))) if row_each else range(len(free))
                    row = next((r for r in rows if free[r] >= n), None)
                    if row is None:
                        return None
                    free[row] -= n
                    entries.append((piece_number, m, d, row))
    return PackedPieces(np.array(entries, np.int64).reshape(-1, 4).T)


def schedule_groups(
    space: PackingSpace, assignment: Assignment, layout: Layout
) -> tuple[Group, ...]:
    """The schedule's groups in running order. Each run of a bucket becomes one group per module,
    producers first, which feeds the groups of the same run that read it. A divided module becomes
    several groups, which all feed or read the same groups."""
    groups: list[Group] = []
    size, ranks = space.capacity.group_size, space.capacity.ranks
    for run in assignment:
        parts_of: dict[str, tuple[Shape, list[PackedPieces]]] = {}  # shape, groups
        for m, placement in run.placements.items():
            if m in layout.divided:
                sub_shape = sub_microbatch_shape(layout, m)
                parts_of[m] = sub_shape, split_group(placement, sub_shape)
            else:
                parts_of[m] = dict(space.buckets[run.bucket].shapes)[m], [placement]
        n_parts = [len(placements) for _, placements in parts_of.values()]
        first = accumulate(n_parts, initial=len(groups))
        groups_of = {
            m: range(first_group, first_group + len(parts_of[m][1]))
            for m, first_group in zip(parts_of, first)
        }
        for m, (shape, placements) in parts_of.items():
            feeds = tuple(f for t in layout.targets(m) for f in groups_of.get(t, ()))
            for placement in placements:
                content = [
                    int(rank_content(placement, feature_P, size, ranks[m]).sum(axis=0).max())
                    for feature_P in space.batch.features[m]
                ]
                pieces = placement.sorted_by_row()
                groups.append(Group(m, shape, feeds, tuple(content), pieces, size))
    return tuple(groups)


def content_tolerance(
    space: PackingSpace, costs: GroupCosts, assignment: Assignment
) -> dict[str, float]:
    """By priced module, the content above the bound that is not worth a further search: it costs a
    small share of the seconds of the assignment."""
    step_s = sum(float(costs.bucket_s(space.buckets[t.bucket]).max()) for t in assignment)
    return {m: _TOLERATED_SHARE * step_s / costs.unit_s(m) for m in space.priced}


def balance_contents(
    space: PackingSpace,
    assignment: Assignment,
    budget: Budget,
    seed: int,
    tolerance: Mapping[str, float],
) -> float:
    """Balance the content of the priced modules, in place, to within `tolerance`; returns the sum
    of their objectives (`content_balance.imbalance`)."""
    uneven_content = 0.0
    priced = [m for m in space.batch.modules if m in space.priced]
    for n_left, m in zip(range(len(priced), 0, -1), priced):
        runs = [t for t in assignment if m in t.placements]
        shapes = [space.buckets[t.bucket].shape(m) for t in runs]
        content = GroupContents(
            space.batch.lengths[m],
            space.batch.content[m],
            space.capacity.ranks[m],
            space.capacity.group_size,
            [s for s in shapes if s is not None],
            [t.placements[m] for t in runs],
        )
        share = budget.sub_budget(budget.remaining / n_left)
        balance_content(content, share, seed, tolerance.get(m, 0.0))
        for t, placement in zip(runs, content.groups, strict=True):
            t.placements[m] = placement
        uneven_content += imbalance(content)
    return uneven_content


def longest_first_assignment(
    space: PackingSpace, assignment: Assignment, budget: Budget
) -> list[BucketRun] | None:
    """The same groups with the samples reassigned, longest first, each to a row of the rank that
    has the least content in the step so far. Where groups have spare room, this is a better start
    for balancing content than packing. None if the content of the anchor module has no price, the
    assignment is empty, or a sample finds no room."""
    batch, anchor = space.batch, space.batch.anchor
    if anchor is None or anchor not in space.priced or not assignment:
        return None
    ranks, tokens_N = space.capacity.ranks[anchor], batch.tokens[anchor]
    tokens_NM = batch.shared_tokens_NM
    runs = [t for t in assignment for _ in t.microbatches]
    empty = [batch.empty_tokens(space.buckets[t.bucket], space.capacity) for t in runs]
    rows: Packing = [[[] for _ in row] for t in assignment for row in t.microbatches]
    micro_R = np.repeat(np.arange(len(rows)), [len(r) for r in rows])
    row_in_microbatch_R = np.concatenate([np.arange(len(r)) for r in rows])  # in its microbatch
    rank_R = np.concatenate([np.arange(len(r)) * ranks // len(r) for r in rows])
    free_R = np.array([row for row, _ in empty])[micro_R]
    free_GM = np.array([shared_M for _, shared_M in empty])
    budget.spend(batch.n_samples * (1 + len(free_R) / 500) / 20)
    content_D, content_N = np.zeros(ranks), np.zeros(batch.n_samples)
    content_N[batch.n_pieces[anchor] > 0] = batch.content[anchor]
    for i in np.argsort(-tokens_N, kind="stable").tolist():
        fits_R = (free_R >= tokens_N[i]) & (free_GM >= tokens_NM[i]).all(axis=1)[micro_R]
        if not fits_R.any():
            return None
        r = int(np.where(fits_R, content_D[rank_R], np.inf).argmin())
        rows[micro_R[r]][row_in_microbatch_R[r]].append(i)
        free_R[r] -= tokens_N[i]
        free_GM[micro_R[r]] -= tokens_NM[i]
        content_D[rank_R[r]] += content_N[i]
    size = space.capacity.group_size
    filled = [
        space.build_run(t.bucket, rows[k * size : (k + 1) * size], budget)
        for k, t in enumerate(assignment)
    ]
    return None if None in filled else [t for t in filled if t]
