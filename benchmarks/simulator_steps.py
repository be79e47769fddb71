"""What `simulator.py` does in the processes that it measures (it runs schedules, and watches what
else uses the cores), and what it reports of its rows: errors by source, set-up and run."""

from __future__ import annotations

import math
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

REPEATS = 5  # undisturbed steps of every schedule
MOST_ROUNDS = 16
CALIBRATIONS = 4  # rounds, each with two runs of every program
DISTURBED = 0.06  # share of the cores that others may take of a step that counts
SLOWER = 1.10  # processor time over the least of the same work; above it the cores were slow


@dataclass(frozen=True)
class Step:
    """A measured step. others: share of the cores that other programs or the host took; own_s:
    processor seconds of all processes."""

    seconds: float
    others: float
    own_s: float
    trace: Any


def undisturbed(steps: list[Step]) -> list[Step]:
    least_s = min((s.own_s for s in steps if s.others <= DISTURBED), default=0.0)
    return [s for s in steps if s.others <= DISTURBED and s.own_s <= SLOWER * least_s]


def calibrated(ex: Any, peers: Any) -> tuple[Any, float]:
    """(every process's calibration, the share of the cores that others took meanwhile) from the
    CALIBRATIONS fastest undisturbed of MOST_ROUNDS / 2 rounds."""
    from dflop_jax.runtime.calibration import Calibration

    watch = Watch(peers)
    rounds: list[tuple[bool, float, float, Any]] = []
    for _ in range(MOST_ROUNDS // 2):
        one = ex.calibrate(2, lambda: peers.barrier("calibrate"), ends=True)
        others, own_s = watch.lap()
        rounds.append((others > DISTURBED, own_s, others, one))
    rounds.sort(key=lambda r: r[:2])
    counted = rounds[:CALIBRATIONS]
    mine = [run for *_, one in counted for run in one]
    parts = peers.gather("calibrated", mine, Calibration)
    return parts, sum(others for _, _, others, _ in counted) / len(counted)


def run_batches(ex: Any, batches: Any, peers: Any) -> list[list[Step]]:
    """The steps of every batch, by turns and each by itself: at least REPEATS undisturbed ones if
    the machine allows it."""
    from dflop_jax.profile.needed import PieceFlops
    from dflop_jax.train.feed import Packer, find_local_ranks

    no_flops = dict.fromkeys(ex.plan.modules, PieceFlops(0.0))  # they are not reported here
    packer = Packer(ex.plan, ex.model, find_local_ranks(ex.programs), peers, no_flops)
    packed = [
        packer.pack(s, loads, samples, key="pack", step=s.step) for s, loads, samples in batches
    ]
    measured: list[list[Step]] = [[] for _ in packed]
    watch = Watch(peers)
    for i in range((1 + MOST_ROUNDS) * len(packed)):
        k = i % len(packed)
        if k == 0 and all(len(undisturbed(steps)) >= REPEATS for steps in measured):
            break
        watch.lap()
        batch = packed[k]
        handle = ex.run_step(batch.schedule, batch.groups, batch.loss.scales)
        seconds, trace = finish(handle, peers)
        others, own_s = watch.lap()
        if i >= len(packed):  # the first round warms up
            measured[k].append(Step(seconds, others, own_s, trace))
    return measured


def finish(handle: Any, peers: Any) -> tuple[float, Any]:
    """Wait for a step on every process; (its seconds, its trace), known on process 0 only."""
    from dflop_jax.runtime.step_result import LocalResult

    every = peers.gather("step", handle.local_result(peers.clock_offset_s), LocalResult)
    seconds, trace = 0.0, None
    if peers.is_primary:
        result = handle.result(every)
        seconds, trace = result.ended_s - result.started_s, result.trace
    peers.barrier("finished")
    return seconds, trace


class Watch:
    """Tells which share of the cores' time was neither idle nor this run's: other programs', and
    what the host of a virtual machine took."""

    def __init__(self, peers: Any):
        self._peers = peers
        self._before = self._clocks()

    def _clocks(self) -> tuple[float, float, float]:
        """Seconds of (the clock times the cores, of these idle, of these this run's)."""
        idle_s, cores = math.nan, os.cpu_count() or 1
        own_s = sum(self._peers.all_gather("clocks", time.process_time(), float))
        if Path("/proc/stat").exists():
            ticks = Path("/proc/stat").read_text().split()[4:6]  # idle, and waiting for disks
            idle_s = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter() * cores, idle_s, own_s

    def lap(self) -> tuple[float, float]:
        """Since the last call, the same on every process: (the share, 0 where it is not known;
        this run's seconds)."""
        now = self._clocks()
        elapsed_s, idle_s, own_s = (b - a for a, b in zip(self._before, now))
        self._before = now
        share = (elapsed_s - idle_s - own_s) / elapsed_s
        share = 0.0 if math.isnan(share) else max(0.0, share)
        return self._peers.broadcast("others", share, float), own_s


# ---- errors of predictions ----

TARGETS = {"median_abs_error": 0.05, "worst_abs_error": 0.12}


def errors(rows: list[dict[str, Any]], source: str = "calibrated_s") -> dict[str, float]:
    """Median and worst error of predictions."""
    each = [abs(error(r, source)) for r in rows]
    return {"median_abs_error": statistics.median(each), "worst_abs_error": max(each)}


def by_run(rows: list[dict[str, Any]], source: str = "calibrated_s") -> list[dict[str, float]]:
    """Errors of every run alone."""
    runs = sorted({r.get("run", 0) for r in rows})
    return [errors([r for r in rows if r.get("run", 0) == i], source) for i in runs]


def by_set_up(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows of every set-up that was measured."""
    return {
        k: [r for r in rows if r["set_up"] == k] for k in dict.fromkeys(r["set_up"] for r in rows)
    }


def error(row: dict[str, Any], source: str = "calibrated_s") -> float:
    """Predicted over measured, less 1."""
    return row[source] / row["measured_s"] - 1


def result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what `--json` writes: errors over all schedules, per set-up, and the rows."""
    parts = by_set_up(rows)
    return {
        **errors(rows),
        "calibrated": errors(rows) | {"runs": by_run(rows)},
        "chosen_by": errors(rows, "chosen_by_s") | {"runs": by_run(rows, "chosen_by_s")},
        "layers": errors(rows, "layers_s") | {"runs": by_run(rows, "layers_s")},
        "targets": TARGETS,
        "set_ups": {
            k: errors(part)
            | {"chosen_by": errors(part, "chosen_by_s"), "layers": errors(part, "layers_s")}
            for k, part in parts.items()
        },
        "rows": rows,
    }


def show(rows: list[dict[str, Any]], names: dict[str, str]) -> None:
    """Print a table of every set-up, by its name, and the errors."""
    console = Console(width=150)
    for key, mine in by_set_up(rows).items():
        table = Table("plan", "submeshes", "batch", "groups", "measured ms (min - max)",
                      "calibrated ms", "error", "chosen by ms", "error", "layers ms", "error",
                      "others",
                      title=f"{names[key]}, concurrency {mine[0]['concurrency']:.2f}")  # fmt: skip
        for r in mine:
            low, high = min(r["steps_s"]), max(r["steps_s"])
            table.add_row(
                r["plan"],
                r["submeshes"],
                str(r["batch"]),
                " ".join(f"{n} {label}" for label, n in r["groups"]),
                f"{1e3 * r['measured_s']:.0f} ({1e3 * low:.0f} - {1e3 * high:.0f})",
                f"{1e3 * r['calibrated_s']:.0f}",
                f"{100 * error(r):+.1f}%",
                f"{1e3 * r['chosen_by_s']:.0f}",
                f"{100 * error(r, 'chosen_by_s'):+.1f}%",
                f"{1e3 * r['layers_s']:.0f}",
                f"{100 * error(r, 'layers_s'):+.1f}%",
                f"{100 * r['others_share']:.0f}% ({r['disturbed']})",
            )
        console.print(table)
        sources = {"calibrated": "calibrated_s", "chosen by": "chosen_by_s",
                   "layers alone": "layers_s"}  # fmt: skip
        for what, source in sources.items():
            e = errors(mine, source)
            console.print(
                f"{what}: median error {100 * e['median_abs_error']:.1f}%, worst "
                f"{100 * e['worst_abs_error']:.1f}%"
            )
    e = errors(rows)
    console.print(
        f"all {len(rows)} schedules: median {100 * e['median_abs_error']:.1f}% (target 5%), worst "
        f"{100 * e['worst_abs_error']:.1f}% (target 12%)"
    )
