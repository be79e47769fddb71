"""Samples that run together, as groups of every module: the greedy answer, the arrival-order
baseline, and the groups of a schedule made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from dflop_jax.records import Bucket, Group, Layout, PiecePlaces, Shape
from dflop_jax.schedule.batch import Batch, Capacity, check_fits
from dflop_jax.schedule.costs import GroupCosts, Ticks, running_order
from dflop_jax.schedule.cover import Demand, demand
from dflop_jax.schedule.packing import Microbatch, Packed, first_fit, width_of
from dflop_jax.schedule.placing import (
    GroupContents,
    balance_content,
    place,
    rank_content,
    slots_of,
    uneven,
)
from dflop_jax.schedule.solver.budget import Budget
from dflop_jax.schedule.sub_microbatches import part_shape, parts_of

# Of a step's seconds, what evening out content further would save at most: where it is less, it is
# left. At a fifth of the steps' content, which is all of 1%, searching took most of planning.
_NEAR = 1e-3


@dataclass
class BucketRun:
    """One group of each of a bucket's modules, for the same samples. `bucket` is a place in the
    list of buckets at hand; `placed` has every module with pieces."""

    bucket: int
    microbatches: Packed
    placed: dict[str, PiecePlaces] = field(default_factory=dict)


@dataclass(frozen=True)
class PackingSpace:
    """What a batch is packed into: buckets with their costs, times ranks and group size; `priced`
    are the modules whose programs cost something by their content."""

    batch: Batch
    buckets: tuple[Bucket, ...]
    capacity: Capacity
    ticks: Ticks
    priced: frozenset[str] = frozenset()

    def cost(self, answer: Sequence[BucketRun]) -> int:
        return self.ticks.pipeline([t.bucket for t in answer])

    def in_order(self, answer: Sequence[BucketRun]) -> list[BucketRun]:
        return [answer[i] for i in running_order([t.bucket for t in answer], self.ticks)]

    def together(self, bucket: int, microbatches: Packed, budget: Budget) -> BucketRun | None:
        """The groups of these microbatches, padded with empty ones; None if some pieces fit no
        row."""
        width = width_of(self.buckets[bucket], self.batch, self.capacity)
        missing = self.capacity.group_size - len(microbatches)
        empty: Packed = [[[] for _ in range(width)] for _ in range(missing)]
        padded = [*microbatches, *empty]
        placed: dict[str, PiecePlaces] = {}
        for module in self.batch.modules:
            places = place(self.batch, self.buckets[bucket], padded, module, self.capacity, budget)
            if places is None:
                return None
            if len(places):
                placed[module] = places
        return BucketRun(bucket, padded, placed)

    def shrunk(self, answer: BucketRun, budget: Budget) -> BucketRun:
        """The same microbatches in the cheapest bucket that holds them."""
        may_hold_C = self._may_hold(answer.microbatches)
        for b in self.by_cost:
            if b == answer.bucket:
                return answer
            if may_hold_C[b]:
                other = self.together(b, answer.microbatches, budget)
                if other is not None:
                    return other
        return answer

    @cached_property
    def able_CN(self) -> NDArray[np.bool_]:
        """[buckets, N]: which samples each bucket can hold."""
        return np.array([self.batch.able(b, self.capacity) for b in self.buckets])

    @cached_property
    def demand(self) -> Demand:
        """What groups must have room for to hold the batch."""
        return demand(self.batch, self.buckets, self.capacity)

    @cached_property
    def by_cost(self) -> list[int]:
        """Buckets, the cheapest first."""
        cost = self.ticks
        places = range(len(self.buckets))
        return sorted(places, key=lambda b: (cost.dearest_C[b], cost.sum_C[b], b))

    @cached_property
    def _width_C(self) -> NDArray[np.int64]:
        """[buckets]: rows of a microbatch."""
        return np.array([width_of(b, self.batch, self.capacity) for b in self.buckets])

    @cached_property
    def _room_C(self) -> dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Tokens [buckets] of a row and of a microbatch, of every module."""
        batch, rooms = self.batch, {}
        for m in batch.modules:
            row = [batch.row_room(b.shape(m), m) for b in self.buckets]
            whole = [batch.room(b, m, self.capacity) for b in self.buckets]
            rooms[m] = np.array(row), np.array(whole)
        return rooms

    def _may_hold(self, microbatches: Packed) -> NDArray[np.bool_]:
        """[buckets]: whether volumes allow these microbatches."""
        batch, able_C = self.batch, self._width_C == len(microbatches[0])
        rows = [row for rows in microbatches for row in rows]
        row_N = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        sample_N = np.fromiter(chain.from_iterable(rows), np.int64, len(row_N))
        microbatch_N = row_N // len(microbatches[0])

        def most(tokens_N: NDArray[np.int64], where_N: NDArray[np.int64]) -> float:
            return np.bincount(where_N, tokens_N).max(initial=0.0)

        for m, (row_C, whole_C) in self._room_C.items():
            tokens_N = batch.tokens[m][sample_N]
            able_C &= whole_C >= most(tokens_N, microbatch_N)
            able_C &= row_C >= batch.longest[m][sample_N].max(initial=0)
            if m == batch.anchor:
                able_C &= row_C >= most(tokens_N, row_N)
        return able_C


