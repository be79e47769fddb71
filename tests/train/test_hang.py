"""What is watched for hanging, and a real run of two processes, one of which hangs while its signs
of life go on."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflop_jax.config import Config, DistributedConfig
from dflop_jax.distributed.hang_watch import Sections
from dflop_jax.distributed.process_exit import TRANSIENT_FAILURE
from dflop_jax.distributed.processes import free_port
from dflop_jax.report.run_folder import HUNG
from dflop_jax.train import trainer
from dflop_jax.train.run_context import RunContext

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
import importlib.util, sys
import jax
process, count, port, folder, run_dir, *flags = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize("127.0.0.1:" + port, int(count), int(process))
from dflop_jax.config import override
from dflop_jax.records.files import load
from dflop_jax.records import Plan, Profile
from dflop_jax.train.trainer import Trainer
spec = importlib.util.spec_from_file_location("small", folder + "/small.py")
small = importlib.util.module_from_spec(spec)
spec.loader.exec_module(small)
values = dict(flag.split("=") for flag in flags)
if values.pop("started", None):
    jax.devices()
config = override(small.config(), {"run_dir": run_dir, **values})
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
    started = [
        subprocess.Popen(
            [sys.executable, str(folder / "script.py"), str(p), "2", port, str(folder), *more],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
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
        (
            ["a"],
            ["a", "distributed.num_processes=3"],
            "distributed.num_processes=3, but this program has called "
            "jax.distributed.initialize() as process 1 of 2; leave the flag out",
        ),
    ],
)
def test_processes_that_disagree_are_told_in_a_line(tmp_path, monkeypatch, first, second, says):
    jobs = Jobs.make(tmp_path / "jobs", FOUR)
    monkeypatch.chdir(tmp_path)
    (_, hub), (code, other) = run_scripts(jobs.folder, tuple(first), tuple(second))
    assert code == 1, other
    assert sum(says in line for line in other.splitlines()) == 1, other
    assert "Check failure" not in hub
