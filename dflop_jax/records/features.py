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
from functools import partial
from operator import mul
from typing import Any

import numpy as np

Array = Any  # an array, or one number


def pairs(tokens: Array) -> Array:
    """Pairs of tokens of a piece."""
    return tokens * tokens


def seen(tokens: Array, window: int) -> Array:
    """Pairs of tokens of a piece of which one sees the other: each token itself and those before
    it, `window` in all at most."""
    near = np.minimum(tokens, window)
    return near * (near + 1) // 2 + (tokens - near) * window


# Windows of published models, in tokens. Attention within another one is priced as if there were
# none.
WINDOWS = (512, 1024, 4096)
# Name of a feature -> how much of it a piece of so many tokens has, whole numbers.
CONTENT: dict[str, Callable[[Array], Array]] = {
    "pair": pairs,
    **{f"seen_in_{window}": partial(seen, window=window) for window in WINDOWS},
}
# Of these, what programs compute for whole rows: what is fitted over static shapes.
_OF_ROWS = ("pair",)


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
    """What the seconds and bytes of a static shape are sums of, [..., 3]: a constant,
    the shape's tokens, and the pairs of rows that are one piece each."""
    rows, tokens = np.asarray(rows, float), np.asarray(tokens)
    size = rows * tokens
    content = [rows * CONTENT[name](tokens) for name in _OF_ROWS]
    return np.stack([np.ones_like(size), size, *content], -1)
