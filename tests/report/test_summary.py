"""Summaries and comparisons: figures against hand-computed ones, and errors with remedies."""

import dataclasses
import io
import json
import math
import statistics

import msgspec
import pytest
from PIL import Image
from rich.console import Console

from dflop_jax.config import Config, override
from dflop_jax.records import TrialResult
from dflop_jax.report.compare import compare, compare_json, summary_table
from dflop_jax.report.html import page
from dflop_jax.report.number_format import duration, number, percent
from dflop_jax.report.reader import read_run, read_runs
from dflop_jax.report.run_folder import RunFolder
from dflop_jax.report.summary import summary_text, trial_lines, write_summary
from dflop_jax.report.trackers import step_scalars
from tests.report.runs import cells_of, figures_of, make_plan, make_row


def json_of(folders):
    return compare_json(read_runs(folders))


def text_of(table) -> str:
    out = io.StringIO()
    Console(width=120, file=out).print(table)
    return out.getvalue()


def test_figures_leave_the_warm_up_out(make_run):
    s = figures_of(make_run(n_steps=12))
    times = [0.5 + 0.01 * i for i in range(2, 12)]
    (median,), (p10, p90) = (s[f"step time, {k}"].values for k in ("median", "p10 - p90"))
    assert median == pytest.approx(1e3 * statistics.median(times))
    assert p10 < median < p90
    assert s["compiles after warm-up"].values == (0,)  # the 7 of step 0 are warm-up
    assert s["schedule over its proved bound"].values == pytest.approx((0.05,))
    assert s["schedules found by"].text == "local 12"
    assert s["steps with an integer program's bound"].values == (12,)
    assert s["busy enc, predicted / measured"].values == (0.7, 0.6)
    assert s["busy llm, predicted / measured"].values == (0.9, 0.8)
    assert (s["padding, vision"].values, s["padding, llm"].values) == ((0.1,), (0.05,))
    assert s["step predicted, chosen by"].values == pytest.approx((380.0,))
    assert s["step predicted, own programs"].values == pytest.approx((400.0,))
    assert s["loss, first -> last"].values == (5.0, 5.0 / 12)
    assert (s["steps"].values, s["policy"].values) == ((12,), ("dflop",))


def test_counts_are_sums_and_what_a_run_did_not_measure_is_a_dash(tmp_path):
    unknown = {"loss": math.nan, "schedule_gap": math.nan, "busy_fraction": {}}
    with RunFolder(tmp_path / "r") as run:
        run.write_plan(make_plan())
        for i in range(6):
            run.append(make_row(i, compiles=int(i == 4), n_bad=1, schedule_wait_s=0.5, **unknown))
    s, cells = figures_of(tmp_path / "r"), cells_of(tmp_path / "r")
    names = ("compiles after warm-up", "samples replaced", "schedule waited for, total")
    assert [s[name].values for name in names] == [(1,), (6,), (2000.0,)]
    assert cells["schedule over its proved bound"] == "-"
    assert cells["loss, first -> last"] == "- -> -"
    assert '"loss":null' in (tmp_path / "r" / "metrics.jsonl").read_text()  # strict JSON
    assert cells["busy enc, predicted / measured"] == "70.0% / -"
    (run,) = json_of([tmp_path / "r"])["runs"]
    assert run["figures"]["loss, first -> last"]["values"] == [None, None]
    write_summary(tmp_path / "r")
    assert "timeline" not in (tmp_path / "r" / "summary.md").read_text()  # no trace, no picture


def test_lines_of_trials_name_each_plan_and_why(make_run):
    run = read_run(make_run())
    assert trial_lines(run.plan) == []
    tried = (
        TrialResult("orch", 0.644, 0.9, 0.898, 6, "2.3% slower than the fastest"),
        TrialResult("dip", 0.798, 0.0, 0.0, 0, "dropped: too large"),
    )
    run = dataclasses.replace(run, plan=dataclasses.replace(run.plan, trials=tried))
    lines = [
        "trial of orch: predicted 644 ms, calibrated 898 ms, measured 900 ms; 2.3% slower than the "
        "fastest",
        "trial of dip: predicted 798 ms; dropped: too large",
    ]
    assert trial_lines(run.plan) == lines
    assert all(f"- {line}" in summary_text(run, []) for line in lines)
    assert all(line in page([run]) for line in lines)


def test_summary_page_and_table_hold_every_figure(make_run):
    path = make_run()
    write_summary(path)
    page, table = (path / "summary.md").read_text(), text_of(summary_table(read_run(path)))
    for label, value in cells_of(path).items():
        assert f"| {label} | {value} |" in page
        assert label in table
        assert value in table
    assert "- submesh llm: devices 2–7 as stage × data × model 1 × 3 × 2, layers llm 0–5" in page
    assert "- bucket vision 16 x 16, llm 1 x 1024 tokens per data rank" in page
    assert "bucket vision 16 x 16" in table
    for name in ("timeline.png", "loss.png"):
        assert str(path / name) in table.replace("\n", "")
        assert f"![{name}]({name})" in page
        with Image.open(path / name) as image:
            assert image.size[0] == 1400


