"""What many processes cost process 0 beside its devices' work: made-up steps without programs.

Command:  python benchmarks/many.py [--processes N ...] [--steps N] [--json FILE]
Minutes:  8 on 2 cores for 2 to 64 processes; each takes 0.3 GB
Expected: process 0's milliseconds of a core a step grow with its children, of which it has 32 at
          most, and then by the few microseconds that it takes to decode what one more has said; the
          last lines say what that makes of 1,024 and 4,096

All processes are on this host and share its cores, so nothing that waits is told apart from what
computes: seconds of a step are those of this host's cores, milliseconds of process 0 are its own.
Every process meets the others as in a run, then goes through what a step exchanges: a schedule of
SCHEDULE_BYTES from process 0, counts of the batch there and their total back, and a report with
the times of TASKS tasks, which process 0 decodes, and its verdict. What process 0 does with the
times is in `many_traces.py`.

  connect_s      from the last process's last import until all have met
  schedule_ms    of a core, for process 0 to send the schedule to all
  step_ms        of a core, for all that process 0 exchanges in a step
  beat_ms        of a core, for a sign of life to and from every other process
  hub_cpu_share  of one core, for steps of a second and a sign of life in each
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
from json_rows import Rows, add_json, as_rows
from rich.console import Console
from rich.table import Table

from dflop_jax import DistributedConfig
from dflop_jax.cluster.distributed import initialise, shutdown
from dflop_jax.cluster.launch import launch
from dflop_jax.cluster.peers import LONGEST_BEAT_S, Peers
from dflop_jax.cluster.tree import FAN_OUT
from dflop_jax.pipeline.step_result import LocalResult
from dflop_jax.pipeline.task_times import Spans
from dflop_jax.train.step_log import REPORTS, Report

SCHEDULE_BYTES, COUNT_BYTES, TASKS = 50_000, 400, 64
IDLE_S = 10.0  # in which signs of life are all that there is
FITTED = 1_024, 4_096
PATIENCE_S = 600.0  # processes start one after another on few cores


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_json(parser)
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 8, 33, 64], metavar="N")
    parser.add_argument("--steps", type=int, default=30, help="of each (default 30)")
    parser.add_argument("--idle", type=float, default=IDLE_S, metavar="S", help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.steps, args.idle)
        return 0
    if min(args.processes) < 2 or args.steps < 1:
        parser.error("--processes must be at least 2, and --steps at least 1")
    rows = Rows(args.json, as_rows)
    for n in args.processes:
        file = Path(f"{args.json or 'many'}.{n}.tmp")
        command = ["python", __file__, "--worker", str(file), "--steps", str(args.steps)]
        command += ["--idle", str(args.idle)]
        if code := launch(command, n, devices_per_process=1).exit_code:
            return code
        rows.append(msgspec.json.decode(file.read_bytes()))
        file.unlink()
    show(rows)
    return 0


def work(file: Path, steps: int, idle_s: float) -> None:
    """One process; process 0 writes its row to `file`."""
    imported_s = time.time()
    config = DistributedConfig(connect_timeout_s=PATIENCE_S, peer_timeout_s=PATIENCE_S)
    member = initialise(config)
    peers = Peers(member.index, member.number, member.links, timeout_s=PATIENCE_S)
    imported = [float(s) for s in peers.gather("imported", repr(imported_s).encode())]
    connect_s = time.time() - max(imported, default=0.0)
    peers.barrier("met")
    spent: dict[str, list[float]] = {"schedule": [], "step": []}
    message, begun_s = msgspec.msgpack.encode(report()), time.perf_counter()
    for step in range(steps):
        exchange(peers, step, message, spent)
    step_s = (time.perf_counter() - begun_s) / steps
    peers.barrier("stepped")
    with core_seconds() as beating:
        time.sleep(idle_s)
    peers.barrier("idled")
    if peers.is_hub:
        step_ms, schedule_ms = (1e3 * statistics.median(spent[k]) for k in ("step", "schedule"))
        beat_ms = 1e3 * beating[0] / max(idle_s / LONGEST_BEAT_S, 1.0)
        row = {
            "processes": peers.count,
            "connect_s": connect_s,
            "schedule_ms": schedule_ms,
            "step_ms": step_ms,
            "beat_ms": beat_ms,
            "hub_cpu_share": (step_ms + beat_ms) / 1e3,
            "step_s": step_s,
        }
        file.write_bytes(msgspec.json.encode(row))
    peers.close()
    shutdown()


def exchange(peers: Peers, step: int, message: bytes, spent: dict[str, list[float]]) -> None:
    """What processes say to each other in a step."""
    with core_seconds() as of_step:
        with core_seconds() as of_schedule:
            peers.share(f"schedule/{step}", bytes(SCHEDULE_BYTES) if peers.is_hub else None)
        peers.gather(f"counts/{step}", bytes(COUNT_BYTES))
        peers.share(f"total/{step}", bytes(COUNT_BYTES) if peers.is_hub else None)
        for theirs in peers.gather(f"report/{step}", message):
            REPORTS.decode(theirs)
        peers.share(f"verdict/{step}", bytes(COUNT_BYTES) if peers.is_hub else None)
    spent["schedule"] += of_schedule
    spent["step"] += of_step


def report() -> Report:
    """That of a process which ran `TASKS` tasks."""
    moments = dict(enumerate(np.arange(4.0 * TASKS).reshape(TASKS, 4).tolist()))
    part = LocalResult(Spans.of(moments), {"llm.loss_sum": 1.0}, {"llm": 1.0}, 1.0)
    return Report(part, 0, False, {})


@contextmanager
def core_seconds() -> Iterator[list[float]]:
    """Seconds of a core that this process spends in here, all threads together."""
    taken: list[float] = []
    begun_s = time.process_time()
    yield taken
    taken.append(time.process_time() - begun_s)


def show(rows: Sequence[dict[str, float]]) -> None:
    table = Table(*rows[0], title="process 0, all processes on this host")
    for row in rows:
        table.add_row(*(f"{v:.4g}" for v in row.values()))
    console = Console(width=120)
    console.print(table)
    full = [row for row in rows if row["processes"] > FAN_OUT]
    if len(full) < 2:
        console.print(f"two rows of more than {FAN_OUT} processes would say what more cost")
        return
    n = [row["processes"] for row in full]
    for key in ("schedule_ms", "step_ms", "beat_ms"):
        each, once = np.polyfit(n, [row[key] for row in full], 1)
        at = ", ".join(f"{once + each * m:.0f} ms at {m:,}" for m in FITTED)
        console.print(f"{key}: {once:.2f} ms and {1e3 * each:.1f} us a process more; {at}")


if __name__ == "__main__":
    sys.exit(main())
