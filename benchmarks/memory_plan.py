"""Memory plans of DIP's set-ups and of random devices: what is saved over the bound, and how long
it takes.

Command:  python benchmarks/memory_plan.py [--json FILE] [--random N]
Minutes:  about 3 on 2 cores
Expected: `run` within 1% of the bound by the median, never behind `greedy`, in well under a second
          a step

A device's groups may keep more where memory is left (`schedule/memory_plan.py`). `greedy` takes
those first that save most for bytes and time, `run` is what schedules get. The bound is the MILP's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from json_rows import Rows, add_json

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dflop_jax.schedule.memory_plan import DeviceRoom, KeepingGroup, chosen, devices_of, greedy
from dflop_jax.schedule.solver.budget import Budget
from experiments.paper.answers import answer
from experiments.paper.costs import prices_of
from experiments.paper.dip_models import CASES

GIB = 2.0**30


@dataclass(frozen=True)
class Row:
    """A step's devices together: `saved_over_bound` of what no choice saves more than."""

    instance: str
    devices: int
    groups: int
    method: str
    saved_over_bound: float
    elapsed_s: float


def random_device(seed: int, n: int = 200) -> DeviceRoom:
    """Groups of a pipeline: each is held for some of the moments of a step, in one of two sizes."""
    rng = np.random.default_rng(seed)
    items = []
    for i in range(n):
        first = int(rng.integers(0, n))
        stop = first + int(rng.integers(1, 24))
        size = (0.4, 1.1)[int(rng.integers(0, 2))] * GIB
        items.append(
            KeepingGroup("s", i, float(rng.uniform(0.5, 2) * size / GIB), size, first, stop)
        )
    room = tuple(float(x) * GIB for x in rng.uniform(1, 8, n + 24))
    return DeviceRoom(tuple(items), room)


def rows_of(instance: str, devices: Sequence[DeviceRoom]) -> Iterator[Row]:
    bound_s = sum(chosen(d, Budget(1e9)).bound_s for d in devices)
    for method in ("greedy", "run"):
        started = time.perf_counter()
        each = [greedy(d) if method == "greedy" else chosen(d, Budget(1e9)).items for d in devices]
        took_s = time.perf_counter() - started
        saved_s = sum(d.saved_s(c) for d, c in zip(devices, each, strict=True))
        n = sum(len(d.items) for d in devices)
        yield Row(instance, len(devices), n, method, saved_s / bound_s, took_s)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_json(parser)
    parser.add_argument("--random", type=int, default=20, help="random devices of 200 groups")
    args = parser.parse_args(argv)
    rows = Rows(args.json)
    for i in range(args.random):
        for row in rows_of(f"random {i}", [random_device(i)]):
            rows.append(row)
    for case in CASES:
        found = answer(case, "dip")
        if found.plan is None or not found.plan.scheduling.kept:
            print(f"{case.name}: nothing to choose")
            continue
        step = found.steps[0]
        devices = devices_of(found.plan, step.schedule, prices_of(case, found.plan))
        for row in rows_of(case.name, [d for d in devices if d.items]):
            rows.append(row)
    print(f"{'instance':12}{'devices':>9}{'groups':>8}{'method':>9}{'of bound':>10}{'took':>10}")
    for r in rows:
        print(
            f"{r.instance:12}{r.devices:9}{r.groups:8}{r.method:>9}{r.saved_over_bound:10.4f}"
            f"{1e3 * r.elapsed_s:8.0f}ms"
        )
    for method in ("greedy", "run"):
        own = [r.saved_over_bound for r in rows if r.method == method]
        print(f"{method}: median {median(own):.4f}, least {min(own):.4f} of the bound")
    return 0


if __name__ == "__main__":
    sys.exit(main())
