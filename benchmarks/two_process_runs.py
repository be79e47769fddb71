"""What each of the two processes of `benchmarks/two_process.py` does: train as its rows say."""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

from json_rows import shortened

from dflop_jax import CheckpointConfig, Config, DataConfig, ModelConfig, PlanConfig, TrainConfig
from dflop_jax.cluster.peers import Peers
from dflop_jax.config import Policy, Remat
from dflop_jax.data import Loader, Source
from dflop_jax.pipeline.executor import Executor
from dflop_jax.plan.search import search_plan
from dflop_jax.record_files import load
from dflop_jax.records import Plan, Profile, ProgramId, Schedule
from dflop_jax.report.run_folder import PLAN, read_metrics
from dflop_jax.schedule.worker import ScheduleWorker
from dflop_jax.tasks.graph import step_graph
from dflop_jax.tasks.order import order_tasks
from dflop_jax.train import choice, loop, prepare, profiling, timing, trainer
from dflop_jax.train.feed import Schedules
from dflop_jax.train.prepare import Workplace
from dflop_jax.train.timing import Timed

RUNS = Path("runs/two_process")
WARMUP = 4  # steps left out of every median
BLIND = ("blind pipeline", "blind data")
SEARCHED = ("dflop", "orch", "dip")
POLICIES = (*BLIND, *SEARCHED)
AWAITED = "awaited"
ORDERS = ("textbook order", "priced order")
# What backward computes again.
PAIR: dict[str, Remat] = {"kept": "none", "recomputed": "segment"}
PAIR_SIZE = "tiny-deep+tiny-short"
FACTORY = "models.llava:build"
DATA = DataConfig(n_samples=8192)
NATIVE = DataConfig(n_samples=8192, min_pixels=1024, max_frames=16, max_tokens=256)  # of others
LOOP = "loop"
OWN_PLAN = (*SEARCHED, "kept")  # the others train by the plan of one of these, or a blind one
ROWS = (*POLICIES, LOOP, AWAITED, *ORDERS, *PAIR)
Row = dict[str, Any]  # see `summary`
Seconds = Mapping[ProgramId, float]


@dataclass(frozen=True)
class Options:
    """What all rows share."""

    steps: int
    batch: int
    size: str
    pair_size: str = PAIR_SIZE
    factory: str = FACTORY

    def config(self, name: str) -> Config:
        policies = {**{n: n.split()[0] for n in POLICIES}, LOOP: "orch"}
        policy = cast(Policy, policies.get(name, "dflop"))
        return Config(
            model=self.model(name),
            data=DATA if self.factory == FACTORY else NATIVE,
            plan=PlanConfig(policy=policy, max_model=1, max_stage=2, max_microbatches=16),
            train=TrainConfig(
                steps=self.steps, global_batch=self.batch, remat=PAIR.get(name, "auto")
            ),
            checkpoint=CheckpointConfig(every_s=0),
            run_dir=str(run_folder(name)),
        )

    def model(self, name: str) -> ModelConfig:
        """The model that a row trains."""
        if name in PAIR:
            return ModelConfig(size=self.pair_size)
        return ModelConfig(factory=self.factory, size=self.size)


def run_folder(name: str) -> Path:
    return RUNS / name.replace(" ", "_")


@dataclass(frozen=True)
class Trained:
    """A run of a row: its plan, the least seconds of the plan's programs (of all processes, on
    process 0), and what process 0 tells of it."""

    plan: Plan
    seconds: Seconds
    row: Row = field(default_factory=dict)


def measure(
    names: Sequence[str], options: Options, write: Callable[[dict[str, Row]], None]
) -> None:
    """Train as the rows say; process 0 prints every row and writes all so far."""
    bench, rows = Bench(options), {}
    for name in names:
        rows[name] = bench.train(name).row
        if bench.is_hub:
            print(f"{name}: {shortened(rows[name])}", file=sys.stderr, flush=True)
            write(rows)
    if bench.is_hub:
        bench.compare_rates()
        write(rows)
    # Who ends before the other is taken for dead.
    bench.place("dflop").peers.barrier("written")


