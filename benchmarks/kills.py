"""SIGKILL at random moments, each followed by a resume: is any step lost, repeated or changed?

Command:  python benchmarks/kills.py --json kills.json
Minutes:  about 8 on two cores for 30 kills of two processes
Expected: every loss sequence equal to the uninterrupted one's, no orphan, every job gone within 1 s

One run is left alone. Others of the same configuration have a process killed, now at a random step,
now while a checkpoint is being written, now while they start, and go on until they are done: with
`--resume auto` in a new job, or with `--restarts` by themselves, as their launcher starts them
again. Victims are the trainers (process 0 is also the parent of the schedule worker and the one
that commits checkpoints) and sometimes the launcher.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from host_processes import begun, environments, parent
from json_rows import add_json, write_json
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dflop_jax.checkpoint.store import CheckpointStore
from dflop_jax.cluster.variables import PROCESS_ID_ENV
from dflop_jax.report.run_folder import CHECKPOINTS, METRICS, read_metrics

LIMIT_S = 600.0  # nothing takes as long on any machine
ENDED_LIMIT_S = 30.0  # from a kill until no process of the job is left
MARK_ENV = "DFLOP_KILLS"  # in the environment of a job and all it starts
LAUNCHER = -1
AGAIN = "has done a step"  # what a launcher says of a restart
RESTARTS = ("--max-restarts", "1000000", "--restarts-an-hour", "1000000")
SAVING, STEPPING, STARTING = "while saving", "at a step", "while starting"

EXPERIMENT = """
from dflop_jax import CheckpointConfig
from dflop_jax import Config
from dflop_jax import DataConfig
from dflop_jax import ModelConfig
from dflop_jax import PlanConfig
from dflop_jax import ScheduleConfig
from dflop_jax import TrainConfig

def config():
    return Config(
        model=ModelConfig(size="nano"),
        data=DataConfig(n_samples=64, max_tiles=1, max_frames=2, max_tokens=96),
        plan=PlanConfig(policy="dflop", max_model=1, buckets=2, effort="quick", max_microbatches=4),
        schedule=ScheduleConfig(correct=False),  # runs are compared that measure anew
        train=TrainConfig(steps={steps}, global_batch=4),
        checkpoint=CheckpointConfig(every=2, keep=2),
        run_dir={run_dir!r},
        cache_dir={cache_dir!r},
    )
