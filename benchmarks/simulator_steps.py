"""What `simulator.py` does in the processes that it measures: run schedules, and watch what else
uses the cores."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

REPEATS = 5  # undisturbed steps of every schedule
MOST_ROUNDS = 8
CALIBRATIONS = 3  # rounds, each with two runs of every program
DISTURBED = 0.06  # share of the cores that others may take of a step that counts


@dataclass(frozen=True)
class Step:
    """A measured step; `others`: share of the cores that other programs took."""

    seconds: float
    others: float
    trace: Any


def undisturbed(steps: list[Step]) -> list[Step]:
    return [s for s in steps if s.others <= DISTURBED]


def calibrated(ex: Any, peers: Any) -> tuple[Any, float]:
    """(every process's calibration, the share of the cores that others took meanwhile) from
    CALIBRATIONS undisturbed rounds, or the least disturbed of MOST_ROUNDS."""
    from dflop_jax.pipeline.calibration import Calibration

    watch = Watch(peers)
    rounds: list[tuple[float, Any]] = []
    for _ in range(MOST_ROUNDS):
        one = ex.calibrate(2, lambda: peers.barrier("calibrate"), ends=True)
        rounds.append((watch.lap(), one))
        if sum(others <= DISTURBED for others, _ in rounds) == CALIBRATIONS:
            break
    rounds.sort(key=lambda r: r[0])
    counted = rounds[:CALIBRATIONS]
    mine = Calibration()
    for _, one in counted:
        for into, runs in ((mine.took, one.took), (mine.arrived, one.arrived)):
            for task, seconds in runs.items():
                into.setdefault(task, []).extend(seconds)
    parts = [Calibration.decode(v) for v in peers.gather("calibrated", mine.encode())]
    return parts, sum(others for others, _ in counted) / len(counted)


def run_batches(ex: Any, batches: Any, setup: Any, source: Any) -> list[list[Step]]:
    """The steps of every batch, at least REPEATS undisturbed ones if the machine allows it."""
    from dflop_jax.train.feed import Packer, own_ranks

    peers = setup.peers
    packer = Packer(ex.plan, source.spec, own_ranks(ex.programs), peers)
    packed = [packer.pack(s, shapes, held, key=f"pack/{s.step}") for s, shapes, held in batches]
    found: list[list[Step]] = [[] for _ in packed]
    watch = Watch(peers)
    ended_s, pending = 0.0, None
    for i in range((1 + MOST_ROUNDS) * len(packed) + 1):
        k = i % len(packed)
        enough = k == 0 and all(len(undisturbed(steps)) >= REPEATS for steps in found)
        handle = None
        if not enough and i < (1 + MOST_ROUNDS) * len(packed):
            scale = 1.0 / max(packed[k].supervised_tokens, 1)
            handle = ex.run_step(i, packed[k].groups, scale)
        if pending:
            end_s, trace = finish(pending[1], peers)
            others = watch.lap()
            if i > len(packed):  # the first round warms up
                found[pending[0]].append(Step(end_s - ended_s, others, trace))
            ended_s = end_s
        if handle is None:
            break
        pending = (k, handle)
    return found


def finish(handle: Any, peers: Any) -> tuple[float, Any]:
    """Wait for a step on every process; (its end, its trace), the trace on process 0 only."""
    from dflop_jax.pipeline.step import LocalResult

    parts = peers.gather("step", msgspec.json.encode(handle.local()))
    end_s, trace = 0.0, None
    if peers.is_hub:
        every = []
        for process, data in enumerate(parts):
            part, by_s = msgspec.json.decode(data, type=LocalResult), peers.offset_s(process)
            spans = tuple((i, d + by_s, e + by_s) for i, d, e in part.spans)
            every.append(LocalResult(spans, part.sums, part.grad_norm))
        result = handle.result(every)
        end_s, trace = result.ended_s, result.trace
    peers.barrier("finished")
    return end_s, trace


class Watch:
    """Tells which share of the cores' time programs other than this run take."""

    def __init__(self, peers: Any):
        self._peers = peers
        self._before = self._clocks()

    def _clocks(self) -> tuple[float, float, float]:
        """Seconds of (the clock, all cores' work, this run's part of it)."""
        (own_s,) = self._peers.sums("clocks", [time.process_time()])
        busy_s = own_s
        if Path("/proc/stat").exists():
            user, nice, system = Path("/proc/stat").read_text().split()[1:4]
            busy_s = (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), busy_s, own_s

    def lap(self) -> float:
        """The share since the last call; the same on every process."""
        now = self._clocks()
        elapsed_s, busy_s, own_s = (b - a for a, b in zip(self._before, now))
        self._before = now
        share = max(0.0, busy_s - own_s) / elapsed_s / (os.cpu_count() or 1)
        return float(self._peers.share("others", repr(share).encode()))
