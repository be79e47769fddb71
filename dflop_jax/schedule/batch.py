"""Global batches: samples drawn from a data profile, with its distribution or a drifted one; their
loads in arrays; and the buckets that can hold them.

A microbatch may run through some modules as several groups of one small shape (sub-microbatches).
Samples are packed as if these groups were one group with the rows of all of them
(`merge_sub_microbatches`), which is split afterwards. Packing, count vectors and bounds therefore
need no special case.

Shape suffixes: N samples, P pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, product

import numpy as np
from numpy.typing import NDArray

from dflop_jax.records import Bucket, Layout, Load, Plan, Prices, Shape, piece_content
from dflop_jax.schedule.balance_problem import Floats, Ints

# Number of samples of a large batch. Fewer such batches are scheduled, since each takes longer and
# they differ less; doubling it doubles their planning time.
LARGE_BATCH = 512
# Approximate drift of a batch's mean in standard deviations of a sample. More drift suits buckets
# to data that differ more from the profile, at the cost of the profiled data.
DRIFT = 0.3
_FARTHEST = 2.0  # standard deviations at which a sample's distance from the mean is clipped
_MAX_VARIANTS = 10  # a plan's buckets, and copies of them without some modules


@dataclass(frozen=True)
class Capacity:
    """The factors that multiply a bucket's shapes: data ranks of every module, in topological
    order, and microbatches per group."""

    ranks: Mapping[str, int]
    group_size: int = 1


def capacity_of(layout: Layout) -> Capacity:
    return Capacity({m: layout.data_ranks(m) for m in layout.modules}, layout.group_size)


def rows_needed(lengths: Sequence[int], shape: Shape) -> float:
    """Return the number of rows that first fit decreasing fills; inf if a piece exceeds a row."""
    longest = max(lengths, default=0)
    if longest > shape.tokens:
        return math.inf
    if not lengths or longest == min(lengths):
        return -(-len(lengths) // (shape.tokens // longest)) if lengths else 0
    return int(first_fit_decreasing(np.array(lengths), shape.tokens).max()) + 1


def first_fit_decreasing(length_P: Ints, tokens: int) -> Ints:
    """Return the row of each piece, [P]. Rows have `tokens` tokens; no piece may be longer."""
    free, row_P = np.full(len(length_P), tokens), np.zeros(len(length_P), np.int64)
    for i in np.argsort(-length_P, kind="stable"):
        row_P[i] = row = int((free >= length_P[i]).argmax())
        free[row] -= length_P[i]
    return row_P


class Batch:
    """The loads of a global batch by module, and the capacity of its buckets.

    Attributes:
      tokens, longest: tokens and longest piece of each sample, [N].
      n_pieces, first: number of pieces of each sample and the index of its first piece, [N].
      lengths, sample: tokens and sample of each piece, [P].
      features: amount of each content feature, such as token pairs, in each piece, [features, P].
      content: one number per piece that combines its features, [P]; see `with_content_weights`.
      step: a common divisor of all lengths.
    """

    def __init__(self, loads: Sequence[Load], capacity: Capacity):
        self.loads, self.capacity, self.n_samples = loads, capacity, len(loads)
        self.modules = tuple(capacity.ranks)
        lengths = {m: [load.lengths(m) for load in loads] for m in self.modules}

        def measure(amount: Callable[[tuple[int, ...]], int]) -> dict[str, Ints]:
            return {m: np.array([*map(amount, n)], np.int64) for m, n in lengths.items()}

        self.tokens, self.n_pieces = measure(sum), measure(len)
        self.longest = measure(partial(max, default=0))
        self.lengths = {m: np.array([*chain(*n)], np.int64) for m, n in lengths.items()}
        self.first = {m: np.cumsum(n) - n for m, n in self.n_pieces.items()}
        sample_N = np.arange(self.n_samples)
        self.sample = {m: np.repeat(sample_N, n) for m, n in self.n_pieces.items()}
        self.features = {m: piece_content(loads, m) for m in self.modules}
        self.content = {m: features_FP[0] for m, features_FP in self.features.items()}
        self.step = {m: int(np.gcd.reduce(n)) or 1 for m, n in self.lengths.items()}

    def with_capacity(self, capacity: Capacity) -> Batch:
        """Return the same loads with another capacity for the same modules."""
        batch = copy(self)
        batch.capacity = capacity
        return batch

    def with_content_weights(self, weights: Mapping[str, Floats]) -> Batch:
        """Return the batch with `content` set to the rounded weighted features of each module,
        or to the first feature of a module without weights."""
        batch = copy(self)
        batch.content = dict(self.content)
        for m, weight_F in weights.items():
            if len(self.lengths[m]):
                batch.content[m] = np.rint(weight_F @ self.features[m]).astype(np.int64)
        return batch

    def rows(self, bucket: Bucket, module: str) -> int:
        """Return a module's rows in one microbatch over all ranks; 0 if the bucket lacks it."""
        shape = bucket.shape(module)
        return shape.rows * self.capacity.ranks[module] if shape else 0

    def can_hold(self, bucket: Bucket) -> NDArray[np.bool_]:
        """Return whether a microbatch of the bucket holds each sample by first fit decreasing."""
        able_N = np.ones(self.n_samples, bool)
        for m in self.modules:
            count_N, longest_N, shape = self.n_pieces[m], self.longest[m], bucket.shape(m)
            if shape is None:
                able_N &= count_N == 0
                continue
            rows = self.rows(bucket, m)
            in_row_N = shape.tokens // np.maximum(longest_N, 1)
            fits_N = count_N <= rows * in_row_N  # first fit fills rows no worse than equal pieces
            unequal_N = self.tokens[m] < count_N * longest_N
            for i in np.flatnonzero(able_N & ~fits_N & (in_row_N > 0) & unequal_N).tolist():
                fits_N[i] = rows_needed(self.loads[i].lengths(m), shape) <= rows
            able_N &= fits_N
        return able_N

    def any_can_hold(self, buckets: Iterable[Bucket]) -> NDArray[np.bool_]:
        """Return whether any of the buckets holds each sample, [N]."""
        return np.any([np.zeros(self.n_samples, bool), *map(self.can_hold, buckets)], axis=0)

    @cached_property
    def anchor(self) -> str | None:
        """The module into whose rows samples are packed: the last one in which every sample has at
        most one piece. None: samples are packed into microbatches."""
        one = (m for m in reversed(self.modules) if self.n_pieces[m].max(initial=0) <= 1)
        return next(one, None)

    def anchor_rows(self, bucket: Bucket) -> int:
        """Return the rows of the anchor in a microbatch; 1 if the bucket lacks it."""
        return self.rows(bucket, self.anchor) or 1 if self.anchor else 1

    @cached_property
    def missing_modules(self) -> tuple[frozenset[str], ...]:
        """The sets of modules that some sample does not use, smaller sets first."""
        sets = {frozenset(m for m in self.modules if not load.lengths(m)) for load in self.loads}
        return tuple(sorted(sets, key=lambda s: (len(s), sorted(s))))

    def row_tokens(self, bucket: Bucket, module: str) -> int:
        """Return the tokens of a row that pieces of this batch can fill."""
        shape, step = bucket.shape(module), self.step[module]
        return shape.tokens // step * step if shape else 0

    def microbatch_tokens(self, bucket: Bucket, module: str) -> int:
        """Return the tokens of a microbatch, over all ranks, that pieces of this batch can fill."""
        return self.rows(bucket, module) * self.row_tokens(bucket, module)

    @cached_property
    def shared(self) -> tuple[str, ...]:
        """The modules other than the anchor, whose capacity all rows of a microbatch share."""
        return tuple(m for m in self.modules if m != self.anchor)

    @cached_property
    def shared_tokens_NM(self) -> Ints:
        """Tokens of each sample in each shared module, [N, modules]."""
        tokens_MN = np.array([self.tokens[m] for m in self.shared], np.int64)
        return tokens_MN.reshape(len(self.shared), self.n_samples).T

    def empty_tokens(self, bucket: Bucket) -> tuple[int, Ints]:
        """Return the capacity in tokens that pieces of this batch can fill: of a row of the anchor
        (0 without one), and of a microbatch in each shared module."""
        row = self.row_tokens(bucket, self.anchor) if self.anchor else 0
        return row, np.array([self.microbatch_tokens(bucket, m) for m in self.shared], np.int64)

    def piece_indices(self, module: str, samples: Sequence[int]) -> Ints:
        """Return the indices of these samples' pieces of a module."""
        chosen = np.asarray(samples, np.int64)
        count, first = self.n_pieces[module][chosen], self.first[module][chosen]
        return np.repeat(first - np.cumsum(count) + count, count) + np.arange(count.sum())


