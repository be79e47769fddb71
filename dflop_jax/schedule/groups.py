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
from dflop_jax.schedule.balance_problem import Budget
from dflop_jax.schedule.batch import Batch, Capacity, check_fits
from dflop_jax.schedule.content_balance import (
    GroupContents,
    balance_content,
    place,
    rank_content,
    uneven,
)
from dflop_jax.schedule.costs import GroupCosts, Ticks, running_order
from dflop_jax.schedule.count_vectors import Demand, demand
from dflop_jax.schedule.packing import Microbatch, Packed, first_fit, width_of
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
        """A cost of running these, which the search minimises: each keeps the dearest resource
        busy, and the one that fills the pipeline fastest runs first."""
        chosen = [t.bucket for t in answer]
        if not chosen:
            return 0
        return int(self.ticks.dearest_C[chosen].sum() + self.ticks.rest_C[chosen].min())

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
        batch, width = self.batch, len(answer.microbatches[0])
        rows = [row for microbatch in answer.microbatches for row in microbatch]
        row_N = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        sample_N = np.fromiter(chain.from_iterable(rows), np.int64, len(row_N))
        needs = {}  # most tokens of a row and of a microbatch
        for m in batch.modules:
            tokens_N = batch.tokens[m][sample_N]
            in_row = (
                np.bincount(row_N, tokens_N) if m == batch.anchor else batch.longest[m][sample_N]
            )
            whole = np.bincount(row_N // width, tokens_N)
            needs[m] = in_row.max(initial=0), whole.max(initial=0)
        for b in self.by_cost:
            if b == answer.bucket:
                break
            bucket = self.buckets[b]
            may_hold = width_of(bucket, batch, self.capacity) == width and all(
                batch.row_room(bucket.shape(m), m) >= in_row
                and batch.room(bucket, m, self.capacity) >= whole
                for m, (in_row, whole) in needs.items()
            )
            if may_hold and (other := self.together(b, answer.microbatches, budget)):
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
        return np.lexsort((self.ticks.sum_C, self.ticks.dearest_C)).tolist()


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
    batch, bucket, capacity = room.batch, room.buckets[b], room.capacity
    while any(
        place(batch, bucket, [microbatch], m, capacity, budget) is None for m in batch.modules
    ):
        fullest = max(microbatch, key=len)
        out.append(fullest.pop())
    return sorted(out)


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
    rows = [[[i] for rank in ranks_D for i in rank] for ranks_D in ranks_MD]
    for b in room.by_cost:
        shapes = {m: room.buckets[b].shape(m) for m in room.batch.modules}
        every = {m: _on_own_ranks(room.batch, ranks_MD, m, s, m == last) for m, s in shapes.items()}
        placed = {m: places for m, places in every.items() if places is not None}
        if len(placed) == len(every):
            held = {m: places for m, places in placed.items() if len(places)}
            return BucketRun(b, [[*r, *([] for _ in range(width - len(r)))] for r in rows], held)
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
        every: dict[str, tuple[Shape, list[PiecePlaces]]] = {}  # the pieces of a module's groups
        for m, places in together.placed.items():
            if m in layout.divided:
                part = part_shape(layout, m)
                every[m] = part, parts_of(places, part)
            else:
                every[m] = dict(room.buckets[together.bucket].shapes)[m], [places]
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


def dealt_answer(
    room: PackingSpace, answer: Sequence[BucketRun], budget: Budget
) -> list[BucketRun] | None:
    """The same groups with the samples dealt out, longest first, each to a row of the rank that has
    least content in the step so far: where groups have room to spare, a better start for evening
    out their content than packing. None where the anchor's content costs nothing, nothing is
    packed, or samples find no room in this order."""
    batch, anchor = room.batch, room.batch.anchor
    if anchor is None or anchor not in room.priced or not answer:
        return None
    ranks, tokens_N = room.capacity.ranks[anchor], batch.tokens[anchor]
    shared = [m for m in batch.modules if m != anchor]
    asks_NM = np.array([batch.tokens[m] for m in shared]).reshape(len(shared), batch.n).T
    buckets = [room.buckets[t.bucket] for t in answer for _ in t.microbatches]
    rows: Packed = [[[] for _ in row] for t in answer for row in t.microbatches]
    micro_R = np.repeat(np.arange(len(rows)), [len(r) for r in rows])
    place_R = np.concatenate([np.arange(len(r)) for r in rows])  # in its microbatch
    rank_R = np.concatenate([np.arange(len(r)) * ranks // len(r) for r in rows])
    free_R = np.array([batch.row_room(b.shape(anchor), anchor) for b in buckets])[micro_R]
    free_GM = np.array([[batch.room(b, m, room.capacity) for m in shared] for b in buckets])
    budget.spend(batch.n * (1 + len(free_R) / 500) / 20)
    content_D, content_N = np.zeros(ranks), np.zeros(batch.n)
    content_N[batch.count[anchor] > 0] = batch.content[anchor]
    for i in np.argsort(-tokens_N, kind="stable").tolist():
        fits_R = (free_R >= tokens_N[i]) & (free_GM >= asks_NM[i]).all(axis=1)[micro_R]
        if not fits_R.any():
            return None
        r = int(np.where(fits_R, content_D[rank_R], np.inf).argmin())
        rows[micro_R[r]][place_R[r]].append(i)
        free_R[r] -= tokens_N[i]
        free_GM[micro_R[r]] -= asks_NM[i]
        content_D[rank_R[r]] += content_N[i]
    size = room.capacity.group_size
    dealt = [
        room.together(t.bucket, rows[k * size : (k + 1) * size], budget)
        for k, t in enumerate(answer)
    ]
    return None if None in dealt else [t for t in dealt if t]
