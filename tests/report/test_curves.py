"""Means of stretches, against numpy over the rows of each."""

import math

import numpy as np
import pytest

from dflop_jax.report.curves import Curve, Means


@pytest.mark.parametrize("n", [0, 1, 2, 7, 8, 9, 16, 17, 100, 1000])
def test_means_are_those_of_equal_stretches(n):
    rng = np.random.default_rng(n)
    values = rng.normal(size=n)
    values[rng.random(n) < 0.2] = math.nan
    means = Means(8)
    for step, value in enumerate(values.tolist()):
        rows = [("a", value), ("b", None if step % 3 else 1.0)]
        means.add(10.0 * step, rows[: 1 + (step > 4)])  # "b" comes later
    length = 1
    while n > 8 * length:
        length *= 2
    stretches = [values[i : i + length] for i in range(0, n, length)]
    assert means.x == [10.0 * i for i in range(0, n, length)]
    seen = [s[~np.isnan(s)] for s in stretches]
    assert means.of("a") == [pytest.approx(s.mean()) if len(s) else None for s in seen]
    has_b = [any(s % 3 == 0 and s > 4 for s in range(i, min(i + length, n)))
             for i in range(0, n, length)]  # fmt: skip
    assert means.of("b") == [1.0 if has else None for has in has_b]
    assert means.of("c") == [None] * len(stretches)
    assert len(means.x) <= 8


def test_a_thinned_curve_keeps_its_extremes():
    curve = Curve(64)
    values = np.random.default_rng(0).normal(size=777).tolist()
    for x, value in enumerate(values):
        curve.add(x, value)
    for most in (None, 31, 5, 1):
        xs, ys = curve.points(most)
        assert (min(ys), max(ys)) == (min(values), max(values))
        assert len(ys) <= 2 * (most or 64)
        assert [values[int(x)] for x in xs] == ys
        assert xs == sorted(xs)
    assert Curve().points() == ([], [])