def test_a_line_says_what_data_aware_scheduling_is_worth(tmp_path):
    """Over the batches that were simulated, in ratios of the same batch; FSDP did not fit."""
    factors = {9: (3.0, 1.1), 19: (2.0, 1.0), 29: (9.0, 1.3)}
    with RunFolder(tmp_path / "r") as run:
        run.write_plan(make_plan())
        for i in range(30):
            arrival, longest = factors.get(i, (0.0, 0.0))
            steps_s = {"arrival order": arrival * (1 + i), "longest first": longest * (1 + i)}
            run.append(make_row(i, makespan_s=1.0 + i, baseline_s=steps_s if arrival else {}))
    line = (
        "Data-aware scheduling: 3.00x over arrival order, 1.10x over longest first, on your 30 "
        "batches (3 of them simulated). No plan of FSDP fits into memory and holds these samples."
    )
    write_summary(tmp_path / "r")
    assert line in (tmp_path / "r" / "summary.md").read_text().splitlines()
    assert line in " ".join(text_of(summary_table(read_run(tmp_path / "r"))).split())
    assert f"r: {line}" in page(read_runs([tmp_path / "r"]))
    assert cells_of(tmp_path / "r")["step simulated, arrival order"] == "40,000 ms"
    tracked = step_scalars(make_row(9, baseline_s={"arrival order": 2.5}))
    assert tracked["baseline_s/arrival order"] == 2.5


@pytest.mark.parametrize("of, value, text", [
    (number, 0.0, "0"), (number, 1.0, "1.00"), (number, 123.4, "123"), (number, 0.01234, "0.0123"),
    (number, 98765.4, "98,765"), (number, 999.7, "1,000"), (number, math.nan, "-"),
    (percent, math.nan, "-"), (duration, 0, "0 s"), (duration, 2.443, "2.44 s"),
    (duration, 59.6, "1 min"), (duration, 876, "14 min 36 s"), (duration, 7199.7, "2 h"),
    (duration, 12034, "3 h 20 min"), (duration, 86400 + 61, "1 d"), (duration, 1e6, "11 d 13 h"),
])  # fmt: skip
def test_numbers_and_durations_read_well(of, value, text):
    assert of(value) == text


def test_a_speed_up_is_of_the_same_work(make_run, tmp_path):
    runs = [make_run(name) for name in ("base", "same", "size", "batch", "data")]
    changes = ({}, {}, {"model.size": "nano"}, {"train.global_batch": "8"}, {"data.path": "d.json"})
    for folder, change in zip(runs, changes, strict=True):
        config = override(Config(), change)
        (folder / "config.json").write_bytes(msgspec.json.encode(config))
    ups = [run["speedup"] for run in json_of(runs)["runs"]]
    assert ups == [1.0, 1.0, None, None, None]
    text = text_of(compare(read_runs(runs), tmp_path / "compare.png"))
    row = next(line for line in text.splitlines() if "speed-up" in line)
    assert (row.count(" x"), row.count("-")) == (2, 4)
    assert page(read_runs(runs)).count("as fast as base") == 1


def test_comparison_is_relative_to_the_first(make_run, tmp_path):
    runs = [make_run("blind", slow=2.0, policy="blind"), make_run("dflop", n_steps=8)]
    out = tmp_path / "pictures" / "compare.png"
    text = text_of(compare(read_runs(runs), out))
    rows = json.loads(json.dumps(json_of(runs), allow_nan=False))["runs"]
    first, other = (run["figures"]["step time, median"]["values"][0] for run in rows)
    assert rows[1]["speedup"] == pytest.approx(first / other)
    assert f"{number(first / other)} x" in text
    assert out.exists()


def test_runs_of_one_name_with_other_rows_and_no_trace_compare(make_run, tmp_path):
    with RunFolder(tmp_path / "other" / "run") as run:
        run.write_plan(make_plan())
        run.append(make_row(0, padding_fraction={"vision": 0.1, "audio": 0.2, "llm": 0.3}))
    runs = [make_run("a/run"), run.path, run.path]
    assert [r["name"] for r in json_of(runs)["runs"]] == [str(r) for r in runs[:2]]
    text = text_of(compare(read_runs(runs), tmp_path / "c.png"))
    order = [text.index(f"padding, {m}") for m in ("vision", "audio", "llm")]
    assert order == sorted(order)
    compare(read_runs(runs[1:]), tmp_path / "c.png")  # losses alone
