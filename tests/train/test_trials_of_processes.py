"""Trials of a run of two processes, of which one runs out of memory under a plan."""

from __future__ import annotations

import re
import subprocess

import numpy as np
import pytest

from dflop_jax.distributed.process_exit import TRANSIENT_FAILURE
from dflop_jax.records import Plan
from dflop_jax.records.files import load as read

from .many import LIMIT_S, Jobs, environment, losses
from .resume_cases import PLAN, STEPS
from .test_trials import RTOL, N

# Appended to an experiment: process 1 fails when it runs a part for the n-th time under a policy.
FAILS = """
import jax
import pytest
from dflop_jax.runtime.executor import Executor
from dflop_jax.train.run_context import count_compiles
from dflop_jax.train.trainer import Trainer
from tests.train.test_trials import SHORT, try_three_plans

try_three_plans(pytest.MonkeyPatch())
run, fit, n_runs = Executor.{part}, Trainer.fit, []

def run_or_fail(self, *args, **options):
    if self.plan.policy == {policy!r} and jax.process_index() == 1:
        n_runs.append(1)
        if len(n_runs) == {n}:
            raise jax.errors.JaxRuntimeError(SHORT)
    return run(self, *args, **options)

def count_and_fit(self):
    with count_compiles() as counts:
        result = fit(self)
    print(f"{{counts.compiled}} programs, {{counts.compiled - counts.cache_hits}} compiled")
    return result

Executor.{part}, Trainer.fit = run_or_fail, count_and_fit
"""


def run_two(folder, policy="", part="run_step", n=2, restarts=0, trials=N, more=()):
    """The exit code and output of a run of two processes, where a policy's plan does not fit."""
    jobs = Jobs.make(folder, PLAN, STEPS, every=4)
    with (folder / "small.py").open("a") as experiment:
        experiment.write(FAILS.format(policy=policy, part=part, n=n))
    limits = ["--plan.trials", str(trials), "--plan.memory_bytes", "1e12"]
    command = jobs.command(2, folder / "run", *limits, *more)
    at = command.index("--plan-file")  # as without trials
    del command[at : at + 2]
    first = command.index("launch") + 1
    command = [*command[:first], "--max-restarts", str(restarts), *command[first:]]
    options = {"capture_output": True, "text": True, "timeout": LIMIT_S}
    done = subprocess.run(command, env=environment(), **options)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def two_whole(tmp_path_factory):
    """The losses of a run of two processes without trials."""
    folder = tmp_path_factory.mktemp("two")
    code, output = run_two(folder, trials=0)
    assert code == 0, output
    return losses(folder / "run")


@pytest.mark.slow
@pytest.mark.parametrize("policy, part, n, restarts, first_code", [
    ("orch", "run_step", 2, 1, 0),
    ("dip", "run_step", 2, 0, TRANSIENT_FAILURE),
    ("dip", "rehearse", 1, 0, 0),  # the processes agree, and go on
])  # fmt: skip
def test_a_plan_that_one_process_cannot_hold_is_dropped_on_all(
    tmp_path, two_whole, policy, part, n, restarts, first_code
):
    code, output = run_two(tmp_path, policy, part, n, restarts)
    assert code == first_code, output
    if code:
        assert "start again with --resume auto: the run goes on without this plan" in output
        code, more = run_two(tmp_path, policy, part, n, more=["--resume", "auto"])
        output += more
    assert code == 0, output
    plan = read(Plan, tmp_path / "run/plan.json")
    outcomes = {r.policy: r.outcome for r in plan.trials}
    assert plan.policy == "dflop"
    assert outcomes["dflop"] == "chosen: the fastest"
    assert outcomes[policy].startswith("dropped: plan " + policy)
    assert outcomes[policy].endswith("process 1 ran out of it in a step")
    np.testing.assert_allclose(losses(tmp_path / "run"), two_whole, rtol=RTOL)
    compiled = [int(n) for n in re.findall(r"\d+ programs, (\d+) compiled", output)]
    assert len(compiled) == 2  # of each process, at the end
    if first_code:  # the first start compiled all plans
        assert compiled == [0, 0]
