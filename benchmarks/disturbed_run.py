"""One run that is disturbed: waits for moments, does faults, and sees what comes of each."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import fault_kinds as fk
from fault_kinds import KINDS, Kind, Target
from faulted_run import OFTEN, Command, Every
from observed_job import AGAIN, LAUNCHER, RESTART, Job

ENDED_LIMIT_S = 30.0  # from the end of a launcher until no process of the job is left
SETTLED = 10  # rows after a fault that cost no restart
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
      brings: it only brings about the restart at which the next one is done, and shares its end.
    """

    kind: str
    moment: str
    victim: int
    rows: int
    survived: bool
    restarted: bool
    to_step_s: float | None
    unexpected: str = ""
    brings: bool = False


class DisturbedRun:
    """One run with faults.

    Args:
      cache: the folder of what is cached.
      limit_s: no recovery takes as long.
    """

    def __init__(
        self,
        command: Command,
        run_dir: Path,
        *,
        n: int,
        steps: int,
        cache: Path,
        rng: random.Random,
        limit_s: float,
        every: Every = OFTEN,
    ):
        self._command, self._run_dir, self._n, self._steps = command, run_dir, n, steps
        self._every = every
        self._cache, self._rng, self._limit_s, self.orphans = cache, rng, limit_s, 0
        self.job = self._start()

    def _start(self, *more: str) -> Job:
        return Job(self._command(self._run_dir, *more), self._run_dir,
                   self._run_dir.with_suffix(".log"))  # fmt: skip

    def wait(self, seconds: float) -> None:
        """Leave it alone for so long, or until it ends."""
        self.job.wait_for(lambda: False, seconds)

    def reach(self, moment: str, brought: list[Fault]) -> bool:
        """Wait for a moment; False: the run was done before. The restart that some moments are
        part of is brought about by a fault, which is added to `brought`."""
        job, rng, limit_s, every = self.job, self._rng, self._limit_s, self._every
        if moment in (fk.START, fk.COMPILE, fk.RECOVERY) and job.recoveries() + job.rows():
            # That of a restart, which another fault brings about.
            restarts = job.restarts()
            trainers = job.trainers()
            if not trainers:
                return False
            victim, rows = rng.choice(sorted(trainers)), job.rows()
            with suppress(ProcessLookupError):
                os.kill(trainers[victim], signal.SIGKILL)
            if not job.wait_for(lambda: job.restarts() > restarts, limit_s):
                return False
            brought.append(Fault("SIGKILL", fk.STEP, victim, rows, True, True, None, brings=True))
        here = len(job.said()) if moment == fk.COMPILE else 0
        conditions: dict[str, Callable[[], bool]] = {
            fk.STEP: lambda: True,
            fk.EXCHANGE: job.exchanging,
            fk.SAVE: job.saving,
            fk.SCHEDULE: lambda: any(map(_runs, job.helpers("worker_main"))),
            fk.START: lambda: len(job.trainers()) == self._n,
            fk.COMPILE: lambda: "plan " in job.said()[here:],
            fk.EVALUATION: lambda: 0 < job.rows() == (job.evaluations() + 1) * every.evaluation,
            fk.REDECISION: lambda: job.rows() > 0 and job.rows() % every.look == 0,
            fk.END: lambda: job.rows() >= self._steps - 1,
            fk.RECOVERY: lambda: True,
        }
        if moment not in (fk.START, fk.COMPILE, fk.RECOVERY):
            rows = job.rows()
            if not job.wait_for(lambda: "compiled" in job.said() and job.rows() > rows, limit_s):
                return False
        if not job.wait_for(conditions[moment], limit_s):
            return False
        longest_s = {fk.START: 4.0, fk.COMPILE: 2.0, fk.RECOVERY: RECOVERY_S}.get(moment, 0.03)
        time.sleep(rng.uniform(0.0, longest_s))
        return not job.ended()

    def strike(self, name: str, moment: str) -> list[Fault]:
        """Do a fault at a moment and wait for what comes of it, and of the one that brought it
        about; nothing: the run was done before."""
        brought: list[Fault] = []
        if not self.reach(moment, brought):
            return []
        fault = self._kill_launcher(moment) if name == LAUNCHER_KILLED else self._do(name, moment)
        if fault is None:
            return []
        return [*(replace(f, survived=fault.survived) for f in brought), fault]

    def _do(self, name: str, moment: str) -> Fault | None:
        """Do a fault now; None: the run has just ended."""
        trainers = self.job.trainers()
        if not trainers:
            return None
        victim = self._rng.choice(sorted(trainers))
        rows, said = self.job.rows(), len(self.job.said())
        target = Target(self.job, victim, trainers[victim], self._cache, self._rng)
        kind = KINDS[name]
        try:
            undo = kind.does(target) or (lambda: True)
        except ProcessLookupError:
            return None
        survived = self._awaited(undo, said)
        news = self.job.said()[said:]
        restarted = RESTART in news
        times = re.findall(rf"{AGAIN}, ([\d.]+) s", news)
        to_step_s = float(times[-1]) if times and moment != fk.RECOVERY else None
        if kind.restarts is False and self.job.ended():  # the run was over before it was named
            kind = replace(kind, says="")
        unexpected = _unexpected(kind, news, restarted, moment) if survived else "not survived"
        return Fault(name, moment, victim, rows, survived, restarted, to_step_s, unexpected)

    def _awaited(self, undo: Callable[[], bool], said: int) -> bool:
        """Whether the run goes on after a fault, once that is undone."""
        undone, settled = False, 0
        deadline = time.monotonic() + self._limit_s
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
        survived = self.job.wait_for(ready, self._limit_s) or self.job.launcher.returncode == 0
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
            code = self.job.launcher.wait(self._limit_s)
            self._count_orphans()
        except subprocess.TimeoutExpired:
            code = 1
        return code

    def end(self) -> None:
        """End all that is left of it, whatever went wrong."""
        self.job.end()


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
