"""Two processes pinned to a core each: what asynchronous dispatch and the planner's choice bring.

Command:  python benchmarks/two_process.py [--json FILE] [--steps N] [--rows NAME ...]
Minutes:  about 12 on 2 cores with nothing else running
Expected: dispatch without waiting beats awaiting every task; `auto` beats both blind variants; the
          order by prices is no slower than the textbook's; kept activations are at least 1.15 times
          as fast as recomputed ones.

Real wall time: each process computes on a core of its own. All runs train the same model on the
same batches, and plan as any run does: the programs of a few plans are timed. Policies:
  blind pipeline   encoder on one process, LLM on the other, arrival order, padded
  blind data       the whole model on both, arrival order, padded: what most would do
  dflop            encoder and LLM apart, balanced microbatches in searched buckets
  orch             both modules on both processes, each balanced over them
  dip              half of both modules on each process, several encoder groups a microbatch
The planner's choice (`auto`) is the one that it predicts to be the fastest of the last three.
`dflop` runs three times more: with every task awaited by both processes before the next is
dispatched, and with its schedules' tasks in either order that the scheduler chooses between: list
scheduling by textbook durations (a backward is two forwards), and by the prices.
`kept` and `recomputed` train another model, whose encoder does half of the work, encoder and LLM
apart by one plan: backward is given what forward computed, or computes it again.

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
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

from dflop_jax import CheckpointConfig, Config, DataConfig, ModelConfig, PlanConfig, TrainConfig
from dflop_jax.records import Plan

RUNS = Path("runs/two_process")
WARMUP = 4  # steps left out of every median
BLIND = ("blind pipeline", "blind data")
SEARCHED = ("dflop", "orch", "dip")
POLICIES = (*BLIND, *SEARCHED)
AWAITED = "awaited"
ORDERS = ("textbook order", "priced order")
PAIR = {"kept": "none", "recomputed": "segment"}  # what backward computes again
PAIR_SIZE = "tiny-deep+tiny-short"
OWN_PLAN = (*SEARCHED, "kept")  # the others train by the plan of one of these, or a blind one
ROWS = (*POLICIES, AWAITED, *ORDERS, *PAIR)


def config(name: str, steps: int, batch: int, size: str) -> Config:
    policy = name.split()[0] if name in POLICIES else "dflop"
    return Config(
        model=ModelConfig(size=PAIR_SIZE if name in PAIR else size),
        data=DataConfig(n_samples=8192),
        plan=PlanConfig(policy=policy, max_model=1, max_stage=2, max_microbatches=16),
        train=TrainConfig(steps=steps, global_batch=batch, remat=PAIR.get(name, "auto")),
        checkpoint=CheckpointConfig(every=0),
        run_dir=str(RUNS / name.replace(" ", "_")),
    )


# ---- in each of the two processes ----


def measure(names: Sequence[str], steps: int, batch: int, size: str, out: Path) -> None:
    """Train as the rows say; process 0 writes what was measured."""
    from dflop_jax.report.run_folder import read_metrics
    from dflop_jax.train import loop, prepare, profiling, timing, trainer

    make_executor, compile_and_time = timing.make_executor, timing.compile_and_time
    took: dict[int, dict] = {}  # by executor: finalists are timed too
    calibrated: dict[str, dict] = {}
    plans: dict[str, Plan] = {}

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
        took[id(ex)] = least_seconds(result)
        return result

    @cache
    def prepared(like: str):
        """Where a model trains, and its profile."""
        place = prepare.set_up(config(like, steps, batch, size))
        return place, profiling.make_profile(place, place.source())

    @cache
    def planned(like: str):
        return choose(like, *prepared(model_of(like)), config(like, steps, batch, size))

    def given(name: str):
        """The plan that a row trains by; None: it searches its own, as any run."""
        like = name if name in BLIND else model_of(name)
        return None if name in OWN_PLAN else plans.get(like) or planned(like)

    rows = {}
    for name in names:
        run = config(name, steps, batch, size)
        place, profile = prepared(model_of(name))
        plan = given(name)
        with ExitStack() as stack:
            if name in ORDERS:
                stack.enter_context(patch.object(loop, "Schedules", partial(in_order, name, plan)))
            for module in (timing, trainer):
                stack.enter_context(patch.object(module, "make_executor", made))
                stack.enter_context(patch.object(module, "compile_and_time", timed))
            training = trainer.Trainer(run, plan=plan, profile=profile, existing="overwrite")
            training.fit()
        plans[name] = plan = training._executor.plan
        calibrated[name] = took[id(training._executor)]
        if place.peers.is_hub:
            steps_run = read_metrics(run.run_dir)[WARMUP:]
            share = partial(useful_share, plan, calibrated[name])
            rows[name] = summary(plan, steps_run, list(map(share, steps_run)))
    place, profile = prepared("dflop")
    trained = [name for name in names if name in POLICIES]
    if place.peers.is_hub and trained:
        rates = {
            module: min(rate(plans[n], calibrated[n], module) for n in trained)
            for module in profile.model.n_layers
        }
        useful_s = work_s(config("dflop", steps, batch, size), place.source(), rates)
        for name in names:
            if name not in PAIR:
                rows[name]["best_rate"] = useful_s / 2 / rows[name]["step_s"]
    if place.peers.is_hub:
        out.write_text(json.dumps(rows))
    place.peers.barrier("written")  # who ends before the other is taken for dead


def least_seconds(timed) -> dict:
    """Of every program the least that it took, on the process where that is most."""
    least: dict = {}
    for program, runs in (row for part in timed.parts for row in part.took.items()):
        least[program] = max(min(runs), least.get(program, 0.0))
    return least


def model_of(name: str) -> str:
    """The first row that trains the same model."""
    return next(iter(PAIR)) if name in PAIR else "dflop"


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
        remat=run.train.remat,
        allowed=lambda m: size in (None, m.n_devices),
    ).plan


def useful_share(plan, seconds, row) -> float:
    """Share of a step's time on both cores that its programs take alone for what is no padding."""
    useful_s = 0.0
    for program, took_s in seconds.items():
        segment = plan.segment(program.segment)
        cores = plan.submesh(segment.submesh).n_devices
        runs = sum(n for label, n in row["groups"].items() if ran(program, segment.module, label))
        useful_s += took_s * cores * runs * (1 - row["padding_fraction"][segment.module])
    return useful_s / 2 / row["step_s"]


