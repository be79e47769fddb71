"""A run that was stopped or killed and resumed is the run that was not, bit for bit."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import msgspec
import pytest

from dflop_jax import CheckpointConfig, Resume, ScheduleConfig
from dflop_jax.distributed.process_exit import TransientError
from dflop_jax.records import PriceList
from dflop_jax.report.reader import read_run
from dflop_jax.report.run_folder import CORRECTIONS, RunFolder, read_metrics
from dflop_jax.report.summary import baseline_lines
from dflop_jax.runtime import executor
from dflop_jax.runtime.executor import Executor
from dflop_jax.schedule import worker as worker_module
from dflop_jax.schedule.correction import CorrectionState, StepSample
from dflop_jax.schedule.worker import BatchRequest
from dflop_jax.train import correction as correction_module

from ..data.media_cases import talk
from .resume_cases import (
    CONFIG,
    STEPS,
    as_killed,
    assert_as_whole,
    copy_of,
    essence,
    evaluations,
    fit,
    refused,
    steps_saved,
)

pytestmark = pytest.mark.usefixtures("_in_a_folder_of_its_own")

compile_all = Executor.compile  # before `quick` has one plan's for all


def ask_after(monkeypatch, step: int) -> None:
    """SIGTERM once the row of a step is in the metrics."""
    append = RunFolder.append

    def append_and_ask(self, row):
        append(self, row)
        if row.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(RunFolder, "append", append_and_ask)


# At 1 it ends where an evaluation is due, at 3 elsewhere.
@pytest.mark.slow(first=1)
@pytest.mark.parametrize(("at", "every", "every_s"), [(1, 2, 0.0), (3, 0, 1e-9)])
def test_sigterm_saves_and_the_resumed_run_is_the_same(whole, monkeypatch, at, every, every_s):
    def handler(*_):
        raise AssertionError("the run's own handler is in place")

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with monkeypatch.context() as patch:
            ask_after(patch, at)
            stopped = fit("run", checkpoint=CheckpointConfig(every, every_s, keep=2))
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stopped.preempted
    assert at < stopped.steps_done <= at + 4
    assert stopped.evaluation is None
    assert len(stopped.losses) == len(read_metrics("run")) == stopped.steps_done
    assert steps_saved("run")[0] == stopped.steps_done
    assert len(steps_saved("run")) == 2
    saved = steps_saved("run")
    resumed = fit("run", "resume", checkpoint=CheckpointConfig(every=5, keep=1, keep_best=True))
    assert (resumed.steps_done, resumed.preempted) == (STEPS, False)
    assert (*stopped.losses, *resumed.losses) == tuple(r["loss"] for r in read_metrics(whole))
    losses = {row["step"]: row["loss"] for row in evaluations("run")}
    could_stay = [s for s in losses if s in saved or stopped.steps_done < s < STEPS]
    best = min(could_stay, key=losses.__getitem__, default=STEPS)
    assert set(steps_saved("run")) == {STEPS, best}
    assert_as_whole("run", whole)


def test_a_killed_run_resumes_at_its_checkpoint(whole, capsys, monkeypatch):
    folder = as_killed(whole, saved=6, rows=8)
    monkeypatch.delattr(executor, "draw_parameters")  # they are all in the checkpoint
    result = fit(folder, "resume")
    assert len(result.losses) == 6
    said = capsys.readouterr().err
    assert "resumed after step 6 of 12" in said
    assert "resumed with" not in said
    assert_as_whole(folder, whole)
    assert steps_saved(folder) == (12, 9, 6, 3)


def test_a_run_goes_on_from_the_step_that_is_asked_for(whole, caplog):
    folder = copy_of(whole)
    says = "no checkpoint of step 5; existing steps: 12, 9, 6"
    assert says in refused(folder, Resume(5))
    result = fit(folder, Resume(6))
    assert (len(result.losses), result.steps_done) == (6, STEPS)
    assert "checkpoint of step 9 stays as" in caplog.text
    assert_as_whole(folder, whole)
    assert steps_saved(folder) == (12, 9, 6, 3)
    names = {p.name for p in (Path(folder) / "checkpoints").iterdir()}
    assert not [n for n in names if "passed" in n]  # newer ones are saved


def test_a_run_whose_hours_are_over_saves_and_ends(whole, capsys):
    hours = dataclasses.replace(CONFIG.train, max_hours=1e-9)
    result = fit("short", train=hours)
    assert (result.preempted, result.evaluation) == (True, None)
    assert 0 < result.steps_done < STEPS
    assert "1e-09 hours are over; saving" in " ".join(capsys.readouterr().err.split())
    assert steps_saved("short")[0] == result.steps_done
    fit("short", "resume")
    assert_as_whole("short", whole)


def test_the_optimizer_may_begin_anew(whole, monkeypatch, capsys):
    """And it may be another one."""
    monkeypatch.setattr(Executor, "compile", compile_all)
    with pytest.raises(ValueError, match="use the same, or --reset-optimizer, or start a new run"):
        fit(copy_of(whole), "resume", train=lion())
    for train in (CONFIG.train, lion()):
        shutil.rmtree("run")
        result = fit(copy_of(whole), Resume(9, reset_optimizer=True), train=train)
        assert (len(result.losses), result.steps_done) == (3, STEPS)
        rows, before = read_metrics("run"), read_metrics(whole)
        assert [r["loss"] for r in rows[:10]] == [r["loss"] for r in before[:10]]
        assert rows[11]["loss"] != before[11]["loss"]
    changed = "train.learning_rate 0.0001 (was 0.001), train.optimizer lion (was adamw)"
    assert f"resumed with {changed}\n" in capsys.readouterr().err


def lion():
    return dataclasses.replace(CONFIG.train, optimizer="lion", learning_rate=1e-4)


def test_the_tenth_step_is_simulated_under_baselines(whole):
    """But for those whose buckets are of a profile that has no samples as large as these."""
    compared = {r["step"]: r["baseline_s"] for r in read_metrics(whole) if r["baseline_s"]}
    assert {step: [*steps_s] for step, steps_s in compared.items()} == {9: ["longest first"]}
    (line,) = baseline_lines(read_run(whole))
    assert "1.00x over longest first, on your 12 batches (1 of them" in line


def test_a_finished_run_has_nothing_to_resume(whole):
    folder = copy_of(whole)
    result = fit(folder, "resume")
    assert (result.losses, result.steps_done, result.preempted) == ((), STEPS, False)
    assert result.compiles_after_warmup == 0
    assert result.evaluation.step == STEPS
    assert_as_whole(folder, whole)
    assert steps_saved(folder) == (12, 9, 6, 3)
    # The plan's figures, too: programs of a run that goes on as it was are not timed again.
    for name in ("metrics.jsonl", "trace.json", "plan.json"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()


def prices_by_step(monkeypatch) -> dict[int, list[PriceList]]:
    """The prices that each step's batch is scheduled by from now on, of every run."""
    asked: dict[int, list[PriceList]] = {}

    def spy(step, loads, prices):
        asked.setdefault(step, []).append(prices)
        return BatchRequest(step, loads, prices)

    monkeypatch.setattr(worker_module, "BatchRequest", spy)
    return asked


