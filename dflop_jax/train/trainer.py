"""Trains a model under a plan: profile -> plan -> compile -> calibrate -> steps -> report."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from dflop_jax.config import Config
from dflop_jax.data import Loader, make_source
from dflop_jax.pipeline.executor import Executor
from dflop_jax.pipeline.step import StepHandle, StepResult
from dflop_jax.records import Plan, Profile, Task, Trace
from dflop_jax.report.metrics import StepMetrics
from dflop_jax.report.progress import Progress
from dflop_jax.report.run_folder import RunFolder
from dflop_jax.report.summary import write_summary
from dflop_jax.schedule.costs import BucketCosts
from dflop_jax.schedule.online import schedule_batch
from dflop_jax.schedule.worker import ScheduleWorker
from dflop_jax.sim.pipeline import simulate_schedules
from dflop_jax.sim.predict import bucket_costs
from dflop_jax.train.compiles import CompileCounter
from dflop_jax.train.feed import Batch, feed, pack_batch
from dflop_jax.train.optimizer import learning_rate, make_optimizer
from dflop_jax.train.prepare import (
    build_model,
    make_plan,
    make_profile,
    use_cache,
    use_devices,
    vision_spec,
)

log = logging.getLogger("dflop_jax")
EVALUATIONS = "evaluations.jsonl"


@dataclass(frozen=True)
class FitResult:
    """How a run ended. `eval_loss` and `eval_accuracy` are per supervised held-out token, None
    without evaluation."""

    run_dir: Path
    losses: tuple[float, ...]
    eval_loss: float | None
    eval_accuracy: float | None
    compiles_after_warmup: int


class Trainer:
    """A run of a configuration.

    Args:
      config: what to train.
      plan, profile: made from the configuration when not given.
      existing: what to do with another run in the folder: "error" or "overwrite".
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
        use_cache(config.cache_dir)
        self.devices = use_devices(config.plan.devices)
        self.model = build_model(config.model)
        self.spec = vision_spec(self.model)
        self.profile, self.plan = profile, plan
        self.compiles = CompileCounter()

    def fit(self) -> FitResult:
        """Train to the last step and write the run folder.

        Raises:
          ValueError: bad configuration or data; nothing of an existing run is overwritten.
        """
        with ExitStack() as stack:
            folder = stack.enter_context(RunFolder(self.config.run_dir, existing=self._existing))
            folder.write_config(self.config)
            progress = stack.enter_context(Progress(self.config.train.steps))
            plan = self._prepare(folder, progress)
            ex = self._executor(plan)
            stack.callback(ex.close)
            seconds = self._warm_up(ex, progress)
            plan = self._calibrated(ex, seconds)
            folder.write_plan(plan)
            return self._train(stack, folder, progress, ex, plan, seconds)

    # ---- before the first step ----

    def _prepare(self, folder: RunFolder, progress: Progress) -> Plan:
        if self.profile is None:
            progress.log("profiling model and data")
            self.profile = make_profile(self.config, self.model, self.devices)
        folder.write_profile(self.profile)
        if self.plan is None:
            progress.log("planning")
            self.plan = make_plan(self.config, self.model, self.profile, self.devices).plan
        meshes = ", ".join(f"{m.name} {m.stage}x{m.data}x{m.model}" for m in self.plan.submeshes)
        progress.log(
            f"plan {self.plan.policy}: {meshes} (stage x data x model); buckets "
            + ", ".join(b.name for b in self.plan.buckets)
        )
        return self.plan

    def _executor(self, plan: Plan) -> Executor:
        train = self.config.train
        return Executor(
            self.model,
            plan,
            make_optimizer(train),
            devices=self.devices,
            clip_norm=train.clip_norm,
            freeze=train.freeze,
            remat_layers=train.remat_layers,
            evaluates=train.eval_samples > 0,
        )

    def _warm_up(self, ex: Executor, progress: Progress) -> dict[Task, float]:
        start = time.perf_counter()
        ex.init(self.config.train.seed)
        n = ex.compile()
        seconds = ex.calibrate()
        progress.log(f"compiled {n} programs in {time.perf_counter() - start:.1f} s")
        return seconds

    def _calibrated(self, ex: Executor, seconds: Mapping[Task, float]) -> Plan:
        """The plan, its predictions made anew from the times of the compiled programs."""
        assert self.profile is not None
        costs = bucket_costs(ex.plan, seconds, ex.trainable)
        shapes, n = self.profile.data.shapes, self.config.train.global_batch
        batches = [[shapes[(k * n + i) % len(shapes)] for i in range(n)] for k in range(4)]
        schedules = [schedule_batch(b, ex.plan, costs, step=k) for k, b in enumerate(batches)]
        trace = simulate_schedules(
            ex.plan,
            schedules,
            seconds,
            ex.trainable,
            concurrency=self.profile.model.concurrency,
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
        plan: Plan,
        seconds: Mapping[Task, float],
    ) -> FitResult:
        config = self.config
        costs = bucket_costs(plan, seconds, ex.trainable)
        source = make_source(config.data, self.spec, eval_fraction=eval_fraction(config))
        loader = Loader(
            source,
            global_batch=config.train.global_batch,
            seed=config.data.seed,
            workers=config.data.workers,
            prefetch=config.data.prefetch,
            max_bad_fraction=config.data.max_bad_fraction,
        )
        worker = stack.enter_context(
            ScheduleWorker(
                loader.shapes,
                plan,
                costs,
                stop_step=config.train.steps,
                ahead=config.schedule.ahead,
                time_limit_s=config.schedule.time_limit_s,
            )
        )
        evaluator = None
        if config.train.eval_samples:
            evaluator = _Evaluator(self, ex, plan, costs, folder.path)
        log_ = _StepLog(self, folder, progress, plan)
        batches = stack.enter_context(closing(feed(loader, worker, plan, self.spec, 0)))
        pending: tuple[StepHandle, Batch, float] | None = None
        for step in range(config.train.steps):
            batch, wait_s = next(batches)
            handle = ex.run_step(step, batch.groups, 1.0 / max(batch.supervised_tokens, 1))
            if pending is not None:
                log_.finish(*pending)
            pending = (handle, batch, wait_s)
            every = config.train.eval_every
            if evaluator and every and (step + 1) % every == 0 and step + 1 < config.train.steps:
                log_.finish(*pending)
                pending = None
                evaluator.run(step + 1, progress)
        if pending is not None:
            log_.finish(*pending)
        final = evaluator.run(config.train.steps, progress) if evaluator else (None, None)
        log_.write()
        write_summary(folder.path)
        return FitResult(
            run_dir=folder.path,
            losses=tuple(log_.losses),
            eval_loss=final[0],
            eval_accuracy=final[1],
            compiles_after_warmup=sum(log_.compiles[1:]),
        )


