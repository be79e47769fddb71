"""Two processes pinned to a core each: what asynchronous dispatch and the planner's choice bring.

Command:  python benchmarks/two_process.py [--json FILE] [--steps N]
Minutes:  about 8 on 2 cores with nothing else running
Expected: dispatch without waiting beats awaiting every task; `auto` beats both blind variants; the
          order by prices is no slower than the textbook's.

Real wall time: each process computes on a core of its own. All runs train the same model on the
same batches. Policies:
  blind pipeline   encoder on one process, LLM on the other, arrival order, padded
  blind data       the whole model on both, arrival order, padded: what most would do
  dflop            encoder and LLM apart, balanced microbatches in searched buckets
  orch             both modules on both processes, each balanced over them
The planner's choice (`auto`) is the one that it predicts to be the faster of the last two.
`dflop` runs three times more: with every task awaited by both processes before the next is
dispatched, and with its schedules' tasks in either order that the scheduler chooses between: list
scheduling by textbook durations (a backward is two forwards), and by the prices.

Efficiency is the useful compute time of a step over what two cores offer in it: of every program
that ran, its calibrated seconds times the share of its tokens that was not padding, divided by
twice the step time (median over steps). `best rate` is stricter: the batch's tokens of every module
at the least seconds of any policy's programs, so the same work for every policy, and attention over
long rows and programs of unfavourable size count as waste.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

from dflop_jax import CheckpointConfig, Config, DataConfig, ModelConfig, PlanConfig, TrainConfig

RUNS = Path("runs/two_process")
WARMUP = 4  # steps left out of every median
BLIND = ("blind pipeline", "blind data")
POLICIES = (*BLIND, "dflop", "orch")
AWAITED = "awaited"
ORDERS = ("textbook order", "priced order")


def config(name: str, steps: int, batch: int, size: str) -> Config:
    policy = "dflop" if name in (AWAITED, *ORDERS) else name.split()[0]
    return Config(
        model=ModelConfig(size=size),
        data=DataConfig(n_samples=8192),
        plan=PlanConfig(policy=policy, max_model=1, max_stage=2, max_microbatches=16),
        train=TrainConfig(steps=steps, global_batch=batch),
        checkpoint=CheckpointConfig(every=0),
        run_dir=str(RUNS / name.replace(" ", "_")),
    )


# ---- in each of the two processes ----


def measure(steps: int, batch: int, size: str, out: Path) -> None:
    """Train under every policy; process 0 writes what was measured."""
    from dflop_jax.report.run_folder import read_metrics
    from dflop_jax.train import loop, prepare, profiling, timing, trainer

    make_executor, compile_and_time = timing.make_executor, timing.compile_and_time
    calibrated: dict[str, dict] = {}

    def made(place, plan):
        """An executor, which awaits every task if it is to."""
        ex = make_executor(place, plan)
        if name == AWAITED:
            tasks = itertools.count()
            ex.one_at_a_time = True
            ex.after_task = lambda: place.peers.barrier(f"awaited/{next(tasks)}")
        return ex

    def timed(place, ex):
        """What is measured of the programs, whose least seconds are kept."""
        result = compile_and_time(place, ex)
        least = calibrated.setdefault(name, {})
        for program, runs in (row for part in result.parts for row in part.took.items()):
            least[program] = max(min(runs), least.get(program, 0.0))
        return result

    place = prepare.set_up(config("dflop", steps, batch, size))
    source = place.source()
    profile = profiling.make_profile(place, source)
    rows, rates = {}, {module: [] for module in profile.model.n_layers}
    for name in (*POLICIES, AWAITED, *ORDERS):
        run = config(name, steps, batch, size)
        given = rows["dflop"]["plan"] if "dflop" in rows else None
        plan = given if name in (AWAITED, *ORDERS) else choose(name, place, profile, run)
        with ExitStack() as stack:
            if name in ORDERS:
                stack.enter_context(patch.object(loop, "Schedules", partial(in_order, name, plan)))
            for module in (timing, trainer):
                stack.enter_context(patch.object(module, "make_executor", made))
                stack.enter_context(patch.object(module, "compile_and_time", timed))
            trainer.Trainer(run, plan=plan, profile=profile, existing="overwrite").fit()
        if place.peers.is_hub:
            seconds = calibrated[name]
            steps_run = read_metrics(run.run_dir)[WARMUP:]
            rows[name] = {"plan": plan, "steps": steps_run, "efficiency": [
                useful_share(plan, seconds, row) for row in steps_run
            ]}  # fmt: skip
            for module in rates:
                rates[module].append(rate(plan, seconds, module))
        else:
            rows[name] = {"plan": plan}
    if place.peers.is_hub:
        useful_s = work_s(run, source, {m: min(r) for m, r in rates.items()})
        out.write_text(json.dumps({n: summary(r, useful_s) for n, r in rows.items()}))


def in_order(name: str, plan, peers, worker):
    """Return a run's schedules with their tasks in one of `ORDERS`."""
    from dflop_jax.pipeline.order import order_tasks, step_graph
    from dflop_jax.train.feed import Schedules

    segments = [s.name for s in plan.segments]

    class Ordered:
        def get(self, step: int):
            schedule, wait_s = worker.get(step)
            if name == ORDERS[0]:  # the runtime makes it
                return replace(schedule, order=()), wait_s
            graph = step_graph(plan, schedule.groups, segments)
            seconds = partial(worker._prices.prices.task_s, plan, schedule)
            order = order_tasks(plan, graph, schedule.groups, seconds)
            return replace(schedule, order=order), wait_s

    return Schedules(peers, worker and Ordered())


