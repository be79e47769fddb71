"""Goes on without a host that is gone for good, and with all when it is back: losses and seconds.

    python benchmarks/shrink.py --hosts 4 --lose 0 --lose 3 --json shrink.json

Launchers with one process each play the hosts, on this machine. In one run nobody is lost. In the
others the launcher of a host is killed once the plan without it is ready and its programs are
compiled; the rest go on, and when they have done a step, the host is started again and all go on,
under the plan of before. Printed are the largest relative difference of a loss from the undisturbed
run's, and what process 0's time went to between each start and its first step: searching for a
plan, compiling, reading its part of the checkpoint (resharding).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from hosts_of_run import HostsOfRun, flat
from json_rows import Rows, add_json
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dflop_jax.report.run_folder import PLANS
from dflop_jax.report.spent import COMPILE, EVENTS, PLAN, PROFILE, EventRow

GONE_AFTER_S = 2.0

EXPERIMENT = """
from dflop_jax import CheckpointConfig, Config, DataConfig, ModelConfig, PlanConfig
from dflop_jax import ScheduleConfig, TrainConfig

def config():
    return Config(
        model=ModelConfig(size="nano"),
        data=DataConfig(n_samples=64, max_tiles=1, max_frames=2, max_tokens=96),
        plan=PlanConfig(
            policy="dflop", devices={hosts}, max_model=1, buckets=1, effort="quick",
            max_microbatches=4, finalists=0, profile_samples=64,
        ),
        schedule=ScheduleConfig(correct=False),  # runs are compared that measure anew
        train=TrainConfig(steps={steps}, global_batch=4),
        checkpoint=CheckpointConfig(every=2, keep=2),
        cache_dir={cache_dir!r},
    )
"""


@dataclass(frozen=True)
class StartSeconds:
    """What a start of a run took until its first step.

    Attributes:
      processes: that it had.
      from_step: the step that it went on with.
      profile_s, plan_s, compile_s: of process 0. To compile is also to trace, and to load what the
        cache has.
      compiled: programs of process 0 that the cache did not have.
      reshard_s: to read its part of the checkpoint; None: there was none.
      to_step_s: from its begin to its first step.
    """

    processes: int
    from_step: int
    profile_s: float
    plan_s: float
    compile_s: float
    compiled: int | None
    reshard_s: float | None
    to_step_s: float


def plan_of(run: HostsOfRun, processes: int) -> Any:
    """The layout that a run keeps for so many processes; None: none is."""
    file = run.run_dir / PLANS / f"{processes}-{processes}.json"
    return json.loads(file.read_text())["value"]["plan"]["layout"] if file.exists() else None


def whole_run(run: HostsOfRun, hosts: int) -> None:
    """A run that nobody disturbs."""
    try:
        for host in range(hosts):
            run.start(host)
        run.await_end()
    finally:
        run.end()


def disturbed_run(run: HostsOfRun, hosts: int, lose: int, steps: int) -> float:
    """A run that loses a host and gets it back; when that was killed."""
    try:
        for host in range(hosts):
            run.start(host)
        ready = f"the programs for {hosts - 1} processes are compiled"
        run.wait_for(
            lambda: (
                run.rows() >= steps // 2 or (run.rows() >= steps // 8 and ready in flat(run.said()))
            )
        )
        first = plan_of(run, hosts)
        killed_s = run.kill(lose)
        run.wait_for(lambda: "has done a step" in flat(run.said()))
        run.start(lose)
        run.await_end()
        assert plan_of(run, hosts) == first
    finally:
        run.end()
    return killed_s


def starts_of(run: HostsOfRun, processes: list[int]) -> list[StartSeconds]:
    """What each start took, by the run's own events; `processes` of each."""
    lines = (run.run_dir / EVENTS).read_bytes().splitlines()
    rows = [msgspec.json.decode(line, type=EventRow) for line in lines]
    begins = [i for i, row in enumerate(rows) if row.begun_s is not None]
    said = flat(run.said())
    read = re.findall(r"resumed after step \d+ of \d+, read in ([\d.]+)", said)
    made = re.findall(r"compiled (\d+) programs in [\d.]+ s(?:, (\d+) of them)?", said)
    starts: list[StartSeconds] = []
    for nth, (begin, end) in enumerate(zip(begins, [*begins[1:], len(rows)], strict=True)):
        mine = rows[begin:end]
        first = next((i for i, row in enumerate(mine) if row.step >= 0), None)
        if first is None:  # it did no step
            continue
        spent: dict[str, float] = {}
        for row in mine[: first + 1]:
            for name, seconds in row.seconds.items():
                spent[name] = spent.get(name, 0.0) + seconds
        begun_s = mine[0].begun_s
        assert begun_s is not None
        starts.append(
            StartSeconds(
                processes[min(len(starts), len(processes) - 1)],
                mine[first].step,
                spent.get(PROFILE, 0.0),
                spent.get(PLAN, 0.0),
                spent.get(COMPILE, 0.0),
                int(made[nth][0]) - int(made[nth][1] or 0) if nth < len(made) else None,
                float(read[nth - 1]) if 0 < nth <= len(read) else None,
                mine[first].until_s - begun_s,
            )
        )
    return starts


