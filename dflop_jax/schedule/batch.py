"""The loads of a global batch in arrays, and how much of it a bucket can hold.

Shape suffixes: N samples, P pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from dflop_jax.records import Bucket, Layout, Load, Shape, piece_content
from dflop_jax.schedule.balance_problem import Ints


@dataclass(frozen=True)
class Capacity:
    """The factors that multiply a bucket's shapes: data ranks of every module, in topological
    order, and microbatches per group."""

    ranks: Mapping[str, int]
    group_size: int = 1

    def __hash__(self) -> int:
        return hash((tuple(self.ranks.items()), self.group_size))

    def rows(self, bucket: Bucket, module: str) -> int:
        """Rows of a module in one microbatch over all its ranks; 0 if the bucket lacks the
        module."""
        shape = bucket.shape(module)
        return shape.rows * self.ranks[module] if shape else 0


def capacity_of(layout: Layout) -> Capacity:
    """The capacity of a layout."""
    return Capacity({m: layout.data_ranks(m) for m in layout.modules}, layout.group_size)


def rows_needed(lengths: Sequence[int], shape: Shape) -> float:
    """Rows of a shape that first fit decreasing needs for pieces of these lengths; inf if a piece
    is longer than a row."""
    longest = max(lengths, default=0)
    if longest > shape.tokens:
        return math.inf
    if not lengths or longest == min(lengths):
        return -(-len(lengths) // (shape.tokens // longest)) if lengths else 0
    return int(first_fit_decreasing(np.array(lengths), shape.tokens).max()) + 1


def first_fit_decreasing(length_P: Ints, tokens: int) -> Ints:
    """[P]: the row of each piece under first fit decreasing into rows of `tokens` tokens. No piece
    may be longer than a row."""
    free, row_P = np.full(len(length_P), tokens), np.zeros(len(length_P), np.int64)
    for i in np.argsort(-length_P, kind="stable"):
        row_P[i] = row = int((free >= length_P[i]).argmax())
        free[row] -= length_P[i]
    return row_P


class Batch:
    """The loads of a global batch, by module.

    Attributes:
      tokens, longest: tokens and longest piece of each sample, [N].
      n_pieces, first: number of pieces of each sample and the index of its first piece, [N].
      lengths, sample: tokens and sample of each piece, [P].
      features: content features of the pieces, [features, P].
      content: the features of each piece in one number, [P]; see `with_content_weights`.
      step: a common divisor of all lengths.
    """

    def __init__(self, loads: Sequence[Load], modules: Iterable[str]):
        self.loads, self.modules, self.n_samples = loads, tuple(modules), len(loads)
        self.lengths: dict[str, Ints] = {}
        self.n_pieces, self.first = dict(self.lengths), dict(self.lengths)
        self.tokens, self.longest = dict(self.lengths), dict(self.lengths)
        for m in self.modules:
            lengths_N = [load.lengths(m) for load in loads]
            count_N = np.array([len(p) for p in lengths_N], np.int64)
            length_P = np.fromiter(chain.from_iterable(lengths_N), np.int64, int(count_N.sum()))
            first_N = np.cumsum(count_N) - count_N
            tokens_N, longest_N = np.zeros((2, self.n_samples), np.int64)
            has_pieces_N = count_N > 0
            if has_pieces_N.any():
                tokens_N[has_pieces_N] = np.add.reduceat(length_P, first_N[has_pieces_N])
                longest_N[has_pieces_N] = np.maximum.reduceat(length_P, first_N[has_pieces_N])
            self.lengths[m], self.n_pieces[m], self.first[m] = length_P, count_N, first_N
            self.tokens[m], self.longest[m] = tokens_N, longest_N
        sample_N = np.arange(self.n_samples)
        self.sample = {m: np.repeat(sample_N, self.n_pieces[m]) for m in self.modules}
        self.features = {m: piece_content(loads, m) for m in self.modules}
        self.content = {m: features_FP[0] for m, features_FP in self.features.items()}
        self.step = {m: int(np.gcd.reduce(self.lengths[m])) or 1 for m in self.modules}

    def with_content_weights(self, weights: Mapping[str, NDArray[np.float64] | None]) -> Batch:
        """The batch with `content` set to the features times the weights of a module, rounded. A
        module without weights uses its first feature."""
        batch = copy(self)
        batch.content = dict(self.content)
        for m, weight_F in weights.items():
            if weight_F is not None and len(self.lengths[m]):
                batch.content[m] = np.rint(weight_F @ self.features[m]).astype(np.int64)
        return batch

    def can_hold(self, bucket: Bucket, capacity: Capacity) -> NDArray[np.bool_]:
        """[N]: whether one microbatch of the bucket holds each sample, by first fit decreasing."""
        able_N = np.ones(self.n_samples, bool)
        for m in self.modules:
            count_N, longest_N, shape = self.n_pieces[m], self.longest[m], bucket.shape(m)
            if shape is None:
                able_N &= count_N == 0
                continue
            rows = capacity.rows(bucket, m)
            in_row_N = shape.tokens // np.maximum(longest_N, 1)
            fits_N = count_N <= rows * in_row_N  # first fit fills rows no worse than equal pieces
            unequal_N = self.tokens[m] < count_N * longest_N
            for i in np.flatnonzero(able_N & ~fits_N & (in_row_N > 0) & unequal_N).tolist():
                fits_N[i] = rows_needed(self.loads[i].lengths(m), shape) <= rows
            able_N &= fits_N
        return able_N

    def any_can_hold(self, buckets: Iterable[Bucket], capacity: Capacity) -> NDArray[np.bool_]:
        """[N]: whether some bucket holds each sample."""
        none_N = np.zeros(self.n_samples, bool)
        return np.any([none_N, *(self.can_hold(b, capacity) for b in buckets)], axis=0)

    @cached_property
    def anchor(self) -> str | None:
        """The last module of which every sample has at most one piece; samples are packed into its
        rows. None: samples are packed into microbatches."""
        one = (m for m in reversed(self.modules) if self.n_pieces[m].max(initial=0) <= 1)
        return next(one, None)

    @cached_property
    def missing_modules(self) -> tuple[frozenset[str], ...]:
        """The sets of modules of which some sample has no piece, smaller sets first."""
        sets = {frozenset(m for m in self.modules if not load.lengths(m)) for load in self.loads}
        return tuple(sorted(sets, key=lambda s: (len(s), sorted(s))))

    def row_tokens(self, shape: Shape | None, module: str) -> int:
        """Tokens of a row that pieces of this batch can fill."""
        return shape.tokens // self.step[module] * self.step[module] if shape else 0

    def microbatch_tokens(self, bucket: Bucket, module: str, capacity: Capacity) -> int:
        """Tokens of one microbatch, over all ranks, that pieces of this batch can fill."""
        rows = capacity.rows(bucket, module)
        return rows * self.row_tokens(bucket.shape(module), module)

    @cached_property
    def shared(self) -> tuple[str, ...]:
        """The modules whose capacity the rows of a microbatch share: all but the anchor."""
        return tuple(m for m in self.modules if m != self.anchor)

    @cached_property
    def shared_tokens_NM(self) -> Ints:
        """[N, modules]: tokens of each sample of the shared modules."""
        tokens_MN = np.array([self.tokens[m] for m in self.shared], np.int64)
        return tokens_MN.reshape(len(self.shared), self.n_samples).T

    def empty_tokens(self, bucket: Bucket, capacity: Capacity) -> tuple[int, Ints]:
        """(tokens of an empty row of the anchor, 0 without an anchor; tokens of an empty microbatch
        of each shared module), that pieces of this batch can fill."""
        row = self.row_tokens(bucket.shape(self.anchor), self.anchor) if self.anchor else 0
        shared = [self.microbatch_tokens(bucket, m, capacity) for m in self.shared]
        return row, np.array(shared, np.int64)

    def piece_indices(self, module: str, samples: Sequence[int]) -> Ints:
        """Indices of the pieces of a module that belong to these samples."""
        chosen = np.asarray(samples, np.int64)
        count, first = self.n_pieces[module][chosen], self.first[module][chosen]
        return np.repeat(first - np.cumsum(count) + count, count) + np.arange(count.sum())


def bucket_variants(buckets: Sequence[Bucket], batch: Batch, limit: int) -> tuple[Bucket, ...]:
    """The buckets, followed by copies without the modules that some samples lack, at most `limit`
    in all. A module without pieces has no group."""
    variants = dict.fromkeys(buckets)
    for missing in batch.missing_modules:
        for b in buckets:
            shapes = {m: s for m, s in b.shapes if m not in missing}
            if shapes and len(variants) < limit:
                variants[Bucket.from_shapes(shapes)] = None
    return tuple(variants)


def oversize(loads: Sequence[Load], buckets: Sequence[Bucket], capacity: Capacity) -> list[int]:
    """Indices of the samples that no bucket can hold. The caller decides what to do with them."""
    able_N = Batch(loads, capacity.ranks).any_can_hold(buckets, capacity)
    return np.flatnonzero(~able_N).tolist()


def check_fits(batch: Batch, buckets: Sequence[Bucket], capacity: Capacity) -> None:
    """Raise a ValueError that names the first sample which no bucket can hold."""
    bad = np.flatnonzero(~batch.any_can_hold(buckets, capacity))
    if len(bad):
        load = batch.loads[int(bad[0])]
        modules = list(capacity.ranks)[::-1]
        largest = max(buckets, key=lambda b: tuple(b.tokens(m) for m in modules))
        amounts = ", ".join(
            f"{load.tokens(m)} tokens of {m} in {len(load.lengths(m))} pieces"
            for m in capacity.ranks
            if load.lengths(m)
        )
        raise ValueError(
            f"sample {bad[0]} of the batch has {amounts}; the largest bucket {largest.name} does "
            "not hold it: drop or truncate it (data.oversize) or plan with a bigger bucket"
        )