def greedy_answer(room: PackingSpace, mains: int) -> list[BucketRun]:
    """First fit, fullest first, into one main bucket (what it cannot hold into the cheapest other
    one), each group then shrunk to its cheapest bucket; the best choice of the first `mains`
    buckets as the main one."""
    budget = Budget(0)
    able_CN = room.able_CN
    cheapest_N = np.array(room.by_cost)[able_CN[room.by_cost].argmax(axis=0)]
    best: list[BucketRun] | None = None
    tried: set[bytes] = set()
    for main in range(mains):
        home_N = np.where(able_CN[main], main, cheapest_N)
        if home_N.tobytes() in tried:
            continue
        tried.add(home_N.tobytes())
        answer: list[BucketRun] = []
        for b in np.unique(home_N).tolist():
            answer += _first_fitted(room, b, np.flatnonzero(home_N == b), budget)
        if best is None or room.cost(answer) < room.cost(best):
            best = answer
    return room.in_order(best or [])


def _first_fitted(
    room: PackingSpace, b: int, members: NDArray[np.int64], budget: Budget
) -> list[BucketRun]:
    """Groups of a bucket that hold the samples, by first fit, fullest first. Samples whose pieces
    then fit no row are packed again."""
    batch, capacity, bucket = room.batch, room.capacity, room.buckets[b]

    fill_N = np.zeros(batch.n)
    for m in batch.modules:
        whole = batch.room(bucket, m, capacity)
        whole = batch.row_room(bucket.shape(m), m) if m == batch.anchor else whole
        np.maximum(fill_N, batch.tokens[m] / max(whole, 1), out=fill_N)
    waiting = members[np.argsort(-fill_N[members], kind="stable")].tolist()
    microbatches: Packed = []
    while waiting:
        packed = first_fit(batch, waiting, bucket, capacity)
        waiting = []
        for microbatch in packed:
            waiting += _taken_out(room, b, microbatch, budget)
        microbatches += packed
    answer = []
    for lo in range(0, len(microbatches), capacity.group_size):
        together = room.together(b, microbatches[lo : lo + capacity.group_size], budget)
        assert together is not None, "a bucket holds what was packed into it"
        answer.append(room.shrunk(together, budget))
    return answer


def _taken_out(room: PackingSpace, b: int, microbatch: Microbatch, budget: Budget) -> list[int]:
    """Samples that leave the microbatch, in place, until all pieces of the others fit rows."""
    out: list[int] = []
    modules = [m for m in room.batch.modules if m != room.batch.anchor]
    bucket = room.buckets[b]
    while any(not _fits(room, bucket, microbatch, m, budget) for m in modules):
        fullest = max(range(len(microbatch)), key=lambda r: (len(microbatch[r]), -r))
        out.append(microbatch[fullest].pop())
    return sorted(out)


def _fits(
    room: PackingSpace, bucket: Bucket, microbatch: Microbatch, module: str, budget: Budget
) -> bool:
    """Whether the module's pieces of a microbatch fit its rows."""
    pieces = room.batch.pieces(module, [i for row in microbatch for i in row])
    slots = slots_of(room.batch, bucket, microbatch, pieces, module, room.capacity, budget)
    return slots is not None


def arrival_answer(room: PackingSpace) -> list[BucketRun]:
    """Samples in order, one a row, rank after rank, each group in the cheapest bucket that holds,
    on each rank, the pieces of that rank's own samples.

    Raises:
      ValueError: modules differ in data ranks, or a sample fits no bucket on one rank.
    """
    batch, ranks = room.batch, room.capacity.ranks
    last = batch.modules[-1]
    if len(set(ranks.values())) > 1:
        raise ValueError(
            f"arrival grouping needs equal data ranks, got {dict(ranks)}; plan all modules alike "
            "or use balanced grouping"
        )
    own_rank = Capacity(dict.fromkeys(ranks, 1))
    check_fits(batch, room.buckets, own_rank)
    shape = room.buckets[0].shape(last)
    per_rank = shape.rows if shape else 1
    width = per_rank * ranks[last]
    answer: list[BucketRun] = []
    start = 0
    while start < batch.n:
        for count in range(min(width * room.capacity.group_size, batch.n - start), 0, -1):
            together = _in_arrival(room, range(start, start + count), per_rank)
            if together is not None:
                break
        assert together is not None, "one sample fits (checked)"
        answer.append(together)
        start += count
    return answer


