"""Strangers at the port where two processes meet: does the job train the same?

Command:  python benchmarks/hostile.py --json hostile.json
Minutes:  about 2 on two busy cores
Expected: the same losses, step time within noise, one line of strangers in the log of process 0

Three runs of one configuration: quiet, attacked, quiet. In the second, process 1 comes only when
the attackers of `tests.cluster.attackers` have made `--connections` connections to the port where
process 0 waits for it, all kinds in turn; slow senders stay connected. Only loopback is used, and
every wait ends. jax's own ports believe whoever reaches them and are not attacked
(docs/clusters.md).
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from json_rows import Rows, add_json, merged

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dflop_jax.report.run_folder import read_metrics
from tests.cluster.attackers import besieged
from tests.train.many import FOUR, Jobs

LIMIT_S = 600.0  # nothing takes as long on any machine
WARMUP = 10  # steps left out of every median


@dataclass(frozen=True)
class Run:
    """A finished job.

    Attributes:
      step_s: median over steps, without the first.
      spread_s: the quartiles.
      lines: what its log says of strangers.
      connected, unanswered: connections of strangers, by what came of them.
    """

    losses: list[float]
    step_s: float
    spread_s: tuple[float, float]
    lines: list[str]
    connected: int
    unanswered: int


def run(jobs: Jobs, name: str, connections: int) -> Run:
    """Run a job to its end, after so many attacks."""
    folder = jobs.folder / name
    command = jobs.command(2, folder)
    codes, outputs, strangers = besieged(command[command.index("dflop") :], connections, LIMIT_S)
    if any(codes):
        sys.exit(f"{name}: exit codes {codes}\n{outputs[0][-4000:]}{outputs[1][-4000:]}")
    rows = read_metrics(folder)
    steps_s = sorted(r["step_s"] for r in rows[WARMUP:])
    quarter = len(steps_s) // 4
    lines = re.findall(r".*turned away.*", "".join(outputs))
    return Run(
        [r["loss"] for r in rows],
        statistics.median(steps_s),
        (steps_s[quarter], steps_s[-quarter - 1]),
        [line.strip() for line in lines],
        strangers.connected,
        strangers.unanswered,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--connections", type=int, default=1000, help="of strangers")
    parser.add_argument("--steps", type=int, default=200, help="of each run")
    add_json(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        jobs = Jobs.make(Path(folder), FOUR, steps=args.steps, every=10**6)
        runs: dict[str, Run] = {}
        rows = Rows(args.json, merged)
        rows.append({"connections": args.connections})
        for name in ("quiet", "attacked", "again"):
            runs[name] = run(jobs, name, args.connections if name == "attacked" else 0)
            rows.append({name: replace(runs[name], losses=[])})
    equal = all(r.losses == runs["quiet"].losses for r in runs.values())
    rows.append({"losses_equal": equal})
    for name, r in runs.items():
        low, high = r.spread_s
        print(f"{name:12s} {1e3 * r.step_s:6.1f} ms a step (quartiles {1e3 * low:.1f} - "
              f"{1e3 * high:.1f}), {r.connected} strangers, of whom {len(r.lines)} lines "
              "tell")  # fmt: skip
    print(*runs["attacked"].lines, f"losses equal: {equal}", sep="\n")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
