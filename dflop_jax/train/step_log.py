"""Turns finished steps into metrics rows, and keeps the trace of a typical late step."""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
import msgspec

from dflop_jax.cluster.messages import ProcessGroup
from dflop_jax.config import TrainConfig
from dflop_jax.pipeline.step_result import LocalResult, StepHandle, StepResult
from dflop_jax.records import Plan, Trace
from dflop_jax.report.metrics import StepMetrics
from dflop_jax.report.progress import Progress
from dflop_jax.report.run_folder import RunFolder
from dflop_jax.report.spent import TimeLog
from dflop_jax.report.trace import group_labels
from dflop_jax.train.callbacks import Callbacks, StepDone
from dflop_jax.train.compiles import CompileCounter
from dflop_jax.train.correct import Corrector
from dflop_jax.train.feed import ReadyBatch, Waits
from dflop_jax.train.optimizer import learning_rates
from dflop_jax.train.skips import Skipping, reason
from dflop_jax.train.step_figures import memory_in_use, most_of, phase_seconds, slowest
from dflop_jax.train.utilisation import Peaks, utilisation

log = logging.getLogger("dflop_jax")
# Samples after which a run is refused that has had no supervised token; a run may be shorter.
FEWEST_SAMPLES = 256


@dataclass(frozen=True)
class Report:
    """What a process tells process 0 about a finished step; `stop`: a signal came to it,
    `memory_bytes` is what it holds, `stops_for` why a callback ends the run."""

    part: LocalResult
    compiles: int
    stop: bool
    memory_bytes: dict[str, float]
    stops_for: str = ""


REPORTS = msgspec.msgpack.Decoder(Report)


@dataclass(frozen=True)
class Verdict:
    """What process 0 tells all about a finished step; `losses` are by module, `applied`: the step
    updated the parameters, `stop`, `stopped_by`: see `Report`, `save`: the next state is to be
    saved."""

    loss: float
    losses: dict[str, float]
    grad_norm: float
    applied: bool
    compiles: int
    stop: bool
    stopped_by: str
    save: bool


def done_step(step: int, verdict: Verdict, row: StepMetrics | None = None) -> StepDone:
    """What callbacks are told of a step."""
    seen = verdict.loss, verdict.losses, verdict.grad_norm, verdict.applied
    return StepDone(step, *seen, row)


@dataclass(frozen=True)
class RowFacts:
    """What the rows of a run are made with.

    Attributes:
      rates: peak learning rates of the parts that train.
      peaks: FLOP/s that the devices reach at most, None where it is not known.
      time: told of the steps that end.
      callbacks: told of the steps that are done.
      devices: of all processes, whose memory is looked at.
    """

    config: TrainConfig
    plan: Plan
    peers: ProcessGroup
    rates: Mapping[str, float] = field(default_factory=dict)
    peaks: Peaks | None = None
    time: TimeLog = field(default_factory=TimeLog)
    callbacks: Callbacks = field(default_factory=Callbacks)
    devices: Sequence[jax.Device] = ()


