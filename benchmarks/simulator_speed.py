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
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from json_rows import Rows, add_json
from rich.console import Console
from rich.table import Table

from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    NO_GROUP,
    REDUCE,
    Bucket,
    Edge,
    Group,
    Layout,
    Plan,
    Price,
    Prices,
    ProgramId,
    Schedule,
    SegmentPlan,
    SendId,
    Shape,
    SubmeshPlan,
    Task,
)
from dflop_jax.sim.pipeline import Noise, simulate_step
from dflop_jax.tasks.graph import links, step_graph
from dflop_jax.tasks.order import order_tasks

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
    buckets = tuple(
        Bucket.of({"vision": Shape(n, 729) if n else None, "llm": Shape(1, tokens)})
        for n, tokens in ((16, 4096), (8, 2048), (0, 4096))
    )
    edge = Edge("vision", "llm", "visual")
    return Plan("dflop", Layout(tuple(submeshes), tuple(segments), buckets, edges=(edge,)))


def make_prices(plan: Plan) -> Prices:
    """Made up, in proportion to the shapes."""
    programs: dict[ProgramId, Price] = {}
    for s in plan.layout.segments:
        largest = max(shape.size for shape in plan.layout.shapes(s.module))
        for shape in plan.layout.shapes(s.module):
            share = shape.size / largest
            programs[ProgramId(s.name, shape, FORWARD)] = Price(0.05 * share)
            programs[ProgramId(s.name, shape, BACKWARD)] = Price(0.1 * share)
    module = {s.name: s.module for s in plan.layout.segments}
    sends = {
        SendId(link.source, link.target, shape, d): 0.004
        for link in links(plan.layout)
        for shape in plan.layout.shapes(module[link.target])
        for d in (FORWARD, BACKWARD)
    }
    ends = {Task(s.name, NO_GROUP, REDUCE): 0.08 for s in plan.layout.segments}
    return Prices(programs, ends, sends)


def make_schedule(plan: Plan, microbatches: int) -> Schedule:
    """Groups of buckets drawn at random, without pieces."""
    groups: list[Group] = []
    for b in np.random.default_rng(0).integers(0, len(plan.layout.buckets), microbatches):
        shapes = plan.layout.buckets[int(b)].shapes
        consumer = len(groups) + len(shapes) - 1
        for module, shape in shapes:
            feeds = () if module == shapes[-1][0] else (consumer,)
            groups.append(Group(module, shape, feeds))
    return Schedule(0, tuple(groups))


def measure(llm: int, llm_devices: int, vision_devices: int, microbatches: int) -> Row:
    plan = make_plan(llm, llm_devices, vision_devices)
    prices, schedule = make_prices(plan), make_schedule(plan, microbatches)
    names = [s.name for s in plan.layout.segments]
    noise = Noise(seed=0, sigma=0.05, stragglers={"llm0": 1.2})
    trace = simulate_step(plan, schedule, prices, names, noise=noise)
    groups = schedule.groups
    order_s = _best(lambda: order_tasks(plan, step_graph(plan.layout, groups, names), groups))
    whole_s = _best(lambda: simulate_step(plan, schedule, prices, names, noise=noise))
    return Row(
        plan.layout.n_devices,
        len(plan.layout.submeshes),
        microbatches,
        len(trace.events),
        order_s,
        whole_s,
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
    add_json(parser)
    args = parser.parse_args()
    rows = Rows(args.json)
    for case in CASES:
        rows.append(measure(*case))
    table = Table("devices", "submeshes", "microbatches", "events", "order ms", "simulate ms")
    for r in rows:
        counts = (r.devices, r.submeshes, r.microbatches, r.events)
        table.add_row(
            *(f"{n:,}" for n in counts), f"{1e3 * r.order_s:.0f}", f"{1e3 * r.seconds:.0f}"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
