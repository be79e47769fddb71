"""Curves over the steps of a run with a bounded number of points, however long it is."""

from __future__ import annotations

import math

import numpy as np


def extremes(values: np.ndarray, max_stretches: int) -> np.ndarray:
    """Indices, ascending, of the lowest and the highest value of each stretch of equal length;
    all of them where there are no more values than stretches."""
    length = _length(values, max_stretches)
    if length == 1:
        return np.arange(len(values))
    padded = np.full(-(-len(values) // length) * length, math.nan)
    padded[: len(values)] = values
    stretches = padded.reshape(-1, length)
    begin = np.arange(len(stretches)) * length
    # A nan gives way to any number.
    low = np.where(np.isnan(stretches), math.inf, stretches).argmin(axis=1)
    high = np.where(np.isnan(stretches), -math.inf, stretches).argmax(axis=1)
    return np.unique([begin + low, begin + high])


def means(values: np.ndarray, max_stretches: int) -> list[float | None]:
    """The mean of the finite values of each stretch of equal length; None where it has none."""
    if not len(values):
        return []
    begin = begins(values, max_stretches)
    is_known = np.isfinite(values)
    totals = np.add.reduceat(np.where(is_known, values, 0.0), begin)
    counts = np.add.reduceat(is_known.astype(int), begin)
    return [float(t / n) if n else None for t, n in zip(totals, counts)]


def begins(values: np.ndarray, max_stretches: int) -> np.ndarray:
    """The index of the first value of each stretch that `means` is of."""
    return np.arange(0, len(values), _length(values, max_stretches))


def _length(values: np.ndarray, max_stretches: int) -> int:
    """Values in a stretch."""
    return max(1, -(-len(values) // max_stretches))
