"""What is watched for hanging, and a real run of two processes, one of which hangs while its signs
of life go on."""

from __future__ import annotations

import subprocess
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflop_jax.config import Config, DistributedConfig
from dflop_jax.distributed.hang_watch import Sections
from dflop_jax.distributed.process_exit import TRANSIENT_FAILURE
from dflop_jax.report.run_folder import HUNG
from dflop_jax.report.wall_time import (
    COMPILE,
    DATA,
    END,
    EVALUATION,
    PLAN,
    PROFILE,
    REDECISION,
    SAVE,
    START,
    TRAINING,
)
from dflop_jax.train import trainer
from dflop_jax.train.loop import FIRST_STEP
from dflop_jax.train.run_context import REPEATED_SECTIONS, RunContext

from .many import FOUR, LIMIT_S, STEPS, Jobs, environment, losses, undisturbed


@pytest.mark.parametrize(
    "count, command, factor, ends",
    [(1, False, 20.0, "said"), (1, True, 20.0, "ended"), (2, False, 20.0, "ended"),
     (2, True, 0.0, "not watched")],
)  # fmt: skip
def test_who_is_ended_where_it_hangs(monkeypatch, count, command, factor, ends):
    """What `dflop train` did not start, such as a notebook, is not."""
    seen = ["not watched"]

    @contextmanager
    def noted(sections, peers, folder, *, min_deadline_s, end_run):
        assert (folder, min_deadline_s) == (Path("run/hung"), 120.0)
        seen[0] = "ended" if end_run is None else "said"
        yield

    monkeypatch.setattr(trainer, "HangWatch", noted)
    monkeypatch.setattr(trainer, "is_cli_process", threading.Event())
    if command:
        trainer.is_cli_process.set()
    config = Config(run_dir="run", distributed=DistributedConfig(hang_factor=factor))
    place = RunContext(config, None, [], SimpleNamespace(n_processes=count), sections=Sections())
    with trainer.watch_for_hangs(place):
        assert seen == [ends]


def test_what_is_measured_of_the_sections_of_a_run():
    """As docs/clusters.md names them."""
    assert {*REPEATED_SECTIONS} == {TRAINING, DATA, SAVE, EVALUATION}
    once = {FIRST_STEP, START, PROFILE, PLAN, COMPILE, REDECISION, END}
    assert not {*REPEATED_SECTIONS} & once


# Appended to the experiment: at the first start, process 1 never comes to the end of step 5.
HANGS = """
import os, threading
from dflop_jax.runtime.executor import Executor
_run_step = Executor.run_step

def run_step(self, schedule, arrays, scales, **limits):
    first = os.environ.get("DFLOP_RESTARTS", "0") == "0"
    if schedule.step == 5 and os.environ["DFLOP_PROCESS_ID"] == "1" and first:
        threading.Event().wait()
    return _run_step(self, schedule, arrays, scales, **limits)

Executor.run_step = run_step
"""
WATCHED = ("--distributed.hang_min_s", "5", "--distributed.peer_timeout_s", "60")


@pytest.mark.slow
def test_a_hang_is_named_and_the_run_goes_on_bit_for_bit(tmp_path, tmp_path_factory):
    whole = undisturbed(tmp_path_factory)
    jobs = Jobs.make(tmp_path, FOUR)
    file = tmp_path / "small.py"
    file.write_text(file.read_text() + HANGS)
    train = jobs.command(2, tmp_path / "run", *WATCHED)
    first = train.index("launch") + 1
    command = [*train[:first], "--max-restarts", "1", *train[first:]]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, env=environment(), timeout=LIMIT_S, check=False, **pipes)
    assert done.returncode == 0, done.stdout
    said = " ".join(done.stdout.split())
    assert "process 1 (" in said
    assert "hangs in step 5, " in said
    assert "and all others wait for it" in said
    assert losses(tmp_path / "run") == losses(whole)
    assert len(losses(tmp_path / "run")) == STEPS
    for p in range(2):
        text = (tmp_path / "run" / HUNG / f"process-{p:05d}.txt").read_text()
        assert "task" in text
        assert "most recent call first" in text
    assert f"ended with exit code {TRANSIENT_FAILURE}" in said
    assert "restart 1 of 1" in said
