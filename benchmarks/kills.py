"""Faults on purpose: what of a run survives them, and is every bit as if nothing had happened?

Command:  python benchmarks/kills.py --faults 200 --mtbf 15 --json kills.json
Minutes:  each fault takes --mtbf and a restart (10 s on two free cores), so 200 about 85
Expected: survived = bit_exact = faults, orphans 0, unexpected []

One run is left alone. Others of the same configuration have a fault after the other, of every kind
of `fault_kinds.KINDS`, at every moment, a tenth of them while the run recovers from the one before;
the time between two counts from the last recovery. `dflop launch --max-restarts` starts again what
ends. Needs Linux, and root for full disks (a tmpfs); without, that kind is left out, and said so.
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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fault_kinds as fk
import faulted_run as fr
from fault_kinds import KINDS, MOMENTS, NOT_FINITE, Kind, Target
from faulted_run import Command, prepare, small_disk
from json_rows import add_json, write_json
from observed_job import AGAIN, LAUNCHER, RESTART, Job
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dflop_jax.report.run_folder import read_metrics
from dflop_jax.report.spent import TRAINING, read_spent

LIMIT_S = 600.0  # nothing takes as long on any machine
ENDED_LIMIT_S = 30.0  # from the end of a launcher until no process of the job is left
SETTLED = 10  # rows after a fault that cost no restart
IN_RECOVERY = 0.1  # share of the faults
RECOVERY_S = 8.0  # at most, from the fault before
LAUNCHER_KILLED = "launcher"  # a kind of its own: nobody is left to start again


@dataclass(frozen=True)
class Fault:
    """One fault and what came of it.

    Attributes:
      victim: number of the process, -1 for the launcher.
      rows: steps in the metrics when it was done.
      survived: the run went on, or was done.
      restarted: the launcher started it again.
      to_step_s: from the failure to the first step after it, where it was.
      unexpected: what else differs from what its kind is expected to do; "" for nothing.
    """

    kind: str
    moment: str
    victim: int
    rows: int
    survived: bool
    restarted: bool
    to_step_s: float | None
    unexpected: str = ""


@dataclass(frozen=True)
class Campaign:
    """What came of all faults so far: the losses of `exact` of `runs` runs equal the undisturbed
    one's, with `exact_faults` faults; `skips` runs had the step that is not finite."""

    faults: Sequence[Fault]
    runs: int
    exact: int
    exact_faults: int
    orphans: int
    skips: int
    goodput: float


def losses(run_dir: Path) -> list[float]:
    """Of every step, each of which has exactly one row."""
    rows = read_metrics(run_dir)
    assert [r["step"] for r in rows] == list(range(len(rows))), f"{run_dir}: steps lost or doubled"
    return [r["loss"] for r in rows]


def whole_run(command: Command, run_dir: Path) -> list[float]:
    """The losses of a run that nobody disturbs."""
    job = Job(command(run_dir), run_dir, run_dir.with_suffix(".log"))
    code = job.launcher.wait(LIMIT_S)
    assert code == 0, f"exit code {code}: {job.said()[-2000:]}"
    return losses(run_dir)


def draws(kinds: Sequence[str], n: int, rng: random.Random) -> Iterator[tuple[str, str]]:
    """(kind, moment) of `n` faults: of each kind as many, at the moments that it is done at least
    often so far."""
    seen: Counter[str] = Counter()
    for i in range(n):
        if i % len(kinds) == 0:
            order = rng.sample(list(kinds), len(kinds))
        kind = order[i % len(kinds)]
        allowed = KINDS[kind].moments if kind in KINDS else MOMENTS
        if rng.random() < IN_RECOVERY and fk.RECOVERY in allowed:
            allowed = (fk.RECOVERY,)
        fewest = min(seen[m] for m in allowed)
        moment = rng.choice([m for m in allowed if seen[m] == fewest])
        seen[moment] += 1
        yield kind, moment


