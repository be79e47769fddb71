"""Real runs of two processes: one that hangs, and scripts that have initialized jax themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dflop_jax.distributed.process_exit import TRANSIENT_FAILURE
from dflop_jax.distributed.processes import free_port
from dflop_jax.report.run_folder import HUNG

from .many import FOUR, LIMIT_S, STEPS, Jobs, environment, losses, undisturbed

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


SCRIPT = """
import runpy, sys
import jax
process, count, port, folder, run_dir, *flags = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize("127.0.0.1:" + port, int(count), int(process))
from dflop_jax.config import override
from dflop_jax.records.files import load
from dflop_jax.records import Plan, Profile
from dflop_jax.train.trainer import Trainer
values = dict(flag.split("=") for flag in flags)
small = runpy.run_path(folder + "/small.py")["config"]()
config = override(small, {"run_dir": run_dir, **values})
trainer = Trainer(
    config, plan=load(Plan, folder + "/plan.json"), profile=load(Profile, folder + "/profile.json")
)
result = trainer.fit()
print("processes", jax.process_count(), "steps", len(result.losses))
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return undisturbed(tmp_path_factory)


def run_scripts(folder: Path, *flags: tuple[str, ...]) -> list[tuple[int, str]]:
    """Exit code and output of each of two processes, which have these flags."""
    (folder / "script.py").write_text(SCRIPT)
    port = str(free_port())
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, str(folder / "script.py")]
    started = [
        subprocess.Popen(
            [*command, str(p), "2", port, str(folder), *more], env=environment(), **pipes
        )
        for p, more in enumerate(flags)
    ]
    try:
        outputs = [p.communicate(timeout=LIMIT_S)[0] for p in started]
    finally:
        for p in started:
            p.kill()
    return [(p.returncode, text) for p, text in zip(started, outputs, strict=True)]


def test_losses_are_those_of_a_launched_run(tmp_path, whole):
    jobs = Jobs.make(tmp_path / "jobs", FOUR)
    run_dir = str(tmp_path / "run")
    for code, text in run_scripts(jobs.folder, (run_dir,), (run_dir,)):
        assert code == 0, text
        assert f"processes 2 steps {STEPS}" in text
    assert losses(Path(run_dir)) == losses(whole)


@pytest.mark.parametrize(
    "first, second, says",
    [
        (["a"], ["b"], "process 1 was started with run_dir=b, process 0 with a; start all with"),
        (["a"], ["a", "distributed.num_processes=3"], "num_processes=3, but this program has "
         "called jax.distributed.initialize() as process 1 of 2; leave the flag out"),
    ],
)  # fmt: skip
def test_processes_that_disagree_are_told_in_a_line(tmp_path, monkeypatch, first, second, says):
    jobs = Jobs.make(tmp_path / "jobs", FOUR)
    monkeypatch.chdir(tmp_path)
    (_, hub), (code, other) = run_scripts(jobs.folder, tuple(first), tuple(second))
    assert code == 1, other
    assert sum(says in line for line in other.splitlines()) == 1, other
    assert "Check failure" not in hub
