"""Loads of samples on modules, the features that determine their cost, and the static shapes that
samples are packed into.

The time of a program call is a sum of features times coefficients. Work on whole rows, including
padding, has features of the static shape; kernels that compute only the pieces in the rows have
features of the pieces' content, which the module names (`content` in the contract). Loads, groups,
prices and schedules hold vectors of content features in the module's order. A module that names no
features has one: the token pairs of each piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np

Array = Any  # an array, or one number
Content = tuple[tuple[int, ...], ...]  # [pieces][features]
PAIR = "pair"
TOKEN = "token"  # a feature of every module, priced by the shape with its padding


def require(condition: bool, message: str) -> None:
    """Raise ValueError with the message unless the condition on a record's values holds."""
    if not condition:
        raise ValueError(message)


def token_pairs(tokens: Array) -> Array:
    """Return the number of token pairs in a piece."""
    return tokens * tokens


def order_coefficients(named: Mapping[str, float], names: Sequence[str]) -> tuple[float, ...]:
    """Return coefficients in the order of a module's features; missing ones are 0."""
    return tuple(named.get(name, 0.0) for name in names)


def scale_coefficients(factor: float, named: Mapping[str, float]) -> dict[str, float]:
    return {name: factor * value for name, value in named.items()}


def content_seconds(coefficients: Sequence[Array], content: Sequence[Array]) -> Array:
    """Return the seconds of content, given the seconds per unit of each feature."""
    return sum(map(mul, coefficients, content))


def shape_features(rows: Array, tokens: Array) -> np.ndarray:
    """Return features of a static shape, [..., 3]: the constant 1, the tokens, and the token pairs
    if each row is one piece."""
    rows, tokens = np.asarray(rows, float), np.asarray(tokens)
    size = rows * tokens
    return np.stack([np.ones_like(size), size, rows * token_pairs(tokens)], -1)


@dataclass(frozen=True)
class Load:
    """Load of one sample on every module, known from headers and text before decoding.

    `pieces[module]` are the token counts of its indivisible pieces: a tile, a picture at native
    resolution, a window of sound, the text sequence. Modules that the sample does not use are
    absent or have none. `content[module]` has each piece's amount of every content feature, if the
    module names features. `runs[module]` has the number of pieces per medium, if a medium's pieces
    are consecutive in the text; absent: one piece each.
    """

    pieces: dict[str, tuple[int, ...]]
    content: dict[str, Content] = field(default_factory=dict)
    runs: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Build the message only on failure: a step has thousands of loads.
        if any(n < 1 for lengths in self.pieces.values() for n in lengths):
            problem = "every piece of a sample must have at least one token"
        elif any(len(c) != len(self.lengths(m)) for m, c in self.content.items()):
            problem = "content must have an entry for every piece of a module"
        elif any(sum(n) != len(self.lengths(m)) for m, n in self.runs.items()):
            problem = "runs must cover every piece of a module"
        else:
            return
        raise ValueError(f"{problem}, got {self}")

    def lengths(self, module: str) -> tuple[int, ...]:
        """Return token counts of the module's pieces; () if the sample does not use it."""
        return self.pieces.get(module, ())

    def content_of(self, module: str) -> Content:
        """Return the amount of each content feature for each of the module's pieces."""
        named = self.content.get(module)
        return tuple((token_pairs(n),) for n in self.lengths(module)) if named is None else named

    def tokens(self, module: str) -> int:
        return sum(self.lengths(module))


@dataclass(frozen=True)
class DataProfile:
    """Loads of all or some samples of a dataset, which has `n_total` samples. `tail` has the
    largest loads of the whole dataset, if the source knows them; together they reach the maxima
    over all samples."""

    source: str
    n_total: int
    loads: tuple[Load, ...]
    tail: tuple[Load, ...] = ()

    def __post_init__(self) -> None:
        require(len(self.loads) > 0, f"no usable sample in {self.source or 'the dataset'}")


@dataclass(frozen=True, order=True)
class Shape:
    """Static shape of one microbatch of a module on one data rank: rows of `tokens` tokens. A row
    holds packed pieces, separated by segment ids, or a single piece such as a tile."""

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
    """Shapes of groups that are used together, in module order; absent modules have no group."""

    shapes: tuple[tuple[str, Shape], ...]

    def __post_init__(self) -> None:
        names = [m for m, _ in self.shapes]
        require(len(set(names)) == len(names) > 0, f"a bucket's modules repeat: {names}")

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, Shape | None]) -> Bucket:
        """Return the bucket of these shapes, without modules whose shape is None."""
        return cls(tuple((m, s) for m, s in shapes.items() if s is not None))

    def shape(self, module: str) -> Shape | None:
        """Return the module's shape; None if the bucket has no group of the module."""
        return next((s for m, s in self.shapes if m == module), None)

    def tokens(self, module: str) -> int:
        """Return the tokens, with padding, of the module's microbatch on one data rank."""
        shape = self.shape(module)
        return shape.size if shape else 0

    @property
    def name(self) -> str:
        return " ".join(f"{m}:{s.name}" for m, s in self.shapes)


def first_piece_numbers(loads: Sequence[Load], module: str) -> tuple[int, ...]:
    """Return the index of every sample's first piece, then the number of pieces: [samples + 1]."""
    return tuple(accumulate((len(load.lengths(module)) for load in loads), initial=0))


def piece_tokens(loads: Iterable[Load], module: str) -> tuple[int, ...]:
    """Return the token count of every piece of a module, in order."""
    return tuple(n for load in loads for n in load.lengths(module))


def piece_content(loads: Iterable[Load], module: str) -> np.ndarray:
    """Return the content of every piece of a module, in order, int64 [features, pieces]."""
    loads = list(loads)
    if not any(module in load.content for load in loads):
        return token_pairs(np.array(piece_tokens(loads, module), np.int64))[None]
    return np.array([c for load in loads for c in load.content_of(module)], np.int64).T
