"""Trains a model under a plan: profile -> plan -> compile -> calibrate -> steps -> report."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from dflop_jax.config import Config
from dflop_jax.data import Loader
from dflop_jax.pipeline.executor import Executor
from dflop_jax.pipeline.step import StepHandle
from dflop_jax.profile.fit import CostModel
from dflop_jax.records import Plan, Profile, Task
from dflop_jax.report.progress import Progress
from dflop_jax.report.run_folder import RunFolder
from dflop_jax.report.summary import write_summary
from dflop_jax.schedule.online import schedule_batch
from dflop_jax.schedule.worker import ScheduleWorker
from dflop_jax.sim.pipeline import simulate_schedules
from dflop_jax.sim.predict import bucket_costs
from dflop_jax.train.compiles import CompileCounter
from dflop_jax.train.correct import Corrector
from dflop_jax.train.evaluate import Evaluation, Evaluator
from dflop_jax.train.feed import Batch, feed
from dflop_jax.train.optimizer import make_optimizer
from dflop_jax.train.prepare import make_plan, make_profile, set_up
from dflop_jax.train.step_log import StepLog


@dataclass(frozen=True)
class FitResult:
    """How a run ended; `evaluation` is that of the last step, None without held-out samples."""

    run_dir: Path
    losses: tuple[float, ...]
    evaluation: Evaluation | None
    compiles_after_warmup: int


class Trainer:
    """A run of a configuration.

    Args:
      config: what to train.
      plan, profile: made from the configuration when not given.
      existing: what to do with another run in the folder: "error" or "overwrite".

    Raises:
      ValueError: the model cannot be built, the data cannot be read, too few devices exist, or
        the given plan is for another model.
    """

    def __init__(
        self,
        config: Config,
        *,
        plan: Plan | None = None,
        profile: Profile | None = None,
        existing: Literal["error", "overwrite"] = "error",
    ):
        self.config, self._existing = config, existing
        self.setup = set_up(config)
        self.source = self.setup.source()
        self.profile = profile
        self._executor = self._make_executor(plan) if plan else None

    def _make_executor(self, plan: Plan) -> Executor:
        train = self.config.train
        return Executor(
            self.setup.model,
            plan,
            make_optimizer(train),
            devices=self.setup.devices,
            clip_norm=train.clip_norm,
            freeze=train.freeze,
            remat_layers=train.remat_layers,
            evaluates=train.eval_samples > 0,
        )

    def fit(self) -> FitResult:
        """Train to the last step and write the run folder.

        Raises:
          ValueError: the folder holds another run, no plan fits, or too many samples are bad.
        """
        with ExitStack() as stack:
            folder = stack.enter_context(RunFolder(self.config.run_dir, existing=self._existing))
            folder.write_config(self.config)
            progress = stack.enter_context(Progress(self.config.train.steps))
            ex = self._prepare(folder, progress)
            stack.callback(ex.close)
            # Prices come from the saved profile, not from this run's clock: the same seed gives
            # the same schedules, so the same losses bit for bit.
            assert self.profile is not None
            seconds = CostModel(self.profile.model).task_seconds(ex.plan)
            measured = self._warm_up(ex, progress)
            folder.write_plan(self._predicted(ex, seconds, measured))
            return self._train(stack, folder, progress, ex, seconds)

    # ---- before the first step ----

    def _prepare(self, folder: RunFolder, progress: Progress) -> Executor:
        if self.profile is None:
            progress.log("profiling model and data")
            self.profile = make_profile(self.setup, self.source)
        folder.write_profile(self.profile)
        if self._executor is None:
            progress.log("planning")
            plan = make_plan(self.setup, self.profile).plan
            self._executor = self._make_executor(plan)
        plan = self._executor.plan
        meshes = ", ".join(f"{m.name} {m.stage}x{m.data}x{m.model}" for m in plan.submeshes)
        progress.log(
            f"plan {plan.policy}: {meshes} (stage x data x model); buckets "
            + ", ".join(b.name for b in plan.buckets)
        )
        return self._executor

    def _warm_up(self, ex: Executor, progress: Progress) -> dict[Task, float]:
        start = time.perf_counter()
        ex.init(self.config.train.seed)
        n = ex.compile()
        seconds = ex.calibrate()
        progress.log(f"compiled {n} programs in {time.perf_counter() - start:.1f} s")
        return seconds

    def _predicted(
        self, ex: Executor, seconds: Mapping[Task, float], measured: Mapping[Task, float]
    ) -> Plan:
        """The plan, its predictions made anew from the times of the compiled programs."""
        assert self.profile is not None
        costs = bucket_costs(ex.plan, seconds, ex.trainable)
        shapes, n = self.profile.data.shapes, self.config.train.global_batch
        batches = [[shapes[(k * n + i) % len(shapes)] for i in range(n)] for k in range(4)]
        schedules = [schedule_batch(b, ex.plan, costs, step=k) for k, b in enumerate(batches)]
        concurrency = self.profile.model.concurrency
        trace = simulate_schedules(
            ex.plan, schedules, measured, ex.trainable, concurrency=concurrency
        )
        predicted = {k: v for k, v in ex.plan.predicted.items() if k.startswith("peak_bytes")}
        predicted["makespan_s"] = trace.makespan_s / len(batches)
        predicted |= {f"busy_fraction.{m}": v for m, v in trace.busy_fraction().items()}
        return replace(ex.plan, predicted=predicted)

    # ---- steps ----

    def _train(
        self,
        stack: ExitStack,
        folder: RunFolder,
        progress: Progress,
        ex: Executor,
        seconds: Mapping[Task, float],
    ) -> FitResult:
        config = self.config
        costs = bucket_costs(ex.plan, seconds, ex.trainable)
        loader = Loader(
            self.source,
            global_batch=config.train.global_batch,
            seed=config.data.seed,
            workers=config.data.workers,
            prefetch=config.data.prefetch,
            max_bad_fraction=config.data.max_bad_fraction,
        )
        worker = stack.enter_context(
            ScheduleWorker(
                loader.shapes,
                ex.plan,
                costs,
                stop_step=config.train.steps,
                ahead=config.schedule.ahead,
                time_limit_s=config.schedule.time_limit_s,
            )
        )
        evaluator = None
        if config.train.eval_samples:
            evaluator = Evaluator(config, self.setup.source("eval"), ex, costs, folder.path)
        counter = CompileCounter()
        stack.callback(counter.close)
        steps = StepLog(config.train, ex.plan, folder, progress, counter)
        batches = stack.enter_context(closing(feed(loader, worker, ex.plan, self.source.spec, 0)))
        corrector = None
        if config.schedule.correct:
            corrector = Corrector(ex.plan, seconds, ex.trainable, worker, progress)
        pending: tuple[StepHandle, Batch, float] | None = None

        def finish() -> None:
            nonlocal pending
            if pending is None:
                return
            handle, batch, wait_s = pending
            pending = None
            trace = steps.finish(handle, batch, wait_s)
            if corrector:
                corrector.after_step(batch.step, trace, batch.schedule, loader.shapes(batch.step))

        for step in range(config.train.steps):
            batch, wait_s = next(batches)
            handle = ex.run_step(step, batch.groups, 1.0 / max(batch.supervised_tokens, 1))
            # The step before is awaited only now, so that the devices never wait for the host.
            finish()
            pending = (handle, batch, wait_s)
            if evaluator and self._evaluates_after(step):
                finish()
                evaluator.run(step + 1, progress)
                steps.pause()
        finish()
        evaluation = evaluator.run(config.train.steps, progress) if evaluator else None
        steps.write_trace()
        write_summary(folder.path)
        return FitResult(folder.path, tuple(steps.losses), evaluation, sum(steps.compiles[1:]))

    def _evaluates_after(self, step: int) -> bool:
        train = self.config.train
        due = train.eval_every and (step + 1) % train.eval_every == 0
        return bool(due) and step + 1 < train.steps
