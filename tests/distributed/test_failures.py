"""Runs of 1, 2 and 4 processes on four devices: equal losses, and what happens when all goes wrong.

One run of two processes is left alone; others go on from copies of its checkpoints.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from dflop_jax.checkpoint.store import CheckpointStore
from dflop_jax.distributed.process_exit import PREEMPTED, TRANSIENT_FAILURE
from dflop_jax.distributed.processes import PROCESS_ID_ENV
from dflop_jax.distributed.supervisor import STOP_GRACE_S
from dflop_jax.report.run_folder import CHECKPOINTS, METRICS, RunFolder
from tests.processes import ROOT, descendants
from tests.test_docs import SLURM
from tests.train.many import FOUR, LIMIT_S, STEPS, Jobs, environment, losses, undisturbed

PEER_TIMEOUT_S = 5.0


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


@pytest.fixture
def cut(whole, tmp_path):
    """A killed run of two processes."""
    return killed(whole, tmp_path / "cut")


def contents(folder: Path) -> dict[str, str]:
    """What is in every file."""
    files = (f for f in sorted(folder.rglob("*")) if f.is_file())
    return {str(f): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def wait_for_rows(run_dir: Path, at_least: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    path = run_dir / METRICS
    while not (path.exists() and path.read_bytes().count(b"\n") >= at_least):
        assert time.monotonic() < deadline, "no step"
        time.sleep(0.005)


def pids_of(launcher: int) -> dict[int, int]:
    """Process ids of a launcher's processes, by their number in the run."""
    found = {}
    for pid in descendants(launcher):
        with suppress(OSError):
            entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
            values = dict(e.partition("=")[::2] for e in entries)
            if PROCESS_ID_ENV in values and _parent(pid) == launcher:
                found[int(values[PROCESS_ID_ENV])] = pid
    return found


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# ---- the same losses ----


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


# ---- ends ----


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


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
@pytest.mark.parametrize("stopped", [1])
def test_a_hung_process_ends_the_run(jobs, whole, tmp_path, stopped):
    run_dir = tmp_path / "run"
    more = ("--distributed.peer_timeout_s", str(PEER_TIMEOUT_S), "--train.steps", "100000")
    with jobs.started(2, run_dir, *more) as job:
        wait_for_rows(run_dir, 2)
        pids = pids_of(job.pid)
        os.kill(pids[stopped], signal.SIGSTOP)
        start = time.monotonic()
        output, _ = job.communicate(timeout=LIMIT_S)
        took_s = time.monotonic() - start
    assert job.returncode == TRANSIENT_FAILURE, output
    assert re.search(rf"process {stopped} \(.*pid {pids[stopped]}\) is silent for", output), output
    assert (
        f"process {1 - stopped} ended with exit code {TRANSIENT_FAILURE}; waiting for the" in output
    )
    # The supervisor gives the hung process, too, time to end by itself.
    assert took_s < PEER_TIMEOUT_S + STOP_GRACE_S + 10.0


@pytest.mark.slow
def test_damaged_checkpoints_are_passed_over(jobs, whole, cut):
    newest, next_one = sorted((cut / CHECKPOINTS).iterdir())[-1:-3:-1]
    file = newest / "process-00000"
    file.write_bytes(file.read_bytes()[:-100])
    file = next_one / "process-00001"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 16
    file.write_bytes(data)
    code, output = jobs.run(2, cut, "--resume", "auto")
    assert code == 0, output
    said = " ".join(output.split())
    for step in (12, 8):
        assert f"checkpoint of step {step} is damaged, using an older one" in said
    assert f"resumed after step 4 of {STEPS}" in said
    assert losses(cut) == losses(whole)


# ---- mistakes ----


def test_two_runs_on_one_folder(jobs, cut):
    with RunFolder(cut, existing="resume"):
        before = contents(cut)
        code, output = jobs.run(2, cut, "--resume", "auto")
        assert contents(cut) == before
    assert code == TRANSIENT_FAILURE
    assert output.count("dflop train:") == 1
    assert "another run is writing to it" in " ".join(output.split())


def test_a_checkpoint_of_another_model(jobs, cut):
    before = contents(cut)
    code, output = jobs.run(
        2, cut, "--resume", "auto", "--train.freeze", "vision", "--plan.max_model", "1"
    )
    assert code == 2, output
    assert output.count("dflop train:") == 1
    assert "it is of another model" in " ".join(output.split())
    assert contents(cut) == before


def test_a_folder_that_cannot_be_written(jobs, tmp_path):
    (tmp_path / "file").write_text("")
    code, output = jobs.run(2, tmp_path / "file" / "run")
    assert code == 2, output
    assert output.count("dflop train:") == 1
    assert "choose another --run_dir" in " ".join(output.split())
