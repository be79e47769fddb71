"""The growth of live bytes, against closed forms and linear algebra."""

import math

import numpy as np
import pytest

from dflop_jax.report.memory_growth import MIN_READINGS, fit_growth
from dflop_jax.report.run_folder import RunFolder
from dflop_jax.report.wall_time import EVENTS, EventRow
from tests.report.runs import cells_of, figures_of, make_plan, make_row


@pytest.mark.parametrize("slope", [0.0, 27e6, -3.5])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 8])
def test_a_line_is_found_exactly(n, slope):
    steps = [3 + 5 * k for k in range(n)]
    growth = fit_growth([0, 1, *steps], [9e10, math.nan, *(4e10 + slope * s for s in steps)])
    assert growth.n_readings == n  # those of the first steps are left out
    assert growth.bytes_per_step == pytest.approx(slope if n > 1 else math.nan, nan_ok=True)
    assert math.isnan(growth.standard_error) == (n < 3)
    assert growth.is_significant == (n >= MIN_READINGS and slope > 0)


@pytest.mark.parametrize("seed", range(5))
def test_slope_and_error_are_those_of_the_normal_equations(seed):
    """beta = (X'X)^-1 X'y, its covariance s^2 (X'X)^-1 with s^2 = |y - X beta|^2 / (n - 2)."""
    rng = np.random.default_rng(seed)
    start, n = int(rng.integers(0, 50)), int(rng.integers(3, 30))
    steps = start + 3 + np.sort(rng.choice(500, n, replace=False))
    live = 1e6 + 7.0 * steps + rng.normal(0, 1e3, n)
    design = np.stack([np.ones(n), steps], 1)
    inverse = np.linalg.inv(design.T @ design)
    beta = inverse @ design.T @ live
    rest = live - design @ beta
    error = math.sqrt(rest @ rest / (n - 2) * inverse[1, 1])
    growth = fit_growth(np.append(steps, steps[-1] + 1), np.append(live, math.nan), start)
    assert growth.bytes_per_step == pytest.approx(beta[1], rel=1e-6)
    assert growth.standard_error == pytest.approx(error, rel=1e-6)


def test_scatter_is_not_growth():
    found = [
        fit_growth(range(3, 15), np.random.default_rng(seed).normal(4e10, 1e8, 12)).is_significant
        for seed in range(500)
    ]
    assert sum(found) <= 10  # 0.7% of Student's t with 10 degrees of freedom are above 3


def test_a_summary_has_the_memory_of_the_last_start(tmp_path):
    gib, mib = 2.0**30, 2.0**20
    with RunFolder(tmp_path / "r") as run:
        run.write_plan(make_plan())
        for i in range(20):
            live = {"live_bytes": gib + 2 * mib * i if i > 9 else 7 * gib} if i % 2 else {}
            peak = "peak_bytes" if i > 12 else "peak_bytes_upper_bound"
            run.append(make_row(i, memory={**live, peak: 3 * gib, "host_bytes": 5 * gib}))
        for begun_s, resumed in ((0.0, 0), (5.0, 10)):
            event = EventRow(begun_s + 2.0, {"start": 2.0}, begun_s=begun_s, resumed=resumed)
            run.rows[EVENTS].append(event)
    cells = {k: v for k, v in cells_of(tmp_path / "r").items() if k.startswith("memory")}
    assert list(cells.items())[1:3] == [
        ("memory, peak since training began", "3.00 GiB"), ("memory, host", "5.00 GiB")
    ]  # fmt: skip
    assert cells["memory, live"] == "1.04 GiB"
    slope, error = figures_of(tmp_path / "r")["memory, live, growth per step"].values
    assert slope == pytest.approx(2.0)
    assert error == pytest.approx(0.0, abs=1e-6)
    assert cells["memory, live, growth per step"].startswith("2.00 MiB ± ")
