"""The sizes that buckets may have for the data at hand, and starting sets of buckets.

A starting set is a chain: a main size and a few smaller ones, with the modules in the data's own
ratio. Sizes within a factor of two keep the pipeline steady, and small ones fill the last
microbatches. If attention over a long row of several pieces is expensive, chains with several short
rows are tried, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from dflop_jax.records import Bucket, Load, Shape
from dflop_jax.schedule.buckets.problem import BucketProblem, Buckets

# Chains, most promising first by held-out makespans of five data sets and meshes: microbatches of a
# batch over the largest sensible number, and the relative distance of the smallest to the main
# size.
_MAIN_CUT_SHARES, _DEPTHS = (0.62, 0.8, 1.0, 0.45), (0.5, 0.7)
# Exponent of even steps from the main size to the smallest; above 1, sizes are denser near the main
# one.
_SPACING_POWER = 1.3
# Rows into which a rank's tokens are split, if a row holds several pieces.
ROW_COUNTS = (1, 2, 4, 8)
# A chain with more rows is tried if a token costs at most this share of its price with fewer rows.
_MAX_PRICE_RATIO = 0.97


@dataclass(frozen=True)
class ModuleSizes:
    """The sizes that shapes of a module may have.

    Attributes:
      piece_tokens: tokens of a row that takes one piece; 0: rows are packed.
      multiple: tokens of packed rows are a multiple of it.
      volume: tokens of an average batch on one rank.
      longest, mean: tokens of the longest and of the mean piece.
      sample_tokens: largest number of tokens of one sample on a rank.
      limit: tokens that memory allows.
    """

    piece_tokens: int
    multiple: int
    volume: float
    longest: int
    mean: float
    sample_tokens: int
    limit: float = math.inf

    @property
    def min_tokens(self) -> int:
        """Tokens on a rank of the smallest shape that holds the largest sample."""
        return max(self.sample_tokens, round_up(self.longest, self.piece_tokens or self.multiple))

    def choices(self, tokens: float, n: int) -> list[Shape]:
        """About `n` shapes of about `tokens` tokens on a rank: packed rows from the mean to the
        longest piece's length, or several numbers of rows."""
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
        """The shape of about `tokens` tokens on a rank, in about `rows` rows if they are packed.
        `holds_largest` makes it hold the largest sample. None: no tokens."""
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
    """The sizes of every module that the loads use.

    Raises:
      ValueError: no bucket within the limits can hold some sample.
    """
    scale = problem.global_batch / len(loads)
    by_module: dict[str, ModuleSizes] = {}
    for m, ranks in problem.ranks.items():
        lengths = [n for load in loads for n in load.lengths(m)]
        if not lengths:
            continue
        piece_tokens = problem.piece_tokens.get(m, 0)
        sizes = ModuleSizes(
            piece_tokens=piece_tokens,
            multiple=problem.token_multiple,
            volume=sum(lengths) * scale / ranks,
            longest=max(lengths),
            mean=sum(lengths) / len(lengths),
            sample_tokens=_sample_tokens(loads, m, ranks, piece_tokens or problem.token_multiple),
            limit=problem.max_tokens.get(m, math.inf),
        )
        usable = sizes.limit // (piece_tokens or sizes.multiple) * (piece_tokens or sizes.multiple)
        if sizes.min_tokens > usable:
            raise ValueError(
                f"the largest sample needs a capacity of {sizes.min_tokens} tokens of {m}, memory "
                f"allows {int(sizes.limit)}: drop or truncate such samples, or use more ranks"
            )
        by_module[m] = sizes
    return by_module


def _sample_tokens(loads: Sequence[Load], module: str, ranks: int, unit: int) -> int:
    """The largest number of tokens that one sample needs on a rank, with its pieces whole."""
    every = filter(None, (load.lengths(module) for load in loads))
    return max((-(-len(n) // ranks) * round_up(max(n), unit) for n in every), default=0)


def make_bucket(
    sizes: Sizes, tokens: Mapping[str, float], rows: int = 1, holds_largest: bool = False
) -> Bucket:
    """The bucket of about so many tokens of each module on a rank."""
    shapes = {m: s.shape(tokens.get(m, 0.0), rows, holds_largest) for m, s in sizes.items()}
    return Bucket.from_shapes(shapes)


def max_cuts(sizes: Sizes, problem: BucketProblem) -> float:
    """The largest number of microbatches of an average batch that still hold the largest sample."""
    cuts = (1.2 * s.volume / s.min_tokens for s in sizes.values())
    return min(float(problem.max_microbatches), *cuts)


def bucket_chains(sizes: Sizes, problem: BucketProblem) -> list[Buckets]:
    """Starting sets of at most K sizes below each of a few main sizes, most promising first: with
    one row, and with more rows while that makes packed tokens cheaper."""
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
    """A change of one bucket: the tokens of some modules scaled (0: module dropped), or their
    packed rows split anew."""

    bucket: int
    modules: tuple[str, ...]
    scale: float = 1.0
    cut: float = 1.0

    def applied(self, bucket: Bucket, sizes: Sizes) -> Bucket | None:
        """The bucket after the move, changed by at least one unit; None if no module is left."""
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
        unit, rows = size.piece_tokens or size.multiple, 1 if size.piece_tokens else shape.rows
        units = shape.size // rows // unit
        scaled = round(units * self.scale)
        scaled = max(scaled, units + 1) if self.scale > 1 else min(scaled, units - 1)
        return size.shape(max(1, scaled) * unit * rows, rows)


def round_up(value: float, multiple: int) -> int:
    return max(multiple, int(-(-value // multiple)) * multiple)
