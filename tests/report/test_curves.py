"""Means and extremes of stretches, against numpy over the rows of each."""

import math

import numpy as np
import pytest

from dflop_jax.report.curves import begins, extremes, means


@pytest.mark.parametrize("n", [0, 1, 2, 7, 8, 9, 16, 17, 100, 1000])
def test_means_are_those_of_equal_stretches(n):
    rng = np.random.default_rng(n)
    values = rng.normal(size=n)
    values[rng.random(n) < 0.2] = math.nan
    length = max(1, math.ceil(n / 8))
    stretches = [values[i : i + length] for i in range(0, n, length)]
    assert begins(values, 8).tolist() == [*range(0, n, length)]
    seen = [s[~np.isnan(s)] for s in stretches]
    assert means(values, 8) == [pytest.approx(s.mean()) if len(s) else None for s in seen]
    assert means(np.full(n, math.nan), 8) == [None] * len(stretches)
    assert len(stretches) <= 8


def test_a_thinned_curve_keeps_its_extremes():
    values = np.random.default_rng(0).normal(size=777)
    values[[0, 5, 300, 301, 776]] = math.nan
    known = values[~np.isnan(values)]
    for most in (64, 31, 5, 1):
        at = extremes(values, most)
        assert (np.diff(at) > 0).all()
        assert len(at) <= 2 * most
        assert (np.nanmin(values[at]), np.nanmax(values[at])) == (known.min(), known.max())
    assert extremes(values, 777).tolist() == [*range(777)]
    assert extremes(np.empty(0), 8).tolist() == []
    assert extremes(np.full(20, math.nan), 4).tolist() == [0, 5, 10, 15]