class Disturbed:
    """One run with faults; `cache` is the folder of what is cached."""

    def __init__(
        self, command: Command, run_dir: Path, n: int, steps: int, cache: Path, rng: random.Random
    ):
        self._command, self._run_dir, self._n, self._steps = command, run_dir, n, steps
        self._cache, self._rng, self.orphans = cache, rng, 0
        self.job = self._start()

    def _start(self, *more: str) -> Job:
        return Job(self._command(self._run_dir, *more), self._run_dir,
                   self._run_dir.with_suffix(".log"))  # fmt: skip

    def reach(self, moment: str) -> bool:
        """Wait for a moment; False: the run was done before."""
        job, rng = self.job, self._rng
        if moment in (fk.START, fk.COMPILE, fk.RECOVERY) and job.recoveries() + job.rows():
            # That of a restart, which another fault brings about.
            restarts = job.restarts()
            trainers = job.trainers()
            if not trainers:
                return False
            with suppress(ProcessLookupError):
                os.kill(rng.choice(sorted(trainers.values())), signal.SIGKILL)
            if not job.wait_for(lambda: job.restarts() > restarts, LIMIT_S):
                return False
        here = len(job.said()) if moment == fk.COMPILE else 0
        conditions: dict[str, Callable[[], bool]] = {
            fk.STEP: lambda: True,
            fk.EXCHANGE: job.exchanging,
            fk.SAVE: job.saving,
            fk.COPY: lambda: job.rows() > 0 and job.rows() % fr.EVERY_COPY == 0,
            fk.SCHEDULE: lambda: any(map(_runs, job.helpers("worker_main"))),
            fk.START: lambda: len(job.trainers()) == self._n,
            fk.COMPILE: lambda: "plan " in job.said()[here:],
            fk.EVALUATION: lambda: 0 < job.rows() == (job.evaluations() + 1) * fr.EVERY_EVALUATION,
            fk.REDECISION: lambda: job.rows() > 0 and job.rows() % fr.EVERY_LOOK == 0,
            fk.END: lambda: job.rows() >= self._steps - 1,
            fk.RECOVERY: lambda: True,
        }
        if moment not in (fk.START, fk.COMPILE, fk.RECOVERY):
            rows = job.rows()
            if not job.wait_for(lambda: "compiled" in job.said() and job.rows() > rows, LIMIT_S):
                return False
        if not job.wait_for(conditions[moment], LIMIT_S):
            return False
        longest_s = {fk.START: 4.0, fk.COMPILE: 2.0, fk.RECOVERY: RECOVERY_S}.get(moment, 0.03)
        time.sleep(rng.uniform(0.0, longest_s))
        return not job.ended()

    def strike(self, name: str, moment: str) -> Fault | None:
        """Do a fault at a moment and wait for what comes of it; None: the run was done before."""
        if not self.reach(moment):
            return None
        trainers = self.job.trainers()
        if name == LAUNCHER_KILLED:
            return self._kill_launcher(moment)
        if not trainers:
            return None
        victim = self._rng.choice(sorted(trainers))
        rows, said = self.job.rows(), len(self.job.said())
        target = Target(self.job, victim, trainers[victim], self._cache, self._rng)
        kind = KINDS[name]
        try:
            undo = kind.does(target) or (lambda: True)
        except ProcessLookupError:
            return None  # it has just ended
        survived = self._awaited(undo, said)
        news = self.job.said()[said:]
        restarted = RESTART in news
        times = re.findall(rf"{AGAIN}, ([\d.]+) s", news)
        to_step_s = float(times[-1]) if times and moment != fk.RECOVERY else None
        unexpected = _unexpected(kind, news, restarted, moment) if survived else "not survived"
        return Fault(name, moment, victim, rows, survived, restarted, to_step_s, unexpected)

    def _awaited(self, undo: Callable[[], bool], said: int) -> bool:
        """Whether the run goes on after a fault, once that is undone."""
        undone, settled = False, 0
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            if not undone and undo():
                undone, settled = True, self.job.rows() + SETTLED
            if self.job.ended():
                return undone and self.job.launcher.returncode == 0
            news = self.job.said()[said:]
            if RESTART in news:
                # A restart may fail in turn, where a fault hit another start.
                if undone and news.rfind(AGAIN) > news.rfind(RESTART):
                    return True
            elif undone and self.job.rows() >= settled:
                return True
            time.sleep(0.05)
        return False

    def _kill_launcher(self, moment: str) -> Fault:
        rows = self.job.rows()
        self.job.launcher.kill()
        self.job.launcher.wait()
        self._count_orphans()
        self.job = self._start("--resume", "auto")
        began_s = time.monotonic()
        ready = lambda: "compiled" in self.job.said() and self.job.rows() > 0  # noqa: E731
        survived = self.job.wait_for(ready, LIMIT_S) or self.job.launcher.returncode == 0
        took_s = time.monotonic() - began_s
        why = "" if survived else "not survived"
        return Fault(LAUNCHER_KILLED, moment, LAUNCHER, rows, survived, True, took_s, why)

    def _count_orphans(self) -> None:
        deadline = time.monotonic() + ENDED_LIMIT_S
        while (left := self.job.members()) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.orphans += len(left)

    def finish(self) -> int:
        """The exit code of the run, which is left alone from here on."""
        try:
            code = self.job.launcher.wait(LIMIT_S)
            self._count_orphans()
        except subprocess.TimeoutExpired:
            code = 1
        finally:
            self.job.end()
        return code


