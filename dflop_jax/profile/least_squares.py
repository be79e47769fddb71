"""Least squares without negative coefficients, and numbers that are the same on every machine.

Fitted numbers keep 24 bits (seven digits): the last bits of a least-squares fit differ from one
linear algebra library to the next, and no plan may hang on them.
"""

from __future__ import annotations

import numpy as np

from dflop_jax.profile.state import Array

_KEPT_BITS = 24  # of a fitted number: seven digits, of which linear algebra libraries give the same


def rounded(values: Array) -> Array:
    """The values with their first 24 bits, the same on every machine."""
    mantissa, exponent = np.frexp(np.asarray(values, float))
    return np.ldexp(np.rint(mantissa * 2.0**_KEPT_BITS), exponent - _KEPT_BITS)


def least_squares(matrix: np.ndarray, values: np.ndarray) -> np.ndarray:
    """x of least |matrix x - values| with no entry below zero, by the active sets of Lawson and
    Hanson; scipy's takes half a second to load, which is long for the start of a run."""
    x, free = np.zeros(matrix.shape[1]), np.zeros(matrix.shape[1], bool)
    least = 1e-13 * max(np.abs(matrix.T @ values).max(), 1e-300)
    for _ in range(3 * len(x)):
        gain = np.where(free, 0.0, matrix.T @ (values - matrix @ x))
        if gain.max() <= least:
            break
        free[gain.argmax()] = True
        while True:
            wanted = np.zeros_like(x)
            wanted[free] = np.linalg.lstsq(matrix[:, free], values, rcond=None)[0]
            below = free & (wanted <= 0)
            if not below.any():
                break
            # As far as the first entry that would fall below zero, which then is out.
            step = (x[below] / np.maximum(x[below] - wanted[below], 1e-300)).min()
            x += step * (wanted - x)
            free &= x > 1e-14 * x.max()
            x[~free] = 0.0
        x = wanted
    return x


def nonnegative(features: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Coefficients of least squared relative error, none below zero."""
    weights = 1.0 / np.maximum(values, values.max() * 1e-3 + 1e-12)
    scale = features.max(axis=0)
    solution = least_squares(features / scale * weights[:, None], values * weights)
    solution[solution < solution.max() * 1e-9] = 0.0  # what is left of a term that is not there
    return rounded(solution / scale)
