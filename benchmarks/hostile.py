"""Hostile connections to every port of a running job of two processes: does it train the same?

Command:  python benchmarks/hostile.py --json hostile.json
Minutes:  about 5 on two busy cores
Expected: the same losses, step time within noise, one line of strangers in the log of each process
          at its end, one more in process 0's for those who came while the processes met

Three runs of one configuration: quiet, attacked, quiet. The attackers of `tests.cluster.attackers`
first besiege the coordinator's port while the processes meet, then make `--connections` connections
to every port on which the job listens and to the coordinator's, all kinds in turn, in slices spread
over the run. Slow senders stay connected until the end. Only loopback is used, and every wait ends.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from json_rows import Rows, add_json, merged

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dflop_jax.report.run_folder import METRICS, read_metrics
from tests.cluster.attackers import KINDS, Attackers, attackers, listening_ports, trainers
from tests.train.many import FOUR, Jobs

LIMIT_S = 600.0  # nothing takes as long on any machine
WARMUP = 10  # steps left out of every median
PAUSE_S = 0.05  # between slices
SLICE = 8 * len(KINDS)  # connections to one port at a time
DEVICES_EACH = 2


@dataclass(frozen=True)
class Run:
    """A finished job.

    Attributes:
      step_s: median over steps, without the first.
      spread_s: the quartiles.
      lines: what its log says of strangers.
    """

    losses: list[float]
    step_s: float
    spread_s: tuple[float, float]
    lines: list[str]


@dataclass(frozen=True)
class Siege:
    """What the attackers did.

    Attributes:
      at_start: connections that the coordinator's port accepted while the processes met.
      ports: where the job listened, as HOST:PORT.
      connected, unanswered: connections to those and to the coordinator's, by what came of them.
      share: of the run's steps that were done when the attack ended.
    """

    at_start: int
    ports: list[str]
    connected: int
    unanswered: int
    share: float


def run(
    jobs: Jobs, name: str, during: Callable[[subprocess.Popen[str], Path], None] | None = None
) -> Run:
    """Run a job to its end with `during` beside it."""
    folder = jobs.folder / name
    with jobs.started(DEVICES_EACH, folder) as job:
        if during:
            during(job, folder / METRICS)
        output, _ = job.communicate(timeout=LIMIT_S)
    if job.returncode:
        sys.exit(f"{name}: exit code {job.returncode}\n{output[-4000:]}")
    rows = read_metrics(folder)
    steps_s = sorted(r["step_s"] for r in rows[WARMUP:])
    quarter = len(steps_s) // 4
    lines = re.findall(r".*(?:turned away|strangers tried).*", output)
    return Run(
        [r["loss"] for r in rows],
        statistics.median(steps_s),
        (steps_s[quarter], steps_s[-quarter - 1]),
        [line.strip() for line in lines],
    )


def besiege(
    job: subprocess.Popen[str], metrics: Path, connections: int, steps: int, told: list[Siege]
) -> None:
    """Attack a job from its start, each of its ports `connections` times."""
    deadline = time.monotonic() + LIMIT_S

    def done() -> int:
        if job.poll() is not None:
            sys.exit(f"the attack ended the run:\n{job.communicate()[0][-4000:]}")
        if time.monotonic() > deadline:
            sys.exit("no step")
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    while len(found := trainers(job.pid)) < 2:
        done()
    first = next(iter(found.values()))
    coordinator = int(first["DFLOP_COORDINATOR"].rpartition(":")[2])
    with attackers(first["DFLOP_SECRET"].encode()) as strangers:
        while done() < WARMUP:
            if strangers.connected < connections:
                strangers.attack(coordinator, KINDS)
            time.sleep(PAUSE_S / 10)
        at_start, before = strangers.connected, (strangers.connected, strangers.unanswered)
        ports = listening_ports(iter(trainers(job.pid)))
        numbers = sorted({p.port for p in ports} | {coordinator})
        _in_slices(strangers, numbers, connections, done)
        share = done() / steps
    told.append(
        Siege(
            at_start,
            sorted({f"{p.host}:{p.port}" for p in ports}),
            strangers.connected - before[0],
            strangers.unanswered - before[1],
            share,
        )
    )


def _in_slices(
    strangers: Attackers, ports: list[int], connections: int, done: Callable[[], int]
) -> None:
    for made in range(0, connections, SLICE):
        size = min(SLICE, connections - made)
        kinds = tuple(KINDS[(made + i) % len(KINDS)] for i in range(size))
        for port in ports:
            strangers.attack(port, kinds)
            time.sleep(PAUSE_S)
        done()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--connections", type=int, default=1000, help="to every port")
    parser.add_argument("--steps", type=int, default=600, help="of each run")
    add_json(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        jobs = Jobs.make(Path(folder), FOUR, steps=args.steps, every=10**6)
        told: list[Siege] = []
        attack = partial(besiege, connections=args.connections, steps=args.steps, told=told)
        runs: dict[str, Run] = {}
        rows = Rows(args.json, merged)
        rows.append({"connections": args.connections})
        for name in ("quiet", "attacked", "again"):
            runs[name] = run(jobs, name, attack if name == "attacked" else None)
            rows.append({name: replace(runs[name], losses=[])})
    (siege,) = told
    equal = all(r.losses == runs["quiet"].losses for r in runs.values())
    rows.append({"losses_equal": equal, "siege": siege})
    for name, r in runs.items():
        low, high = r.spread_s
        print(f"{name:12s} {1e3 * r.step_s:6.1f} ms a step (quartiles {1e3 * low:.1f} - "
              f"{1e3 * high:.1f}), {len(r.lines)} lines of strangers")  # fmt: skip
    print(f"{siege.connected + siege.unanswered} connections to {len(siege.ports)} ports and the "
          f"coordinator's ({siege.unanswered} were not answered), {siege.at_start} while the "
          f"processes met; done at {siege.share:.0%} of the steps")  # fmt: skip
    print(*runs["attacked"].lines, f"losses equal: {equal}", sep="\n")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
