"""What program calls cost something for: the one list of features of pieces and of static shapes.

A call takes the sum of its features times coefficients, which are measured, modelled or fitted.
What is computed for whole rows, padding included, goes by the shape. What a kernel computes only
for the pieces in the rows goes by the content: of a group the sums over its pieces.

A new cost term is a line in `CONTENT`. Modules say what they spend on it (`NAME_flops` in the
contract); fits, prices, groups, bounds, balancing and simulation have it from here. Vectors have
one place for each feature of `CONTENT`, in its order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import mul
from typing import Any

import numpy as np

Array = Any  # an array, or one number


def pairs(tokens: Array) -> Array:
    """Pairs of tokens of a piece."""
    return tokens * tokens


# Name of a feature -> how much of it a piece of so many tokens has, whole numbers.
CONTENT: dict[str, Callable[[Array], Array]] = {"pair": pairs}


def content_of(tokens: Array) -> np.ndarray:
    """Content of every piece by its tokens, [features, *tokens.shape]."""
    tokens = np.asarray(tokens)
    return np.stack([of(tokens) for of in CONTENT.values()])


def by_feature(named: Mapping[str, float]) -> tuple[float, ...]:
    """Coefficients in the order of the features; 0 of those that have no name there."""
    return tuple(named.get(name, 0.0) for name in CONTENT)


def times(factor: float, named: Mapping[str, float]) -> dict[str, float]:
    """So many times as large coefficients."""
    return {name: factor * value for name, value in named.items()}


def content_s(coefficients: Sequence[Array], content: Sequence[Array]) -> Array:
    """Seconds of content, from those of a unit of each feature; features that either lacks at its
    end cost nothing."""
    return sum(map(mul, coefficients, content))


def shape_features(rows: Array, tokens: Array) -> np.ndarray:
    """What the seconds and bytes of a static shape are sums of, [..., 2 + features]: a constant,
    the shape's tokens, and the content of rows that are one piece each."""
    rows, tokens = np.asarray(rows, float), np.asarray(tokens)
    size = rows * tokens
    content = [rows * of(tokens) for of in CONTENT.values()]
    return np.stack([np.ones_like(size), size, *content], -1)
