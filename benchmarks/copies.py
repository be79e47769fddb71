"""What the loss of a process costs with copies in memory, and what the copies cost.

Command:  python benchmarks/copies.py --json copies.json
Minutes:  10 on two free cores
Expected: steps_lost below --copy-every with copies, below --every without; equal true in all rows

One run of --processes is left alone. In others a process is killed at the same step, before a save:
one has checkpoints on disk only, one has copies in the launcher's memory as well. In the last one
each process has a launcher of its own, as on hosts, and one launcher is killed with its process and
started again. `stall_s` is the mean that training waited for a save or a copy where it did at all.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from faulted_run import prepare
from hosts_of_run import HostsOfRun, flat
from json_rows import Rows, add_json, as_rows
from observed_job import Job
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dflop_jax.report.run_folder import read_metrics

LIMIT_S = 900.0  # nothing takes as long on any machine


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run_dir)]


def lost(command: Sequence[str], run_dir: Path, at: int, victim: int) -> dict[str, Any]:
    """A run whose process is killed once it has done `at` steps."""
    job = Job(list(command), run_dir, run_dir.with_suffix(".log"))
    try:
        assert job.wait_for(lambda: job.rows() >= at, LIMIT_S), job.said()[-2000:]
        os.kill(job.trainers()[victim], signal.SIGKILL)
        done = job.rows()
        assert job.launcher.wait(LIMIT_S) == 0, job.said()[-2000:]
        return {"killed_at": done, "said": job.said()}
    finally:
        job.end()


def host_lost(run: HostsOfRun, hosts: int, at: int, victim: int) -> dict[str, Any]:
    """A run one of whose hosts is lost with all that it holds once it has done `at` steps, and
    comes back."""
    try:
        for host in range(hosts):
            run.start(host)
        run.wait_for(lambda: run.rows() >= at)
        run.kill(victim)
        done = run.rows()
        run.start(victim)
        run.await_end()
        return {"killed_at": done, "said": flat(run.said())}
    finally:
        run.end()


def row_of(name: str, run_dir: Path, seen: dict[str, Any], expected: list[float]) -> dict[str, Any]:
    """What is printed of a run."""
    said = seen["said"]
    (step, where), *_ = re.findall(r"resumed after step (\d+) of \d+(, from a copy)?", said)
    again = re.findall(r"has done a step, ([\d.]+) s after", said)
    size = re.search(r"copies take ([\d.]+ [GM]B) each, ([\d.]+ [GM]B) of a host", said)
    seconds = re.search(r"read in ([\d.]+) s", said)
    waits = [row["save_wait_s"] for row in read_metrics(run_dir) if row["save_wait_s"] > 0]
    return {
        "row": name,
        "killed_at": seen["killed_at"],
        "steps_lost": seen["killed_at"] - int(step),
        "from": "copy" if where else "disk",
        "read_s": float(seconds[1]) if seconds else None,
        "to_step_s": float(again[0]) if again else None,
        "copy": size[1] if size else "",
        "memory": size[2] if size else "",
        "stalls": len(waits),
        "stall_s": statistics.mean(waits) if waits else 0.0,
        "equal": losses(run_dir) == expected,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--processes", type=int, default=4, help="of each run (default: 4)")
    parser.add_argument("--every", type=int, default=20, help="steps between saves (default: 20)")
    parser.add_argument("--copy-every", type=int, default=5, help="and copies (default: 5)")
    parser.add_argument("--victim", type=int, default=1, help="process that is lost (default: 1)")
    parser.add_argument("--size", default="tiny", help="of the model (default: tiny, 23 MB)")
    add_json(parser)
    args = parser.parse_args()
    os.environ.setdefault("DFLOP_SECRET", "benchmarks/copies.py on this machine only")
    every, rows = args.every, Rows(args.json, as_rows)
    with tempfile.TemporaryDirectory(prefix="copies-") as name:
        folder = Path(name)
        command, _ = prepare(
            folder, folder, args.processes, 2 * every + 2, size=args.size, silent_s=20.0
        )
        saves = ["--checkpoint.every", str(every)]
        names = {"disk only": 0, "copies": args.copy_every}
        whole = Job(command(folder / "whole", "--checkpoint.copy_every", "0"), folder / "whole",
                    folder / "whole.log")  # fmt: skip
        assert whole.launcher.wait(LIMIT_S) == 0, whole.said()[-2000:]
        for row, copy_every in names.items():
            run_dir = folder / row.replace(" ", "-")
            more = [*saves, "--checkpoint.copy_every", str(copy_every)]
            seen = lost(command(run_dir, *more), run_dir, 2 * every - 1, args.victim)
            rows.append(row_of(row, run_dir, seen, losses(folder / "whole")))

        def train(run_dir: Path) -> list[str]:
            words = command(run_dir, *saves, "--checkpoint.copy_every", str(args.copy_every))
            return words[words.index("--") + 1 :]

        run = HostsOfRun(folder, "host-lost", args.processes, ["--max-restarts", "9"], train)
        seen = host_lost(run, args.processes, 2 * every - 1, args.victim)
        rows.append(row_of("copies, a host lost", run.run_dir, seen, losses(folder / "whole")))
    table = Table(*(rows[0] if rows else ()))
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