class Bench:
    """Runs of rows, one after another, in this process."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.trained: dict[str, Trained] = {}
        self.place = cache(lambda like: prepare.set_up(options.config(like)))
        self.profile = cache(self._profile)
        self.planned = cache(self._planned)

    @cached_property
    def is_hub(self) -> bool:
        return self.place("dflop").peers.is_hub

    def train(self, name: str) -> Trained:
        """Train as a row says, by the plan that it names."""
        config, plan = self.options.config(name), self._given_plan(name)
        timings = Timings(self.profile(model_of(name)))
        with ExitStack() as stack:
            stack.enter_context(timings.taken())
            if name == AWAITED:
                stack.enter_context(every_task_awaited())
            if name in ORDERS:
                assert plan, "these rows are given one"
                stack.enter_context(tasks_ordered(name, plan, timings))
            training = trainer.Trainer(
                config, plan=plan, profile=timings.profile, existing="overwrite"
            )
            training.fit()
        # Both processes find it there: they share this machine.
        plan = load(Plan, run_folder(name) / PLAN)
        seconds = least_seconds(timings.of(plan))
        row = {}
        if self.is_hub:
            steps = read_metrics(config.run_dir)[WARMUP:]
            row = summary(plan, steps, [useful_share(plan, seconds, step) for step in steps])
        self.trained[name] = Trained(plan, seconds, row)
        return self.trained[name]

    def compare_rates(self) -> None:
        """Give every row of the common model its efficiency at the least seconds of any policy's
        programs; process 0 only."""
        policies = [t for name, t in self.trained.items() if name in POLICIES]
        if not policies:
            return
        rates = {
            module: min(rate(t.plan, t.seconds, module) for t in policies)
            for module in self.profile("dflop").model.n_layers
        }
        source = self.place("dflop").source()
        useful_s = work_s(self.options.config("dflop"), source, rates)
        for name, trained in self.trained.items():
            if name not in PAIR:
                trained.row["best_rate"] = useful_s / 2 / trained.row["step_s"]
        if {"orch", LOOP} <= self.trained.keys():
            loop, whole = self.trained[LOOP], self.trained["orch"]
            (llm,) = loop.plan.layout.segments_of("llm")
            size = loop.plan.layout.group_size
            loop.row["over_needed"] = {
                "planned": llm.ticks(2, size) / llm.ticks(1, size),
                "measured": rate(loop.plan, loop.seconds, "llm")
                / rate(whole.plan, whole.seconds, "llm"),
            }

    def _profile(self, like: str) -> Profile:
        place = self.place(like)
        return profiling.make_profile(place, place.source())

    def _given_plan(self, name: str) -> Plan | None:
        """The plan that a row trains by; None: it searches its own, as any run."""
        if name in OWN_PLAN:
            return None
        like = name if name in (*BLIND, LOOP) else model_of(name)
        return self.trained[like].plan if like in self.trained else self.planned(like)

    def _planned(self, like: str) -> Plan:
        """The best plan of a policy; the blind one's two variants by what its submeshes may be, and
        orch's whose LLM is a loop of two stages."""
        model, config = model_of(like), self.options.config(like)
        size = {"blind pipeline": 1, "blind data": 2}.get(like)
        return search_plan(
            self.profile(model).model,
            self.profile(model).data,
            n_devices=len(self.place(model).devices),
            global_batch=config.train.global_batch,
            config=config.plan,
            remat=config.train.remat,
            allowed=lambda m: (
                size in (None, m.n_devices)
                and not (like == LOOP and m.name == "llm" and m.stage == 1)
            ),
        ).plan


def model_of(name: str) -> str:
    """The first row that trains the same model."""
    return next(iter(PAIR)) if name in PAIR else "dflop"


class Timings:
    """What is measured of the programs of the plans that a run tries and of the one it takes."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._timed: list[Timed] = []

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Note what runs measure meanwhile."""
        compile_and_time = timing.compile_and_time

        def noted(place: Workplace, ex: Executor, **how: Any) -> Timed:
            self._timed.append(compile_and_time(place, ex, **how))
            return self._timed[-1]

        with (
            patch.object(timing, "compile_and_time", noted),
            patch.object(trainer, "compile_and_time", noted),
        ):
            yield

    def of(self, plan: Plan) -> Timed:
        """What was measured of a plan, last."""
        alike = (t for t in reversed(self._timed) if t.executor.plan.layout == plan.layout)
        return next(alike)


@contextmanager
def every_task_awaited() -> Iterator[None]:
    """Runs meanwhile await every task, on both processes, before the next is dispatched."""
    make_executor, tasks = timing.make_executor, itertools.count()

    def made(place: Workplace, plan: Plan) -> Executor:
        ex = make_executor(place, plan)
        ex.one_at_a_time = True
        ex.after_task = lambda: place.peers.barrier(f"awaited/{next(tasks)}")
        return ex

    with (
        patch.object(timing, "make_executor", made),
        patch.object(trainer, "make_executor", made),
        patch.object(choice, "make_executor", made),
    ):
        yield


