"""A folder to train in, as a user has it, and commands that run there on virtual hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from virtual_hosts import Host, Hosts

from dflop_jax.report.run_folder import PLAN, PROFILE, read_metrics

# A command is killed when this program ends, however that ends. Only Linux has prctl; 1 is
# PR_SET_PDEATHSIG.
ENDS_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.execvp(sys.argv[1], sys.argv[1:])
"""
ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 900.0  # nothing takes as long on any machine
PORT = 29400
DFLOP = """#!/bin/sh
[ "$1" = train ] && exec {python} -m dflop_jax.cli "$@" {more}
exec {python} -m dflop_jax.cli "$@"
"""
EXPERIMENT = """
from dflop_jax import CheckpointConfig, Config, DataConfig, ModelConfig, PlanConfig
from dflop_jax import ScheduleConfig, TrainConfig

def config():
    return Config(
        model=ModelConfig(size="nano"),
        data=DataConfig(n_samples=64, max_tiles=1, max_frames=2, max_tokens=96),
        plan=PlanConfig(policy="dflop", max_model=1, buckets=2, effort="quick", max_microbatches=4),
        schedule=ScheduleConfig(correct=False),
        train=TrainConfig(steps={steps}, global_batch=4),
        checkpoint=CheckpointConfig(every=20, keep=2),
        cache_dir={cache!r},
    )
"""


@dataclass(frozen=True)
class Site:
    """A folder to train in, as a user has it: .venv, experiments/demo.py, runs."""

    folder: Path
    steps: int

    @property
    def whole(self) -> Path:
        """The folder of the run that is left alone."""
        return self.folder / "runs" / "whole"

    def prepare(self) -> None:
        more = f"--plan-file {self.whole / PLAN} --profile-file {self.whole / PROFILE}"
        experiment = EXPERIMENT.format(steps=self.steps, cache=str(self.folder / "cache"))
        files = {".venv/bin/dflop": "", "experiments/demo.py": experiment}
        for name, text in files.items():
            (self.folder / name).parent.mkdir(parents=True)
            (self.folder / name).write_text(text)
        self._set_dflop("")
        job = self.start("launch -n 2 --devices-per-process 1 -- dflop train experiments/demo.py "
                         f"--run_dir {self.whole}", "whole")  # fmt: skip
        assert job.wait() == 0, job.said()
        self._set_dflop(more)

    def _set_dflop(self, more: str) -> None:
        script = self.folder / ".venv/bin/dflop"
        script.write_text(DFLOP.format(python=sys.executable, more=more))
        script.chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        path = f"{self.folder / '.venv/bin'}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}

    def start(
        self,
        words: str,
        name: str,
        host: Host | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Job:
        """`dflop WORDS`, on a host, with what it says in a file."""
        command = ["dflop", *words.split()]
        return self.run(host.command(*command) if host else command, name, environment)

    def run(
        self, command: Sequence[str], name: str, environment: Mapping[str, str] | None = None
    ) -> Job:
        log = self.folder / f"{name}.log"
        with log.open("ab") as out:
            popen = subprocess.Popen(
                [sys.executable, "-c", ENDS_WITH_PARENT, *command],
                cwd=self.folder,
                env=environment or self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        return Job(popen, log)

    def train_by_hand(self, hosts: Hosts, run: str, *more: str) -> list[Job]:
        """A process on each host."""
        environment, first = self.environment, hosts.hosts[0]
        words = f"train experiments/demo.py --run_dir runs/{run} {' '.join(more)} "
        words += f"--distributed.num_processes {len(hosts.hosts)} "
        words += f"--distributed.coordinator {first.name}:{PORT} --distributed.process_id "
        return [
            self.start(f"{words} {h.index}", f"{run}.{h.index}", h, environment)
            for h in hosts.hosts
        ]

    def losses(self, run: str) -> list[float]:
        return [row["loss"] for row in read_metrics(self.folder / "runs" / run)]

    def wait_for_steps(self, run: str, steps: int, jobs: Sequence[Job] = ()) -> None:
        deadline = time.monotonic() + LIMIT_S
        metrics = self.folder / "runs" / run / "metrics.jsonl"
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < steps:
            assert time.monotonic() < deadline, f"{run} does not come to step {steps}"
            ended = [job.said() for job in jobs if job.popen.poll() is not None]
            assert not ended, ended
            time.sleep(0.05)

    def is_whole(self, run: str) -> bool:
        """Whether a run's losses are those of the one that was left alone."""
        return self.losses(run) == self.losses("whole")


@dataclass(frozen=True)
class Job:
    popen: subprocess.Popen[bytes]
    log: Path

    def wait(self) -> int:
        """The exit code."""
        return self.popen.wait(LIMIT_S)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def line(self, pattern: str) -> str:
        """The first thing said that fits."""
        found = re.search(pattern, " ".join(self.said().split()))
        assert found, f"{pattern!r} is not in {self.said()!r}"
        return found[0]
