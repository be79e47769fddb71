"""The figures of long runs: exact sums, medians of a bounded sample, curves with all extremes."""

import json
import math
import statistics
import tracemalloc

import numpy as np
import pytest

from dflop_jax.report import columns, curves
from dflop_jax.report.columns import read_columns
from dflop_jax.report.run_folder import read_metrics


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
            "compiles": int(step in (1, n // 2)),
            "n_bad": 1,
            "schedule_wait_s": 0.25,
            "busy_fraction": {"enc": float(rng.random()), **({"llm": 0.5} if step > 2 else {})},
            "of another version": "x",
        }


@pytest.mark.parametrize("n", [1, 2, 3, 50])
def test_a_short_run_has_the_figures_of_all_its_rows(tmp_path, n):
    got, rows = read_columns(write(tmp_path / "run", made_rows(n))), [*made_rows(n)]
    steady = rows[2:] or rows
    assert got.column("step_s").tolist() == [r["step_s"] for r in steady]
    enc = [r["busy_fraction"]["enc"] for r in steady]
    assert got.column_of("busy_fraction")["enc"].tolist() == enc
    llm = [r["busy_fraction"].get("llm", math.nan) for r in steady]
    assert n < 4 or [str(v) for v in got.column_of("busy_fraction")["llm"]] == [*map(str, llm)]
    assert got.column("grad_norm").tolist() == []
    assert (got.n_steps, got.first_step, got.last_step) == (n, 0, n - 1)
    assert (got.loss_first, got.loss_last) == (rows[0]["loss"], rows[-1]["loss"])
    assert got.sums == {"compiles": sum(r["compiles"] for r in rows), "n_bad": n,
                        "schedule_wait_s": n / 4}  # fmt: skip
    assert got.curve[0] == [*range(n)]
    losses = [math.nan if r["loss"] is None else r["loss"] for r in rows]
    assert [str(v) for v in got.curve[1]] == [*map(str, losses)]


def test_a_long_run_is_held_in_part(tmp_path, monkeypatch):
    monkeypatch.setattr(columns, "MEDIAN_STEPS", 500)
    monkeypatch.setattr(curves, "CURVE_POINTS", 16)
    n = 5000
    folder = write(tmp_path / "run", made_rows(n))
    tracemalloc.start()
    got = read_columns(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < (folder / "metrics.jsonl").stat().st_size / 2
    rows = read_metrics(folder)
    assert (got.n_steps, got.sums["n_bad"], got.sums["compiles"]) == (n, n, 2)
    assert got.sums["schedule_wait_s"] == n / 4
    steady = [r["step_s"] for r in rows[2:]]
    drawn = got.column("step_s").tolist()
    assert len({*drawn}) == len(drawn) == 500
    assert {*drawn} <= {*steady}
    place = sorted(steady).index(min(steady, key=lambda s: abs(s - statistics.median(drawn))))
    assert abs(place / n - 0.5) < 0.1  # five times what chance gives
    # Fields of a step stand together.
    enc = {r["step_s"]: r["busy_fraction"]["enc"] for r in rows}
    assert [enc[s] for s in drawn] == got.column_of("busy_fraction")["enc"].tolist()
    curve_steps, losses = got.curve
    assert curve_steps == sorted(curve_steps)
    assert 16 < len(losses) <= 32
    known = [r["loss"] for r in rows if r["loss"] is not None]
    assert (min(losses), max(losses)) == (min(known), max(known))
    assert all(rows[int(s)]["loss"] == loss for s, loss in zip(curve_steps, losses, strict=True))


def test_a_file_that_grew_is_read_again(tmp_path):
    folder = write(tmp_path / "run", made_rows(3))
    assert read_columns(folder).n_steps == 3
    write(folder, made_rows(4))
    assert read_columns(folder).n_steps == 4


def test_a_broken_line_is_named(tmp_path):
    folder = write(tmp_path / "run", made_rows(2))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "step_s": 1.0, "loss": "x"}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:3: not a row of metrics .*remove"):
        read_columns(folder)
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="holds no step yet"):
        read_columns(folder)
