"""RunFolder: what is written comes back, kills lose nothing, other runs are not overwritten."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import math
import os
import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest

from dflop_jax.config import Config
from dflop_jax.report.metrics import StepMetrics, percentiles
from dflop_jax.report.run_folder import PAGE, RunFolder, read_metrics, read_plan
from tests.report.runs import make_plan, make_row, read_traces

WATCHING = Path(__file__).resolve().parents[2] / "docs" / "watching.md"


def test_everything_written_is_read_back(make_run):
    path = make_run(n_steps=3)
    rows = [msgspec.convert(row, StepMetrics) for row in read_metrics(path)]
    assert rows[1:] == [make_row(1), make_row(2)]
    assert read_plan(path) == make_plan()
    assert [t.source for t in read_traces(path)] == ["measured", "simulated"]
    assert msgspec.convert(json.loads((path / "config.json").read_text()), Config) == Config()


def test_a_run_without_a_step_leaves_no_folder_that_it_made(tmp_path):
    for n_rows, launch, mine in ((0, "", False), (0, "launch", False), (0, "", True), (1, "", 0)):
        path = tmp_path / "runs" / "run"
        if mine:
            path.mkdir(parents=True)
        with contextlib.suppress(OSError), RunFolder(path, launch=launch) as run:
            run.write_config(Config())
            for step in range(n_rows):
                run.append(make_row(step))
            raise OSError
        assert path.exists() == path.parent.exists() == bool(n_rows or launch or mine)
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
    with RunFolder(tmp_path / "saved" / "run") as run:
        (run.path / "checkpoints" / "3").mkdir(parents=True)
    assert run.path.exists()


def test_a_folder_of_other_files_is_refused(tmp_path):
    for name in ("slurm-7.out", ".cache", "lost+found"):  # what may be there before a run
        (tmp_path / name).mkdir()
    RunFolder(tmp_path, existing="overwrite").close()
    others = tmp_path / "others"
    (others / "plans").mkdir(parents=True)
    (others / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"others: holds .* and no run; choose a new or empty"):
        RunFolder(others, existing="overwrite")
    assert sorted(p.name for p in others.iterdir()) == ["config.json", "plans"]


def test_another_runs_metrics_are_kept_unless_asked(make_run):
    path = make_run(n_steps=5)
    with pytest.raises(ValueError, match=r"another run; choose another --run_dir"):
        RunFolder(path)
    assert len(read_metrics(path)) == 5
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # a kill cut it short
    with RunFolder(path, existing="resume") as run:
        run.restart(3)
        run.append(make_row(3))
    assert [r["step"] for r in read_metrics(path)] == [0, 1, 2, 3]
    (path / "checkpoints").mkdir()
    (path / PAGE).touch()
    (path / "xprof" / "process-00000").mkdir(parents=True)
    with RunFolder(path, existing="overwrite") as run:
        run.append(make_row(0))
    assert [r["step"] for r in read_metrics(path)] == [0]
    assert not (path / "trace.json").exists() | (path / PAGE).exists()
    assert not (path / "checkpoints").exists()
    assert not (path / "xprof").exists()


@pytest.mark.parametrize("broken", ["{", "[1]", "", '{"step": 1}', '{"step_s": 1, "loss": "x"}'])
def test_another_broken_line_is_named(tmp_path, broken):
    good = '{"step": 0, "step_s": 1.0}'
    (tmp_path / "metrics.jsonl").write_text(f"{good}\n{broken}\n{good}\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: .*remove the line") as e:
        read_metrics(tmp_path)
    assert "\n" not in str(e.value)


def test_folders_that_are_no_runs_are_named_with_a_remedy(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "metrics.jsonl").touch()
    for name, text in [("none", "no such run"), ("empty", "not a run"), ("begun", "no step yet")]:
        with pytest.raises(ValueError, match=text) as e:
            read_metrics(tmp_path / name)
        assert "train it" in str(e.value)
        assert name in str(e.value)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file"):
        RunFolder(tmp_path / "file")


def test_a_file_system_without_locks_is_said_once_and_other_failures_end(
    tmp_path, monkeypatch, caplog
):
    number = errno.ENOLCK

    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    for _ in range(2):  # a run that takes up another plan opens its folder again
        with RunFolder(tmp_path / "run", existing="resume") as folder:
            folder.append(make_row(0))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"{tmp_path / 'run'}: the file system has no locks" in record.getMessage()

    number = errno.EIO
    with pytest.raises(ValueError, match=r"run: cannot be locked .*choose another --run_dir"):
        RunFolder(tmp_path / "run")


def test_impossible_times_and_statistics():
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="step_s"):
            make_row(0, step_s=bad)
    s = percentiles([float(i) for i in range(11)])
    assert (s.median, s.p10, s.p90) == (5.0, 1.0, 9.0)
    assert percentiles([3.0]) == percentiles([3.0, math.nan, math.inf])
    assert all(map(math.isnan, percentiles([])))


def test_trackers_get_every_so_many_steps(tmp_path):
    tracker = Mock()
    with RunFolder(tmp_path) as run:
        run.trackers, run.tracking_interval = [tracker], 3
        for i in range(7):
            run.append(make_row(i))
    assert [c.args[0] for c in tracker.log.call_args_list] == [2, 5]


def test_every_key_is_explained_in_the_docs():
    table = WATCHING.read_text(encoding="utf-8").partition("## metrics.jsonl")[2]
    named = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    keys = [key for cell in named for key in re.findall(r"`(\w+)`", cell)]
    assert sorted(keys) == sorted(f.name for f in dataclasses.fields(StepMetrics))