def measure(
    run: HostsOfRun, hosts: int, lose: int, steps: int, expected: list[float]
) -> dict[str, Any]:
    """One run that loses a host, beside the undisturbed one's losses."""
    killed_s = disturbed_run(run, hosts, lose, steps)
    losses = run.losses()
    assert len(losses) == len(expected) == steps
    off = [abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)]
    said = re.findall(r"has done a step, ([\d.]+) s after", flat(run.said()))
    assert "profiling" not in run.said().partition("has done a step")[2]
    return {
        "lose": lose,
        "hosts": hosts,
        "steps": steps,
        "largest_difference": max(off),
        "equal_losses": sum(d == 0 for d in off),
        "kill_to_step_s": float(said[0]),
        "starts": starts_of(run, [hosts, hosts - 1, hosts]),
        "killed_s": killed_s,
        "losses": losses,
    }


def table(rows: list[dict[str, Any]]) -> Table:
    out = Table(
        "lost host", "processes", "from step", "profile s", "plan s", "compile s", "compiled",
        "reshard s",        "start to step s", "largest difference",
        title="starts of runs that lose a host, and get it back",
    )  # fmt: skip
    for row in rows:
        for start in row["starts"]:
            seconds = (start.profile_s, start.plan_s, start.compile_s)
            read = "-" if start.reshard_s is None else f"{start.reshard_s:.1f}"
            out.add_row(
                str(row["lose"]), str(start.processes), str(start.from_step),
                *(f"{s:.1f}" for s in seconds), str(start.compiled), read, f"{start.to_step_s:.1f}",
                f"{row['largest_difference']:.1e}",
            )  # fmt: skip
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--hosts", type=int, default=4, help="of each run (default: 4)")
    parser.add_argument(
        "--lose", type=int, action="append", help="host that is lost, again for more (default: 0)"
    )
    parser.add_argument("--steps", type=int, default=1000, help="of each run (default: 1000)")
    parser.add_argument("--profile", type=Path, help="begin with this one; else it is measured")
    parser.add_argument("--folder", type=Path, help="keep runs and logs here (a new folder)")
    add_json(parser)
    args = parser.parse_args()
    lost = args.lose or [0]
    if args.hosts < 2 or not all(0 <= h < args.hosts for h in lost):
        parser.error("give --hosts 2 or more, and --lose one of them, from 0")
    if args.steps < 8:
        parser.error(f"--steps {args.steps} must be at least 8")
    os.environ.setdefault("DFLOP_SECRET", "benchmarks/shrink.py on this machine only")
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="shrink-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    text = EXPERIMENT.format(hosts=args.hosts, steps=args.steps, cache_dir=str(folder / "cache"))
    (folder / "experiment.py").write_text(text)
    fewer = ["--min-processes", str(args.hosts - 1), "--gone-after", str(GONE_AFTER_S)]
    options = ["--max-restarts", "99", "--restarts-an-hour", "99", *fewer]
    train = ["dflop", "train", str(folder / "experiment.py")]
    train += ["--profile-file", str(args.profile.resolve())] if args.profile else []
    run = partial(HostsOfRun, folder, hosts=args.hosts, options=options,
                  train=lambda run_dir: [*train, "--run_dir", str(run_dir)])  # fmt: skip
    undisturbed = run("undisturbed")
    whole_run(undisturbed, args.hosts)
    rows = Rows(args.json)
    for lose in lost:
        lost_run = run(f"lose{lose}")
        rows.append(measure(lost_run, args.hosts, lose, args.steps, undisturbed.losses()))
    Console(width=None if sys.stdout.isatty() else 120).print(table(rows))


if __name__ == "__main__":
    main()
