"""A real run of two processes, one of which hangs while its signs of life go on."""

from __future__ import annotations

import json
import subprocess

import pytest

from dflop_jax.cluster.ending import TRY_AGAIN
from dflop_jax.report.run_folder import HUNG, RESTARTS

from .many import FOUR, LIMIT_S, STEPS, Jobs, environment, losses, undisturbed

# Appended to the experiment: at the first start, process 1 never comes to the end of step 5.
HANGS = """
import os, threading
from dflop_jax.pipeline.executor import Executor
_run_step = Executor.run_step

def run_step(self, schedule, arrays, scales, **limits):
    first = os.environ.get("DFLOP_RESTARTS", "0") == "0"
    if schedule.step == 5 and os.environ["DFLOP_PROCESS_ID"] == "1" and first:
        threading.Event().wait()
    return _run_step(self, schedule, arrays, scales, **limits)

Executor.run_step = run_step
"""
WATCHED = ("--distributed.hang_least_s", "5", "--distributed.peer_timeout_s", "60")


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
    setback, _ = map(json.loads, (tmp_path / "run" / RESTARTS).read_text().splitlines())
    assert (setback["exit_code"], setback["error"]) == (TRY_AGAIN, False)
    assert setback["host"]
