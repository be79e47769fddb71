"""Kills processes of launched runs at random moments: is every loss that of an undisturbed run?

Command:  python benchmarks/kills.py --kills 20 --json kills.json
Minutes:  a kill takes --every and a restart, 15 s on two free cores: 20 take 6
Expected: survived = exact = kills, left_behind 0

One run is left alone. In others of the same configuration a process is ended by SIGKILL or
SIGSEGV, or stopped by SIGSTOP, after random seconds since the last recovery, and `dflop launch
--max-restarts` starts the run again; where the launcher itself is killed, a new one resumes the
run. Needs Linux.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from json_rows import add_json, write_json
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dflop_jax.distributed.processes import PROCESS_ID_ENV
from dflop_jax.report.run_folder import METRICS, read_metrics

LAUNCHER = "launcher"
KINDS = ("SIGKILL", "SIGSEGV", "SIGSTOP", LAUNCHER)
LIMIT_S = 300.0  # no start or recovery takes as long
LEFT_S = 30.0  # longest wait for the end of processes whose launcher was killed
KILLS_A_RUN = 5
Command = Callable[..., list[str]]  # (run folder, further arguments) -> command line of a launch

EXPERIMENT = """
from dflop_jax import (CheckpointConfig, Config, DataConfig, DistributedConfig, ModelConfig,
                       PlanConfig, ScheduleConfig, TrainConfig)

def config():
    return Config(
        model=ModelConfig(size="nano"),
        data=DataConfig(n_samples=64, max_tiles=1, max_frames=2, max_tokens=96),
        plan=PlanConfig(policy="orch", max_model=1, buckets=2, effort="quick",
                        max_microbatches=4),
        schedule=ScheduleConfig(correct=False),  # runs are compared that measure anew
        train=TrainConfig(steps={steps}, global_batch=4, eval_every=20, eval_samples=4),
        checkpoint=CheckpointConfig(every=5, keep=3),
        distributed=DistributedConfig(peer_timeout_s=5.0, hang_min_s=5.0),
        run_dir={run_dir!r},
        cache_dir={cache_dir!r},
    )
