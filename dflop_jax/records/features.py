"""Features that the cost of program calls depends on: of static shapes, and of the pieces in them.

A call takes the sum of its features times coefficients, which are measured, modelled or fitted.
What is computed for whole rows, padding included, goes by the shape. What a kernel computes only
for the pieces in the rows goes by their content: of a group the sums over its pieces.

Which features its content has is said by the module, by name and how much of each a piece has
(`content` in the contract). Loads, groups, prices and schedules hold vectors of them in the
module's own order, and know no more of them than their number. A module that says nothing has one,
the pairs of a piece's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import mul
from typing import Any

import numpy as np

Array = Any  # an array, or one number
PAIR = "pair"
TOKEN = "token"  # every module's; the shape has it, padding included


def token_pairs(tokens: Array) -> Array:
    """Return the number of pairs of tokens of a piece."""
    return tokens * tokens


def order_coefficients(named: Mapping[str, float], names: Sequence[str]) -> tuple[float, ...]:
    """Return coefficients in the order of a module's features; 0 for features without one."""
    return tuple(named.get(name, 0.0) for name in names)


def scale_coefficients(factor: float, named: Mapping[str, float]) -> dict[str, float]:
    """Return the coefficients times `factor`."""
    return {name: factor * value for name, value in named.items()}


def content_seconds(coefficients: Sequence[Array], content: Sequence[Array]) -> Array:
    """Return the seconds of content from the seconds of a unit of each feature. Features that
    either sequence lacks at its end cost nothing."""
    return sum(map(mul, coefficients, content))


def shape_features(rows: Array, tokens: Array) -> np.ndarray:
    """Return the features of a static shape, [..., 3]: a constant, the shape's tokens, and the
    pairs of tokens of rows that are one piece each."""
    rows, tokens = np.asarray(rows, float), np.asarray(tokens)
    size = rows * tokens
    return np.stack([np.ones_like(size), size, rows * token_pairs(tokens)], -1)
