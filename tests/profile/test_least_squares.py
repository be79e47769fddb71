"""Least squares without negative entries against scipy's."""

import numpy as np
from scipy.optimize import nnls

from dflop_jax.profile.least_squares import least_squares


def problem(seed):
    """A random one: of any sizes, scales and signs, some with columns that cannot be told apart,
    some with an exact answer."""
    rng = np.random.default_rng(seed)
    rows, columns = int(rng.integers(1, 12)), int(rng.integers(1, 7))
    matrix = rng.normal(size=(rows, columns)) * 10.0 ** rng.integers(-3, 4, columns)
    if seed % 2:
        matrix = np.abs(matrix)
    if seed % 5 == 0:
        matrix[:, -1] = 2 * matrix[:, 0]
    if seed % 3 == 0:
        return matrix, matrix @ np.maximum(rng.normal(size=columns), 0.0)
    return matrix, rng.normal(size=rows)


def test_it_is_the_least_of_all():
    for seed in range(300):
        matrix, values = problem(seed)
        found, (want, error) = least_squares(matrix, values), nnls(matrix, values)
        assert (found >= 0).all(), seed
        assert np.linalg.norm(matrix @ found - values) <= error + 1e-9 * np.linalg.norm(values)
        if seed % 5 and len(matrix) >= len(want):  # only one answer
            np.testing.assert_allclose(found, want, rtol=1e-6, atol=1e-9 * want.max())


def test_nothing_is_left_of_what_only_negative_entries_would_fit():
    assert not least_squares(np.ones((3, 2)), -np.ones(3)).any()
    assert not least_squares(np.ones((3, 2)), np.zeros(3)).any()