def _in_arrival(room: PackingSpace, samples: range, per_rank: int) -> BucketRun | None:
    """The cheapest groups for samples in order; None if no bucket holds them so."""
    last, n_ranks = room.batch.modules[-1], next(iter(room.capacity.ranks.values()))
    width, size = per_rank * n_ranks, room.capacity.group_size
    ranks_MD = [
        [
            list(samples[(k * n_ranks + d) * per_rank : (k * n_ranks + d + 1) * per_rank])
            for d in range(n_ranks)
        ]
        for k in range(size)
    ]
    for b in room.by_cost:
        bucket = room.buckets[b]
        placed: dict[str, PiecePlaces] = {}
        for m in room.batch.modules:
            places = _on_own_ranks(room.batch, ranks_MD, m, bucket.shape(m), m == last)
            if places is None:
                break
            if len(places):
                placed[m] = places
        else:
            rows = [[[i] for rank in ranks_D for i in rank] for ranks_D in ranks_MD]
            return BucketRun(b, [[*r, *([] for _ in range(width - len(r)))] for r in rows], placed)
    return None


def _on_own_ranks(
    batch: Batch,
    ranks_MD: Sequence[Sequence[Sequence[int]]],
    module: str,
    shape: Shape | None,
    row_each: bool,
) -> PiecePlaces | None:
    """Pieces on the ranks of their samples: a sample's in a row of their own (`row_each`), else by
    first fit; None if they do not fit."""
    entries: list[tuple[int, int, int, int]] = []
    for m, ranks_D in enumerate(ranks_MD):
        for d, samples in enumerate(ranks_D):
            free = [shape.tokens] * shape.rows if shape else []
            for slot, i in enumerate(samples):
                for piece in batch.pieces(module, [i]).tolist():
                    n = int(batch.lengths[module][piece])
                    rows = range(slot, min(slot + 1, len(free))) if row_each else range(len(free))
                    row = next((r for r in rows if free[r] >= n), None)
                    if row is None:
                        return None
                    free[row] -= n
                    entries.append((piece, m, d, row))
    return PiecePlaces(np.array(entries, np.int64).reshape(-1, 4).T)


def schedule_groups(
    room: PackingSpace, answer: Sequence[BucketRun], layout: Layout
) -> tuple[Group, ...]:
    """The schedule's groups in running order: of every bucket's run its modules, producers first,
    each feeding those of the same run that read it; divided modules in several groups, all of
    which feed or read the same groups."""
    groups: list[Group] = []
    size, ranks = room.capacity.group_size, room.capacity.ranks
    for together in answer:
        every = {m: _parts(room, together, layout, m) for m in together.placed}
        first = accumulate((len(parts) for _, parts in every.values()), initial=len(groups))
        places_of = {m: range(at, at + len(every[m][1])) for m, at in zip(every, first)}
        for m, (shape, parts) in every.items():
            feeds = tuple(f for t in layout.targets(m) for f in places_of.get(t, ()))
            for places in parts:
                content = [
                    int(rank_content(places, feature_P, size, ranks[m]).sum(axis=0).max())
                    for feature_P in room.batch.features[m]
                ]
                groups.append(Group(m, shape, feeds, tuple(content), places.in_rows(), size))
    return tuple(groups)


def _parts(
    room: PackingSpace, together: BucketRun, layout: Layout, module: str
) -> tuple[Shape, list[PiecePlaces]]:
    """The shape of a module's groups in a run, and the pieces of each group."""
    shape, places = room.buckets[together.bucket].shape(module), together.placed[module]
    assert shape is not None, "pieces are placed in a shape"
    if module not in layout.divided:
        return shape, [places]
    part = part_shape(layout, module)
    return part, parts_of(places, part)


def near_enough(
    room: PackingSpace, costs: GroupCosts, answer: Sequence[BucketRun]
) -> dict[str, float]:
    """How much content more than the least a rank of each priced module may have: what costs a
    small share of the seconds that an answer takes."""
    step_s = sum(float(costs.bucket_s(room.buckets[t.bucket]).max()) for t in answer)
    return {m: _NEAR * step_s / costs.unit_s(m) for m in room.priced}


def even_content(
    room: PackingSpace,
    answer: Sequence[BucketRun],
    budget: Budget,
    seed: int,
    near: Mapping[str, float],
) -> float:
    """Even out the content of the modules whose programs it costs something, in place, to what is
    `near` enough; returns what was lowered (`placing.uneven`), of all of them."""
    uneven_content = 0.0
    priced = [m for m in room.batch.modules if m in room.priced]
    for left, m in zip(range(len(priced), 0, -1), priced):
        runs = [t for t in answer if m in t.placed]
        shapes = [room.buckets[t.bucket].shape(m) for t in runs]
        content = GroupContents(
            room.batch.lengths[m],
            room.batch.content[m],
            room.capacity.ranks[m],
            room.capacity.group_size,
            [s for s in shapes if s is not None],
            [t.placed[m] for t in runs],
        )
        balance_content(content, budget.part(budget.left / left), seed, near.get(m, 0.0))
        for t, places in zip(runs, content.groups, strict=True):
            t.placed[m] = places
        uneven_content += uneven(content)
    return uneven_content
