"""How long the simulator takes for a step on many devices.

Command:  python benchmarks/simulator_speed.py [--json FILE]
Minutes:  under 1 on one core
Expected: every row under a second, 1,024 devices x 64 microbatches included.

The LLM is cut into segments of one submesh each, behind an encoder of two; sends, collectives, a
straggler and noise are simulated. `order` is the making of the task lists, which the runtime makes
too; `simulate` is all of it, that included. Each is the best of three.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from dflop_jax.pipeline.order import order_tasks, step_graph
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    REDUCE,
    Bucket,
    Plan,
    SegmentPlan,
    SubmeshPlan,
    Task,
)
from dflop_jax.sim.pipeline import Noise, simulate_step

# (LLM segments, devices of each, devices of each of two encoder segments, microbatches)
CASES = ((4, 14, 4, 64), (8, 28, 16, 64), (16, 56, 64, 64), (16, 56, 64, 256), (56, 16, 64, 64))
REPEATS = 3


@dataclass(frozen=True)
class Row:
    devices: int
    submeshes: int
    microbatches: int
    events: int
    order_s: float
    seconds: float


def make_plan(llm: int, llm_devices: int, vision_devices: int) -> Plan:
    """Two encoder and `llm` LLM segments in a row, each on devices of its own."""
    submeshes: list[SubmeshPlan] = []
    segments: list[SegmentPlan] = []
    for module, n, size in (("vision", 2, vision_devices), ("llm", llm, llm_devices)):
        for i in range(n):
            name = f"{module}{i}"
            first = submeshes[-1].devices.stop if submeshes else 0
            submeshes.append(SubmeshPlan(name, first, 1, size, 1))
            segments.append(SegmentPlan(name, module, i, i + 1, name, i == 0, i == n - 1))
    buckets = (Bucket(16, 4096), Bucket(8, 2048), Bucket(0, 4096))
    return Plan("dflop", tuple(submeshes), tuple(segments), buckets)


def make_times(plan: Plan) -> tuple[dict[Task, float], dict[Task, float]]:
    """(seconds of tasks and collectives, of sends): made up, in proportion to the buckets."""
    size = [b.tokens / 4096 for b in plan.buckets]
    seconds = {
        Task(s.name, b, d): size[b] * (0.05 if d == FORWARD else 0.1)
        for s in plan.segments
        for b in range(len(size))
        for d in (FORWARD, BACKWARD)
    }
    seconds |= {Task(s.name, -1, REDUCE): 0.08 for s in plan.segments}
    sends = {k: 0.05 * v for k, v in seconds.items() if k.group >= 0}
    return seconds, sends


def measure(llm: int, llm_devices: int, vision_devices: int, microbatches: int) -> Row:
    plan = make_plan(llm, llm_devices, vision_devices)
    seconds, sends = make_times(plan)
    buckets = np.random.default_rng(0).integers(0, len(plan.buckets), microbatches).tolist()
    names = [s.name for s in plan.segments]
    noise = Noise(seed=0, sigma=0.05, stragglers={"llm0": 1.2})
    trace = simulate_step(plan, buckets, seconds, names, sends=sends, noise=noise)
    order_s = _best(lambda: order_tasks(plan, step_graph(plan, buckets, names)))
    whole_s = _best(lambda: simulate_step(plan, buckets, seconds, names, sends=sends, noise=noise))
    return Row(
        plan.n_devices, len(plan.submeshes), microbatches, len(trace.events), order_s, whole_s
    )


def _best(call: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    args = parser.parse_args()
    rows = [measure(*case) for case in CASES]
    table = Table("devices", "submeshes", "microbatches", "events", "order ms", "simulate ms")
    for r in rows:
        counts = (r.devices, r.submeshes, r.microbatches, r.events)
        table.add_row(
            *(f"{n:,}" for n in counts), f"{1e3 * r.order_s:.0f}", f"{1e3 * r.seconds:.0f}"
        )
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
