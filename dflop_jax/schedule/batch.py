"""A global batch in array form, and the room that groups of a bucket have for it.

Shape suffixes: N samples, P pieces.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dflop_jax.records import Bucket, Load, Plan, Shape, first_pieces, piece_tokens
from dflop_jax.schedule.solver.problem import Ints


@dataclass(frozen=True)
class Capacity:
    """What multiplies a bucket's shapes: the data ranks of every module, in topological order, and
    the microbatches of a group."""

    ranks: Mapping[str, int]
    group_size: int = 1

    def __hash__(self) -> int:
        return hash((tuple(self.ranks.items()), self.group_size))

    def rows(self, bucket: Bucket, module: str) -> int:
        """Rows of a module in one microbatch on all its ranks; 0 where the bucket lacks it."""
        shape = bucket.shape(module)
        return shape.rows * self.ranks[module] if shape else 0

    def executed(self, bucket: Bucket, module: str) -> int:
        """Tokens of a module that a group computes on all ranks, padding included."""
        return bucket.tokens(module) * self.ranks[module] * self.group_size

    def holds(self, bucket: Bucket, load: Load) -> bool:
        """Whether a microbatch of this bucket can hold the sample, by first fit decreasing."""
        for module, lengths in load.pieces.items():
            if module not in self.ranks or not lengths:
                continue
            shape = bucket.shape(module)
            if shape is None or rows_needed(lengths, shape) > self.rows(bucket, module):
                return False
        return True


def capacity_of(plan: Plan) -> Capacity:
    return Capacity({m: plan.data_ranks(m) for m in plan.modules}, plan.group_size)


def rows_needed(lengths: Sequence[int], shape: Shape) -> float:
    """Rows of a shape that first fit decreasing takes for these pieces; inf where one is too
    long."""
    longest = max(lengths, default=0)
    if longest > shape.tokens:
        return math.inf
    if not lengths or longest == min(lengths):
        return -(-len(lengths) // (shape.tokens // longest)) if lengths else 0
    free: list[int] = []
    for n in sorted(lengths, reverse=True):
        row = next((i for i, room in enumerate(free) if room >= n), None)
        if row is None:
            free.append(shape.tokens - n)
        else:
            free[row] -= n
    return len(free)


class Batch:
    """Loads of a global batch, by module: `tokens` and `longest` piece of every sample [N], `count`
    of its pieces [N], and `step`, of which all lengths are multiples."""

    def __init__(self, loads: Sequence[Load], modules: Sequence[str]):
        self.loads, self.modules = loads, tuple(modules)
        self.n = len(loads)
        self.first: dict[str, tuple[int, ...]] = {m: first_pieces(loads, m) for m in modules}
        self.lengths: dict[str, Ints] = {
            m: np.array(piece_tokens(loads, m), np.int64) for m in modules
        }
        self.tokens = {m: self._by_sample(m, sum) for m in modules}
        self.longest = {m: self._by_sample(m, lambda n: max(n, default=0)) for m in modules}
        self.count = {m: self._by_sample(m, len) for m in modules}
        self.step = {m: int(np.gcd.reduce(self.lengths[m])) or 1 for m in modules}

    def _by_sample(self, module: str, of: object) -> Ints:
        assert callable(of)
        return np.array([of(load.lengths(module)) for load in self.loads], np.int64)

    @cached_property
    def anchor(self) -> str | None:
        """The last module of which no sample has several pieces: its rows are what samples are
        packed into. None: samples are packed into microbatches."""
        one = (m for m in reversed(self.modules) if self.count[m].max(initial=0) <= 1)
        return next(one, None)

    @cached_property
    def absences(self) -> tuple[frozenset[str], ...]:
        """The sets of modules of which a sample has no piece, smaller ones first."""
        lacks = {frozenset(m for m in self.modules if not load.lengths(m)) for load in self.loads}
        return tuple(sorted(lacks, key=lambda s: (len(s), sorted(s))))

    def row_room(self, shape: Shape | None, module: str) -> int:
        """Tokens of a row that pieces of this batch can fill."""
        return shape.tokens // self.step[module] * self.step[module] if shape else 0

    def room(self, bucket: Bucket, module: str, capacity: Capacity) -> int:
        """Tokens of one microbatch, on all ranks, that pieces of this batch can fill."""
        rows = capacity.rows(bucket, module)
        return rows * self.row_room(bucket.shape(module), module)

    def pieces(self, module: str, samples: Sequence[int]) -> Ints:
        """Numbers of the samples' pieces of a module."""
        first = self.first[module]
        ranges = [np.arange(first[i], first[i + 1]) for i in samples]
        return np.concatenate([*ranges, np.zeros(0, np.int64)]).astype(np.int64)


def variants(buckets: Sequence[Bucket], batch: Batch, most: int) -> tuple[Bucket, ...]:
    """The buckets, and what is left of them without modules of which some samples have no piece: a
    module without pieces has no group. At most `most` in all."""
    every = dict.fromkeys(buckets)
    for lacks in batch.absences:
        for b in buckets:
            left = {m: s for m, s in b.shapes if m not in lacks}
            if left and len(every) < most:
                every[Bucket.of(left)] = None
    return tuple(every)


def oversize(loads: Sequence[Load], buckets: Sequence[Bucket], capacity: Capacity) -> list[int]:
    """Indices of the samples that no bucket can hold; what to do with them is the caller's."""
    return [i for i, load in enumerate(loads) if not any(capacity.holds(b, load) for b in buckets)]


def check_fits(loads: Sequence[Load], buckets: Sequence[Bucket], capacity: Capacity) -> None:
    """ValueError that names the first sample which no bucket can hold."""
    bad = oversize(loads, buckets, capacity)
    if bad:
        load = loads[bad[0]]
        modules = list(capacity.ranks)[::-1]
        largest = max(buckets, key=lambda b: tuple(b.tokens(m) for m in modules))
        asks = ", ".join(
            f"{load.tokens(m)} tokens of {m} in {len(load.lengths(m))} pieces"
            for m in capacity.ranks
            if load.lengths(m)
        )
        raise ValueError(
            f"sample {bad[0]} of the batch has {asks}; the largest bucket {largest.name} does not "
            "hold it: drop or truncate it (data.oversize) or plan with a bigger bucket"
        )
