"""What each of the two processes of `benchmarks/two_process.py` does: train as its rows say."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

from json_rows import shortened

from dflop_jax import CheckpointConfig, Config, DataConfig, ModelConfig, PlanConfig, TrainConfig
from dflop_jax.config import Policy
from dflop_jax.plan.search import search_plan
from dflop_jax.records import Plan, Profile, ProgramId
from dflop_jax.records.files import load
from dflop_jax.report.run_folder import PLAN, read_metrics
from dflop_jax.runtime.calibration import runs_by_key
from dflop_jax.runtime.executor import Executor
from dflop_jax.train import plan_timer, profiling, run_context, trainer
from dflop_jax.train.plan_timer import TimedPlan
from dflop_jax.train.run_context import RunContext

RUNS = Path("runs/two_process")
WARMUP = 4  # steps left out of every median
BLIND = ("blind pipeline", "blind data")
SEARCHED = ("dflop", "orch", "dip")
POLICIES = (*BLIND, *SEARCHED)
FACTORY = "models.llava:build"
DATA = DataConfig(n_samples=8192)
NATIVE = DataConfig(n_samples=8192, min_pixels=1024, max_frames=16, max_tokens=256)  # of others
LOOP = "loop"
ROWS = (*POLICIES, LOOP)
Row = dict[str, Any]  # see `summary`
Seconds = Mapping[ProgramId, float]


@dataclass(frozen=True)
class Options:
    """What all rows share."""

    steps: int
    batch: int
    size: str
    factory: str = FACTORY

    def config(self, name: str) -> Config:
        policies = {**{n: n.split()[0] for n in POLICIES}, LOOP: "orch"}
        policy = cast(Policy, policies.get(name, "dflop"))
        return Config(
            model=ModelConfig(factory=self.factory, size=self.size),
            data=DATA if self.factory == FACTORY else NATIVE,
            plan=PlanConfig(policy=policy, max_model=1, max_stage=2, max_microbatches=16),
            train=TrainConfig(steps=self.steps, global_batch=self.batch),
            checkpoint=CheckpointConfig(every_s=0),
            run_dir=str(run_folder(name)),
        )


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
        if bench.is_primary:
            print(f"{name}: {shortened(rows[name])}", file=sys.stderr, flush=True)
            write(rows)
    # Who ends before the other is taken for dead.
    bench.place.peers.barrier("written")


class Bench:
    """Runs of rows, one after another, in this process."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.trained: dict[str, Trained] = {}
        self.planned = cache(self._planned)

    @cached_property
    def place(self) -> RunContext:
        return run_context.make_run_context(self.options.config("dflop"))

    @cached_property
    def profile(self) -> Profile:
        return profiling.make_profile(self.place, self.place.source())

    @property
    def is_primary(self) -> bool:
        return self.place.peers.is_primary

    def train(self, name: str) -> Trained:
        """Train as a row says, by the plan that it names, or by one that the run searches."""
        config, plan = self.options.config(name), None
        if name not in SEARCHED:
            plan = self.planned(name)
        timings = Timings(self.profile)
        with timings.taken():
            training = trainer.Trainer(
                config, plan=plan, profile=timings.profile, existing="overwrite"
            )
            training.fit()
        # Both processes find it there: they share this machine.
        plan = load(Plan, run_folder(name) / PLAN)
        seconds = least_seconds(timings.of(plan))
        row = {}
        if self.is_primary:
            steps = read_metrics(config.run_dir)[WARMUP:]
            row = summary(plan, steps, [useful_share(plan, seconds, step) for step in steps])
        self.trained[name] = Trained(plan, seconds, row)
        return self.trained[name]

    def _planned(self, like: str) -> Plan:
        """The best plan of the blind policy's two variants, by what its submeshes may be, and of
        orch's whose LLM is a loop of two stages."""
        config = self.options.config(like)
        size = {"blind pipeline": 1, "blind data": 2}.get(like)
        return search_plan(
            self.profile.model,
            self.profile.data,
            n_devices=len(self.place.devices),
            global_batch=config.train.global_batch,
            config=config.plan,
            remat=config.train.remat,
            allowed=lambda m: (
                size in (None, m.n_devices)
                and not (like == LOOP and m.name == "llm" and m.stage == 1)
            ),
        ).plan


class Timings:
    """What is measured of the programs of the plans that a run tries and of the one it takes."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._timed: list[TimedPlan] = []

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Note what runs measure meanwhile."""
        compile_and_time = plan_timer.compile_and_time

        def noted(place: RunContext, ex: Executor, **how: Any) -> TimedPlan:
            self._timed.append(compile_and_time(place, ex, **how))
            return self._timed[-1]

        with (
            patch.object(plan_timer, "compile_and_time", noted),
        ):
            yield

    def of(self, plan: Plan) -> TimedPlan:
        """What was measured of a plan, last."""
        alike = (t for t in reversed(self._timed) if t.executor.plan.layout == plan.layout)
        return next(alike)


def least_seconds(timed: TimedPlan) -> Seconds:
    """Of every program the least that it took, on the process where that is most."""
    least: dict[ProgramId, float] = {}
    for program, runs in (row for part in timed.calibrations for row in runs_by_key(part).items()):
        seconds = [r.device_s for r in runs if r.device_s is not None]
        if isinstance(program, ProgramId) and seconds:
            least[program] = max(min(seconds), least.get(program, 0.0))
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