"""


@dataclass(frozen=True)
class Kill:
    """One kill and what came of it.

    Attributes:
      rank: of the process; -1 for the launcher.
      steps: that were done when it came.
      survived: the run did another step, or ended well.
      to_step_s: seconds from the kill to the next step, where there was one.
      left_behind: processes that outlived their launcher.
    """

    kind: str
    rank: int
    steps: int
    survived: bool
    to_step_s: float | None
    left_behind: int = 0


class Launch:
    """A launched run, watched from outside, with what it prints in a file."""

    def __init__(self, command: Sequence[str], run_dir: Path):
        self._metrics = run_dir / METRICS
        with run_dir.with_suffix(".log").open("ab") as log:
            self.popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def processes(self) -> dict[int, int]:
        """Process ids by rank."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, IndexError):  # it has ended
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == self.popen.pid and fields[0] not in "ZX":
                    entries = (folder / "environ").read_bytes().split(b"\0")
                    rank = next(e for e in entries if e.startswith(f"{PROCESS_ID_ENV}=".encode()))
                    found[int(rank.partition(b"=")[2])] = int(folder.name)
        return found

    def steps(self) -> int:
        """Steps that are done, as far as its metrics tell."""
        return self._metrics.read_bytes().count(b"\n") if self._metrics.exists() else 0

    def wait_for(self, condition: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
        """Whether a condition came true before the run ended or the time was over."""
        deadline = time.monotonic() + limit_s
        while self.popen.poll() is None and time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(0.01)
        return False

    def wait_for_end_of(self, pids: Iterable[int]) -> None:
        """Wait until none of these processes is the run's any more: it is started again."""
        self.wait_for(lambda: not set(pids) & {*self.processes().values()})

    def does_a_step(self) -> bool:
        """Wait until the run does a step; a restart first drops the rows that it does anew."""
        last = self.steps()

        def grown() -> bool:
            nonlocal last
            before, last = last, self.steps()
            return last > before

        return self.wait_for(grown)

    def end(self) -> None:
        """Kill what is left of it."""
        self.popen.kill()  # its processes end with it
        self.popen.wait()


def losses(run_dir: Path) -> list[float]:
    """Of every step, each of which has exactly one row."""
    rows = read_metrics(run_dir)
    assert [r["step"] for r in rows] == list(range(len(rows))), f"{run_dir}: steps lost or doubled"
    return [r["loss"] for r in rows]


def undisturbed(command: Command, run_dir: Path) -> list[float]:
    """The losses of a run that nobody disturbs."""
    code = Launch(command(run_dir), run_dir).popen.wait(2 * LIMIT_S)
    assert code == 0, f"exit code {code}: {run_dir.with_suffix('.log').read_text()[-2000:]}"
    return losses(run_dir)


def killed_run(
    command: Command, run_dir: Path, kinds: Sequence[str], every_s: float, rng: random.Random
) -> tuple[int, list[Kill]]:
    """Run with a kill of each kind after another; its exit code, and the kills that were done
    before it ended."""
    kills: list[Kill] = []
    launch = Launch(command(run_dir), run_dir)
    try:
        for kind in kinds:
            launch.does_a_step()
            launch.wait_for(lambda: False, rng.expovariate(1 / every_s) if every_s else 0.0)
            processes, steps, begun_s = launch.processes(), launch.steps(), time.monotonic()
            if not processes:  # the run is over
                break
            left, rank = 0, -1
            if kind == LAUNCHER:
                launch.end()
                left = _left_behind(processes.values())
                launch = Launch(command(run_dir, "--resume", "auto"), run_dir)
            else:
                rank = rng.choice(sorted(processes))
                with suppress(ProcessLookupError):
                    os.kill(processes[rank], signal.Signals[kind])
                launch.wait_for_end_of(processes.values())
            went_on = launch.does_a_step()
            to_step_s = time.monotonic() - begun_s if went_on else None
            survived = went_on or launch.popen.poll() == 0
            kills.append(Kill(kind, rank, steps, survived, to_step_s, left))
            print(kills[-1], flush=True)
        return launch.popen.wait(LIMIT_S), kills
    finally:
        launch.end()


def _left_behind(pids: Iterable[int]) -> int:
    """How many processes do not end though their launcher was killed."""
    deadline = time.monotonic() + LEFT_S
    while (left := [p for p in pids if Path(f"/proc/{p}").exists()]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.02)
    return len(left)


def prepare(folder: Path, n: int, steps: int) -> Command:
    """Plan once for all runs; the command line of a launch of `n` processes."""
    experiment, planned = folder / "experiment.py", str(folder / "plan")
    experiment.write_text(
        EXPERIMENT.format(steps=steps, run_dir=planned, cache_dir=str(folder / "cache"))
    )
    dflop = [sys.executable, "-m", "dflop_jax.cli"]
    plan = [*dflop, "plan", str(experiment), "--plan.devices", str(n)]
    subprocess.run(plan, check=True, stdout=subprocess.DEVNULL)
    files = [a for f in ("plan", "profile") for a in (f"--{f}-file", f"{planned}/{f}.json")]

    def command(run_dir: Path, *more: str) -> list[str]:
        options = ["-n", str(n), "--devices-per-process", "1", "--max-restarts", "1000"]
        train = ["dflop", "train", str(experiment), "--run_dir", str(run_dir), *files, *more]
        return [*dflop, "launch", *options, "--", *train]

    return command


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=20, help="how many (default: 20)")
    mean = "mean seconds from a recovery to the next kill (default: 5)"
    parser.add_argument("--every", type=float, default=5.0, help=mean)
    parser.add_argument("--processes", type=int, default=2, help="of each run (default: 2)")
    parser.add_argument("--steps", type=int, default=1000, help="of each run (default: 1000)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="only these")
    parser.add_argument("--seed", type=int, default=0, help="of moments and ranks (default: 0)")
    parser.add_argument("--folder", type=Path, help="keep runs and logs here (a new folder)")
    add_json(parser)
    args = parser.parse_args()
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="kills-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    print(f"runs and logs: {folder}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that all is ended
    command, rng = prepare(folder, args.processes, args.steps), random.Random(args.seed)
    expected = undisturbed(command, folder / "undisturbed")
    kills: list[Kill] = []
    exact = runs = 0
    while len(kills) < args.kills:
        order = [args.kinds[(len(kills) + i) % len(args.kinds)] for i in range(KILLS_A_RUN)]
        run_dir = folder / f"killed{runs}"
        more = order[: args.kills - len(kills)]
        code, done = killed_run(command, run_dir, more, args.every, rng)
        is_exact = code == 0 and losses(run_dir) == expected
        kills, runs, exact = [*kills, *done], runs + 1, exact + len(done) * is_exact
        print(f"run {runs}: exit code {code}, losses {'equal' if is_exact else 'DIFFER'}")
        write_json(args.json, summary(kills, runs, exact))
        if not done:
            parser.error(f"--every {args.every:g}: runs end before a kill; give more --steps")
    Console(width=None if sys.stdout.isatty() else 120).print(table(kills, exact))


def summary(kills: Sequence[Kill], runs: int, exact: int) -> dict[str, object]:
    """What is written: `exact` counts the kills of runs whose losses are all equal."""
    return {
        "kills": len(kills),
        "survived": sum(k.survived for k in kills),
        "exact": exact,
        "left_behind": sum(k.left_behind for k in kills),
        "runs": runs,
        "each": kills,
    }


def table(kills: Sequence[Kill], exact: int) -> Table:
    """A row for each kind of kill."""
    out = Table("kind", "kills", "survived", "kill to step, median (worst) s",
                title=f"{exact} of {len(kills)} kills left every loss equal")  # fmt: skip
    for kind in dict.fromkeys(k.kind for k in kills):
        some = [k for k in kills if k.kind == kind]
        took = [k.to_step_s for k in some if k.to_step_s is not None]
        times = f"{statistics.median(took):.1f} ({max(took):.1f})" if took else ""
        out.add_row(kind, str(len(some)), str(sum(k.survived for k in some)), times)
    return out


if __name__ == "__main__":
    main()