def samples(folder) -> list[StepSample]:
    lines = (Path(folder) / CORRECTIONS).read_bytes().splitlines()
    return [msgspec.json.decode(line, type=StepSample) for line in lines]


def test_a_resumed_run_takes_the_decisions_of_the_killed_one(monkeypatch):
    asked = prices_by_step(monkeypatch)
    always = partial(CorrectionState, window=1000)
    monkeypatch.setattr(correction_module, "CorrectionState", always)
    correct = {
        "schedule": ScheduleConfig(correct=True, ahead=1),
        "data": dataclasses.replace(CONFIG.data, prefetch=1),
    }
    corrected = fit("whole", **correct).run_dir
    known = samples(corrected)
    assert [s.step for s in known] == list(range(2, STEPS))  # the monitor stays on
    # The made-up profile is far off, so prices change, at recorded steps.
    again_run = range(6, 11)
    assert len({msgspec.json.encode(asked[step]) for step in again_run}) >= 2
    assert asked[10] != asked[0]
    killed = as_killed(corrected, saved=6, rows=10)
    lines = (killed / CORRECTIONS).read_bytes().splitlines(keepends=True)
    left = [s for s in known if s.step < 10]
    (killed / CORRECTIONS).write_bytes(b"".join(lines[: len(left)]) + lines[0][:20])
    for copy in ("bare", "plain"):
        shutil.copytree(killed, copy)
    fit(killed, "resume", **correct)
    assert essence(killed)[:11] == essence(corrected)[:11]
    assert samples(killed)[: len(left)] == left
    assert [s.step for s in samples(killed)] == list(range(2, STEPS))
    for step in again_run:
        first, second = asked[step]
        assert first == second, step
    # Without the file a checkpoint has what was learnt before it.
    Path("bare", CORRECTIONS).unlink()
    fit("bare", "resume", **correct)
    assert asked[6][2] == asked[6][0]
    assert all(s.step > 4 for s in samples("bare"))
    # A run that does not correct takes no notice, and leaves nothing to be replayed.
    fit("plain", "resume")
    assert [s.step for s in samples("plain")] == list(range(2, 6))
    assert asked[10][3] == asked[0][0]


def test_a_broken_line_of_samples_is_named(whole):
    folder = copy_of(whole)
    (folder / CORRECTIONS).write_text('{"step": 3, "first": 3}\n{}\n')
    says = refused(folder)
    assert "corrections.jsonl:1: not a sampled step" in says
    assert "remove the line" in says
    assert essence(folder) == essence(whole)


@pytest.mark.parametrize(
    "changed, says",
    [
        ({"data": dataclasses.replace(CONFIG.data, seed=1)}, "seed=0, this run has 1"),
        ({"data": dataclasses.replace(CONFIG.data, n_samples=65)}, "n=64, this run has 65"),
        ({"train": dataclasses.replace(CONFIG.train, global_batch=2)}, "global_batch=4, this run"),
        ({"data": dataclasses.replace(CONFIG.data, path="d.json")}, "digest=, this run has"),
    ],
    ids=["seed", "samples", "global batch", "as many"],
)
def test_other_data_are_refused(whole, changed, says):
    records = [{"conversations": talk("a?", "b")}] * 68  # of which 4 are held out
    Path("d.json").write_text(json.dumps(records))
    folder = copy_of(whole)
    assert says in refused(folder, **changed)
    assert essence(folder) == essence(whole)
    # Still the folder of the run that it holds.
    assert (folder / "config.json").read_bytes() == (whole / "config.json").read_bytes()


def test_a_folder_in_use_is_refused_and_left_alone(whole):
    folder = copy_of(whole)
    with RunFolder(folder, existing="resume"):
        for existing in ("resume", "overwrite"):
            assert "another run is writing to it" in refused(folder, existing, kind=TransientError)
    assert steps_saved(folder) == steps_saved(whole)
    assert_as_whole(folder, whole)
    assert "holds the metrics of another run" in refused(folder, "error")
    assert steps_saved(folder) == steps_saved(whole)
