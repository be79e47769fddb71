"""Runs of 1, 2 and 4 processes on four devices: equal losses, and what happens when all goes wrong.

One run of two processes is left alone; others go on from copies of its checkpoints.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from dflop_jax.checkpoint.store import CheckpointStore
from dflop_jax.distributed.process_exit import BAD_INPUT, PREEMPTED, TRANSIENT_FAILURE
from dflop_jax.report.run_folder import CHECKPOINTS, METRICS, RunFolder
from tests.processes import ROOT
from tests.test_docs import SLURM
from tests.train.many import FOUR, LIMIT_S, STEPS, Jobs, environment, losses, undisturbed


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    return Jobs.make(tmp_path_factory.mktemp("jobs"), FOUR)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an undisturbed run of two processes."""
    return undisturbed(tmp_path_factory)


@pytest.fixture(scope="module")
def alone(jobs):
    """The folder of an undisturbed run of one process."""
    code, output = jobs.run(1, jobs.folder / "alone")
    assert code == 0, output
    return jobs.folder / "alone"


def killed(run_dir: Path, copy: Path) -> Path:
    """A copy of a run as if it had been killed after step 14, with checkpoints 4, 8 and 12."""
    shutil.copytree(run_dir, copy)
    store = CheckpointStore(copy / CHECKPOINTS)
    for step in store.steps():
        if step > 12:
            store.discard(step)
    rows = (copy / METRICS).read_bytes().splitlines(keepends=True)
    (copy / METRICS).write_bytes(b"".join(rows[:14]))
    return copy


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.mark.slow
def test_any_number_of_processes_has_the_same_losses(jobs, whole, alone, tmp_path):
    code, output = jobs.run(4, tmp_path / "run")
    assert code == 0, output
    for run_dir in (alone, tmp_path / "run"):
        assert losses(run_dir) == pytest.approx(losses(whole), rel=1e-5)


@pytest.mark.slow
def test_a_run_resumes_on_more_processes(jobs, whole, alone, tmp_path):
    cut = killed(alone, tmp_path / "cut")
    code, output = jobs.run(2, cut, "--resume", "auto")
    assert code == 0, output
    assert f"resumed after step 12 of {STEPS}" in output
    assert output.count("resumed after step") == 1  # process 0 speaks for all
    assert losses(cut)[:12] == losses(alone)[:12]
    assert losses(cut) == pytest.approx(losses(whole), rel=1e-5)


SRUN = """#!{python}
import os, signal, subprocess, sys, time
assert sys.argv[1] == "--wait=60"
launch = ["dflop", "launch", "-n", "2", "--devices-per-process", "2", "--"]
more = ["--plan-file", "{folder}/plan.json", "--profile-file", "{folder}/profile.json"]
step = subprocess.Popen([*launch, *sys.argv[2:], *more, "--checkpoint.every", "100"])
while not os.path.exists("requeued") and step.poll() is None:
    try:
        with open("runs/4098/metrics.jsonl") as metrics:
            if len(metrics.readlines()) >= 3:
                step.send_signal(signal.SIGTERM)
                break
    except FileNotFoundError:
        pass
    time.sleep(0.005)
sys.exit(step.wait())
"""
DFLOP = '#!/bin/sh\nexec {python} -m dflop_jax.cli "$@"\n'
SCONTROL = '#!/bin/sh\necho "$@" >> requeued\n'


@pytest.fixture
def slurm(jobs, tmp_path):
    """Runs the Slurm script of docs/clusters.md for two tasks on a small model. Its time is nearly
    over after three steps, so that `--signal` signals the step, unless it was requeued."""
    texts = {"bin/srun": SRUN, ".venv/bin/dflop": DFLOP}
    files = {n: t.format(python=sys.executable, folder=jobs.folder) for n, t in texts.items()}
    files["bin/scontrol"] = SCONTROL
    files["experiments/demo.py"] = (jobs.folder / "small.py").read_text()
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "4098", "SLURM_SUBMIT_DIR": str(tmp_path)}
    job |= {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}

    def run() -> tuple[int, str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = {"env": environment() | job, "input": SLURM, "timeout": LIMIT_S, "check": False}
        done = subprocess.run(["bash"], **pipes, **command)
        return done.returncode, done.stdout

    return run


@pytest.mark.slow
def test_the_slurm_script_saves_requeues_and_goes_on_bit_for_bit(slurm, whole, tmp_path):
    run_dir, requeued = tmp_path / "runs" / "4098", tmp_path / "requeued"
    code, output = slurm()  # --resume auto where nothing is, not even a folder
    assert code == PREEMPTED, output
    (step,) = map(int, re.findall(r"preempted at step (\d+)", output))
    assert 3 <= step < STEPS
    assert len(losses(run_dir)) == step
    assert CheckpointStore(run_dir / CHECKPOINTS).steps() == (step,)
    assert requeued.read_text() == "requeue 4098\n"
    code, output = slurm()
    assert code == 0, output
    assert f"resumed after step {step} of {STEPS}" in output
    assert losses(run_dir) == losses(whole)
    assert requeued.read_text() == "requeue 4098\n"


@pytest.mark.parametrize("is_open", [False, True])
def test_a_mistake_is_said_once_and_changes_nothing(jobs, whole, tmp_path, is_open):
    """A checkpoint of another model; and a folder that another run writes to."""
    cut = killed(whole, tmp_path / "cut")
    changed = () if is_open else ("--train.freeze", "vision", "--plan.max_model", "1")
    with RunFolder(cut, existing="resume") if is_open else nullcontext():
        before = contents(cut)
        code, output = jobs.run(2, cut, "--resume", "auto", *changed)
        assert contents(cut) == before
    assert code == (TRANSIENT_FAILURE if is_open else BAD_INPUT), output
    assert output.count("dflop train:") == 1
    says = "another run is writing to it" if is_open else "it is from another model"
    assert says in " ".join(output.split())
