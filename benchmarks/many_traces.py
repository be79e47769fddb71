"""What process 0 does with the traces of a step of a thousand processes.

Command:  python benchmarks/many_traces.py [--processes N] [--steps N] [--json FILE]
Minutes:  2 on one core
Expected: finish under 20 ms, for a chain of segments and for modules that share all devices

Traces are made up: a simulated step, seen by each process with scatter. A
process has one device. `chain` has two encoder and eight LLM segments on devices of their own;
under `shared` every process runs every task. What is timed are medians of

  decode    the reports, from the bytes that came
  finish    `StepLog.finish`: decode, trace, seconds by process and the row of metrics
  learn     `Corrector.after_step` of a sampled step
  decide    the same of the last one in a window of eight, after which the schedule worker is asked
            what correction gains
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
from json_rows import Rows, add_json
from rich.console import Console
from rich.table import Table
from simulator_speed import make_plan, make_prices, make_schedule

from dflop_jax.config import TrainConfig
from dflop_jax.pipeline.step_call import StepCall, UnderWay
from dflop_jax.pipeline.step_result import LocalResult, StepHandle
from dflop_jax.pipeline.task_times import Spans
from dflop_jax.records import (
    Edge,
    Layout,
    Load,
    Plan,
    Schedule,
    SegmentPlan,
    SubmeshPlan,
    Task,
    Trace,
)
from dflop_jax.report.progress import Progress
from dflop_jax.report.run_folder import RunFolder, read_metrics
from dflop_jax.schedule.counts.program import canonical, sizes_of
from dflop_jax.schedule.learnt import Learnt
from dflop_jax.schedule.worker import ScheduleWorker
from dflop_jax.schedule.worker_main import SolverSetup
from dflop_jax.sim.pipeline import simulate_step
from dflop_jax.tasks.graph import resources, step_graph
from dflop_jax.tasks.order import order_of
from dflop_jax.train.correct import Corrector
from dflop_jax.train.feed import ReadyBatch, Waits
from dflop_jax.train.losses import BatchLoss
from dflop_jax.train.moved import BatchTraffic
from dflop_jax.train.step_log import REPORTS, Report, RowFacts, StepLog

MICROBATCHES = 32
VISION_SEGMENTS, LLM_SEGMENTS = 2, 8
SLOW_PROCESS, SLOW_TIMES = 7, 2.0


@dataclass(frozen=True)
class Row:
    """`tasks` of the step, `spans` that all processes report of them; seconds are medians."""

    plan: str
    processes: int
    tasks: int
    spans: int
    report_bytes: int
    decode_s: float
    finish_s: float
    learn_s: float
    decide_s: float


def shared_plan(processes: int) -> Plan:
    """Encoder and LLM on all devices."""
    chain = make_plan(1, processes, processes)
    submesh = SubmeshPlan("all", 0, 1, processes, 1)
    segments = tuple(SegmentPlan(m, m, 0, 1, "all", True, True) for m in ("vision", "llm"))
    return Plan(
        "orch",
        Layout(
            (submesh,), segments, chain.layout.buckets, edges=(Edge("vision", "llm", "visual"),)
        ),
    )


def reports(plan: Plan, trace: Trace, order: Sequence[Task], seed: int) -> list[bytes]:
    """What every process sends of a step: the simulated one, with scatter."""
    rng = np.random.default_rng(seed)
    events = {(e.segment, e.group, e.direction): e for e in trace.events}
    placed = [(i, events[t.segment, t.group, t.direction]) for i, t in enumerate(order)]
    messages = []
    for process in range(plan.layout.n_devices):
        held = {m.name for m in plan.layout.submeshes if process in m.devices}
        slow = SLOW_TIMES if process == SLOW_PROCESS else 1.0
        spans, scatter = {}, rng.lognormal(0, 0.03, len(placed)).tolist()
        for i, event in placed:
            if event.submesh in held:
                start_s = event.start_s
                end_s = start_s + slow * (event.end_s - event.start_s) * scatter[i]
                spans[i] = start_s, start_s, end_s, end_s
        squares = {s.name: 1.0 for s in plan.layout.segments if s.submesh in held}
        part = LocalResult(Spans.of(spans), {"llm.loss_sum": 1.0}, squares, 1.0)
        messages.append(msgspec.msgpack.encode(Report(part, 0, False, {})))
    return messages


class AllSaid:
    """In place of `Peers` on process 0: all reports are there."""

    is_hub, process, offset_s = True, 0, 0.0

    def __init__(self, messages: list[bytes]):
        self.messages, self.count = messages, len(messages)

    def gather(self, key: str, value: bytes) -> list[bytes]:
        return self.messages

    def share(self, key: str, value: bytes) -> bytes:
        return value


def measure(name: str, plan: Plan, steps: int, folder: Path) -> Row:
    prices, schedule = make_prices(plan), make_schedule(plan, MICROBATCHES)
    trainable = [s.name for s in plan.layout.segments]
    trace = simulate_step(plan, schedule, prices, trainable)
    graph = step_graph(plan.layout, schedule.groups, trainable)
    order = order_of(plan, schedule, graph)
    resource = resources(plan.layout)
    programs = SimpleNamespace(
        submesh={s.name: s.submesh for s in plan.layout.segments},
        resource={s.name: resource[s.submesh] for s in plan.layout.segments},
        segments={s.name: SimpleNamespace(plan=s) for s in plan.layout.segments},
    )
    call = cast(StepCall, SimpleNamespace(programs=programs, under_way=UnderWay(), limit=np.inf))
    peers = AllSaid(reports(plan, trace, order, 0))
    samples = SimpleNamespace(append=lambda sample: None)
    progress = Progress(steps, quiet=True)
    made = made_batch(plan, schedule)
    monitor = Learnt("").monitor
    sampled = range(monitor.next_step, monitor.next_step + monitor.window)
    worker = ScheduleWorker(
        lambda step: made.loads,
        SolverSetup(plan, tuple(trainable), program=canonical(sizes_of(plan.layout))),
        prices,
        first_step=sampled.stop,
        ahead=0,
    )
    with RunFolder(folder) as run, worker:
        log = StepLog(
            RowFacts(TrainConfig(steps=steps), plan, cast(Any, peers)),
            run,
            progress,
            cast(Any, SimpleNamespace(read=lambda: 0)),
        )
        corrector = Corrector(
            plan, prices, trainable, worker, cast(Any, samples), progress, Learnt("")
        )
        finish_s, free_s = [], dict[int, float]()
        for step in range(steps):
            batch = replace(made, step=step)
            handle = StepHandle(step, call, graph, order, {}, free_s)
            finish_s.append(seconds(partial(log.finish, handle, batch, Waits(0.0, 0.0), False)))
        *learn_s, decide_s = (
            seconds(partial(corrector.after_step, trace, replace(made, step=k))) for k in sampled
        )
    process_s = read_metrics(folder)[-1]["process_s"]
    assert max(process_s, key=process_s.__getitem__) == str(SLOW_PROCESS)
    decode_s = [seconds(lambda: [REPORTS.decode(m) for m in peers.messages]) for _ in range(steps)]
    return Row(
        name,
        peers.count,
        len(order),
        sum(len(REPORTS.decode(m).part.spans.places) // 4 for m in peers.messages),
        sum(map(len, peers.messages)),
        statistics.median(decode_s),
        statistics.median(finish_s),
        statistics.median(learn_s),
        decide_s,
    )


def made_batch(plan: Plan, schedule: Schedule) -> ReadyBatch:
    """Samples that fill about as many rows as the schedule has."""
    rng = np.random.default_rng(0)
    n = sum(
        g.microbatches * plan.layout.data_ranks("llm") for g in schedule.groups if g.module == "llm"
    )
    tokens, tiles = rng.integers(500, 2048, n).tolist(), rng.integers(0, 5, n).tolist()
    loads = tuple(
        Load({"vision": (729,) * k, "llm": (t,)}) for k, t in zip(tiles, tokens, strict=True)
    )
    counts = dict.fromkeys(plan.layout.modules, 1)
    return ReadyBatch(
        step=0,
        loads=loads,
        schedule=schedule,
        groups=(),
        loss=BatchLoss({"llm": 1.0}, {"llm": 1.0}),
        used_tokens=counts,
        flops=dict.fromkeys(plan.layout.modules, 1.0),
        padding_fraction=dict.fromkeys(plan.layout.modules, 0.1),
        imbalance=dict.fromkeys(plan.layout.modules, 0.1),
        groups_run=counts,
        bad=[],
        moved=BatchTraffic(),
    )


def seconds(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def plans(processes: int) -> dict[str, Plan]:
    """By name, of about so many devices."""
    each = max(1, processes // (VISION_SEGMENTS + LLM_SEGMENTS))
    return {"chain": make_plan(LLM_SEGMENTS, each, each), "shared": shared_plan(processes)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--processes", type=int, default=1000, help="default 1000")
    parser.add_argument("--steps", type=int, default=20, help="default 20")
    add_json(parser)
    args = parser.parse_args()
    table = Table(
        *("plan", "processes", "tasks", "spans", "reports MB"),
        *("decode ms", "finish ms", "learn ms", "decide ms"),
    )
    rows = Rows(args.json)
    for name, plan in plans(args.processes).items():
        with tempfile.TemporaryDirectory() as folder:
            row = measure(name, plan, args.steps, Path(folder))
        rows.append(row)
        times = (f"{1e3 * s:.1f}" for s in (row.decode_s, row.finish_s, row.learn_s, row.decide_s))
        counts = (f"{n:,}" for n in (row.processes, row.tasks, row.spans))
        table.add_row(name, *counts, f"{row.report_bytes / 1e6:.1f}", *times)
    Console().print(table)


if __name__ == "__main__":
    main()
