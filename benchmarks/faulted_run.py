"""The run that `kills.py` disturbs: experiment, data, plan, and a disk that can be filled."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import numpy as np
from PIL import Image

RESTARTS = ("--max-restarts", "1000000", "--restarts-an-hour", "1000000")
OVERFLOWS = 11  # a step
DISK_MB = 512
CONNECT_FACTOR = 6  # of the silence that is taken for a fault: processes may wait so long to meet

EXPERIMENT = """
from dflop_jax import (CheckpointConfig, Config, DataConfig, DistributedConfig, ModelConfig,
                       PlanConfig, ScheduleConfig, TrainConfig)
from dflop_jax.pipeline.executor import Executor

_run_step = Executor.run_step

def run_step(self, schedule, arrays, scales, **limits):  # gradients of one step are not finite
    scales = {{m: s * (1e39 if schedule.step == {overflows} else 1) for m, s in scales.items()}}
    return _run_step(self, schedule, arrays, scales, **limits)

Executor.run_step = run_step

def config():
    return Config(
        model=ModelConfig(size={size!r}),
        data=DataConfig(path={data!r}, max_tiles=1, max_tokens=96, sample_timeout_s=20.0),
        plan=PlanConfig(policy="orch", max_model=1, buckets=2, effort="quick", zero="1",
                        finalists=0, max_microbatches=4, redecide_every={look}, drift=1.0),
        schedule=ScheduleConfig(correct=False),  # runs are compared that measure anew
        train=TrainConfig(steps={steps}, global_batch=4, eval_every={evaluation}, eval_samples=4),
        checkpoint=CheckpointConfig(every={save}, keep=3),
        distributed=DistributedConfig(peer_timeout_s={silent_s}, hang_least_s={silent_s},
                                      connect_timeout_s={connect_s}),
        run_dir={run_dir!r},
        cache_dir={cache_dir!r},
    )
"""


@dataclass(frozen=True)
class Every:
    """Steps from one to the next."""

    save: int = 5
    evaluation: int = 20
    look: int = 25

    def times(self, factor: int) -> Every:
        return Every(*(factor * steps for steps in astuple(self)))


OFTEN = Every()
Command = Callable[..., list[str]]  # (run folder, further arguments) -> command line of a job


def prepare(
    folder: Path,
    runs: Path,
    n: int,
    steps: int,
    *,
    silent_s: float = 5.0,
    size: str = "nano",
    every: Every = OFTEN,
) -> tuple[Command, Path]:
    """Make the data, and plan once for all runs; the command line of a job, and its cache.
    `silent_s`: of silence, or of a hang, that is taken for a fault."""
    experiment, cache, first = folder / "experiment.py", folder / "cache", str(folder / "plan")
    experiment.write_text(
        EXPERIMENT.format(
            data=str(pictures(folder / "data")), steps=steps, overflows=OVERFLOWS, run_dir=first,
            cache_dir=str(cache), size=size, silent_s=silent_s,
            connect_s=CONNECT_FACTOR * silent_s, **asdict(every),
        )
    )  # fmt: skip
    dflop = [sys.executable, "-m", "dflop_jax.cli"]
    planned = [*dflop, "plan", str(experiment), "--plan.devices", str(n)]
    subprocess.run(planned, check=True, stdout=subprocess.DEVNULL)
    files = [a for f in ("plan", "profile") for a in (f"--{f}-file", f"{first}/{f}.json")]

    def command(run_dir: Path, *more: str) -> list[str]:
        launch = [*dflop, "launch", "-n", str(n), "--devices-per-process", "1", *RESTARTS, "--"]
        train = ["dflop", "train", str(experiment), "--run_dir", str(run_dir)]
        return [*launch, *train, *files, *more]

    return command, cache


def pictures(folder: Path, n: int = 64) -> Path:
    """A LLaVA-format file of small pictures, so that there are decoders and an index."""
    folder.mkdir()
    rng, records = np.random.default_rng(0), []
    for i in range(n):
        size = (int(rng.integers(16, 64)), int(rng.integers(16, 64)), 3)
        Image.fromarray(rng.integers(0, 256, size, np.uint8)).save(folder / f"{i}.png")
        turns = [
            {"from": "human", "value": "<image>\nWhat?"},
            {"from": "gpt", "value": f"{i}." * 3},
        ]
        records.append({"id": str(i), "image": f"{i}.png", "conversations": turns})
    file = folder / "samples.json"
    file.write_text(json.dumps(records))
    return file


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A file system of its own for the runs, which can be filled; whether there is one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "dflop-kills", str(folder)]
    with_disk = os.geteuid() == 0 and not subprocess.run(mount, check=False).returncode
    try:
        yield with_disk
    finally:
        if with_disk:
            kept = folder.with_name("logs")
            kept.mkdir(exist_ok=True)
            for log in folder.glob("*.log"):
                shutil.copy(log, kept)
            # Lazily: what was ended a moment ago may still hold a file.
            subprocess.run(["umount", "--lazy", str(folder)], check=False)
