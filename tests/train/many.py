"""Real jobs for tests: `dflop launch -n N -- dflop train`, with a given plan and profile."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from dflop_jax.records import Plan, SubmeshPlan
from dflop_jax.records.files import save
from dflop_jax.report.run_folder import read_metrics

from ..plans import NANO, bucket, nano_profile
from ..processes import CACHE, ROOT

LIMIT_S = 240.0  # no job takes more than some seconds, on a loaded machine a minute
STEPS = 16
BUCKETS = (bucket(8, 160), bucket(3, 96))
TWO = NANO.with_layout(buckets=BUCKETS)
FOUR = TWO.with_layout(
    buckets=(bucket(4, 96),),
    submeshes=(SubmeshPlan("vision", 0, 1, 2, 1), SubmeshPlan("llm", 2, 1, 2, 1)),
)

EXPERIMENT = """
import sys
sys.path.append({root!r})
from dflop_jax import (CheckpointConfig, Config, DataConfig, DistributedConfig, ModelConfig,
                       ScheduleConfig, TrainConfig)

def config():
    return Config(
        model=ModelConfig(factory="tests.small:build"),
        data=DataConfig(n_samples=64, max_tiles=1, max_frames=2, max_tokens=96),
        train=TrainConfig(steps={steps}, global_batch=4, warmup_steps=2),
        schedule=ScheduleConfig(correct=False),  # runs are compared that measure anew
        checkpoint=CheckpointConfig(every={every}, keep=100),
        distributed=DistributedConfig(peer_timeout_s=20.0),
        run_dir={run_dir!r},
        cache_dir={cache_dir!r},
    )
"""


# Appended to an experiment: gradients of one step that are not finite.
OVERFLOWS = """
from dflop_jax.runtime.executor import Executor
_run_step = Executor.run_step

def run_step(self, schedule, arrays, scales, **limits):
    scales = {{m: s * (1e39 if schedule.step == {step} else 1) for m, s in scales.items()}}
    return _run_step(self, schedule, arrays, scales, **limits)

Executor.run_step = run_step
"""


@dataclass(frozen=True)
class Jobs:
    """Files that jobs of one plan share, in `folder`; every job names its own run folder."""

    folder: Path
    plan: Plan

    @classmethod
    def make(
        cls, folder: Path, plan: Plan, steps=STEPS, every=4, overflows: int | None = None
    ) -> Jobs:
        """`overflows`: the step whose gradients are not finite."""
        folder.mkdir(parents=True, exist_ok=True)
        folders = {"root": str(ROOT), "run_dir": str(folder / "run"), "cache_dir": str(CACHE)}
        text = EXPERIMENT.format(steps=steps, every=every, **folders)
        more = "" if overflows is None else OVERFLOWS.format(step=overflows)
        (folder / "small.py").write_text(text + more)
        save(plan, folder / "plan.json")
        save(nano_profile(), folder / "profile.json")
        return cls(folder, plan)

    def command(self, n: int, run_dir: Path, *more: str) -> list[str]:
        """The command line of a job of `n` processes, which share the plan's devices evenly."""
        devices = 1 + max(d for s in self.plan.layout.submeshes for d in s.devices)
        train = ["dflop", "train", str(self.folder / "small.py"), "--run_dir", str(run_dir)]
        for name in ("plan", "profile"):
            train += [f"--{name}-file", str(self.folder / f"{name}.json")]
        launch = [sys.executable, "-m", "dflop_jax.cli", "launch", "-n", str(n)]
        return [*launch, "--devices-per-process", str(devices // n), "--", *train, *more]

    @contextmanager
    def started(self, n: int, run_dir: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
        """A running job, with all that it prints in one pipe; it is gone when this ends."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(self.command(n, run_dir, *more), env=environment(), **pipes)
        try:
            yield process
        finally:
            process.kill()  # its processes end with it
            with suppress(ValueError):  # read and closed
                process.communicate(timeout=LIMIT_S)

    def run(self, n: int, run_dir: Path, *more: str) -> tuple[int, str]:
        """Exit code and all output of a whole job."""
        with self.started(n, run_dir, *more) as process:
            output, _ = process.communicate(timeout=LIMIT_S)
            return process.returncode, output


def environment() -> dict[str, str]:
    """Of the jobs: as this one's, on the CPU."""
    return os.environ | {"JAX_PLATFORMS": "cpu"}


def undisturbed(factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run of `FOUR` on two processes, one for all workers."""
    ours = factory.getbasetemp()
    shared = ours.parent if "PYTEST_XDIST_WORKER" in os.environ else ours
    folder = shared / "undisturbed"
    with (shared / "undisturbed.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            code, output = Jobs.make(folder, FOUR).run(2, folder / "whole")
            assert code == 0, output
            assert "turned away" not in output
            assert len(losses(folder / "whole")) == STEPS
            (folder / "done").touch()
    return folder / "whole"


def losses(run_dir: Path) -> list[float]:
    """Of every step, each of which has exactly one row."""
    rows = read_metrics(run_dir)
    assert [r["step"] for r in rows] == list(range(len(rows)))
    return [r["loss"] for r in rows]