def _runs(pid: int) -> bool:
    return fk.state_of(pid) == "R"


def _unexpected(kind: Kind, news: str, restarted: bool, moment: str) -> str:
    if kind.restarts is not None and restarted != kind.restarts and moment != fk.END:
        return "started again" if restarted else "not started again"
    if (
        restarted in (True, kind.restarts)
        and kind.says
        and moment != fk.RECOVERY
        and not re.search(kind.says, news)
    ):
        return f"not named: {kind.says}"
    return ""


def campaign(
    command: Command,
    folder: Path,
    cache: Path,
    *,
    n: int,
    steps: int,
    wanted: Iterable[tuple[str, str]],
    mtbf_s: float,
    rng: random.Random,
    tell: Callable[[Campaign], None] = lambda _: None,
) -> Campaign:
    """Do the `wanted` faults, (kind, moment) each, to one run after the other, and compare each
    with one that nobody disturbs; `tell` gets what came of them after every run."""
    expected = whole_run(command, folder / "undisturbed")
    assert len(expected) == steps
    skipped = [r["step"] for r in read_metrics(folder / "undisturbed") if r["skipped"]]
    faults: list[Fault] = []
    runs = exact = exact_faults = orphans = skips = 0
    trained_s = wall_s = 0.0
    left = list(wanted)
    while left:
        run_dir = folder / f"disturbed{runs}"
        run = Disturbed(command, run_dir, n, steps, cache, rng)
        here: list[Fault] = []
        while left:
            run.job.wait_for(lambda: False, rng.expovariate(1.0 / mtbf_s) if mtbf_s else 0.0)
            fault = run.strike(*left[0])
            if fault is None:
                break
            left.pop(0)
            here.append(fault)
            print(f"{len(faults) + len(here)}: {fault}", flush=True)
            if not fault.survived:
                break
        code = run.finish()
        runs, orphans = runs + 1, orphans + run.orphans
        same = code == 0 and losses(run_dir) == expected
        exact, exact_faults = exact + same, exact_faults + same * len(here)
        with suppress(FileNotFoundError):
            skips += [r["step"] for r in read_metrics(run_dir) if r["skipped"]] == skipped
        if spent := read_spent(run_dir):
            trained_s += spent.seconds.get(TRAINING, 0.0)
            wall_s += spent.wall_s
        faults += here
        done = Campaign(faults, runs, exact, exact_faults, orphans, skips,
                        trained_s / wall_s if wall_s else 0.0)  # fmt: skip
        tell(done)
        print(f"run {runs}: exit code {code}, losses {'equal' if same else 'DIFFER'}", flush=True)
    return done