class _StepLog:
    """Turns finished steps into metrics rows, and keeps the trace of a typical late step."""

    def __init__(self, trainer: Trainer, folder: RunFolder, progress: Progress, plan: Plan):
        self.trainer, self.folder, self.progress, self.plan = trainer, folder, progress, plan
        steps = np.arange(trainer.config.train.steps)
        self.rates = np.asarray(learning_rate(trainer.config.train)(steps))
        self.losses: list[float] = []
        self.compiles: list[int] = []
        self._compiled = trainer.compiles.read()
        self._ended_s: float | None = None
        self._kept: tuple[Trace, Batch] | None = None

    def finish(self, handle: StepHandle, batch: Batch, wait_s: float) -> None:
        result = handle.result()
        compiled = self.trainer.compiles.read()
        begun = result.started_s if self._ended_s is None else self._ended_s
        step_s = max(result.ended_s - begun, 0.0)
        loss = result.sums["loss_sum"] / max(batch.supervised_tokens, 1)
        row = StepMetrics(
            step=batch.step,
            loss=loss,
            supervised_tokens=batch.supervised_tokens,
            step_s=step_s,
            tokens_per_s=batch.llm_tokens / step_s if step_s > 0 else 0.0,
            learning_rate=float(self.rates[batch.step]),
            grad_norm=result.grad_norm,
            busy_fraction=result.trace.busy_fraction(),
            padding_fraction=batch.padding_fraction,
            compiles=compiled - self._compiled,
            schedule_s=batch.schedule.elapsed_s,
            schedule_wait_s=wait_s,
            makespan_s=batch.schedule.makespan_s,
            lower_bound_s=batch.schedule.lower_bound_s,
            n_bad=batch.n_bad,
        )
        self.folder.append(row)
        self.progress.update(row)
        self.losses.append(loss)
        self.compiles.append(row.compiles)
        self._compiled, self._ended_s = compiled, result.ended_s
        self._keep(result, batch)

    def _keep(self, result: StepResult, batch: Batch) -> None:
        """The last step but one: steady, and not the one that drains the pipeline."""
        if self._kept is None or batch.step < self.trainer.config.train.steps - 1:
            self._kept = (result.trace, batch)

    def write(self) -> None:
        if self._kept is None:
            return
        trace, batch = self._kept
        names = {
            g: self.plan.buckets[group[0].bucket].name
            for g, group in enumerate(batch.schedule.groups)
        }
        self.folder.write_trace([trace], names)


class _Evaluator:
    """Loss and accuracy on held-out samples, with the training programs' shapes."""

    def __init__(
        self, trainer: Trainer, ex: Executor, plan: Plan, costs: BucketCosts, folder: Path
    ):
        config = trainer.config
        self.ex, self.path = ex, folder / EVALUATIONS
        source = make_source(config.data, trainer.spec, "eval", eval_fraction=eval_fraction(config))
        n = min(config.train.eval_samples, len(source))
        size = min(n, config.train.global_batch)
        self.batches: list[Batch] = []
        for first in range(0, n, size):
            samples = [source.sample(i) for i in range(first, min(first + size, n))]
            schedule = schedule_batch([s.shape for s in samples], plan, costs, step=first)
            self.batches.append(pack_batch(plan, trainer.spec, schedule, samples))

    def run(self, step: int, progress: Progress) -> tuple[float, float]:
        sums: dict[str, float] = {}
        count = sum(b.supervised_tokens for b in self.batches)
        for handle in [self.ex.run_evaluation(b.groups) for b in self.batches]:
            for k, v in handle.result().sums.items():
                sums[k] = sums.get(k, 0.0) + v
        loss = sums["loss_sum"] / max(count, 1)
        accuracy = sums.get("correct", 0.0) / max(count, 1)
        progress.log(f"step {step}: held-out loss {loss:.4f}, token accuracy {accuracy:.3f}")
        row: dict[str, Any] = {"step": step, "loss": loss, "accuracy": accuracy}
        with self.path.open("ab") as f:
            f.write(msgspec.json.encode(row) + b"\n")
        return loss, accuracy


def eval_fraction(config: Config) -> float:
    """Share of a dataset on disk that is held out: a tenth when evaluation is on."""
    return 0.1 if config.train.eval_samples else 0.0
