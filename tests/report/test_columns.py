"""The figures of runs, short and long: exact sums and medians, curves with all extremes."""

import json
import math

import numpy as np
import pytest

from dflop_jax.report.reader import extreme_indices, read_columns, stretch_means


def write(folder, rows):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def made_rows(n):
    rng = np.random.default_rng(n)
    for step in range(n):
        yield {
            "step": step,
            "step_s": float(rng.lognormal(0, 0.2)),
            "loss": None if step % 97 == 5 else float(rng.normal()),
            "n_bad": 1,
            "busy_fraction": {"enc": float(rng.random()), **({"llm": 0.5} if step > 2 else {})},
            "of another version": "x",
        }


@pytest.mark.parametrize("n", [1, 2, 3, 50])
def test_a_short_run_has_the_figures_of_all_its_rows(tmp_path, n):
    got, rows = read_columns(write(tmp_path / "run", made_rows(n))), [*made_rows(n)]
    steady = rows[2:] or rows
    assert got.after_warmup("step_s").tolist() == [r["step_s"] for r in steady]
    enc = [r["busy_fraction"]["enc"] for r in steady]
    assert got.after_warmup(("busy_fraction", "enc")).tolist() == enc
    assert got.keys("busy_fraction") == ["enc", "llm"][: 1 + (n > 3)]
    llm = [r["busy_fraction"].get("llm", math.nan) for r in steady]
    assert [str(v) for v in got.after_warmup(("busy_fraction", "llm"))] == [*map(str, llm)]
    assert np.isnan(got.column("grad_norm")).all()
    assert got.column("n_bad").sum() == got.n_steps == n
    assert got.curve()[0] == [*range(n)]
    losses = [math.nan if r["loss"] is None else r["loss"] for r in rows]
    assert [str(v) for v in got.curve()[1]] == [*map(str, losses)]


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 17, 1000])
def test_means_are_those_of_equal_stretches(n):
    rng = np.random.default_rng(n)
    values = rng.normal(size=n)
    values[rng.random(n) < 0.2] = math.nan
    length = max(1, math.ceil(n / 8))
    stretches = [values[i : i + length] for i in range(0, n, length)]
    seen = [s[~np.isnan(s)] for s in stretches]
    assert stretch_means(values, 8) == [pytest.approx(s.mean()) if len(s) else None for s in seen]
    assert stretch_means(np.full(n, math.nan), 8) == [None] * len(stretches)
    assert len(stretches) <= 8


def test_a_thinned_curve_keeps_its_extremes():
    values = np.random.default_rng(0).normal(size=777)
    values[[0, 5, 300, 301, 776]] = math.nan
    known = values[~np.isnan(values)]
    for most in (64, 31, 5, 1):
        at = extreme_indices(values, most)
        assert (np.diff(at) > 0).all()
        assert len(at) <= 2 * most
        assert (np.nanmin(values[at]), np.nanmax(values[at])) == (known.min(), known.max())
    assert extreme_indices(values, 777).tolist() == [*range(777)]
    assert extreme_indices(np.empty(0), 8).tolist() == []
    assert extreme_indices(np.full(20, math.nan), 4).tolist() == [0, 5, 10, 15]