"""

Command = Callable[..., list[str]]  # (run folder, further arguments) -> command line of a job


@dataclass(frozen=True)
class Kill:
    """One kill and what came of it.

    Attributes:
      victim: number of the process, -1 for the launcher.
      aimed: the moment that was waited for.
      in_save: a checkpoint was begun and not committed when it hit.
      rows: steps in the metrics then.
      ended_s: from the kill until no process of the job was left; of a launcher that starts them
        again, until they had done a step.
    """

    victim: int
    aimed: str
    in_save: bool
    rows: int
    ended_s: float


class Job:
    """A launched run under observation, with what it prints in a file."""

    def __init__(self, command: list[str], run_dir: Path, log: Path):
        self.run_dir, self.log, self._mark = run_dir, log, uuid.uuid4().hex
        self._said_before = log.stat().st_size if log.exists() else 0
        environment = os.environ | {MARK_ENV: self._mark}
        with log.open("ab") as out:
            self.launcher = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def said(self) -> str:
        """What this job has printed."""
        return self.log.read_bytes()[self._said_before :].decode(errors="replace")

    def members(self) -> dict[int, int]:
        """Process id of every process of the job: -1 the launcher's, then the trainers'; what they
        started has numbers from 1000, and so have processes that wait to take a trainer's place."""
        members = {}
        for pid, environ in sorted(environments(), key=lambda process: begun(process[0])):
            if environ.get(MARK_ENV) == self._mark:
                is_child = pid != self.launcher.pid and parent(pid) == self.launcher.pid
                index = environ.get(PROCESS_ID_ENV)
                if pid == self.launcher.pid:
                    members[LAUNCHER] = pid
                elif is_child and index is not None and int(index) not in members:
                    members[int(index)] = pid
                else:
                    members[1000 + pid] = pid
        return members

    def wait_for(self, condition: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
        """Whether it came true before the job ended."""
        deadline = time.monotonic() + limit_s
        while self.launcher.poll() is None:
            if condition():
                return True
            assert time.monotonic() < deadline, f"{self.log}: nothing happens"
            time.sleep(0.002)
        return False

    def rows(self) -> int:
        path = self.run_dir / METRICS
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def saving(self) -> bool:
        """Whether a checkpoint has been begun and not committed."""
        folder = self.run_dir / CHECKPOINTS
        begun = list(folder.glob("[0-9]*")) if folder.exists() else []
        return len(begun) > len(CheckpointStore(folder).steps())

    def kill(self, victim: int, aimed: str, *, again: bool = False) -> Kill | None:
        """SIGKILL it, and wait until all of the job have ended, or with `again` until the launcher
        has started them again and they have done a step; None: the run was done just before."""
        pid = self.members()[victim]
        rows, restarts = self.rows(), self.said().count(AGAIN)
        os.kill(pid, signal.SIGKILL)
        start = time.monotonic()
        in_save = self.saving()
        if again and victim != LAUNCHER:
            if not self.wait_for(lambda: self.said().count(AGAIN) > restarts):
                assert self.launcher.returncode == 0, self.said()[-2000:]
                return None
            took_s = float(re.findall(rf"{AGAIN}, ([\d.]+) s", self.said())[-1])
            return Kill(victim, aimed, in_save, rows, took_s)
        code = self.launcher.wait(ENDED_LIMIT_S)
        while self.members():
            assert victim == LAUNCHER, f"orphans: {self.members()}"  # nobody else ends them
            assert time.monotonic() - start < ENDED_LIMIT_S, f"orphans: {self.members()}"
            time.sleep(0.01)
        ended_s = time.monotonic() - start
        if victim == LAUNCHER:
            assert code == -signal.SIGKILL, code
        else:
            assert code == 128 + signal.SIGKILL, (code, self.log)
            assert f"process {victim} was killed by SIGKILL" in self.said(), self.log
        return Kill(victim, aimed, in_save, rows, ended_s)


def whole_run(command: Command, run_dir: Path, *more: str) -> list[float]:
    """The losses of a run that nobody disturbs."""
    job = Job(command(run_dir, *more), run_dir, run_dir.with_suffix(".log"))
    code = job.launcher.wait(LIMIT_S)
    assert code == 0, f"exit code {code}: {job.log.read_text()[-2000:]}"
    return losses(run_dir)


def losses(run_dir: Path) -> list[float]:
    """Of every step, each of which has exactly one row."""
    rows = read_metrics(run_dir)
    assert [r["step"] for r in rows] == list(range(len(rows))), f"{run_dir}: steps lost or doubled"
    return [r["loss"] for r in rows]


def killed_run(
    command: Command,
    run_dir: Path,
    *,
    n: int,
    steps: int,
    most: int,
    rng: random.Random,
    again: bool = False,
) -> list[Kill]:
    """Kills of one run, at most `most`, each followed by a resume, until it is done; with `again`
    the launcher starts it again, unless the launcher itself is killed."""
    kills: list[Kill] = []
    store, log = CheckpointStore(run_dir / CHECKPOINTS), run_dir.with_suffix(".log")

    def strike() -> Kill | None:
        newest = max(store.steps(), default=0)
        return _strike(job, newest, n, steps, rng, again) if len(kills) < most else None

    while True:
        saved = max(store.steps(), default=0)
        job = Job(command(run_dir, *(["--resume", "auto"] if kills else [])), run_dir, log)
        kill = strike()
        while again and kill is not None and kill.victim != LAUNCHER:
            kills.append(kill)
            kill = strike()
        if kill is None:
            code = job.launcher.wait(LIMIT_S)
            assert code == 0, f"exit code {code}: {job.said()[-2000:]}"
            assert not job.members(), f"orphans: {job.members()}"
        assert "damaged" not in job.said(), job.said()
        resumed = re.findall(r"resumed after step (\d+)", job.said())
        expected = [str(saved)] if saved else []
        started = kill is None or kill.aimed != STARTING
        fits = again or resumed == expected or not (started or resumed)
        assert fits, f"{resumed}, not {expected}"
        if kill is None:
            return kills
        kills.append(kill)


def _strike(
    job: Job, saved: int, n: int, steps: int, rng: random.Random, again: bool
) -> Kill | None:
    """Kill a random process at a random moment; None when the run was done before."""
    victim = LAUNCHER if rng.random() < 0.1 else rng.randrange(n)
    aimed = rng.choices([SAVING, STEPPING, STARTING], [0.5, 0.4, 0.1])[0]
    if aimed == STARTING:
        there = job.wait_for(lambda: set(range(n)) <= job.members().keys())
        delay_s = rng.uniform(0.0, 5.0)
    else:
        # Not the first step: every life of a run is to get on.
        target = saved + 1 + rng.randrange(max(1, steps // 4))
        # Until it has started, the rows are those of the life before.
        there = job.wait_for(lambda: "compiled" in job.said())
        there = there and job.wait_for(lambda: job.rows() >= target)
        if aimed == SAVING:
            there = there and job.wait_for(job.saving)
        delay_s = rng.uniform(0.0, 0.03)
    time.sleep(delay_s)
    if not there or victim not in job.members():
        return None
    return job.kill(victim, aimed, again=again)


def campaign(
    command: Command,
    folder: Path,
    *,
    n: int,
    steps: int,
    kills: int,
    seed: int,
    again: bool = False,
    tell: Callable[[list[Kill], int], None] = lambda *_: None,
) -> tuple[list[Kill], int]:
    """(all kills, runs that had them): every run's losses equal the undisturbed run's; `tell` gets
    those so far after every run."""
    rng = random.Random(seed)
    expected = whole_run(command, folder / "undisturbed")
    assert len(expected) == steps
    done: list[Kill] = []
    runs = 0
    while len(done) < kills:
        run_dir = folder / f"killed{runs}"
        most = kills - len(done)
        found = killed_run(command, run_dir, n=n, steps=steps, most=most, rng=rng, again=again)
        assert losses(run_dir) == expected, f"{run_dir}: other losses than {folder}/undisturbed"
        done += found
        runs += 1
        tell(done, runs)
        print(f"run {runs}: {len(found)} kills, {len(done)} of {kills}; losses equal", flush=True)
    return done, runs


def summary(kills: list[Kill], runs: int) -> dict[str, Any]:
    """What is written."""
    ended = [k.ended_s for k in kills]
    return {
        "kills": len(kills),
        "in_save": sum(k.in_save for k in kills),
        "runs": runs,
        "resumes": len(kills),
        "ended_s": {"median": statistics.median(ended), "worst": max(ended)} if ended else {},
        "each": kills,
    }


def table(kills: list[Kill], runs: int, steps: int) -> Table:
    out = Table(
        "victim", "kills", "in a save", "between", "ended after s, median", "worst", "resumes",
        title=f"{runs} runs of {steps} steps: every loss sequence equal to the undisturbed one",
    )  # fmt: skip
    names = {v: f"process {v}" if v != LAUNCHER else "launcher" for k in kills for v in [k.victim]}
    groups = [(names[v], [k for k in kills if k.victim == v]) for v in sorted(names)]
    for name, some in [*groups, ("all", kills)]:
        ended = [k.ended_s for k in some]
        saving = sum(k.in_save for k in some)
        out.add_row(
            name, str(len(some)), str(saving), str(len(some) - saving),
            f"{statistics.median(ended):.2f}", f"{max(ended):.2f}", str(len(some)),
        )  # fmt: skip
    return out


def prepare(folder: Path, n: int, steps: int, again: bool = False) -> Command:
    """Plan once for all runs; the command line of a job."""
    experiment = folder / "experiment.py"
    first, cache = str(folder / "plan"), str(folder / "cache")
    experiment.write_text(EXPERIMENT.format(steps=steps, run_dir=first, cache_dir=cache))
    dflop = [sys.executable, "-m", "dflop_jax.cli"]
    planned = [*dflop, "plan", str(experiment), "--plan.devices", str(n)]
    subprocess.run(planned, check=True, stdout=subprocess.DEVNULL)
    files = [a for f in ("plan", "profile") for a in (f"--{f}-file", f"{first}/{f}.json")]

    def command(run_dir: Path, *more: str) -> list[str]:
        launch = [*dflop, "launch", "-n", str(n), "--devices-per-process", "1"]
        return [
            *launch,
            *(RESTARTS if again else ()),
            "--",
            "dflop",
            "train",
            str(experiment),
            "--run_dir",
            str(run_dir),
            *files,
            *more,
        ]

    return command


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=30, help="how many (default: 30)")
    parser.add_argument("--processes", type=int, default=2, help="of each job (default: 2)")
    parser.add_argument("--steps", type=int, default=60, help="of each run (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="of victims and moments (default: 0)")
    parser.add_argument(
        "--restarts", action="store_true", help="the launcher starts again what is killed"
    )
    parser.add_argument("--folder", type=Path, help="keep runs and logs here (a new folder)")
    add_json(parser)
    args = parser.parse_args()
    for name in ("kills", "processes", "steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} must be at least 1")
    if not Path("/proc/self/environ").exists():
        parser.error("this platform shows no processes in /proc; run it on Linux")
    if args.folder:
        try:
            args.folder.mkdir(parents=True)
        except OSError as e:
            parser.error(f"--folder {args.folder}: {e.strerror}; name a new one")
    folder = args.folder or Path(tempfile.mkdtemp(prefix="kills-"))
    command = prepare(folder.resolve(), args.processes, args.steps, args.restarts)
    kills, runs = campaign(
        command,
        folder.resolve(),
        n=args.processes,
        steps=args.steps,
        kills=args.kills,
        seed=args.seed,
        again=args.restarts,
        tell=lambda kills, runs: write_json(args.json, summary(kills, runs)),
    )
    Console(width=None if sys.stdout.isatty() else 120).print(table(kills, runs, args.steps))


if __name__ == "__main__":
    main()