def choose(name: str, place, profile, run: Config):
    """Return the best plan of a policy; the blind one's two variants by what its submeshes may
    be."""
    from dflop_jax.plan.search import search_plan

    size = {"blind pipeline": 1, "blind data": 2}.get(name)
    return search_plan(
        profile.model,
        profile.data,
        n_devices=len(place.devices),
        global_batch=run.train.global_batch,
        config=run.plan,
        allowed=lambda m: size in (None, m.n_devices),
    ).plan


def useful_share(plan, seconds, row) -> float:
    """Share of a step's time on both cores that its programs take alone for what is no padding."""
    useful_s = 0.0
    for program, took_s in seconds.items():
        segment = plan.segment(program.segment)
        cores = plan.submesh(segment.submesh).n_devices
        runs = row["groups"].get(f"{segment.module}:{program.shape.name}", 0)
        useful_s += took_s * cores * runs * (1 - row["padding_fraction"][segment.module])
    return useful_s / 2 / row["step_s"]


def rate(plan, seconds, module: str) -> float:
    """Least device-seconds per token of a module, over its shapes in a plan."""
    names = [s.name for s in plan.segments_of(module)]
    mesh = plan.submesh(plan.segments_of(module)[0].submesh)
    rates = []
    for shape in plan.shapes(module):
        took_s = sum(s for p, s in seconds.items() if p.segment in names and p.shape == shape)
        tokens = mesh.data * shape.size * plan.group_size
        rates.append(took_s * mesh.n_devices / tokens)
    return min(rates)


def work_s(run: Config, source, rates: dict[str, float]) -> float:
    """Mean seconds of a batch's tokens at these rates, on one core."""
    from dflop_jax.data import Loader

    loader = Loader(source, global_batch=run.train.global_batch, seed=run.data.seed)
    steps = range(WARMUP, run.train.steps)
    loads = [load for step in steps for load in loader.loads(step)]
    return sum(load.tokens(m) * r for load in loads for m, r in rates.items()) / len(steps)