def ran(program, module: str, label: str) -> bool:
    """Whether groups of a label (see `dflop_jax.report.trace`) ran a program."""
    shape, *keeping = label.split(" +")
    alike = shape == f"{module}:{program.shape.name}"
    return alike and (program.segment in keeping) == program.remat_less


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


def summary(plan, steps: list[dict], efficiency: list[float]) -> dict:
    step_s = [r["step_s"] for r in steps]
    return {
        "plan": " ".join(
            f"{m.name}@{m.first} {m.stage}x{m.data}x{m.model}" for m in plan.submeshes
        ),
        "predicted_s": plan.predicted.makespan_s,
        "step_s": statistics.median(step_s),
        "spread_s": [min(step_s), max(step_s)],
        "scheduled_s": statistics.median(r["makespan_s"] for r in steps),
        "padding": {m: statistics.mean(r["padding_fraction"][m] for r in steps)
                    for m in plan.modules},
        "efficiency": statistics.median(efficiency),
        "losses": [r["loss"] for r in steps],
    }  # fmt: skip


# ---- the one that starts them ----


def main() -> int:
    args = arguments()
    if args.worker:
        measure(args.rows, args.steps, args.batch, args.size, args.worker)
        return 0
    from dflop_jax.cluster.launch import launch

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = ["python", __file__, "--steps", str(args.steps), "--size", args.size]
        command += ["--batch", str(args.batch), "--worker", str(out), "--rows", *args.rows]
        code = launch(command, 2, devices_per_process=1, pin=True).exit_code
        if code:
            return code
        rows = json.loads(out.read_text())
    figures = result(rows)
    show(rows, figures)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the numbers")
    parser.add_argument("--steps", type=int, default=12, help="steps of each run (default 12)")
    parser.add_argument("--batch", type=int, default=256, help="samples of a step (default 256)")
    parser.add_argument(
        "--size", default="tiny+tiny-short", help="of the model; nano for a quick look"
    )
    parser.add_argument(
        "--rows", nargs="+", metavar="NAME", choices=ROWS, default=ROWS,
        help=f"only some of: {', '.join(ROWS)}",
    )  # fmt: skip
    parser.add_argument("--worker", metavar="FILE", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps <= WARMUP:
        parser.error(f"--steps must be above {WARMUP}, which only warm up")
    return args


def result(rows: dict[str, dict]) -> dict:
    """What is written of the rows that ran."""
    named = ("step_s", "efficiency", "best_rate")
    figures: dict = {
        "policies": {n: {k: rows[n][k] for k in named} for n in POLICIES if n in rows},
        "orders": {n.split()[0]: {k: rows[n][k] for k in ("step_s", "spread_s")}
                   for n in ORDERS if n in rows},
    }  # fmt: skip
    if set(SEARCHED) <= rows.keys():
        figures["policies"]["auto"] = figures["policies"][chosen(rows)]
    for key, slow, fast in (
        ("async_over_awaited", AWAITED, "dflop"),
        ("kept_over_recomputed", "recomputed", "kept"),
    ):
        if {slow, fast} <= rows.keys():
            figures[key] = rows[slow]["step_s"] / rows[fast]["step_s"]
    return figures


def chosen(rows: dict[str, dict]) -> str:
    """The planner's choice."""
    return min(SEARCHED, key=lambda n: rows[n]["predicted_s"])


def show(rows: dict[str, dict], figures: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    from dflop_jax.report.compare import compare

    console = Console(width=140)
    table = Table("row", "plan", "step ms (min - max)", "as scheduled", "padded tokens %",
                  "efficiency", "best rate", title="two processes, a core each")  # fmt: skip
    for name, r in rows.items():
        low, high = r["spread_s"]
        table.add_row(
            name,
            r["plan"],
            f"{1e3 * r['step_s']:.0f} ({1e3 * low:.0f} - {1e3 * high:.0f})",
            f"{1e3 * r['scheduled_s']:.0f}",
            ", ".join(f"{100 * p:.1f}" for p in r["padding"].values()),
            f"{r['efficiency']:.3f}",
            f"{r['best_rate']:.3f}" if "best_rate" in r else "",
        )
    console.print(table)
    for key, words in (
        ("async_over_awaited", "asynchronous over awaited dispatch (dflop)"),
        ("kept_over_recomputed", "kept over recomputed activations (encoder half of the work)"),
    ):
        if key in figures:
            console.print(f"{words}: {figures[key]:.2f} x")
    if set(ORDERS) <= rows.keys():
        textbook_s, priced_s = (rows[n]["step_s"] for n in ORDERS)
        console.print(f"order by prices over the textbook's (dflop): {priced_s / textbook_s:.3f}")
    if set(POLICIES) <= rows.keys():
        name = chosen(rows)
        best_blind = min(BLIND, key=lambda n: rows[n]["step_s"])
        step_s = rows[name]["step_s"]
        console.print(
            f"the planner chooses {name}: {rows['blind pipeline']['step_s'] / step_s:.2f} x the "
            f"blind pipeline, {rows[best_blind]['step_s'] / step_s:.2f} x the best blind variant "
            f"({best_blind})"
        )
        picture = RUNS / "compare.png"
        compare([RUNS / n.replace(" ", "_") for n in POLICIES], picture)
        console.print(f"timelines under one time axis: {picture}")


if __name__ == "__main__":
    sys.exit(main())