class StepLog:
    """Gathers what the processes saw of each step; process 0 (which has a `folder`) writes
    metrics.jsonl, the progress bar and, at the end, trace.json. `skipping` notes the steps whose
    updates are left out."""

    def __init__(
        self,
        facts: RowFacts,
        folder: RunFolder | None,
        progress: Progress,
        counter: CompileCounter,
        corrector: Corrector | None = None,
        skipping: Skipping | None = None,
    ):
        config = facts.config
        self._skipping = skipping or Skipping(config)
        self._facts, self._corrector, self.peers = facts, corrector, facts.peers
        self.folder, self.progress = folder, progress
        self.rates = learning_rates(config)
        self._factors = {g: rate / config.learning_rate for g, rate in facts.rates.items()}
        self.losses = array("d")  # 8 bytes a step, not 32
        self.compiles: list[int] = []
        self.step_s = array("d")  # on process 0
        self._counter, self._compiled = counter, counter.read()
        self._last_step = config.steps - 1
        self._ended_s: float | None = None
        self._kept: tuple[Trace, ReadyBatch] | None = None
        self.n_unsupervised = 0  # steps without a supervised token, on process 0

    def finish(
        self,
        handle: StepHandle,
        batch: ReadyBatch,
        waits: Waits,
        stop: bool,
        save: bool = False,
    ) -> Verdict:
        """Wait for a step on every process, log it and learn from it; `stop` asks all to end the
        run, process 0's `save` to save.

        Raises:
          ValueError: no step of the run so far had a supervised token.
        """
        part = handle.local(self.peers.offset_s)
        compiled = self._counter.read()
        stops_for = self._facts.callbacks.stops_for
        held = memory_in_use(self._facts.devices)
        report = Report(part, compiled - self._compiled, stop, held, stops_for)
        self._compiled = compiled
        # Not as JSON, which has no number for what is not finite.
        gathered = self.peers.gather("report", msgspec.msgpack.encode(report), step=batch.step)
        answer = b""
        if self.peers.is_hub:
            reports = [REPORTS.decode(v) for v in gathered]
            result = handle.result([r.part for r in reports])
            decided = Verdict(
                batch.loss.total(result.sums),
                batch.loss.means(result.sums),
                result.grad_norm,
                result.applied,
                sum(r.compiles for r in reports),
                any(r.stop for r in reports),
                next((r.stops_for for r in reports if r.stops_for), ""),
                save,
            )
            answer = msgspec.msgpack.encode(decided)
        verdict = msgspec.msgpack.decode(
            self.peers.broadcast("verdict", answer, step=batch.step), type=Verdict
        )
        self.losses.append(verdict.loss)
        self.compiles.append(verdict.compiles)
        if self.peers.is_hub:
            if self._corrector:
                self._corrector.after_step(result.trace, batch)
            process_s = handle.process_seconds(result) if self.peers.count > 1 else {}
            held = most_of(r.memory_bytes for r in reports)
            self._log(result, batch, waits, verdict, held, process_s)
        else:
            self._facts.callbacks.after_step(done_step(batch.step, verdict))
        self._skipping.note(batch.step, verdict.grad_norm, verdict.applied)
        return verdict

    def _log(
        self,
        result: StepResult,
        batch: ReadyBatch,
        waits: Waits,
        verdict: Verdict,
        memory_bytes: Mapping[str, float],
        process_s: Mapping[int, float],
    ) -> None:
        assert self.folder is not None
        begun = result.started_s if self._ended_s is None else self._ended_s
        step_s = max(result.ended_s - begun, 0.0)
        # Of the first step nothing tells when devices began to wait.
        idle_s = math.inf if self._ended_s is None else max(result.started_s - begun, 0.0)
        waits_s = waits.of_devices(idle_s)
        self._facts.time.step(batch.step, waits_s)
        skipped = self._skipping.of(batch.step, result)
        if skipped:
            self.progress.log(f"step {batch.step} changed no parameter: {reason(skipped)}")
        # The rate goes on with the updates that are made.
        rate = float(self.rates[batch.step - self._skipping.known.count])
        last = self._facts.plan.layout.modules[-1]
        row = StepMetrics(
            step=batch.step,
            loss=verdict.loss,
            losses=verdict.losses,
            supervised_tokens=batch.loss.supervised_tokens,
            step_s=step_s,
            tokens_per_s=batch.used_tokens[last] / step_s if step_s > 0 else 0.0,
            learning_rate=rate,
            learning_rates={g: rate * factor for g, factor in self._factors.items()},
            grad_norm=result.grad_norm,
            busy_fraction=result.trace.busy_fraction(),
            padding_fraction=batch.padding_fraction,
            groups=batch.groups_run,
            compiles=verdict.compiles,
            schedule_s=batch.schedule.elapsed_s,
            schedule_wait_s=waits.schedule_s,
            save_wait_s=waits.save_s,
            makespan_s=batch.schedule.makespan_s,
            lower_bound_s=batch.schedule.lower_bound_s,
            made_by=batch.schedule.made_by,
            schedule_gap=batch.schedule.gap,
            integer_bound_s=batch.schedule.integer_bound_s,
            schedule_work=batch.schedule.work,
            n_bad=len(batch.bad),
            phase_s=phase_seconds(
                self._facts.plan.layout,
                result.trace,
                begun - result.started_s,
                step_s,
                waits_s if math.isfinite(idle_s) else {},
            ),
            imbalance=batch.imbalance,
            memory_bytes=memory_bytes,
            moved_in_node=batch.moved.in_node,
            moved_across_nodes=batch.moved.across_nodes,
            correction=self._corrector.report if self._corrector else {},
            process_s=slowest(process_s),
            skipped=skipped,
            **utilisation(batch.flops, step_s, self._facts.peaks),
        )
        own = self._facts.callbacks.after_step(done_step(batch.step, verdict, row))
        row = replace(row, own=own) if own else row
        self.step_s.append(step_s)
        self.folder.append(row)
        self.progress.update(row)
        self._ended_s = result.ended_s
        # The last step but one: steady, and not the one that drains the pipeline.
        if self._kept is None or batch.step < self._last_step:
            self._kept = (result.trace, batch)
        if not batch.loss.is_supervised:
            self._note_unsupervised(batch.step)

    def _note_unsupervised(self, step: int) -> None:
        self.n_unsupervised += 1
        done = step + 1
        if self.n_unsupervised == 1:
            log.warning("step %d has no supervised token; others are counted at the end", step)
        n_samples = done * self._facts.config.global_batch
        if self.n_unsupervised == done and (n_samples >= FEWEST_SAMPLES or step == self._last_step):
            raise ValueError(
                f"none of the first {n_samples} samples has a supervised token; give answers a "
                "weight above 0 (weight, loss and train of their turns), or raise data.max_tokens "
                "where it cuts them away"
            )

    def pause(self) -> None:
        """Something other than steps ran (an evaluation): do not count it as step time."""
        self._ended_s = None

    def write_trace(self) -> None:
        """Write the trace that was kept, if there is one."""
        if self._kept is None or self.folder is None:
            return
        trace, batch = self._kept
        self.folder.write_trace([trace], group_labels([batch.schedule]))