@contextmanager
def tasks_ordered(name: str, plan: Plan, timings: Timings) -> Iterator[None]:
    """Runs of a plan meanwhile have their schedules' tasks in one of `ORDERS`."""
    prices = cache(lambda: timings.of(plan).prices(timings.profile.model))

    def made(peers: Peers, worker: ScheduleWorker | None) -> Schedules:
        return Schedules(peers, cast(ScheduleWorker, Ordered(worker, order)) if worker else None)

    def order(schedule: Schedule) -> Schedule:
        if name == ORDERS[0]:  # the runtime makes it
            return replace(schedule, order=())
        seconds = partial(prices().task_s, plan.layout, schedule)
        graph = step_graph(plan.layout, schedule.groups, [s.name for s in plan.layout.segments])
        return replace(schedule, order=order_tasks(plan, graph, schedule.groups, seconds))

    with patch.object(loop, "Schedules", made):
        yield


@dataclass(frozen=True)
class Ordered:
    """A worker's schedules, their tasks in another order."""

    worker: ScheduleWorker
    order: Callable[[Schedule], Schedule]

    def get(self, step: int) -> tuple[Schedule, float]:
        schedule, wait_s = self.worker.get(step)
        return self.order(schedule), wait_s


def least_seconds(timed: Timed) -> Seconds:
    """Of every program the least that it took, on the process where that is most."""
    least: dict[ProgramId, float] = {}
    for program, runs in (row for part in timed.parts for row in part.took.items()):
        if isinstance(program, ProgramId):
            least[program] = max(min(runs), least.get(program, 0.0))
    return least


def useful_share(plan: Plan, seconds: Seconds, row: Row) -> float:
    """Share of a step's time on both cores that its programs take alone for what is no padding."""
    useful_s = 0.0
    for program, took_s in seconds.items():
        segment = plan.layout.segment(program.segment)
        cores = plan.layout.submesh(segment.submesh).n_devices
        runs = sum(n for label, n in row["groups"].items() if ran(program, segment.module, label))
        useful_s += took_s * cores * runs * (1 - row["padding_fraction"][segment.module])
    return useful_s / 2 / row["step_s"]


def ran(program: ProgramId, module: str, label: str) -> bool:
    """Whether groups of a label (see `dflop_jax.report.trace`) ran a program."""
    shape, *keeping = label.split(" +")
    alike = shape == f"{module}:{program.shape.name}"
    return alike and (program.segment in keeping) == program.remat_less


def rate(plan: Plan, seconds: Seconds, module: str) -> float:
    """Least device-seconds per token of a module, over its shapes in a plan."""
    names = [s.name for s in plan.layout.segments_of(module)]
    mesh = plan.layout.submesh(plan.layout.segments_of(module)[0].submesh)
    rates = []
    for shape in plan.layout.shapes(module):
        took_s = sum(s for p, s in seconds.items() if p.segment in names and p.shape == shape)
        tokens = mesh.data * shape.size * plan.layout.group_size
        rates.append(took_s * mesh.n_devices / tokens)
    return min(rates)


def work_s(run: Config, source: Source, rates: dict[str, float]) -> float:
    """Mean seconds of a batch's tokens at these rates, on one core."""
    loader = Loader(source, global_batch=run.train.global_batch, seed=run.data.seed)
    steps = range(WARMUP, run.train.steps)
    loads = [load for step in steps for load in loader.loads(step)]
    return sum(load.tokens(m) * r for load in loads for m, r in rates.items()) / len(steps)


def summary(plan: Plan, steps: Sequence[Row], efficiency: Sequence[float]) -> Row:
    step_s = [r["step_s"] for r in steps]
    return {
        "plan": " ".join(
            f"{m.name}@{m.first} {m.stage}x{m.data}x{m.model}" for m in plan.layout.submeshes
        ),
        "predicted_s": plan.predicted.makespan_s,
        "step_s": statistics.median(step_s),
        "spread_s": [min(step_s), max(step_s)],
        "scheduled_s": statistics.median(r["makespan_s"] for r in steps),
        "padding": {m: statistics.mean(r["padding_fraction"][m] for r in steps)
                    for m in plan.layout.modules},
        "efficiency": statistics.median(efficiency),
        "losses": [r["loss"] for r in steps],
    }  # fmt: skip
