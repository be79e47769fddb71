"""The possible sizes of buckets for the profiled data, starting sets of buckets, and buckets that
are not searched: the baseline's, and the spare bucket for samples that no other bucket holds.

A starting set is a chain: a main size and a few smaller ones, with the ratio of modules as in the
data. Sizes within a factor of two keep the pipeline steady; small sizes fit the last microbatches.
If attention over a long row of several pieces is expensive, chains with several short rows are also
tried.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from dflop_jax.records import Bucket, Load, Plan, Shape
from dflop_jax.schedule.batch import Capacity, capacity_of, merged_buckets, oversize, rows_needed
from dflop_jax.schedule.buckets.problem import BucketProblem, Buckets, largest_first

# Chains, most promising first by held-out makespans on five data sets and meshes: the number of
# microbatches over `max_cuts`, and the relative distance of the smallest from the main size.
_MAIN_CUT_SHARES, _DEPTHS = (0.62, 0.8, 1.0, 0.45), (0.5, 0.7)
# Exponent of even steps from the main size to the smallest; above 1: denser near the main size.
_SPACING_POWER = 1.3
ROW_COUNTS = (1, 2, 4, 8)  # numbers of rows for a rank's tokens, if a row holds several pieces
# A chain with more rows is tried if a token costs at most this share of its price with fewer rows.
_MAX_PRICE_RATIO = 0.97


@dataclass(frozen=True)
class ModuleSizes:
    """The statistics of a module's samples, and the limits on its shapes."""

    piece_tokens: int  # of a row that takes one piece; 0: rows are packed
    multiple: int  # the tokens of packed rows are a multiple of it
    volume: float  # tokens of an average batch on one rank
    longest: int  # tokens of the longest piece
    mean: float  # mean tokens of a piece
    sample_tokens: int  # maximum tokens of one sample on a rank
    limit: float = math.inf  # maximum tokens that fit into memory

    @property
    def unit(self) -> int:
        """Tokens of a row that takes one piece, else the divisor of packed rows' tokens."""
        return self.piece_tokens or self.multiple

    @property
    def min_tokens(self) -> int:
        """Tokens of the smallest shape that holds the largest sample."""
        return max(self.sample_tokens, round_up(self.longest, self.unit))

    def choices(self, tokens: float, n: int) -> list[Shape]:
        """Return about `n` shapes with about `tokens` tokens: row lengths from the mean to the
        longest piece, or several numbers of rows."""
        if self.piece_tokens:
            shapes = [self.shape(tokens * f) for f in np.geomspace(0.5, 2.0, n)]
        else:
            lengths = np.geomspace(min(self.mean, self.longest), self.longest, n)
            units = [round_up(x, self.multiple) for x in lengths.tolist()]
            wanted = min(tokens, self.limit)
            shapes = [Shape(max(1, round(wanted / u)), u) for u in units]
        fitting = [s for s in shapes if s is not None and s.size <= self.limit]
        return list(dict.fromkeys(fitting))

    def shape(self, tokens: float, rows: int = 1, holds_largest: bool = False) -> Shape | None:
        """Return the shape of about `tokens` tokens on a rank, in about `rows` rows if rows are
        packed; with `holds_largest`, it holds the largest sample. None: no tokens."""
        if self.volume <= 0 or (tokens <= 0 and not holds_largest):
            return None
        tokens = min(tokens, self.limit)
        if self.piece_tokens:
            n = math.ceil(tokens / self.piece_tokens - 1e-9)
            n = max(n, -(-self.sample_tokens // self.piece_tokens)) if holds_largest else n
            max_rows = int(min(self.limit, 1e15)) // self.piece_tokens
            return Shape(max(1, min(n, max_rows)), self.piece_tokens)
        longest = round_up(self.longest, self.multiple)
        if holds_largest:
            tokens = max(tokens, self.sample_tokens)
            rows = min(rows, max(1, round(tokens / longest)))
        length = self.multiple * max(1, math.ceil(tokens / rows / self.multiple - 1e-9))
        length = max(length, longest) if holds_largest else length
        if self.limit < math.inf:
            length = min(length, int(self.limit) // self.multiple * self.multiple)
            rows = min(rows, max(1, int(self.limit) // length))
        return Shape(rows, length)


Sizes = Mapping[str, ModuleSizes]


def sizes_of(loads: Sequence[Load], problem: BucketProblem) -> dict[str, ModuleSizes]:
    """Return the sizes of each module that the loads use; ValueError if a sample exceeds memory."""
    scale = problem.global_batch / len(loads)
    by_module: dict[str, ModuleSizes] = {}
    for m, ranks in problem.ranks.items():
        lengths = [n for load in loads for n in load.lengths(m)]
        if not lengths:
            continue
        unit = problem.piece_tokens.get(m) or problem.token_multiple
        sample_lengths = filter(
            None, (load.lengths(m) for load in loads)
        )  # a sample's pieces stay whole
        sizes = ModuleSizes(
            piece_tokens=problem.piece_tokens.get(m, 0),
            multiple=problem.token_multiple,
            volume=sum(lengths) * scale / ranks,
            longest=max(lengths),
            mean=sum(lengths) / len(lengths),
            sample_tokens=max(-(-len(n) // ranks) * round_up(max(n), unit) for n in sample_lengths),
            limit=problem.max_tokens.get(m, math.inf),
        )
        if sizes.min_tokens > sizes.limit // unit * unit:
            raise ValueError(
                f"the largest sample needs a capacity of {sizes.min_tokens} tokens of {m}, memory "
                f"allows {int(sizes.limit)}: drop or truncate such samples, or use more ranks"
            )
        by_module[m] = sizes
    return by_module


def make_bucket(
    sizes: Sizes, tokens: Mapping[str, float], rows: int = 1, holds_largest: bool = False
) -> Bucket:
    """Return the bucket with about `tokens` tokens of each module on a rank."""
    shapes = {m: s.shape(tokens.get(m, 0.0), rows, holds_largest) for m, s in sizes.items()}
    return Bucket.from_shapes(shapes)


def max_cuts(sizes: Sizes, problem: BucketProblem) -> float:
    """Return the maximum number of microbatches of an average batch that hold any sample."""
    cuts = (1.2 * s.volume / s.min_tokens for s in sizes.values())
    return min(float(problem.max_microbatches), *cuts)


def bucket_chains(sizes: Sizes, problem: BucketProblem) -> list[Buckets]:
    """Return starting sets, most promising first: chains of at most K sizes from each of a few main
    sizes, with one row, and with more rows while that makes packed tokens cheaper."""
    size_step_K = (np.arange(problem.n_buckets) / max(1, problem.n_buckets - 1)) ** _SPACING_POWER
    packed = [m for m, s in sizes.items() if not s.piece_tokens]
    starts: dict[Buckets, None] = {}
    for cut_share, depth in product(_MAIN_CUT_SHARES, _DEPTHS):
        cut = max(1.0, max_cuts(sizes, problem) * cut_share)
        tokens = {m: s.volume / cut for m, s in sizes.items()}
        min_price = math.inf
        for rows in ROW_COUNTS:
            if rows > 1 and not any(tokens[m] / rows >= sizes[m].mean for m in packed):
                break
            main = make_bucket(sizes, tokens, rows)
            static_s = problem.costs(main).static_s
            price = sum(float(static_s[m, s].max()) / s.size for m, s in main.shapes if m in packed)
            if price > min_price * _MAX_PRICE_RATIO:
                break
            min_price = price
            chain = [
                make_bucket(sizes, {m: size_share * n for m, n in tokens.items()}, rows, index == 0)
                for index, size_share in enumerate((1 - depth * size_step_K).tolist())
            ]
            starts[tuple(dict.fromkeys(chain))] = None
    return list(starts)


@dataclass(frozen=True)
class Move:
    """A change of one bucket: scales the tokens of modules (0: drops them), or their row count."""

    bucket: int
    modules: tuple[str, ...]
    scale: float = 1.0
    cut: float = 1.0

    def apply(self, bucket: Bucket, sizes: Sizes) -> Bucket | None:
        """Return the bucket after the move; None if no module is left. Scaling changes a module by
        at least one unit."""
        shapes = {
            m: self._change_shape(shape, sizes[m]) if m in self.modules else shape
            for m, shape in bucket.shapes
        }
        return Bucket.from_shapes(shapes) if any(shapes.values()) else None

    def _change_shape(self, shape: Shape, size: ModuleSizes) -> Shape | None:
        if self.scale == 0:
            return None
        if self.cut != 1:
            rows = max(1, int(shape.rows * self.cut))
            return shape if size.piece_tokens else size.shape(shape.size, rows)
        rows = 1 if size.piece_tokens else shape.rows
        units = shape.size // rows // size.unit
        scaled = round(units * self.scale)
        scaled = max(scaled, units + 1) if self.scale > 1 else min(scaled, units - 1)
        return size.shape(max(1, scaled) * size.unit * rows, rows)


def round_up(value: float, multiple: int) -> int:
    return max(multiple, int(-(-value // multiple)) * multiple)


def arrival_buckets(
    loads: Sequence[Load],
    ranks: Mapping[str, int],
    per_rank: int,
    *,
    n_buckets: int = 4,
    piece_tokens: Mapping[str, int],
    token_multiple: int,
) -> Buckets:
    """Return buckets of the arrival baseline: `per_rank` rows of one sample each in the last
    module, and as many rows of the other modules as these samples' pieces need.

    Capacities are quantiles of the needs per rank of `len(loads)` randomly drawn microbatches; the
    largest bucket holds `per_rank` times the largest sample.
    """
    last = list(ranks)[-1]
    rng = np.random.default_rng(0)
    picks = rng.integers(len(loads), size=(len(loads), ranks[last], per_rank))
    needs: dict[str, tuple[np.ndarray, int]] = {}
    row_tokens: dict[str, int] = {}
    for m in ranks:
        lengths = [load.lengths(m) for load in loads]
        if not any(lengths):
            continue
        if m == last:
            unit = piece_tokens.get(m, token_multiple)
            sizes_N = np.array([sum(n) for n in lengths])
            drawn = sizes_N[picks].max(axis=(1, 2))
            needs[m] = np.array([round_up(v, unit) for v in drawn]), round_up(sizes_N.max(), unit)
            continue
        longest = max((max(n, default=0) for n in lengths), default=0)
        row_tokens[m] = piece_tokens.get(m) or round_up(longest, token_multiple)
        shape = Shape(1, row_tokens[m])
        rows_N = np.array([rows_needed(n, shape) for n in lengths], int)
        needs[m] = rows_N[picks].sum(axis=2).max(axis=1), int(rows_N.max()) * per_rank

    chosen: dict[Bucket, None] = {}
    for q in np.arange(1, n_buckets + 1) / n_buckets:
        shapes: dict[str, Shape | None] = {}
        for m, (drawn, largest) in needs.items():
            n = largest if q == 1 else int(np.quantile(drawn, q, method="higher"))
            rows, tokens = (per_rank, n) if m == last else (n, row_tokens[m])
            shapes[m] = Shape(rows, tokens) if n else None
        chosen[Bucket.from_shapes(shapes)] = None
    return largest_first([*chosen])


def sample_capacity(plan: Plan) -> Capacity:
    """Return the ranks that may hold one sample: all, or one under arrival grouping."""
    capacity = capacity_of(plan.layout)
    if plan.scheduling.grouping == "balanced":
        return capacity
    return Capacity(dict.fromkeys(capacity.ranks, 1), capacity.group_size)


def oversize_samples(loads: Sequence[Load], plan: Plan) -> list[int]:
    """Return the indices of the samples that no microbatch of the plan holds."""
    return oversize(loads, merged_buckets(plan.layout), sample_capacity(plan))


def spare_bucket(
    loads: Sequence[Load], capacity: Capacity, piece_tokens: Mapping[str, int], multiple: int
) -> Bucket:
    """Return the bucket that holds any one of these samples. Rows have `piece_tokens` tokens if
    they take one piece each, else the longest piece's tokens rounded up to `multiple`."""
    shapes: dict[str, Shape | None] = {}
    for m, ranks in capacity.ranks.items():
        longest = max((max(load.lengths(m), default=0) for load in loads), default=0)
        row = Shape(1, piece_tokens.get(m) or round_up(longest, multiple))
        rows = max(int(rows_needed(load.lengths(m), row)) for load in loads)
        shapes[m] = Shape(-(-rows // ranks), row.tokens) if longest else None
    return Bucket.from_shapes(shapes)