def summary(row: dict, useful_s: float) -> dict:
    plan, steps = row["plan"], row["steps"]
    step_s = [r["step_s"] for r in steps]
    return {
        "plan": " ".join(
            f"{m.name}@{m.first} {m.stage}x{m.data}x{m.model}" for m in plan.submeshes
        ),
        "predicted_s": plan.predicted.makespan_s,
        "step_s": statistics.median(step_s),
        "spread_s": [min(step_s), max(step_s)],
        "padding": {m: statistics.mean(r["padding_fraction"][m] for r in steps)
                    for m in plan.modules},
        "efficiency": statistics.median(row["efficiency"]),
        "best_rate": useful_s / 2 / statistics.median(step_s),
        "losses": [r["loss"] for r in steps],
    }  # fmt: skip


# ---- the one that starts them ----


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the numbers")
    parser.add_argument("--steps", type=int, default=12, help="steps of each run (default 12)")
    parser.add_argument("--batch", type=int, default=256, help="samples of a step (default 256)")
    parser.add_argument(
        "--size", default="tiny+tiny-short", help="of the model; nano for a quick look"
    )
    parser.add_argument("--worker", metavar="FILE", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps <= WARMUP:
        parser.error(f"--steps must be above {WARMUP}, which only warm up")
    if args.worker:
        measure(args.steps, args.batch, args.size, args.worker)
        return 0
    from dflop_jax.cluster.launch import launch

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = ["python", __file__, "--steps", str(args.steps), "--size", args.size]
        command += ["--batch", str(args.batch), "--worker", str(out)]
        code = launch(command, 2, devices_per_process=1, pin=True).exit_code
        if code:
            return code
        rows = json.loads(out.read_text())
    show(rows)
    if args.json:
        args.json.write_text(json.dumps(result(rows), indent=1))
    return 0


def result(rows: dict[str, dict]) -> dict:
    policies = {n: {k: rows[n][k] for k in ("step_s", "efficiency", "best_rate")} for n in POLICIES}
    policies["auto"] = policies[min(("dflop", "orch"), key=lambda n: rows[n]["predicted_s"])]
    ratio = rows[AWAITED]["step_s"] / rows["dflop"]["step_s"]
    orders = {n.split()[0]: {k: rows[n][k] for k in ("step_s", "spread_s")} for n in ORDERS}
    return {"async_over_awaited": ratio, "policies": policies, "orders": orders}


def show(rows: dict[str, dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    from dflop_jax.report.compare import compare

    console = Console(width=140)
    figures = result(rows)
    table = Table("policy", "plan", "step ms (min - max)", "padded tokens %", "efficiency",
                  "best rate", title="two processes, a core each")  # fmt: skip
    for name in (*POLICIES, *ORDERS):
        r = rows[name]
        low, high = r["spread_s"]
        table.add_row(
            name,
            r["plan"],
            f"{1e3 * r['step_s']:.0f} ({1e3 * low:.0f} - {1e3 * high:.0f})",
            ", ".join(f"{100 * p:.1f}" for p in r["padding"].values()),
            f"{r['efficiency']:.3f}",
            f"{r['best_rate']:.3f}",
        )
    console.print(table)
    chosen = min(("dflop", "orch"), key=lambda n: rows[n]["predicted_s"])
    best_blind = min(BLIND, key=lambda n: rows[n]["step_s"])
    step_s = rows[chosen]["step_s"]
    console.print(
        f"asynchronous over awaited dispatch (dflop): {figures['async_over_awaited']:.2f} x\n"
        f"order by prices over the textbook's (dflop): "
        f"{figures['orders']['priced']['step_s'] / figures['orders']['textbook']['step_s']:.3f}\n"
        f"the planner chooses {chosen}: {rows['blind pipeline']['step_s'] / step_s:.2f} x the "
        f"blind pipeline, {rows[best_blind]['step_s'] / step_s:.2f} x the best blind variant "
        f"({best_blind})"
    )
    picture = RUNS / "compare.png"
    compare([RUNS / n.replace(" ", "_") for n in POLICIES], picture)
    console.print(f"timelines under one time axis: {picture}")


if __name__ == "__main__":
    sys.exit(main())