def summary(done: Campaign) -> dict[str, Any]:
    """What is written; a step that is not finite counts as a fault of every run."""
    to_step = [f.to_step_s for f in done.faults if f.to_step_s is not None]
    return {
        "faults": len(done.faults) + done.runs,
        "by_kind": dict(Counter(f.kind for f in done.faults)) | {NOT_FINITE: done.runs},
        "by_moment": dict(Counter(f.moment for f in done.faults)) | {NOT_FINITE: done.runs},
        "survived": sum(f.survived for f in done.faults) + done.skips,
        "bit_exact": done.exact_faults + done.exact,
        "orphans": done.orphans,
        "goodput": done.goodput,
        "kill_to_step_s": (
            {"median": statistics.median(to_step), "worst": max(to_step)} if to_step else {}
        ),
        "runs": done.runs,
        "unexpected": [f for f in done.faults if f.unexpected],
        "each": done.faults,
    }


def table(done: Campaign) -> Table:
    out = Table("kind", "expected", "faults", "survived", "started again", "unexpected",
                title=f"{done.exact} of {done.runs} runs have every bit of the undisturbed one; "
                f"{done.orphans} orphans; goodput {done.goodput:.2f}")  # fmt: skip
    for name in dict.fromkeys(f.kind for f in done.faults):
        some = [f for f in done.faults if f.kind == name]
        expected = KINDS[name].expected if name in KINDS else "a new launch resumes; no orphans"
        out.add_row(
            name, expected, str(len(some)), str(sum(f.survived for f in some)),
            str(sum(f.restarted for f in some)),
            "; ".join(f"{f.moment}: {f.unexpected}" for f in some if f.unexpected),
        )  # fmt: skip
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--faults", type=int, default=30, help="how many (default: 30)")
    mean = "mean seconds from a recovery to the next fault (default: 15)"
    parser.add_argument("--mtbf", type=float, default=15.0, help=mean)
    parser.add_argument("--processes", type=int, default=2, help="of each job (default: 2)")
    parser.add_argument("--steps", type=int, default=400, help="of each run (default: 400)")
    parser.add_argument("--seed", type=int, default=0, help="of victims and moments (default: 0)")
    every = [*KINDS, LAUNCHER_KILLED]
    parser.add_argument("--kinds", nargs="+", choices=every, default=every, help="only these")
    parser.add_argument("--folder", type=Path, help="keep runs and logs here (a new folder)")
    add_json(parser)
    args = parser.parse_args()
    for name in ("faults", "processes", "steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} must be at least 1")
    if args.mtbf < 0:
        parser.error(f"--mtbf {args.mtbf} must be at least 0")
    if not Path("/proc/self/environ").exists():
        parser.error("this platform shows no processes in /proc; run it on Linux")
    if args.folder:
        try:
            args.folder.mkdir(parents=True)
        except OSError as e:
            parser.error(f"--folder {args.folder}: {e.strerror}; name a new one")
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="kills-"))).resolve()
    rng = random.Random(args.seed)
    with small_disk(folder / "runs") as can_fill:
        kinds = [k for k in args.kinds if can_fill or k != "full disk"]
        if len(kinds) < len(args.kinds):
            print("no full disk: a tmpfs can be mounted by root only", flush=True)
        command, cache = prepare(folder, folder / "runs", args.processes, args.steps)
        done = campaign(
            command,
            folder / "runs",
            cache,
            n=args.processes,
            steps=args.steps,
            wanted=draws(kinds, args.faults, rng),
            mtbf_s=args.mtbf,
            rng=rng,
            tell=lambda done: write_json(args.json, summary(done)),
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table(done))


if __name__ == "__main__":
    main()