def oversize(loads: Sequence[Load], buckets: Sequence[Bucket], capacity: Capacity) -> list[int]:
    """Return the indices of the samples that no bucket can hold."""
    return np.flatnonzero(~Batch(loads, capacity).any_can_hold(buckets)).tolist()


def check_fits(batch: Batch, buckets: Sequence[Bucket]) -> None:
    """Raise a ValueError that names the first sample which no bucket can hold."""
    for i in np.flatnonzero(~batch.any_can_hold(buckets))[:1]:
        load = batch.loads[i]
        largest = max(buckets, key=lambda b: tuple(b.tokens(m) for m in batch.modules[::-1]))
        amounts = ", ".join(
            f"{load.tokens(m)} tokens of {m} in {len(load.lengths(m))} pieces"
            for m in batch.modules
            if load.lengths(m)
        )
        raise ValueError(
            f"sample {i} of the batch has {amounts}; the largest bucket {largest.name} does "
            "not hold it: drop or truncate it (data.oversize) or plan with a larger bucket"
        )


def sample_batches(
    loads: Sequence[Load], global_batch: int, n: int, seed: int = 0
) -> list[list[Load]]:
    """Draw `n` global batches from `loads`, each without replacement if there are enough loads."""
    rng = np.random.default_rng(seed)
    repeats = global_batch > len(loads)
    picks = [rng.choice(len(loads), global_batch, replace=repeats) for _ in range(n)]
    return [[loads[int(i)] for i in pick] for pick in picks]


