"""Turns finished steps into metrics rows, and keeps the trace of a typical late step."""

from __future__ import annotations

from dflop_jax.config import TrainConfig
from dflop_jax.pipeline.step import StepHandle, StepResult
from dflop_jax.records import Plan, Trace
from dflop_jax.report.metrics import StepMetrics
from dflop_jax.report.progress import Progress
from dflop_jax.report.run_folder import RunFolder
from dflop_jax.train.compiles import CompileCounter
from dflop_jax.train.feed import Batch
from dflop_jax.train.optimizer import learning_rates


class StepLog:
    """Writes metrics.jsonl, the progress bar and, at the end, trace.json."""

    def __init__(
        self,
        config: TrainConfig,
        plan: Plan,
        folder: RunFolder,
        progress: Progress,
        counter: CompileCounter,
    ):
        self.plan, self.folder, self.progress = plan, folder, progress
        self.rates = learning_rates(config)
        self.losses: list[float] = []
        self.compiles: list[int] = []
        self._counter, self._compiled = counter, counter.read()
        self._last_step = config.steps - 1
        self._ended_s: float | None = None
        self._kept: tuple[Trace, Batch] | None = None

    def finish(self, handle: StepHandle, batch: Batch, wait_s: float) -> Trace:
        """Wait for a step and log it; `wait_s` is what training waited for its schedule."""
        result = handle.result()
        compiled = self._counter.read()
        begun = result.started_s if self._ended_s is None else self._ended_s
        step_s = max(result.ended_s - begun, 0.0)
        row = StepMetrics(
            step=batch.step,
            loss=result.sums["loss_sum"] / max(batch.supervised_tokens, 1),
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
        self.losses.append(row.loss)
        self.compiles.append(row.compiles)
        self._compiled, self._ended_s = compiled, result.ended_s
        self._keep(result, batch)
        return result.trace

    def _keep(self, result: StepResult, batch: Batch) -> None:
        # The last step but one: steady, and not the one that drains the pipeline.
        if self._kept is None or batch.step < self._last_step:
            self._kept = (result.trace, batch)

    def pause(self) -> None:
        """Something other than steps ran (an evaluation): do not count it as step time."""
        self._ended_s = None

    def write_trace(self) -> None:
        if self._kept is None:
            return
        trace, batch = self._kept
        names = {
            g: self.plan.buckets[group[0].bucket].name
            for g, group in enumerate(batch.schedule.groups)
        }
        self.folder.write_trace([trace], names)
