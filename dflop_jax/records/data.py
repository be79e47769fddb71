"""The loads of samples on modules, what their cost depends on, and the static shapes that samples
are packed into.

A program call takes the sum of its features times coefficients. What is computed for whole rows,
padding included, goes by the static shape; what a kernel computes only for the pieces in the rows
goes by their content, of which a module names the features (`content` in the contract). Loads,
groups, prices and schedules hold vectors of these in the module's own order. A module that names
none has one, the pairs of a piece's tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np

Array = Any  # an array, or one number
Content = tuple[tuple[int, ...], ...]
PAIR = "pair"
TOKEN = "token"  # every module's; the shape has it, padding included


def require(condition: bool, message: str) -> None:
    """ValueError with the message unless the condition, of a record's values, holds."""
    if not condition:
        raise ValueError(message)


def token_pairs(tokens: Array) -> Array:
    """Number of pairs of tokens of a piece."""
    return tokens * tokens


def order_coefficients(named: Mapping[str, float], names: Sequence[str]) -> tuple[float, ...]:
    """Coefficients in the order of a module's features; 0 for features without one."""
    return tuple(named.get(name, 0.0) for name in names)


def scale_coefficients(factor: float, named: Mapping[str, float]) -> dict[str, float]:
    return {name: factor * value for name, value in named.items()}


def content_seconds(coefficients: Sequence[Array], content: Sequence[Array]) -> Array:
    """Seconds of content from those of a unit of each feature; absent features are free."""
    return sum(map(mul, coefficients, content))


def shape_features(rows: Array, tokens: Array) -> np.ndarray:
    """Features of a static shape, [..., 3]: a constant, the shape's tokens, and the pairs of tokens
    of rows that are one piece each."""
    rows, tokens = np.asarray(rows, float), np.asarray(tokens)
    size = rows * tokens
    return np.stack([np.ones_like(size), size, rows * token_pairs(tokens)], -1)


@dataclass(frozen=True)
class Load:
    """The load of one sample on every module, known from headers and text before decoding.

    `pieces[module]` are the token counts of the pieces that the module cannot divide: a tile, a
    picture at native resolution, a window of sound, the sequence of text. A module that the sample
    does not use is absent or has none. `content[module]` is how much of each feature of its content
    each of these pieces has, where the module names features. `runs[module]` is how many pieces
    each medium has, where these stand together in the text; absent: each is alone.
    """

    pieces: dict[str, tuple[int, ...]]
    content: dict[str, Content] = field(default_factory=dict)
    runs: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The message is built only for a mistake: there are thousands of loads a step.
        if any(n < 1 for lengths in self.pieces.values() for n in lengths):
            problem = "every piece of a sample has at least one token"
        elif any(len(c) != len(self.lengths(m)) for m, c in self.content.items()):
            problem = "content is of every piece of a module"
        elif any(sum(n) != len(self.lengths(m)) for m, n in self.runs.items()):
            problem = "runs hold every piece of a module"
        else:
            return
        raise ValueError(f"{problem}, got {self}")

    def lengths(self, module: str) -> tuple[int, ...]:
        """Token counts of the module's pieces; () if the sample does not use it."""
        return self.pieces.get(module, ())

    def content_of(self, module: str) -> Content:
        """For each of the module's pieces, the amount of each feature of its content."""
        named = self.content.get(module)
        return tuple((token_pairs(n),) for n in self.lengths(module)) if named is None else named

    def tokens(self, module: str) -> int:
        return sum(self.lengths(module))


@dataclass(frozen=True)
class DataProfile:
    """Loads of (a part of) a dataset of `n_total` samples. `tail` has the largest loads of the
    whole dataset, where the source knows them: together they cover the maxima of all samples."""

    source: str
    n_total: int
    loads: tuple[Load, ...]
    tail: tuple[Load, ...] = ()

    def __post_init__(self) -> None:
        require(len(self.loads) > 0, f"no usable sample in {self.source or 'the dataset'}")


@dataclass(frozen=True, order=True)
class Shape:
    """Static shape of one microbatch of a module on one data rank: rows of pieces of at most
    `tokens` tokens in all, kept apart by segment ids; a tile alone is a row of one piece."""

    rows: int
    tokens: int

    def __post_init__(self) -> None:
        require(min(self.rows, self.tokens) >= 1, f"a shape needs rows, tokens >= 1, got {self}")

    @property
    def size(self) -> int:
        return self.rows * self.tokens

    @property
    def name(self) -> str:
        return f"{self.rows}x{self.tokens}"


@dataclass(frozen=True)
class Bucket:
    """The shapes of groups that belong together, in module order; absent modules have none."""

    shapes: tuple[tuple[str, Shape], ...]

    def __post_init__(self) -> None:
        names = [m for m, _ in self.shapes]
        require(len(set(names)) == len(names) > 0, f"a bucket names modules once, got {names}")

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, Shape | None]) -> Bucket:
        """The bucket of these shapes, without modules whose shape is None."""
        return cls(tuple((m, s) for m, s in shapes.items() if s is not None))

    def shape(self, module: str) -> Shape | None:
        """The module's shape; None if the bucket has no group of it."""
        return next((s for m, s in self.shapes if m == module), None)

    def tokens(self, module: str) -> int:
        """Tokens of the module's microbatch on one data rank, with padding."""
        shape = self.shape(module)
        return shape.size if shape else 0

    @property
    def name(self) -> str:
        return " ".join(f"{m}:{s.name}" for m, s in self.shapes)


def first_piece_numbers(loads: Sequence[Load], module: str) -> tuple[int, ...]:
    """The number of every sample's first piece, and one past the last: [samples + 1]."""
    return tuple(accumulate((len(load.lengths(module)) for load in loads), initial=0))


def piece_tokens(loads: Iterable[Load], module: str) -> tuple[int, ...]:
    """Token count of every piece of a module, by its number."""
    return tuple(n for load in loads for n in load.lengths(module))


def piece_content(loads: Iterable[Load], module: str) -> np.ndarray:
    """Content of every piece of a module, by its number, int64 [features, pieces]."""
    loads = list(loads)
    if not any(module in load.content for load in loads):
        return token_pairs(np.array(piece_tokens(loads, module), np.int64))[None]
    return np.array([c for load in loads for c in load.content_of(module)], np.int64).T