def drifted_batches(
    loads: Sequence[Load], modules: Sequence[str], global_batch: int, n: int, seed: int = 0
) -> list[list[Load]]:
    """Draw `n` global batches from a drifted distribution: samples with many tokens of some modules
    and few of others are drawn more often, and less often in every second batch."""
    tokens = np.array([[load.tokens(m) for m in modules] for load in loads], float)
    spread = tokens.std(axis=0)
    away = (tokens - tokens.mean(axis=0)) / np.where(spread, spread, 1.0)
    away = away.clip(-_FARTHEST, _FARTHEST)
    rng = np.random.default_rng(seed)
    batches = []
    for i in range(n):
        if i % 2 == 0:
            direction = rng.normal(size=len(modules))
            direction *= DRIFT / np.linalg.norm(direction)
        else:
            direction = -direction
        weights = np.exp(away @ direction)
        picks = rng.choice(len(loads), global_batch, p=weights / weights.sum())
        batches.append([loads[int(j)] for j in picks])
    return batches


def sub_microbatch_shape(layout: Layout, module: str) -> Shape:
    """Return the shape of a divided module's groups; ValueError if the plan has several."""
    shapes = layout.shapes(module)
    if len(shapes) != 1:
        names = ", ".join(s.name for s in shapes)
        raise ValueError(
            f"up to {layout.fan_in} groups of {module!r} feed one group, in shapes {names}; "
            "give the module one shape, or set the plan's fan_in to 1"
        )
    return shapes[0]


def merge_sub_microbatches(plan: Plan, prices: Prices) -> tuple[Plan, Prices]:
    """Return the plan and its prices with 1 to `fan_in` sub-microbatches of every divided module
    merged into one group; unchanged if no module is divided."""
    modules = divided_modules(plan.layout)
    if not modules:
        return plan, prices
    sub_shape = {m: sub_microbatch_shape(plan.layout, m) for m in modules}
    programs = dict(prices.programs)
    for program, price in prices.programs.items():
        if sub_shape.get(plan.layout.segment(program.segment).module) == program.shape:
            for n in range(plan.layout.fan_in, 0, -1):
                merged = replace(program, shape=_scale_rows(program.shape, n))
                programs[merged] = replace(price, static_s=n * price.static_s)
    undivided = plan.with_layout(buckets=merged_buckets(plan.layout), fan_in=1)
    return undivided, replace(prices, programs=programs)


def merged_buckets(layout: Layout) -> tuple[Bucket, ...]:
    """Return the plan's buckets with 1 to `fan_in` parts of divided modules, most parts first."""
    modules, counts = divided_modules(layout), range(layout.fan_in, 0, -1)
    if not modules:
        return layout.buckets
    merged = (
        Bucket(tuple((m, _scale_rows(s, n) if m in modules else s) for m, s in b.shapes))
        for n, b in product(counts, layout.buckets)
    )
    return tuple(dict.fromkeys(merged))


def max_buckets(layout: Layout) -> int:
    """Return the number of buckets that a batch may use; see `bucket_variants`."""
    return len(merged_buckets(layout)) + max(0, _MAX_VARIANTS - len(layout.buckets))


def bucket_variants(layout: Layout, batch: Batch) -> tuple[Bucket, ...]:
    """Return the merged buckets, followed by copies without modules that some samples lack, at most
    `max_buckets` in all. A module without pieces has no group."""
    buckets, limit = merged_buckets(layout), max_buckets(layout)
    variants = dict.fromkeys(buckets)
    for missing, b in product(batch.missing_modules, buckets):
        shapes = {m: s for m, s in b.shapes if m not in missing}
        if shapes and len(variants) < limit:
            variants[Bucket.from_shapes(shapes)] = None
    return tuple(variants)


def divided_modules(layout: Layout) -> list[str]:
    """Return the divided modules that have groups."""
    return [m for m in layout.divided if layout.shapes(m)]


def _scale_rows(shape: Shape, n_parts: int) -> Shape:
    return replace(shape, rows=shape.rows * n_parts)
